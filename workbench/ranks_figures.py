"""Plotly figure of notebooks/60_many_ranks.ipynb, in the style of `workbench.figures`."""

from __future__ import annotations

import plotly.graph_objects as go

from workbench.figures import _styled
from workbench.ranks_study import KIB, LEDGERS, RanksRun

_COLORS = dict(zip(LEDGERS, ("#0072b2", "#56b4e9", "#009e73", "#d55e00", "#e69f00", "#8f8f8f"), strict=True))


def memory_figure(run: RanksRun) -> go.Figure:
    """Peak bytes by ledger on a logarithmic axis, for one process and for every rank; ledgers peak at different times.

    Outlines over a rank's bars are the plan's, for the ledgers that follow from the configuration alone.
    """
    names = ["one process", *(f"rank {rank['rank']}" for rank in run.ranks)]
    memories = [run.parity["memory"], *(rank["memory"] for rank in run.ranks)]
    figure = go.Figure()
    for ledger in LEDGERS:
        figure.add_bar(
            x=names, y=[memory.get(ledger, 0) / KIB for memory in memories], name=f"{_words(ledger)}, measured",
            offsetgroup=ledger,
            marker={"color": _COLORS[ledger]}, hovertemplate=f"{ledger}, %{{x}}: %{{y:,.1f}} KiB<extra></extra>",
        )  # fmt: skip
    for ledger, planned in run.planned.items():
        if planned:
            figure.add_bar(
                x=names[1:], y=[planned / KIB] * len(run.ranks), name=f"{_words(ledger)}, modelled", offsetgroup=ledger,
                marker={"color": "rgba(0,0,0,0)", "line": {"color": _COLORS[ledger], "width": 2}},
                hovertemplate=f"{ledger}, planned for a rank: %{{y:,.1f}} KiB<extra></extra>",
            )  # fmt: skip
    figure.update_layout(barmode="group", bargap=0.2)
    figure.update_yaxes(title="peak, KiB", type="log")
    return _styled(figure).update_layout(height=560)


def _words(ledger: str) -> str:
    return ledger.replace("_", " ")
