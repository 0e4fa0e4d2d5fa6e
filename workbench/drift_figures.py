"""Plotly figures of notebooks/50_prefix_reuse.ipynb, in the style of `workbench.figures`.

Every series says where it comes from: published (the paper's table) or measured (a recording, with its seeds).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from workbench.drift import DriftReport
from workbench.drift_tables import seed_bands
from workbench.figures import _styled
from workbench.planner.sources import read_data
from workbench.recordings import Recording

_RATE_COLORS = ("#56b4e9", "#0072b2", "#009e73", "#e69f00")
_RULE_COLORS = ("#d55e00", "#56b4e9", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#8f8f8f")
_PUBLISHED = {"color": "#d62728", "dash": "dash", "width": 2}
# Column of a recording -> (axis title, name in the published table)
MEASURES = {
    "mean_abs_logprob_drift": ("mean |log-prob drift| per token, nats", "mean_abs_logprob_difference"),
    "max_abs_logprob_drift": ("largest |log-prob drift|, nats", None),
    "loss_drift_pct": ("loss difference, %", "loss_difference_pct"),
    "kl": ("KL(reused || fresh) per token, nats", None),
    "gradient_cosine": ("cosine of the gradients", None),
    "gradient_norm_ratio": ("gradient norm, reused / fresh", None),
}


def drift_figure(recording: Recording, model: str, measure: str) -> go.Figure:
    """One measure against optimizer steps since the capture: mean and range over seeds, a colour a learning rate."""
    title, published_name = MEASURES[measure]
    figure = go.Figure()
    rates = [rate for rate in recording.values("learning_rate") if rate > 0]
    for rate, color in zip(rates, _RATE_COLORS, strict=False):
        rows = recording.select(model=model, learning_rate=rate)
        bands = {age: band for age, band in seed_bands(rows, measure).items() if age > 0}
        seeds = len({row["seed"] for row in rows})
        _add_band(figure, bands, f"{recording.origin}: learning rate {rate:g}, {seeds} seeds", color)
    if published_name is not None:
        table = read_data("published.json")["prefix_reuse"]
        figure.add_scatter(
            x=table["steps_since_capture"], y=table[published_name],
            name="published: LongStraw, 1M positions (another model, task and learning rate)", mode="lines+markers",
            line=_PUBLISHED, marker={"size": 9, "symbol": "x"}, hovertemplate="step %{x}: %{y:.4g}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title="optimizer steps since the capture")
    figure.update_yaxes(title=title, type="linear" if measure.startswith("gradient") else "log")
    return _styled(figure)


def _add_band(figure: go.Figure, bands: Mapping[int, tuple[float, float, float]], name: str, color: str) -> None:
    ages = list(bands)
    lowest, mean, highest = (list(values) for values in zip(*bands.values(), strict=True))
    figure.add_scatter(
        x=[*ages, *reversed(ages)], y=[*highest, *reversed(lowest)], fill="toself", fillcolor=_faint(color),
        line={"width": 0}, hoverinfo="skip", showlegend=False,
    )  # fmt: skip
    figure.add_scatter(
        x=ages, y=mean, name=name, mode="lines+markers", line={"color": color, "width": 3}, marker={"size": 7},
        customdata=list(zip(lowest, highest, strict=True)),
        hovertemplate="step %{x}: %{y:.4g} (%{customdata[0]:.4g} to %{customdata[1]:.4g})<extra></extra>",
    )  # fmt: skip


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.2)"


def rules_figure(recording: Recording, model: str) -> go.Figure:
    """Captures made against steps within the threshold, a point a rule: few and all is the corner wanted."""
    figure = go.Figure()
    for rule, color in zip(recording.values("rule"), _RULE_COLORS, strict=False):
        rows = recording.select(model=model, rule=rule)
        within = 100 * sum(r["mean_abs_logprob_drift"] <= r["max_logprob_drift"] for r in rows) / len(rows)
        figure.add_scatter(
            x=[100 * sum(r["refreshed"] for r in rows) / len(rows)], y=[within],
            name=f"{recording.origin}: {rule}", mode="markers",
            marker={"color": color, "size": 13, "symbol": "star" if rule == "drift" else "circle"},
            hovertemplate=f"{rule}: %{{x:.0f}} % of steps capture, %{{y:.1f}} % within<extra></extra>",
        )  # fmt: skip
    figure.add_hline(95, line={"color": _PUBLISHED["color"], "width": 1, "dash": "dot"})
    figure.update_xaxes(title="steps that capture the prompt, %", rangemode="tozero")
    figure.update_yaxes(title="steps with drift within the threshold, %")
    return _styled(figure)


def run_figure(rows: Sequence[Mapping[str, Any]]) -> go.Figure:
    """One run under the drift rule: drift measured by the oracle, drift predicted by the rule, and its refreshes."""
    figure = go.Figure()
    steps = [row["step"] for row in rows]
    series = {
        "measured: drift of the state used": ("mean_abs_logprob_drift", "#0072b2", "lines+markers"),
        "modelled: drift predicted before the decision": ("predicted_drift", "#e69f00", "markers"),
        "measured: drift that a refresh ended (probe)": ("measured_drift", "#d55e00", "markers"),
    }
    for name, (column, color, mode) in series.items():
        figure.add_scatter(
            x=steps, y=[row[column] for row in rows], name=name, mode=mode, line={"color": color, "width": 2},
            marker={"color": color, "size": 8}, hovertemplate="step %{x}: %{y:.4g}<extra></extra>",
        )  # fmt: skip
    figure.add_hline(rows[0]["max_logprob_drift"], line={"color": _PUBLISHED["color"], "width": 1, "dash": "dot"})
    figure.update_xaxes(title="optimizer step")
    figure.update_yaxes(title="mean |log-prob drift| per token, nats", rangemode="tozero")
    return _styled(figure)


def state_figure(report: DriftReport) -> go.Figure:
    """Relative L2 distance of the reused state from the fresh one, a bar for each layer and kind of state."""
    figure = go.Figure()
    kinds = dict.fromkeys((distance.kind, distance.name) for distance in report.state_distance)
    for (kind, name), color in zip(kinds, _RULE_COLORS, strict=False):
        chosen = [d for d in report.state_distance if (d.kind, d.name) == (kind, name)]
        figure.add_bar(
            x=[d.layer for d in chosen], y=[d.relative_l2 for d in chosen], name=f"measured: {name} ({kind})",
            marker={"color": color}, hovertemplate=f"layer %{{x}}, {name}: %{{y:.3g}}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title="decoder layer", dtick=1)
    figure.update_yaxes(title="relative L2 distance", rangemode="tozero")
    return _styled(figure)


def position_figure(report: DriftReport) -> go.Figure:
    """Mean |log-prob drift| by position in the response, over the responses."""
    figure = go.Figure()
    values = report.mean_by_position
    figure.add_bar(
        x=list(range(1, len(values) + 1)), y=list(values), marker={"color": "#0072b2"},
        name="measured", hovertemplate="token %{x}: %{y:.3g}<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title="response token", dtick=1)
    figure.update_yaxes(title="mean |log-prob drift|, nats", rangemode="tozero")
    return _styled(figure)
