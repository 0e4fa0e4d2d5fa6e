"""Prefix reuse, measured: drift against steps since the capture, and refresh rules on held-out prompts.

`python -m workbench.drift_study` records both for the bundled models in `data/runs/`;
notebooks/50_prefix_reuse.ipynb reads the recordings, or measures again.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from workbench import (
    Policy,
    PromptReuse,
    RefreshPolicy,
    ResidentState,
    Response,
    ReuseStep,
    capture_prompt,
    reuse_run,
    sample_responses,
    score_responses,
    update_step,
)
from workbench.config import ObjectiveConfig
from workbench.drift_tables import RULE_HEADINGS, TRIGGER_HEADINGS, rule_table, trigger_table
from workbench.progress import progress
from workbench.recordings import RUNS_FOLDER, Recording, save_recording
from workbench.records import run_folder
from workbench.study_problems import (
    Problem,
    family_of,
    open_policy,
    open_problem,
    rows_of_other_models,
    shipped_recording,
)

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
    group_size: int = Field(default=3, ge=2)
    max_new_tokens: PositiveInt = 8
    chunk_tokens: PositiveInt = 128
    lora_rank: PositiveInt = 8
    temperature: PositiveFloat = 1.0
    num_steps: int = Field(default=9, ge=2)
    gradient_ages: tuple[int, ...] = (0, 1, 2, 4, 8)  # where loss and gradient are compared: those of the paper's table
    frozen_adapter: Literal["response", "replay"] | None = None  # adapter scope of the prefix-frozen case, if any
    # the comparison of refresh rules
    refresh_learning_rate: PositiveFloat = 3e-3
    refresh_steps: int = Field(default=48, ge=2)
    refresh_prompts: PositiveInt = 3
    intervals: tuple[PositiveInt, ...] = (2, 3, 4, 6, 8, 12)
    max_logprob_drift: PositiveFloat = 0.01

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
    oracle: Literal["first", "current"] = "first",
    oracle_gradient: bool | Collection[int] = True,
) -> Iterator[ReuseStep]:
    """`reuse_run` by AdamW without weight decay, the learning rate constant."""
    steps = num_steps or parameters.num_steps
    optimizer, schedule = _optimizer(policy, learning_rate, steps, decay=False)
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
        oracle=oracle,
        oracle_gradient=oracle_gradient,
        seed=seed,
    )


def _optimizer(policy: Policy, learning_rate: float, num_steps: int, *, decay: bool) -> tuple[Any, Any]:
    """AdamW without weight decay and its schedule; decay: linearly to 0, as by TRL's default."""
    optimizer = torch.optim.AdamW([p for _, p in policy.trainable_parameters()], lr=learning_rate, weight_decay=0.0)
    factor = (lambda step: 1.0 - step / num_steps) if decay else (lambda step: 1.0)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def exact_cases(model: str, parameters: DriftParameters, learning_rate: float) -> list[list[Any]]:
    """What must hold to the bit: [case, state ages, largest |log-prob drift| over its steps], five steps each."""
    cases: dict[str, tuple[int, float, str]] = {
        "learning rate 0, never captured again": (6, 0.0, "all"),
        "captured at every step": (1, learning_rate, "all"),
        "captured every 4 steps": (4, learning_rate, "all"),
    }
    if parameters.frozen_adapter is not None:
        cases["adapter off at the prompt (prefix-frozen)"] = (6, learning_rate, parameters.frozen_adapter)
    table = []
    for case, (interval, rate, adapter_scope) in cases.items():
        policy, problem = open_run(model, parameters, seed=parameters.seeds[0], adapter_scope=adapter_scope)
        rule = RefreshPolicy(interval=interval)
        steps = list(study_run(policy, problem, parameters, refresh=rule, learning_rate=rate, seed=0, num_steps=5))
        drifts = [step.drift.max_abs_logprob_drift for step in steps if step.drift]
        table.append([case, ", ".join(str(step.state_age) for step in steps), max(drifts)])
    return table


def drift_rows(parameters: DriftParameters) -> Iterator[Row]:
    """Drift without any refresh: one row for each step of each model, learning rate and seed."""
    never = parameters.num_steps + 1
    runs = list(itertools.product(parameters.models, parameters.learning_rates, parameters.seeds))
    for model, learning_rate, seed in progress(runs, "drift runs", unit="run"):
        policy, problem = open_run(model, parameters, seed=seed)
        rule = RefreshPolicy(interval=never)
        for step in study_run(
            policy, problem, parameters, refresh=rule, learning_rate=learning_rate, seed=seed,
            oracle_gradient=parameters.gradient_ages,
        ):  # fmt: skip
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
    """Every rule on every held-out prompt, the learning rate falling to 0: one row for each step and rule.

    The rules watch one training run side by side, each with its own state: they see the same weights and the same
    responses, so they differ in nothing but when they capture. The run itself trains on fresh captures. Drift is that
    of the step's own group.
    """
    seeds = range(first_seed, first_seed + parameters.refresh_prompts)
    runs = list(itertools.product(parameters.models, seeds))
    for model, seed in progress(runs, "refresh runs", unit="run"):
        policy, problem = open_run(model, parameters, seed=seed)
        yield from watched_run(model, policy, problem, parameters, seed)


def watched_run(model: str, policy: Policy, problem: Problem, parameters: DriftParameters, seed: int) -> Iterator[Row]:
    """One training run on fresh captures, with a `PromptReuse` of every rule beside it."""
    num_steps, rules = parameters.refresh_steps, refresh_rules(parameters)
    optimizer, schedule = _optimizer(policy, parameters.refresh_learning_rate, num_steps, decay=True)
    watched = {
        name: PromptReuse(
            policy, problem.prompt_ids, refresh=rule, chunk_tokens=parameters.chunk_tokens,
            temperature=parameters.temperature,
        )
        for name, rule in rules.items()
    }  # fmt: skip
    probe_seconds = dict.fromkeys(rules, 0.0)
    for step in range(num_steps):
        started = time.perf_counter()
        fresh = capture_prompt(policy, problem.prompt_ids, chunk_tokens=parameters.chunk_tokens, keep_boundaries=False)
        capture_seconds = time.perf_counter() - started
        group = sample_responses(
            policy, fresh, parameters.group_size, max_new_tokens=parameters.max_new_tokens,
            temperature=parameters.temperature, seed=seed * 100_003 + step,
        )  # fmt: skip
        for name, reuse in watched.items():
            state = reuse.state_for_step()
            decision, cost = reuse.last_decision, reuse.report().probe_seconds
            assert decision is not None
            yield {
                "model": model,
                "family": family_of(policy),
                "learning_rate": parameters.refresh_learning_rate,
                "seed": seed,
                "prompt_tokens": problem.prompt_ids.numel(),
                "rule": name,
                "max_logprob_drift": parameters.max_logprob_drift,
                "step": step,
                "state_age": reuse.state_age,
                "refreshed": decision.refresh,
                "predicted_drift": decision.predicted_drift,
                "measured_drift": decision.measured_drift,
                "mean_abs_logprob_drift": _mean_drift(policy, state, fresh, group, parameters.temperature),
                "capture_seconds": capture_seconds,
                "probe_seconds": cost - probe_seconds[name],
            }
            probe_seconds[name] = cost
            reuse.note_responses(group)
            del state
        update_step(
            policy, problem.prompt_ids, group, rewards=problem.rewards(group), objective=parameters.objective(),
            gradient_scope="response_only", state=fresh, optimizer=optimizer, measure_memory=False,
        )  # fmt: skip
        schedule.step()


def _mean_drift(
    policy: Policy, state: ResidentState, fresh: ResidentState, group: Sequence[Response], temperature: float
) -> float:
    reused, right = (
        torch.cat(score_responses(policy, either, group, temperature=temperature, allow_stale=True))
        for either in (state, fresh)
    )
    return float((reused - right).abs().double().mean())


# ---------------------------------------------------------------- recordings

COMMAND = "python -m workbench.drift_study"
Source = Callable[[DriftParameters], Iterator[Row]]
TITLES: Mapping[str, tuple[Source, str]] = {
    "drift": (drift_rows, "Drift of a reused prompt state against optimizer steps since its capture"),
    "refresh": (refresh_rows, "Refresh rules on held-out prompts, the learning rate falling linearly to 0"),
}


def record(kind: str, parameters: DriftParameters, folder: Path = RUNS_FOLDER, command: str = COMMAND) -> Recording:
    """Measure and save; an interruption leaves the file with the rows so far, and a note that says so.

    Rows of other models that the file has already are kept, so that models can be recorded one by one.
    """
    source, title = TITLES[kind]
    notes = [f"{name}: {value}" for name, value in parameters.model_dump(exclude={"models"}).items()]
    rows = rows_of_other_models(folder / f"{kind}.json", parameters.models)
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


def recorded_or_measured(
    kind: str, parameters: DriftParameters, *, rerun: bool, folder: Path | None = None
) -> Recording:
    """The shipped recording, or with rerun a new one, measured here and saved in `folder` (default: the run's own)."""
    if rerun:
        target = folder or run_folder() or Path("runs")
        return record(kind, parameters, target, command="notebooks/50_prefix_reuse.ipynb with rerun = True")
    return shipped_recording(RUNS_FOLDER / f"{kind}.json", parameters.models, COMMAND)


def drift_results(
    parameters: DriftParameters, exact: Sequence[Sequence[Any]], drift: Recording, refresh: Recording
) -> dict[str, Any]:
    """Everything that the notebook shows, as `workbench.records.save_results` takes it."""
    zero = all(largest == 0.0 for case, _, largest in exact if "every 4" not in case)
    checks = [
        {"level": 1, "what": "executed", "passed": True},
        {"level": 1, "what": "drift is exactly 0 without learning, without reuse and prefix-frozen", "passed": zero},
    ]
    return {
        "seed": parameters.seeds[0],
        "evidence": {"level": int(zero), "checks": checks},
        "settings": parameters.model_dump(),
        "exact_cases": exact,
        "trigger": dict(zip(("headings", "rows"), (TRIGGER_HEADINGS, trigger_table(drift)), strict=True)),
        "rules": dict(zip(("headings", "rows"), (RULE_HEADINGS, rule_table(refresh)), strict=True)),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--kind", choices=TITLES, action="append", help="both by default")
    parser.add_argument("--model", action="append", help="one to record, may be repeated; others in the file are kept")
    parser.add_argument("--out", type=Path, default=RUNS_FOLDER, help="folder of the recordings")
    given = parser.parse_args(argv)
    parameters = DriftParameters(**({"models": given.model} if given.model else {}))
    for kind in given.kind or TITLES:
        recording = record(kind, parameters, given.out)
        print(f"{given.out / kind}.json: {len(recording.rows)} rows")


if __name__ == "__main__":
    main()
