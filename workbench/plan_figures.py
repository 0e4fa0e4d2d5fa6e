"""Plotly figures of notebooks/10_plan.ipynb, in the style of `workbench.figures`."""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

from workbench.figures import COLORS, LABELS, _styled

# Okabe and Ito's eight and two greys; neighbours in a stack differ in lightness as well as in hue.
TERM_COLORS = {
    "weights": "#8f8f8f",
    "adapter": "#6a3d9a",
    "optimizer": "#f0e442",
    "rows": "#0072b2",
    "carry": "#cc79a7",
    "boundary_carries": "#56b4e9",
    "gradient_pages": "#d55e00",
    "graph": "#e69f00",
    "logits": "#b79f00",
    "workspace": "#009e73",
    "outside": "rgba(128, 128, 128, 0.35)",
}
_CEILING = "#d62728"
_LINE_COLORS = {"roofline": "#56b4e9", "half of peak": "#0072b2", "calibrated": "#d55e00"}


def memory_stack_figure(terms: Mapping[str, Mapping[str, float]], ceiling_gb: float) -> go.Figure:
    """Stacked bytes per rank by phase against the card's memory. terms: phase -> term -> GB."""
    figure = go.Figure()
    phases = [_words(phase) for phase in terms]
    for term in next(iter(terms.values())):
        figure.add_bar(
            y=phases, x=[by_term[term] for by_term in terms.values()], name=_words(term), orientation="h",
            marker={"color": TERM_COLORS[term]},
            hovertemplate=f"{_words(term)} in %{{y}}: %{{x:,.2f}} GB<extra></extra>",
        )  # fmt: skip
    figure.add_vline(ceiling_gb, line={"color": _CEILING, "width": 2, "dash": "dash"})
    figure.add_annotation(
        x=ceiling_gb, y=1, yref="paper", yanchor="bottom", xanchor="right", showarrow=False,
        text=f"the card: {ceiling_gb:,.1f} GB", font={"color": _CEILING},
    )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.35)
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(
        title={"text": "GB per rank", "standoff": 6}, range=[0, 1.04 * max(ceiling_gb, _tallest(terms))]
    )
    return _with_legend_below(_styled(figure), height=460)


def frontier_figure(points: Mapping[str, Mapping[int, int]], asked: tuple[int, int]) -> go.Figure:
    """Most positions that surely fit against ranks, a line for each scope. asked: (ranks, positions) of the plan."""
    figure = go.Figure()
    for scope, by_ranks in points.items():
        figure.add_scatter(
            x=list(by_ranks), y=list(by_ranks.values()), name=LABELS[scope], mode="lines+markers",
            line={"color": COLORS[scope], "width": 3}, marker={"size": 9},
            hovertemplate="%{x} ranks: %{y:,} positions<extra></extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=[asked[0]], y=[asked[1]], name="asked for", mode="markers",
        marker={"color": _CEILING, "size": 13, "symbol": "x"},
        hovertemplate="asked for: %{y:,} positions on %{x} ranks<extra></extra>",
    )  # fmt: skip
    ranks = sorted({n for by_ranks in points.values() for n in by_ranks} | {asked[0]})
    figure.update_xaxes(title="ranks", type="log", tickvals=ranks)
    figure.update_yaxes(title="positions", type="log", dtick="D2")
    return _styled(figure)


def seconds_figure(lines: Mapping[str, Mapping[str, float]]) -> go.Figure:
    """Seconds by phase, a bar for each line of time."""
    figure = go.Figure()
    for name, by_phase in lines.items():
        shown = {_words(phase): seconds for phase, seconds in by_phase.items() if phase != "optimizer"}
        figure.add_bar(
            x=list(shown), y=list(shown.values()), name=f"{name}: {sum(by_phase.values()):,.0f} s in all",
            marker={"color": _LINE_COLORS[name]}, hovertemplate=f"%{{x}}, {name}: %{{y:,.0f}} s<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="group")
    figure.update_yaxes(title="seconds", rangemode="tozero")
    return _styled(figure)


def _tallest(terms: Mapping[str, Mapping[str, float]]) -> float:
    return max(sum(by_term.values()) for by_term in terms.values())


def _words(name: str) -> str:
    return name.replace("_", " ")


def _with_legend_below(figure: go.Figure, height: int) -> go.Figure:
    """Many short names: side by side under the plot, where they wrap on a phone."""
    legend = {"orientation": "h", "x": 0, "y": -0.27, "yanchor": "top", "traceorder": "normal"}
    return figure.update_layout(height=height, legend=legend, margin={"l": 10, "r": 10, "t": 30, "b": 10})
