"""Plotly figures of notebooks/40_train.ipynb, in the style of `workbench.figures`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench.figures import _styled
from workbench.recordings import Recording
from workbench.training_curves import ArmResult, arm_results, seed_band

# Colour-blind safe (Okabe and Ito); each scope has its own symbol as well.
_STYLES = {
    "full": ("#0072b2", "circle"),
    "tail": ("#009e73", "square"),
    "response_only": ("#d55e00", "diamond"),
    "prefix_frozen": ("#cc79a7", "triangle-up"),
}
_OTHER = ("#8f8f8f", "x")
_COLORS = {"sampled": "#56b4e9", "held out": "#d55e00"}


def learning_figure(recording: Recording | None) -> go.Figure:
    """Held-out reward of every arm over its steps, mean and range over seeds, and beside it what a step costs.

    A row of panels for each answer style. Without a recording, or without a complete arm: a figure that says so.
    """
    arms = arm_results(recording) if recording is not None else []
    if recording is None or not arms:
        return _nothing_yet()
    answers = list(dict.fromkeys(arm.answer for arm in arms))
    titles = [text for answer in answers for text in (f"answers of a {answer}", "seconds per step")]
    figure = make_subplots(len(answers), 2, column_widths=[0.72, 0.28], subplot_titles=titles, vertical_spacing=0.2)
    named: set[str] = set()
    for arm in arms:
        place = {"row": answers.index(arm.answer) + 1, "col": 1}
        _add_curve(figure, arm, recording.origin, shown=arm.scope not in named, **place)
        _add_cost(figure, arm, recording.origin, **place | {"col": 2})
        named.add(arm.scope)
    figure.update_xaxes(title={"text": "step", "standoff": 4}, col=1)
    figure.update_xaxes(showticklabels=False, col=2)
    figure.update_yaxes(title="held-out reward", rangemode="tozero", col=1)
    figure.update_yaxes(rangemode="tozero", col=2)
    styled = _styled(figure).update_layout(height=60 + 320 * len(answers))
    return styled.update_layout(margin={"t": 40}, legend={"y": 1.04 if len(answers) > 1 else 1.1})


def _add_curve(figure: go.Figure, arm: ArmResult, origin: str, *, shown: bool, **place: int) -> None:
    color, symbol = _STYLES.get(arm.scope, _OTHER)
    band = seed_band(arm.rows, "held_out_reward")
    if not band:  # seeds that ended at different steps
        return
    steps = list(band)
    lowest, middle, highest = (list(values) for values in zip(*band.values(), strict=True))
    figure.add_scatter(
        x=[*steps, *reversed(steps)], y=[*highest, *reversed(lowest)], mode="lines", fill="toself",
        fillcolor=_faint(color), line={"width": 0}, hoverinfo="skip", showlegend=False, legendgroup=arm.scope, **place,
    )  # fmt: skip
    figure.add_scatter(
        x=steps, y=middle, name=f"{origin}: {arm.scope}, mean and range of {len(arm.before)} seeds",
        mode="lines+markers", line={"color": color, "width": 3}, marker={"size": 9, "symbol": symbol},
        legendgroup=arm.scope, showlegend=shown, customdata=list(zip(lowest, highest, strict=True)),
        hovertemplate=f"{arm.scope}, learning rate {arm.learning_rate:g}, step %{{x}}: %{{y:.3f}} "
        "(%{customdata[0]:.3f} to %{customdata[1]:.3f})<extra></extra>", **place,
    )  # fmt: skip


def _add_cost(figure: go.Figure, arm: ArmResult, origin: str, **place: int) -> None:
    figure.add_bar(
        x=[arm.scope], y=[arm.step_seconds], marker={"color": _STYLES.get(arm.scope, _OTHER)[0]}, showlegend=False,
        legendgroup=arm.scope, name=f"{origin}: {arm.scope}",
        hovertemplate=f"{arm.scope}: %{{y:.2f}} s per step, median ({origin})<extra></extra>", **place,
    )  # fmt: skip


def reward_figure(rows: Sequence[Mapping[str, Any]], *, origin: str = "measured") -> go.Figure:
    """One run: mean reward of the sampled responses at every step, and of held-out tasks where they were evaluated.

    Without rows: a figure that says so.
    """
    if not rows:
        return _nothing_yet()
    figure = go.Figure()
    series = (("sampled", "reward_mean", "responses that it trained on"), ("held out", "held_out_reward", "held out"))
    for name, column, label in series:
        points = [(row["step"], row[column]) for row in rows if row[column] is not None]
        figure.add_scatter(
            x=[step for step, _ in points], y=[value for _, value in points], name=f"{origin}: {label}",
            mode="lines+markers", line={"color": _COLORS[name], "width": 3 if name == "held out" else 1.5},
            marker={"size": 10 if name == "held out" else 5, "symbol": "diamond" if name == "held out" else "circle"},
            hovertemplate=f"{label}, step %{{x}}: %{{y:.3f}}<extra></extra>",
        )  # fmt: skip
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="mean reward", rangemode="tozero")
    return _styled(figure)


def _nothing_yet() -> go.Figure:
    figure = go.Figure().add_annotation(text="no run is recorded yet", showarrow=False)
    figure.update_xaxes(visible=False)
    figure.update_yaxes(visible=False)
    return _styled(figure).update_layout(height=120)


def _faint(color: str) -> str:
    red, green, blue = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.2)"
