"""What notebooks/45_tiny_models.ipynb shows: its parameters, the training curve, and tables of accuracies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import plotly.graph_objects as go
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from workbench.figures import _styled
from workbench.model_sources import BUNDLED_MODELS, bundled_model_path
from workbench.records import read_record
from workbench.tiny_models.evaluation import Accuracy
from workbench.tiny_models.make import RECORD_FILE, MadeModel, curve
from workbench.tiny_models.recipes import Recipe, find_recipe

ACCURACY_HEADINGS = ("task", "needles", "answer", "prompt tokens", "tasks", "greedy", "sampled", "groups that vary")
_COLORS = {"accuracy": "#0072b2", "length": "#8f8f8f"}


class TinyModelParameters(BaseModel):
    """The parameters of the notebook; an unknown name, or a value that does not fit, is an error.

    max_steps: of each stage; 0 leaves each stage's number to the recipe.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    max_steps: int = Field(ge=0)
    prompt_tokens: list[int] = Field(min_length=1)
    num_tasks: PositiveInt
    seed: int = Field(ge=0)

    def recipe(self) -> Recipe:
        recipe = replace(find_recipe(self.name), seed=self.seed)
        if not self.max_steps:
            return recipe
        most = self.max_steps
        return replace(
            recipe,
            copying_steps=min(most, recipe.copying_steps),
            max_steps=min(most, recipe.max_steps),
            cooldown_steps=min(most, recipe.cooldown_steps),
            index_steps=min(most, recipe.index_steps),
            sparse_steps=min(most, recipe.sparse_steps),
        )


def bundled_records() -> dict[str, dict[str, Any]]:
    """The record of every bundled model, by name."""
    return {name: read_record(bundled_model_path(name) / RECORD_FILE) for name in BUNDLED_MODELS}


def accuracy_rows(accuracies: Iterable[Accuracy | Mapping[str, Any]]) -> list[list[Any]]:
    """Rows under ACCURACY_HEADINGS, of measured accuracies or of a record's."""
    rows = []
    for found in accuracies:
        row = asdict(found) if isinstance(found, Accuracy) else dict(found)
        sampled = "" if row["sampled"] is None else row["sampled"]
        varied = "" if row["varied_groups"] is None else f"{row['varied_groups']:.0%}"
        columns = ("kind", "num_needles", "answer_style", "prompt_tokens", "num_tasks", "greedy")
        rows.append([*(row[column] for column in columns), sampled, varied])
    return rows


def curve_figure(points: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Accuracy over the optimizer steps of the curriculum, and the length of its sequences."""
    points = [point for point in points if point["stage"] == "curriculum"]
    steps = [point["step"] for point in points]
    figure = go.Figure()
    figure.add_scatter(
        x=steps, y=[point["accuracy"] for point in points], name="accuracy on the values asked for (measured)",
        mode="lines+markers", line={"color": _COLORS["accuracy"], "width": 3},
        hovertemplate="step %{x}: %{y:.0%}<extra></extra>",
    )  # fmt: skip
    figure.add_scatter(
        x=steps, y=[point["tokens"] for point in points], name="tokens of a sequence", mode="lines", yaxis="y2",
        line={"color": _COLORS["length"], "width": 2, "dash": "dot", "shape": "hv"},
        hovertemplate="step %{x}: %{y:,} tokens<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title="optimizer step")
    figure.update_yaxes(title="accuracy", range=[0, 1.02])
    styled = _styled(figure)
    return styled.update_layout(
        yaxis2={"overlaying": "y", "side": "right", "type": "log", "title": "tokens", "showgrid": False}
    )


def made_results(parameters: TinyModelParameters, made: MadeModel) -> dict[str, Any]:
    """What the run's record keeps."""
    return {
        "name": parameters.name,
        "seed": parameters.seed,
        "interrupted": made.interrupted,
        "curve": curve(made.steps),
        "accuracies": [asdict(found) for found in made.accuracies],
    }
