"""Published pages: nothing is fetched on opening them, and figures are drawn all the same."""

from __future__ import annotations

import nbformat
import plotly.graph_objects as go
import pytest

from workbench.publish import ExternalAddressError, find_external_addresses, notebook_html


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
    assert page.count("Plotly.newPlot(") >= 2
    assert page.count("our only line") == 2
    assert 3_000_000 < len(page) < 8_000_000, "plotly.js is about 4.7 MB and must be there once"
    assert "application/vnd.plotly.v1+json" in node.cells[0].outputs[0].data, "the notebook itself stays as it was"


def test_a_page_without_figures_stays_small():
    node = nbformat.v4.new_notebook()
    node.cells = [nbformat.v4.new_markdown_cell("# Words")]
    assert len(notebook_html(node, title="toy")) < 500_000
