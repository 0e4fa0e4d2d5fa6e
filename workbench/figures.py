"""Tables and plotly figures of the notebooks. Data in, a thing to display out; nothing here knows a model.

Figures have no background and grey text, so they read on light and dark pages. A published page needs no network
(`workbench.publish` puts plotly.js into it once).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import plotly.graph_objects as go

# Colour-blind safe (Okabe and Ito), legible on white and on black.
COLORS = {"full": "#0072b2", "response_only": "#d55e00", "state": "#8f8f8f"}
LABELS = {"full": "full gradient", "response_only": "response only"}
_TEXT = "#767676"
_GRID = "rgba(128, 128, 128, 0.25)"
MIB = 2**20


@dataclass(frozen=True)
class Table:
    """Rows under headings: HTML where that can be shown, aligned text elsewhere. Numbers are right-aligned."""

    headings: Sequence[str]
    rows: Sequence[Sequence[Any]]
    caption: str = ""

    def __repr__(self) -> str:
        texts = [list(map(str, self.headings)), *[[_text(value) for value in row] for row in self.rows]]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts
        ]
        return "\n".join([*filter(None, [self.caption]), *lines])

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{escape(str(heading))}</th>" for heading in self.headings)
        body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in self.rows)
        caption = f"<caption style='text-align:left'>{escape(self.caption)}</caption>" if self.caption else ""
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _cell(value: Any) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    style = "text-align:right; font-variant-numeric:tabular-nums" if is_number else "text-align:left"
    return f"<td style='{style}'>{escape(_text(value))}</td>"


def memory_figure(points: Mapping[str, Mapping[int, int]], state_bytes: int) -> go.Figure:
    """Peak bytes of a step above the weights, resident state included, against group size; a line for each scope.

    points: scope -> group size -> peak bytes above the start of the step (the state being there already).
    """
    figure = go.Figure()
    sizes = sorted({size for by_size in points.values() for size in by_size})
    for scope, by_size in points.items():
        values = [(by_size[size] + state_bytes) / MIB for size in sorted(by_size)]
        growth = values[-1] / values[0] - 1
        figure.add_scatter(
            x=sorted(by_size), y=values, name=f"{LABELS[scope]} ({growth:+.1%} from G = {sizes[0]} to {sizes[-1]})",
            mode="lines+markers", line={"color": COLORS[scope], "width": 3}, marker={"size": 9},
            hovertemplate="G = %{x}: %{y:,.1f} MiB<extra></extra>",
        )  # fmt: skip
    figure.add_scatter(
        x=sizes, y=[state_bytes / MIB] * len(sizes), name="of which the captured prompt", mode="lines",
        line={"color": COLORS["state"], "dash": "dot", "width": 2},
        hovertemplate="captured prompt: %{y:,.1f} MiB<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title="group size G", type="log", tickvals=sizes)
    figure.update_yaxes(title="peak above the weights, MiB", rangemode="tozero")
    return _styled(figure)


def layers_figure(relative_l2: Mapping[int, float]) -> go.Figure:
    """What the response-only gradient misses, layer by layer."""
    figure = go.Figure()
    figure.add_bar(
        x=list(relative_l2), y=list(relative_l2.values()), marker={"color": COLORS["response_only"]},
        hovertemplate="layer %{x}: %{y:.2f}<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title="decoder layer", dtick=max(1, len(relative_l2) // 6))
    figure.update_yaxes(title="relative L2 of the omitted part", rangemode="tozero")
    return _styled(figure)


def logprobs_figure(advantages: Sequence[float], changes: Mapping[str, Sequence[float]]) -> go.Figure:
    """Change of each response's mean log-prob by one step, against its advantage; a colour for each scope."""
    figure = go.Figure()
    symbols = {"full": "circle", "response_only": "diamond-open"}
    for scope, values in changes.items():
        color = COLORS[scope]
        figure.add_scatter(
            x=list(advantages), y=list(values), name=LABELS[scope], mode="markers",
            marker={"color": color, "size": 11, "symbol": symbols[scope], "line": {"width": 2, "color": color}},
            hovertemplate="advantage %{x:.2f}: %{y:+.4f}<extra></extra>",
        )  # fmt: skip
    for add_line in (figure.add_hline, figure.add_vline):
        add_line(0, line={"color": _GRID, "width": 1})
    figure.update_xaxes(title="advantage")
    figure.update_yaxes(title="change of the mean log-prob")
    return _styled(figure)


def _styled(figure: go.Figure) -> go.Figure:
    axis = {"gridcolor": _GRID, "zeroline": False, "linecolor": _TEXT, "ticks": "outside", "tickcolor": _TEXT}
    figure.update_xaxes(**axis, automargin=True)
    figure.update_yaxes(**axis, automargin=True)
    return figure.update_layout(
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": _TEXT, "size": 13, "family": "system-ui, sans-serif"},
        height=400,
        margin={"l": 10, "r": 10, "t": 10, "b": 10},
        # Above the plot and one entry a line: the only place where long names fit on a phone.
        legend={"x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
    )
