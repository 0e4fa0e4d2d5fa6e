"""A published notebook in a real browser: its figures are drawn and its widgets move, with every request refused."""

from __future__ import annotations

import nbformat
import plotly.graph_objects as go
import pytest

from tests.browser.test_widgets import check_shown
from workbench.publish import notebook_html

pytestmark = pytest.mark.browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_figures_and_widgets_of_a_published_notebook(open_page, examples, artifacts, tmp_path, scheme):
    widget = examples["group_serialization"]
    figure = go.Figure(go.Scatter(x=[1, 2], y=[3, 4], name="our only line"))
    shown, _ = widget._repr_mimebundle_()
    bundles = (shown, {"application/vnd.plotly.v1+json": figure.to_plotly_json(), "text/plain": "Figure"})
    outputs = [nbformat.v4.new_output("display_data", data) for data in bundles]
    node = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("show()", outputs=outputs)])
    node.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"state": {}}}
    path = tmp_path / "page.html"
    path.write_text(notebook_html(node, title="page"), encoding="utf-8")
    assert path.stat().st_size <= 2_500_000

    page = open_page(path, color_scheme=scheme)
    page.locator(".longstraw-figure .main-svg").first.wait_for(timeout=30_000)
    assert page.locator(".longstraw-figure .scatterlayer .trace").count() == 1
    check_shown(page, widget.view())
    page.locator('[name="group_size"]').press("ArrowRight")
    check_shown(page, widget.view_of(widget.record, widget.state() | {"group_size": 12}))
    text, background = page.locator(".lsw").evaluate(
        "e => [getComputedStyle(e).color, getComputedStyle(document.body).backgroundColor]"
    )
    light = [sum(map(float, color.partition("(")[2].rstrip(")").split(",")[:3])) / 765 for color in (text, background)]
    assert abs(light[0] - light[1]) > 0.5, f"{text} on {background}"
    page.screenshot(path=artifacts / f"page-{scheme}.png", full_page=True)
