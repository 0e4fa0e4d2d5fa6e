"""Tables and figures hold the numbers they were given."""

from __future__ import annotations

from workbench.figures import Table, layers_figure, logprobs_figure, memory_figure


def test_tables_read_as_text_and_escape_html():
    table = Table(["what", "value"], [["<b>", 1234567], ["small", 0.000123], ["is", True]], caption="a & b")
    assert repr(table) == "a & b\nwhat   value\n<b>    1,234,567\nsmall  0.000123\nis     yes"
    html = table._repr_html_()
    assert "&lt;b&gt;" in html
    assert "a &amp; b" in html
    assert html.count("<tr>") == 4


def test_the_memory_figure_adds_the_state_and_states_the_growth():
    figure = memory_figure({"full": {1: 3 * 2**20, 8: 4 * 2**20}}, state_bytes=2**20)
    line, state = figure.data
    assert list(line.y) == [4.0, 5.0]
    assert line.name == "full gradient (+25.0% from G = 1 to 8)"
    assert list(state.y) == [1.0, 1.0]


def test_figures_have_no_background_of_their_own():
    for figure in (layers_figure({0: 0.5}), logprobs_figure([1.0, -1.0], {"full": [0.1, -0.1]})):
        assert figure.layout.paper_bgcolor == figure.layout.plot_bgcolor == "rgba(0,0,0,0)"
