"""Published pages: nothing is fetched on opening them, and figures are drawn all the same."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re

import nbformat
import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs

from workbench.pictures import figure_png
from workbench.publish import (
    _BASIC_BUNDLE,
    ExternalAddressError,
    detach_widgets,
    find_external_addresses,
    github_notebook,
    notebook_html,
)


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example/x.js"></script>',
        "<script src=//cdn.example/x.js></script>",
        "<img alt='' src='http://pictures.example/a.png'>",
        '<link rel="stylesheet" href="https://cdn.example/x.css">',
        "<style>@import 'https://cdn.example/x.css';</style>",
        "<p style=\"background: url('https://pictures.example/a.png')\">",
        "<style>p { background: url(//pictures.example/a.png) }</style>",
        "<script type=module>import { a } from 'https://cdn.example/a.js';</script>",
        '<script type="module">const a = await import("https://cdn.example/a.js")</script>',
        '<iframe src="https://other.example/"></iframe>',
    ],
)
def test_a_page_that_would_need_a_network_is_found_out(html):
    assert len(find_external_addresses(f"<html><body>{html}</body></html>")) == 1


@pytest.mark.parametrize(
    "html",
    [
        '<a href="https://papers.example/">a link</a>',
        '<script>/* see https://docs.example/ */ var home = "https://docs.example/<img src=//x>"; </script>',
        '<img src="data:image/png;base64,AAAA">',
        "<style>p { background: url(data:image/svg+xml,x) }</style>",
        "<pre>&lt;script src=&quot;https://cdn.example/x.js&quot;&gt;</pre>",
    ],
)
def test_links_text_and_embedded_data_are_not_loads(html):
    assert find_external_addresses(f"<html><body>{html}</body></html>") == []


def test_publishing_refuses_a_page_that_loads_from_elsewhere():
    node = nbformat.v4.new_notebook()
    output = nbformat.v4.new_output("display_data", {"text/html": '<script src="https://cdn.example/x.js"></script>'})
    node.cells = [nbformat.v4.new_code_cell("show()", outputs=[output])]
    with pytest.raises(ExternalAddressError, match=r"cdn\.example"):
        notebook_html(node, title="toy")


def test_figures_are_drawn_by_one_copy_of_plotly():
    figure = go.Figure(go.Scatter(x=[1, 2], y=[3, 4], name="our only line"))
    data = {"application/vnd.plotly.v1+json": figure.to_plotly_json(), "text/plain": "Figure"}
    node = nbformat.v4.new_notebook()
    outputs = [nbformat.v4.new_output("execute_result", data, execution_count=1) for _ in range(2)]
    node.cells = [nbformat.v4.new_code_cell("figure", outputs=outputs)]
    page = notebook_html(node, title="toy")
    assert page.count('<div class="longstraw-figure">') == 2
    assert page.count("our only line") == 2
    assert page.count("DecompressionStream") == 1
    assert 700_000 < len(page) < 1_200_000, "plotly.js is about 0.5 MB, compressed, and must be there once"
    assert "application/vnd.plotly.v1+json" in node.cells[0].outputs[0].data, "the notebook itself stays as it was"


def test_a_trace_beyond_the_basic_bundle_gets_the_whole_library():
    figure = go.Figure(go.Heatmap(z=[[1, 2], [3, 4]]))
    data = {"application/vnd.plotly.v1+json": figure.to_plotly_json(), "text/plain": "Figure"}
    node = nbformat.v4.new_notebook()
    node.cells = [nbformat.v4.new_code_cell("f", outputs=[nbformat.v4.new_output("display_data", data)])]
    assert 2_000_000 < len(notebook_html(node, title="toy")) < 3_000_000


def test_the_bundled_library_is_the_one_that_python_draws_with():
    text = gzip.decompress(_BASIC_BUNDLE.read_bytes())
    version = re.search(r"plotly\.js v([\d.]+)", get_plotlyjs()[:300])[1]
    assert f"(basic - minified) v{version}".encode() in text[:200]
    digest = hashlib.sha256(text).hexdigest()
    assert digest in (_BASIC_BUNDLE.parent / "README.md").read_text()


# --- for hosts without scripts -----------------------------------------------------------------------------------


def output_notebook(*bundles):
    outputs = [nbformat.v4.new_output("display_data", dict(bundle)) for bundle in bundles]
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("show()", outputs=outputs)])


def test_a_copy_for_github_has_pictures_and_text_only():
    png = base64.b64encode(b"\x89PNG picture").decode()
    live = {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}}
    figure = go.Figure(go.Bar(x=["a", "b"], y=[1, 2]))
    node = output_notebook(
        {**live, "text/html": "<div></div><script>1</script>", "image/png": png, "text/plain": "widget"},
        {"application/vnd.plotly.v1+json": figure.to_plotly_json(), "text/plain": "Figure"},
        {"text/html": "<table></table>", "text/plain": "table"},
        {"text/html": "<script>1</script>"},
    )
    node.metadata["widgets"] = {"state": {}}
    safe = github_notebook(node)
    kept = [set(output.data) for output in safe.cells[0].outputs]
    assert kept == [
        {"image/png", "text/plain"},
        {"image/png", "text/plain"},
        {"text/html", "text/plain"},
        {"text/plain"},
    ]
    assert safe.cells[0].outputs[0].data["image/png"] == png
    assert base64.b64decode(safe.cells[0].outputs[1].data["image/png"]).startswith(b"\x89PNG")
    assert "widgets" not in safe.metadata
    assert "application/vnd.plotly.v1+json" in node.cells[0].outputs[1].data, "the notebook itself stays as it was"
    nbformat.validate(safe)


def test_a_dead_widget_gives_way_to_its_page_and_a_plain_one_stays():
    live = {"application/vnd.jupyter.widget-view+json": {"model_id": "x"}}
    node = output_notebook({**live, "text/html": "<p></p>"}, {**live, "text/plain": "IntSlider()"})
    detach_widgets(node)
    assert [set(o.data) for o in node.cells[0].outputs] == [{"text/html"}, {*live, "text/plain"}]


@pytest.mark.parametrize(
    "figure",
    [
        go.Figure(go.Scatter(x=[1, 10], y=[3, 4], name="<b>bold</b>")).update_xaxes(type="log", tickvals=[1, 10]),
        go.Figure([go.Bar(y=["a"], x=[1], orientation="h"), go.Bar(y=["a"], x=[2], orientation="h")]).update_layout(
            barmode="stack"
        ),
        go.Figure(go.Scatter(x=np.arange(3), y=np.ones(3), mode="markers", marker={"symbol": ["x"] * 3})).add_hline(1),
        go.Figure(go.Scatter(x=[1, 2, 2], y=[1, 1, 2], fill="toself", fillcolor="rgba(0, 114, 178, 0.2)")),
    ],
)
def test_figures_have_a_picture(figure):
    assert figure_png(json.loads(figure.to_json())).startswith(b"\x89PNG")


def test_what_cannot_be_drawn_has_no_picture():
    assert figure_png(json.loads(go.Figure(go.Heatmap(z=[[1]])).to_json())) is None


def test_a_page_without_figures_stays_small():
    node = nbformat.v4.new_notebook()
    node.cells = [nbformat.v4.new_markdown_cell("# Words")]
    assert len(notebook_html(node, title="toy")) < 500_000
