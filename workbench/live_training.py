"""What notebooks/40_train.ipynb does between its prose: its parameters, a short run of its own, and its results."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from workbench.recordings import RUNS_FOLDER, Recording
from workbench.records import run_folder
from workbench.training_curves import Row, recorded, result_rows
from workbench.training_study import ARMS, Run, StudyConfig, curves, perform

RESULT_NAME = "training"


class TrainParameters(BaseModel):
    """The parameters of notebooks/40_train.ipynb; an unknown name, or a value that does not fit, is refused.

    scope: of the gradient; "tail" walks the last prompt chunk, "prefix_frozen" has its adapter off at the prompt.
    lora_rank: 0 trains the whole model. recordings: where training*.json lie; empty: those of this repository.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(min_length=1)
    kind: str
    answer_style: Literal["token", "sentence"]
    prompt_tokens: PositiveInt
    num_needles: PositiveInt
    scope: Literal["full", "tail", "response_only", "prefix_frozen"]
    learning_rate: PositiveFloat
    lora_rank: NonNegativeInt
    num_steps: PositiveInt
    prompts_per_step: PositiveInt
    group_size: int = Field(ge=2)
    chunk_tokens: PositiveInt
    eval_every: PositiveInt
    num_held_out: PositiveInt
    seed: NonNegativeInt
    recordings: str = ""

    @model_validator(mode="after")
    def _has_what_it_freezes(self) -> Self:
        if self.scope == "prefix_frozen" and self.lora_rank == 0:
            raise ValueError("scope='prefix_frozen' is about an adapter: give lora_rank > 0")
        return self

    def recording(self, name: str) -> Recording | None:
        """A recording by name; None where it was not made yet."""
        return recorded((Path(self.recordings) if self.recordings else RUNS_FOLDER) / f"{name}.json")

    @property
    def study(self) -> StudyConfig:
        return StudyConfig(
            model=self.model,
            kind=self.kind,
            prompt_tokens=self.prompt_tokens,
            num_steps=self.num_steps,
            prompts_per_step=self.prompts_per_step,
            group_size=self.group_size,
            num_tasks=self.num_steps * self.prompts_per_step,
            num_held_out=self.num_held_out,
            eval_every=self.eval_every,
            lora=self.lora_rank or None,
            chunk_tokens=self.chunk_tokens,
            num_needles=self.num_needles,
            checkpoint_every=self.eval_every,
        )

    @property
    def run(self) -> Run:
        arm = next(arm for arm in ARMS if arm.name == self.scope)
        return Run(arm, self.answer_style, self.learning_rate, self.seed, self.num_steps)

    @property
    def folder(self) -> Path:
        """Where the run writes: the notebook run's own folder, or one that only these parameters have."""
        name = hashlib.sha256(repr(self.study).encode()).hexdigest()[:8]
        return run_folder() or Path("runs") / f"40_train-{name}"


def train_live(parameters: TrainParameters) -> list[Row]:
    """The notebook's own run, or what is left of it, and its curve: one row per step."""
    perform(parameters.run, parameters.study, parameters.folder)
    return curves(parameters.run, parameters.study, parameters.folder)


LIVE_HEADINGS = ("steps", "held out, before", "after", "gain", "seconds per step")


def live_row(rows: Sequence[Row]) -> list[Any]:
    """Held-out reward at the first and the last evaluation, and the mean cost of a step."""
    held_out = [row["held_out_reward"] for row in rows if row["held_out_reward"] is not None]
    seconds = [row["step_seconds"] for row in rows if row["step_seconds"] is not None]
    return [len(seconds), held_out[0], held_out[-1], held_out[-1] - held_out[0], sum(seconds) / len(seconds)]


def training_results(
    parameters: TrainParameters, recordings: Mapping[str, Recording | None], rows: Sequence[Row]
) -> dict[str, Any]:
    """Everything that the notebook shows, as `workbench.records.save_results` takes it."""
    return {
        "seed": parameters.seed,
        "evidence": {"level": 1, "checks": [{"level": 1, "what": "executed", "passed": True}]},
        "settings": parameters.model_dump(),
        "recorded": {name: None if found is None else result_rows(found) for name, found in recordings.items()},
        "live": [dict(row) for row in rows],
        "live_summary": dict(zip(LIVE_HEADINGS, live_row(rows), strict=True)),
    }
