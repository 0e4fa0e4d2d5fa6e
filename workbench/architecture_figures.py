"""Plotly figures of notebooks/20_architectures.ipynb, in the style of `workbench.figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from workbench.architecture_study import KINDS, MIB, Footprint, Growth
from workbench.figures import _styled

_KIND_COLORS = {"full_attention": "#0072b2", "latent_indexed": "#d55e00", "latent_shared": "#e69f00"}
_FAMILY_COLORS = ("#0072b2", "#d55e00")
_PARTS = {"rows": ("solid", "circle"), "carry": ("dot", "square"), "workspace": ("dash", "diamond")}


def growth_figure(growth: Mapping[str, Sequence[Growth]]) -> go.Figure:
    """Bytes against prompt length, both axes logarithmic: one colour for each family, one dash for each part."""
    figure = go.Figure()
    for (family, points), color in zip(growth.items(), _FAMILY_COLORS, strict=True):
        for part, (dash, symbol) in _PARTS.items():
            values = [getattr(point, part) / MIB for point in points]
            if max(values) > 0:
                figure.add_scatter(
                    x=[point.positions for point in points], y=values, name=f"{part}, {family}", mode="lines+markers",
                    line={"color": color, "width": 3, "dash": dash}, marker={"size": 9, "symbol": symbol},
                    hovertemplate=f"{part}, %{{x:,}} tokens: %{{y:,.2f}} MiB<extra></extra>",
                )  # fmt: skip
    ticks = sorted({point.positions for points in growth.values() for point in points})
    figure.update_xaxes(title="prompt positions", type="log", tickvals=ticks, ticktext=[f"{t:,}" for t in ticks])
    figure.update_yaxes(title="MiB", type="log", dtick=1)
    return _styled(figure).update_layout(height=460)


def footprint_figure(found: Sequence[Footprint]) -> go.Figure:
    """Bytes that one more token costs at full size, a bar for each model, stacked by kind of layer."""
    figure = go.Figure()
    for kind, color in _KIND_COLORS.items():
        figure.add_bar(
            y=[footprint.name for footprint in found], x=[footprint.by_kind.get(kind, 0) / 1024 for footprint in found],
            name=KINDS[kind][0], orientation="h", marker={"color": color},
            hovertemplate=f"{KINDS[kind][0]}, %{{y}}: %{{x:,.1f}} KiB a token<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="stack", bargap=0.3)
    figure.update_xaxes(title="KiB per token, bfloat16")
    figure.update_yaxes(autorange="reversed")
    return _styled(figure).update_layout(height=180 + 26 * len(found))
