"""Plotly figures of notebooks/55_gradient_scope.ipynb, in the style of `workbench.figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from workbench.figures import _styled
from workbench.recordings import Recording
from workbench.scope_study import means_by

_COLORS = ("#d55e00", "#56b4e9", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#8f8f8f", "#b79f00")
AXES = {
    "prompt_tokens": "prompt tokens",
    "response_tokens": "response tokens",
    "learning_rate": "learning rate of the updates before (0: fresh adapter)",
}


def _whole(recording: Recording, model: str) -> list[Mapping[str, Any]]:
    return recording.select(model=model, layer=None, parameter_family="all")


def scopes_figure(recording: Recording, model: str) -> go.Figure:
    """Cosine with the full gradient, a bar for each scope: mean, and range over all settings and seeds."""
    figure = go.Figure()
    rows = [dict(row) | {"name": series_name(row)} for row in _whole(recording, model)]
    spread = means_by(rows, "name", "cosine")
    names = list(spread)
    figure.add_bar(
        y=names, x=[spread[n][1] for n in names], orientation="h", name=recording.origin, marker={"color": "#0072b2"},
        error_x={
            "type": "data", "symmetric": False, "array": [spread[n][2] - spread[n][1] for n in names],
            "arrayminus": [spread[n][1] - spread[n][0] for n in names],
        },
        hovertemplate="%{y}: %{x:.3f}<extra></extra>",
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title=f"cosine with the full gradient ({recording.origin})")
    return _styled(figure).update_layout(height=140 + 26 * len(names))


def series_name(row: Mapping[str, Any]) -> str:
    """The scope, with the adapter's own where the adapter is off at the prompt."""
    return row["scope"] if row["adapter_scope"] == "all" else f"adapter {row['adapter_scope']}"


def axis_figure(recording: Recording, model: str, axis: str, scopes: Sequence[str]) -> go.Figure:
    """Cosine against one of AXES, the others at their middle value: mean and range over seeds, a colour a scope."""
    figure = go.Figure()
    others = [name for name in AXES if name != axis]
    rows = _whole(recording, model)
    middle = _middle(recording, model)
    chosen = [r for r in rows if all(r[name] == middle[name] for name in others) and r["adapter_scope"] == "all"]
    for scope, color in zip(scopes, _COLORS, strict=False):
        spread = dict(sorted(means_by([r for r in chosen if r["scope"] == scope], axis, "cosine").items()))
        figure.add_scatter(
            x=list(spread), y=[v[1] for v in spread.values()], name=f"{recording.origin}: {scope}",
            mode="lines+markers", line={"color": color, "width": 3}, marker={"size": 8},
            error_y={
                "type": "data", "symmetric": False, "array": [v[2] - v[1] for v in spread.values()],
                "arrayminus": [v[1] - v[0] for v in spread.values()],
            },
            hovertemplate="%{x}: %{y:.3f}<extra></extra>",
        )  # fmt: skip
    values = sorted({row[axis] for row in chosen})
    kind = "category" if axis == "learning_rate" else "log"
    figure.update_xaxes(title=AXES[axis], type=kind, tickvals=values if kind == "log" else None)
    figure.update_yaxes(title="cosine with the full gradient")
    return _styled(figure)


def _middle(recording: Recording, model: str) -> Mapping[str, Any]:
    """The setting whose layers were compared apart."""
    return next(row for row in recording.select(model=model) if row["layer"] is not None)


def parts_figure(recording: Recording, model: str, scopes: Sequence[str], *, by: str = "layer") -> go.Figure:
    """Relative L2 against the full gradient by "layer" or by "parameter_family", a colour for each scope."""
    figure = go.Figure()
    rows = [
        row
        for row in recording.select(model=model, adapter_scope="all")
        if (row["layer"] is not None if by == "layer" else row["layer"] is None and row["parameter_family"] != "all")
    ]
    for scope, color in zip(scopes, _COLORS, strict=False):
        spread = means_by([row for row in rows if row["scope"] == scope], by, "relative_l2")
        figure.add_bar(
            x=list(spread), y=[v[1] for v in spread.values()], name=f"{recording.origin}: {scope}",
            marker={"color": color}, hovertemplate="%{x}: %{y:.3f}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title="decoder layer" if by == "layer" else "kind of module", type="category")
    figure.update_yaxes(title="relative L2 of what is left out", rangemode="tozero")
    return _styled(figure)


def convergence_figure(errors: Mapping[str, Mapping[int, float]]) -> go.Figure:
    """Relative L2 error of the mean of n draws, both axes logarithmic, with a line that falls as 1 / sqrt(n)."""
    figure = go.Figure()
    for (name, by_draws), color in zip(errors.items(), _COLORS[1:], strict=False):
        draws = list(by_draws)
        figure.add_scatter(
            x=draws, y=list(by_draws.values()), name=f"measured: {name}", mode="markers",
            marker={"color": color, "size": 9}, hovertemplate="mean of %{x}: %{y:.3g}<extra></extra>",
        )  # fmt: skip
        figure.add_scatter(
            x=draws, y=[by_draws[draws[0]] * (draws[0] / n) ** 0.5 for n in draws], mode="lines",
            name=f"modelled: 1 / sqrt(n) from {name}'s first point", line={"color": color, "dash": "dot", "width": 2},
            hoverinfo="skip",
        )  # fmt: skip
    figure.update_xaxes(title="draws averaged", type="log", dtick="D2")
    figure.update_yaxes(title="relative L2 against the full gradient", type="log", dtick="D2")
    return _styled(figure)
