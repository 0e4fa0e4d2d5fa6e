"""Prefix reuse, measured: drift against steps since the capture, and refresh rules on held-out prompts.

`python -m workbench.drift_study` records both for the bundled models in `data/runs/`;
notebooks/50_prefix_reuse.ipynb reads the recordings, or measures again.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from workbench import DriftReport, Policy, RefreshPolicy, ReuseStep, reuse_run
from workbench.config import ObjectiveConfig
from workbench.progress import progress
from workbench.recordings import RUNS_FOLDER, Recording, load_recording, save_recording
from workbench.study_problems import Problem, family_of, open_policy, open_problem

Row = Mapping[str, Any]
HELD_OUT = 1000  # seeds of held-out prompts begin here; margins and rules were chosen on seeds below


class DriftParameters(BaseModel):
    """The parameters of notebooks/50_prefix_reuse.ipynb; an unknown name, or a value that does not fit, is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[str, ...] = Field(default=("tiny-hybrid-half", "tiny-glm-dsa-half"), min_length=1)
    learning_rates: tuple[NonNegativeFloat, ...] = Field(default=(3e-4, 1e-3, 3e-3), min_length=1)
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1)
    prompt_tokens: PositiveInt = 512
    answer_style: Literal["token", "sentence"] = "sentence"
    reward: Literal["exact_answer", "answer_similarity"] = "answer_similarity"
    group_size: int = Field(default=4, ge=2)
    max_new_tokens: PositiveInt = 12
    chunk_tokens: PositiveInt = 128
    lora_rank: PositiveInt = 8
    temperature: PositiveFloat = 1.0
    num_steps: int = Field(default=12, ge=2)
    # the comparison of refresh rules
    refresh_learning_rate: PositiveFloat = 1e-3
    refresh_steps: int = Field(default=24, ge=2)
    refresh_prompts: PositiveInt = 4
    intervals: tuple[PositiveInt, ...] = (2, 3, 4, 6, 8)
    max_logprob_drift: PositiveFloat = 0.05

    def objective(self) -> ObjectiveConfig:
        return ObjectiveConfig(temperature=self.temperature)


# ---------------------------------------------------------------- runs


def open_run(
    model: str, parameters: DriftParameters, *, seed: int, adapter_scope: str = "all"
) -> tuple[Policy, Problem]:
    """A fresh adapter and a prompt, both of this seed."""
    policy = open_policy(model, lora_rank=parameters.lora_rank, seed=seed, adapter_scope=adapter_scope)
    problem = open_problem(
        policy,
        prompt_tokens=parameters.prompt_tokens,
        answer_style=parameters.answer_style,
        reward=parameters.reward,
        seed=seed,
    )
    return policy, problem


def study_run(
    policy: Policy,
    problem: Problem,
    parameters: DriftParameters,
    *,
    refresh: RefreshPolicy,
    learning_rate: float,
    seed: int,
    num_steps: int | None = None,
    decay: bool = False,
    oracle_gradient: bool = True,
) -> Iterator[ReuseStep]:
    """`reuse_run` by AdamW without weight decay. decay: the learning rate falls linearly to 0, as by TRL's default."""
    steps = num_steps or parameters.num_steps
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable_parameters()], lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / steps if decay else 1.0)
    return reuse_run(
        policy,
        problem.prompt_ids,
        problem.rewards,
        refresh=refresh,
        optimizer=optimizer,
        scheduler=schedule,
        num_steps=steps,
        group_size=parameters.group_size,
        max_new_tokens=parameters.max_new_tokens,
        objective=parameters.objective(),
        chunk_tokens=parameters.chunk_tokens,
        oracle_gradient=oracle_gradient,
        seed=seed,
    )


def drift_rows(parameters: DriftParameters) -> Iterator[Row]:
    """Drift without any refresh: one row for each step of each model, learning rate and seed."""
    never = parameters.num_steps + 1
    runs = list(itertools.product(parameters.models, parameters.learning_rates, parameters.seeds))
    for model, learning_rate, seed in progress(runs, "drift runs", unit="run"):
        policy, problem = open_run(model, parameters, seed=seed)
        rule = RefreshPolicy(interval=never)
        for step in study_run(policy, problem, parameters, refresh=rule, learning_rate=learning_rate, seed=seed):
            yield drift_row(model, policy, problem, parameters, learning_rate, seed, never, step)


def drift_row(
    model: str,
    policy: Policy,
    problem: Problem,
    parameters: DriftParameters,
    learning_rate: float,
    seed: int,
    interval: int,
    step: ReuseStep,
) -> Row:
    """One step as a row of the recording kind "drift"."""
    drift = step.drift
    assert drift is not None
    return {
        "model": model,
        "family": family_of(policy),
        "learning_rate": learning_rate,
        "seed": seed,
        "prompt_tokens": problem.prompt_ids.numel(),
        "response_tokens": parameters.max_new_tokens,
        "refresh_interval": interval,
        "step": step.step,
        "state_age": step.state_age,
        "loss_drift_pct": drift.loss_drift_pct,
        "mean_abs_logprob_drift": drift.mean_abs_logprob_drift,
        "max_abs_logprob_drift": drift.max_abs_logprob_drift,
        "kl": drift.kl,
        "gradient_cosine": drift.gradient_cosine,
        "gradient_norm_ratio": drift.gradient_norm_ratio,
        "capture_seconds": drift.seconds["capture"],
        "step_seconds": step.seconds,
    }


def refresh_rules(parameters: DriftParameters) -> dict[str, RefreshPolicy]:
    """The rules that are compared, by name."""
    fixed = {f"interval {k}": RefreshPolicy(interval=k) for k in parameters.intervals}
    return {"drift": RefreshPolicy(max_logprob_drift=parameters.max_logprob_drift)} | fixed


def refresh_rows(parameters: DriftParameters, first_seed: int = HELD_OUT) -> Iterator[Row]:
    """Every rule on every held-out prompt, the learning rate falling to 0: one row for each step."""
    seeds = range(first_seed, first_seed + parameters.refresh_prompts)
    runs = list(itertools.product(parameters.models, seeds, refresh_rules(parameters).items()))
    for model, seed, (name, rule) in progress(runs, "refresh runs", unit="run"):
        policy, problem = open_run(model, parameters, seed=seed)
        before = 0.0
        for step in study_run(
            policy, problem, parameters, refresh=rule, learning_rate=parameters.refresh_learning_rate, seed=seed,
            num_steps=parameters.refresh_steps, decay=True, oracle_gradient=False,
        ):  # fmt: skip
            assert step.drift is not None
            yield {
                "model": model,
                "family": family_of(policy),
                "learning_rate": parameters.refresh_learning_rate,
                "seed": seed,
                "prompt_tokens": problem.prompt_ids.numel(),
                "rule": name,
                "max_logprob_drift": parameters.max_logprob_drift,
                "step": step.step,
                "state_age": step.state_age,
                "refreshed": step.decision.refresh,
                "predicted_drift": step.decision.predicted_drift,
                "measured_drift": step.decision.measured_drift,
                "mean_abs_logprob_drift": step.drift.mean_abs_logprob_drift,
                "capture_seconds": step.drift.seconds["capture"],
                "probe_seconds": step.reuse.probe_seconds - before,
                "step_seconds": step.seconds,
            }
            before = step.reuse.probe_seconds


# ---------------------------------------------------------------- what the rows say


def seed_bands(rows: Iterable[Row], column: str) -> dict[int, tuple[float, float, float]]:
    """Lowest, mean and highest over the seeds at each state age; rows without the value (None) are left out."""
    by_age: dict[int, list[float]] = {}
    for row in rows:
        if row[column] is not None:
            by_age.setdefault(row["state_age"], []).append(row[column])
    return {age: (min(v), sum(v) / len(v), max(v)) for age, v in sorted(by_age.items())}


def falls(rows: Sequence[Row], column: str) -> tuple[int, int]:
    """How often the value falls from one step to the next of a run, and how many such pairs there are."""
    fell = pairs = 0
    ordered = sorted(rows, key=_run_and_step)
    for earlier, later in itertools.pairwise(ordered):
        if _run_and_step(earlier)[:-1] == _run_and_step(later)[:-1] and None not in (earlier[column], later[column]):
            fell += later[column] < earlier[column]
            pairs += 1
    return fell, pairs


def _run_and_step(row: Row) -> tuple[Any, ...]:
    return row["model"], row["learning_rate"], row["seed"], row["step"]


def rank_correlation(rows: Iterable[Row], one: str, other: str) -> float:
    """Spearman's, over rows of stale states that have both values: does a larger `one` go with a larger `other`?"""
    pairs = [(row[one], row[other]) for row in rows if row["state_age"] > 0 and None not in (row[one], row[other])]
    ranks = [
        torch.tensor(values, dtype=torch.float64).argsort().argsort().double() for values in zip(*pairs, strict=True)
    ]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


TRIGGER_HEADINGS = (
    "model", "loss drift: falls between steps", "log-prob drift: falls between steps",
    "rank correlation with 1 - gradient cosine: of loss drift", "of log-prob drift",
)  # fmt: skip


def trigger_table(recording: Recording) -> list[list[Any]]:
    """Which of loss drift and log-prob drift is the steadier sign of staleness, for each model."""
    table = []
    for model in recording.values("model"):
        rows = [
            dict(row) | {"gradient_error": None if row["gradient_cosine"] is None else 1 - row["gradient_cosine"]}
            for row in recording.select(model=model)
            if row["learning_rate"] > 0
        ]
        columns = ("loss_drift_pct", "mean_abs_logprob_drift")
        table.append(
            [
                model,
                *("{} of {}".format(*falls(rows, column)) for column in columns),
                *(rank_correlation(rows, column, "gradient_error") for column in columns),
            ]
        )
    return table


RULE_HEADINGS = (
    "model", "rule", "steps", "captures", "steps within the threshold, %", "largest drift", "probe, % of a capture",
)  # fmt: skip


def rule_table(recording: Recording) -> list[list[Any]]:
    """What each refresh rule keeps and costs on the held-out prompts, for each model."""
    table = []
    for model, rule in itertools.product(recording.values("model"), recording.values("rule")):
        rows = recording.select(model=model, rule=rule)
        within = sum(row["mean_abs_logprob_drift"] <= row["max_logprob_drift"] for row in rows)
        captures = sum(row["refreshed"] for row in rows)
        probe = sum(row["probe_seconds"] for row in rows) / sum(row["capture_seconds"] for row in rows)
        largest = max(row["mean_abs_logprob_drift"] for row in rows)
        table.append([model, rule, len(rows), captures, 100 * within / len(rows), largest, 100 * probe])
    return table


def report_rows(report: DriftReport) -> list[list[Any]]:
    """One report in words and numbers."""
    return [
        ["mean |log-prob drift| per token, nats", report.mean_abs_logprob_drift],
        ["largest |log-prob drift|", report.max_abs_logprob_drift],
        ["KL(reused || fresh) per token, exact", report.kl],
        ["the same, sampled (k3)", report.kl_sampled],
        ["loss on the reused state", report.loss_reused],
        ["loss on the fresh state", report.loss_fresh],
        ["gradient cosine", report.gradient_cosine],
        ["gradient norm, reused / fresh", report.gradient_norm_ratio],
        ["cost of this measurement, s", report.seconds["total"]],
        ["its peak, MB", report.memory["peak_bytes"] / 1e6],  # type: ignore[operator]
    ]


# ---------------------------------------------------------------- recordings

COMMAND = "python -m workbench.drift_study"
Source = Callable[[DriftParameters], Iterator[Row]]
TITLES: Mapping[str, tuple[Source, str]] = {
    "drift": (drift_rows, "Drift of a reused prompt state against optimizer steps since its capture"),
    "refresh": (refresh_rows, "Refresh rules on held-out prompts, the learning rate falling linearly to 0"),
}


def record(kind: str, parameters: DriftParameters, folder: Path = RUNS_FOLDER, command: str = COMMAND) -> Recording:
    """Measure and save; an interruption leaves the file with the rows so far, and a note that says so."""
    source, title = TITLES[kind]
    notes = [f"{name}: {value}" for name, value in parameters.model_dump().items()]
    rows: list[Row] = []
    finished = False
    try:
        rows.extend(source(parameters))
        finished = True
    finally:
        if rows:
            partial = [] if finished else ["interrupted: the rows end where the run did"]
            saved = save_recording(
                folder / f"{kind}.json", kind, rows, title=title, command=command, notes=[*notes, *partial]
            )
    return saved


def recorded_or_measured(kind: str, parameters: DriftParameters, *, rerun: bool, folder: Path) -> Recording:
    """The shipped recording, or with rerun a new one, measured here and saved in `folder`."""
    if rerun:
        return record(kind, parameters, folder, command="notebooks/50_prefix_reuse.ipynb with rerun = True")
    return load_recording(RUNS_FOLDER / f"{kind}.json")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("kinds", nargs="*", choices=[[], *TITLES], help="drift, refresh; both by default")
    parser.add_argument("--out", type=Path, default=RUNS_FOLDER, help="folder of the recordings")
    given = parser.parse_args(argv)
    for kind in given.kinds or TITLES:
        recording = record(kind, DriftParameters(), given.out)
        print(f"{given.out / kind}.json: {len(recording.rows)} rows")


if __name__ == "__main__":
    main()
