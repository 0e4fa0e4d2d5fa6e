"""Plotly figures of notebooks/70_performance.ipynb, in the style of `workbench.figures`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from workbench.figures import _styled
from workbench.performance_study import FULL, MB, OURS, PLAIN, RESPONSE, Row
from workbench.recordings import Recording

_COLORS = {
    FULL: "#0072b2",
    PLAIN: "#56b4e9",
    RESPONSE: "#d55e00",
    "serial": "#8f8f8f",
    "serial + checkpointing": "#8f8f8f",
    "batched": "#b79f00",
    "batched + checkpointing": "#b79f00",
    "TRL": "#cc79a7",
    "TRL + checkpointing": "#cc79a7",
    "shared prefix": "#009e73",
    "shared prefix + checkpointing": "#009e73",
    "PrefixGrouper": "#6a3d9a",
    "PrefixGrouper + checkpointing": "#6a3d9a",
}
_AXES = {"prompt_tokens": "prompt tokens P", "group_size": "group size G"}


def time_figure(recording: Recording, *, family: str, over: str, **fixed: int) -> go.Figure:
    """CPU seconds of every mode against `over` ("prompt_tokens" or "group_size"), with the limit as a dashed line."""
    rows = recording.select(family=family, **fixed)
    figure = _lines(rows, over, lambda row: row["cpu_seconds"], "s", recording.origin)
    _reference(figure, rows, over, lambda row: row["limit_flops"] / row["matmul_flops_per_second"], "limit", "s")
    return _on_axes(figure, rows, over, "CPU seconds of a step")


def peak_figure(recording: Recording, *, family: str, over: str, **fixed: int) -> go.Figure:
    """Peak MB of every mode against `over`, with rows and their gradients as the floor."""
    rows = recording.select(family=family, **fixed)
    figure = _lines(rows, over, lambda row: row["peak_bytes"] / MB, "MB", recording.origin)
    _reference(figure, rows, over, lambda row: row["floor_bytes"] / MB, "floor: rows and their gradients", "MB")
    return _on_axes(figure, rows, over, "peak above the start, MB")


def reach_figure(recording: Recording | None) -> go.Figure:
    """Peak against prompt length in full scope, with the floor; without a recording, a figure that says so."""
    figure = go.Figure()
    if recording is None:
        figure.add_annotation(text="no run is recorded yet", showarrow=False)
        return _styled(figure)
    rows = list(recording.rows)
    lengths = [row["prompt_tokens"] for row in rows]
    for column, name, dash in (
        ("peak_bytes", f"peak ({recording.origin})", "solid"),
        ("floor_bytes", "floor: rows and their gradients (modelled)", "dash"),
    ):
        figure.add_scatter(
            x=lengths, y=[row[column] / MB for row in rows], name=name, mode="lines+markers",
            line={"color": _COLORS[FULL], "width": 3, "dash": dash}, marker={"size": 9},
            hovertemplate="P = %{x:,}: %{y:,.1f} MB<extra></extra>",
        )  # fmt: skip
    return _on_axes(figure, rows, "prompt_tokens", "MB")


def _lines(rows: Sequence[Row], over: str, value: Any, unit: str, origin: str) -> go.Figure:
    figure = go.Figure()
    for mode, color in _COLORS.items():
        points = sorted((row[over], value(row)) for row in rows if row["mode"] == mode)
        if not points:
            continue
        ours, checkpointed = mode in OURS, "checkpoint" in mode
        figure.add_scatter(
            x=[x for x, _ in points], y=[y for _, y in points], name=f"{mode} ({origin})", mode="lines+markers",
            line={"color": color, "width": 4 if ours else 2, "dash": "solid" if ours or not checkpointed else "dot"},
            marker={"size": 9, "symbol": "circle" if ours else "diamond-open" if checkpointed else "diamond"},
            hovertemplate=f"{mode}, %{{x:,}}: %{{y:,.1f}} {unit}<extra></extra>",
        )  # fmt: skip
    return figure


def _reference(figure: go.Figure, rows: Sequence[Row], over: str, value: Any, name: str, unit: str) -> None:
    """What the exact gradient needs at least."""
    exact = [row for row in rows if not row["mode"].startswith("response_only")]
    points = sorted({row[over]: value(row) for row in exact}.items())
    figure.add_scatter(
        x=[x for x, _ in points], y=[y for _, y in points], name=f"{name} (modelled)", mode="lines",
        line={"color": "#767676", "width": 2, "dash": "dash"},
        hovertemplate=f"{name}, %{{x:,}}: %{{y:,.1f}} {unit}<extra></extra>",
    )  # fmt: skip


def _on_axes(figure: go.Figure, rows: Sequence[Row], over: str, title: str) -> go.Figure:
    ticks = sorted({row[over] for row in rows})
    figure.update_xaxes(title=_AXES[over], type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks])
    figure.update_yaxes(title=title, type="log")
    return _styled(figure).update_layout(height=420 + 18 * len(figure.data))
