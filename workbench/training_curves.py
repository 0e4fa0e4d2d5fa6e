"""Training runs as rows of recordings of kind "training", and what those rows say about learning.

A run's folder (`train`, output_dir) becomes one row per step; rows of several seeds become bands, gains and costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from workbench.recordings import Recording, load_recording
from workbench.train_metrics import JsonLines
from workbench.train_output import EVALUATIONS, METRICS

Row = Mapping[str, Any]
TUNING_SEED = 100
"""Runs of this seed choose a learning rate; no result counts them."""


def curve_rows(folder: Path, **about: Any) -> Iterator[Row]:
    """One row for the start and one for every step of the run in `folder`, however it ended.

    about: the columns that are the same in every row. step_seconds: CPU seconds of the step's sampling and updates.
    """
    lines = JsonLines.read(folder / METRICS).lines
    held_out = {e["step"]: e["reward_mean"] for e in JsonLines.read(folder / EVALUATIONS).lines}
    rewards: dict[int, float | None] = {}
    seconds: dict[int, float] = {}
    for line in lines:
        step = line["step"] + 1  # the reward of a step is of the weights before it, its update comes after
        rewards[step] = line["reward_mean"]
        if "cpu_seconds" in line:  # runs of earlier revisions have wall seconds only
            seconds[step] = seconds.get(step, 0.0) + line["cpu_seconds"]
    for step in range(max([*rewards, *held_out], default=-1) + 1):
        yield {
            **about,
            "step": step,
            "reward_mean": rewards.get(step),
            "held_out_reward": held_out.get(step),
            "step_seconds": seconds.get(step),
        }


def seed_band(rows: Iterable[Row], column: str) -> dict[int, tuple[float, float, float]]:
    """Lowest, mean and highest of a column over seeds, at every step where all seeds of the rows have a value."""
    rows = list(rows)
    seeds = {row["seed"] for row in rows}
    by_step: dict[int, list[float]] = {}
    for row in rows:
        if row[column] is not None:
            by_step.setdefault(row["step"], []).append(row[column])
    full = {step: values for step, values in sorted(by_step.items()) if len(values) == len(seeds)}
    return {step: (min(values), mean(values), max(values)) for step, values in full.items()}


@dataclass(frozen=True)
class ArmResult:
    """One way of training over its seeds. before, after: held-out reward by seed, at the first and last evaluation."""

    answer: str
    scope: str
    learning_rate: float
    before: Mapping[int, float]
    after: Mapping[int, float]
    step_seconds: float | None
    rows: Sequence[Row]

    @property
    def gains(self) -> list[float]:
        return [self.after[seed] - self.before[seed] for seed in self.before]


def arm_results(recording: Recording) -> list[ArmResult]:
    """Every answer style, scope and learning rate of a recording, tuning runs left out; seeds need two evaluations."""
    names = ("answer", "scope", "learning_rate")
    rows = [row for row in recording.rows if row["seed"] != TUNING_SEED]
    results = []
    for key in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        chosen = [row for row in rows if tuple(row[name] for name in names) == key]
        curves: dict[int, list[float]] = {}
        for row in chosen:
            if row["held_out_reward"] is not None:
                curves.setdefault(row["seed"], []).append(row["held_out_reward"])
        curves = {seed: curve for seed, curve in curves.items() if len(curve) > 1}
        seconds = [row["step_seconds"] for row in chosen if row["step_seconds"] is not None]
        if curves:
            before, after = ({seed: curve[at] for seed, curve in curves.items()} for at in (0, -1))
            kept = [row for row in chosen if row["seed"] in curves]
            answer, scope, learning_rate = key
            results.append(
                ArmResult(answer, scope, learning_rate, before, after, median(seconds) if seconds else None, kept)
            )
    return results


RESULT_HEADINGS = (
    "answer", "scope", "learning rate", "seeds", "held out, before", "after", "gain", "smallest gain", "s per step",
)  # fmt: skip


def result_rows(recording: Recording | None) -> list[list[Any]]:
    """One line for each arm: means over seeds, the smallest gain of a seed, and the median cost of a step."""
    return [
        [
            arm.answer,
            arm.scope,
            f"{arm.learning_rate:g}",
            len(arm.before),
            mean(arm.before.values()),
            mean(arm.after.values()),
            mean(arm.gains),
            min(arm.gains),
            arm.step_seconds,
        ]
        for arm in (arm_results(recording) if recording is not None else ())
    ]


def recorded(path: Path) -> Recording | None:
    """The recording at `path`; None where none was made yet. Raises InvalidInputError for a damaged one."""
    return load_recording(path) if path.is_file() else None


def says(recording: Recording | None, name: str, command: str) -> str:
    """Where a recording comes from and what it lacks, or that there is none, in words."""
    if recording is None:
        return f"{name}: not recorded yet. {command} makes it."
    machine = recording.provenance.get("machine", {})
    where = f"{recording.origin} on {machine.get('processor', 'an unknown machine')} by {recording.command}"
    return "\n".join([f"{recording.title}: {where}", *recording.notes])
