"""What each gradient scope leaves out of the full gradient, by layer and kind of module; whether `Sampled` is unbiased.

`python -m workbench.scope_study` records it for the bundled models in `data/runs/gradient_scope.json`;
notebooks/55_gradient_scope.ipynb reads the recording, or measures again.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from workbench import (
    ObjectiveConfig,
    Policy,
    ResidentState,
    Response,
    Sampled,
    Tail,
    capture_prompt,
    group_advantages,
    sample_responses,
    update_step,
)
from workbench.gradients import (
    Gradient,
    GradientComparison,
    compare_by,
    compare_gradients,
    gradients_set_aside,
    layer_of,
    parameter_family,
    take_gradient,
)
from workbench.progress import progress
from workbench.recordings import RUNS_FOLDER, Recording, load_recording, save_recording
from workbench.study_problems import Problem, family_of, open_policy, open_problem
from workbench.types import GradientScope

Row = Mapping[str, Any]


class ScopeParameters(BaseModel):
    """The parameters of notebooks/55_gradient_scope.ipynb; an unknown name or a value that does not fit is refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[str, ...] = Field(default=("tiny-hybrid-half", "tiny-glm-dsa-half"), min_length=1)
    seeds: tuple[int, ...] = Field(default=(0, 1, 2), min_length=1)
    prompt_tokens: tuple[PositiveInt, ...] = Field(default=(256, 512, 1024), min_length=1)
    response_tokens: tuple[PositiveInt, ...] = Field(default=(1, 4, 16), min_length=1)
    learning_rates: tuple[NonNegativeFloat, ...] = Field(default=(0.0, 1e-3, 3e-3), min_length=1)
    num_updates: PositiveInt = 4  # full-scope updates before the comparison, where the learning rate is not 0
    tails: tuple[PositiveInt, ...] = (1, 2, 4)
    fractions: tuple[float, ...] = (0.25, 0.5)
    num_draws: PositiveInt = 4  # of `Sampled`, averaged: powers of two up to this
    adapter_scopes: tuple[Literal["response", "replay"], ...] = ("response", "replay")
    answer_style: Literal["token", "sentence"] = "sentence"
    reward: Literal["exact_answer", "answer_similarity"] = "answer_similarity"
    group_size: int = Field(default=4, ge=2)
    chunk_tokens: PositiveInt = 64
    lora_rank: PositiveInt = 8
    temperature: PositiveFloat = 1.0

    def objective(self) -> ObjectiveConfig:
        return ObjectiveConfig(temperature=self.temperature)


def scope_name(scope: GradientScope) -> str:
    """ "full", "response_only", "tail:2" or "sampled:0.5"."""
    if isinstance(scope, Tail):
        return f"tail:{scope.chunks}"
    return f"sampled:{scope.fraction:g}" if isinstance(scope, Sampled) else scope


# ---------------------------------------------------------------- one group, its gradient in every scope


class ScopeProblem:
    """One sampled group of one prompt at the current weights, whose gradient can be taken in any scope.

    Advantages are those of the rewards, or +1, -1, ... where the rewards do not vary.
    """

    def __init__(
        self, policy: Policy, problem: Problem, parameters: ScopeParameters, response_tokens: int, seed: int
    ) -> None:
        self.policy, self._parameters = policy, parameters
        self._prompt = problem.prompt_ids
        self._state = self._capture(policy)
        self._responses: list[Response] = sample_responses(
            policy,
            self._state,
            parameters.group_size,
            max_new_tokens=response_tokens,
            temperature=parameters.temperature,
            eos_token_ids=None,  # every response has the length that is studied
            seed=seed,
        )
        advantages = group_advantages(problem.rewards(self._responses))
        alternating = torch.tensor([1.0 - 2.0 * (i % 2) for i in range(parameters.group_size)])
        self._advantages = advantages if bool(advantages.any()) else alternating

    def gradient(self, scope: GradientScope, policy: Policy | None = None) -> Gradient:
        """The step's gradient; `.grad` is as before. policy: another view of the same weights (an adapter scope)."""
        policy = policy or self.policy
        state = self._state if policy is self.policy else self._capture(policy)
        with gradients_set_aside(policy):
            update_step(
                policy,
                self._prompt,
                self._responses,
                advantages=self._advantages,
                objective=self._parameters.objective(),
                gradient_scope=scope,
                state=state,
                measure_memory=False,
            )
            return take_gradient(policy)

    def train(self, learning_rate: float, num_updates: int) -> None:
        """Full-scope updates by AdamW on this group, and a fresh capture."""
        optimizer = torch.optim.AdamW([p for _, p in self.policy.trainable_parameters()], lr=learning_rate)
        for _ in range(num_updates):
            update_step(
                self.policy,
                self._prompt,
                self._responses,
                advantages=self._advantages,
                objective=self._parameters.objective(),
                chunk_tokens=self._parameters.chunk_tokens,
                optimizer=optimizer,
                measure_memory=False,
            )
        self._state = self._capture(self.policy)

    def _capture(self, policy: Policy) -> ResidentState:
        return capture_prompt(policy, self._prompt, chunk_tokens=self._parameters.chunk_tokens)


def mean_of_draws(problem: ScopeProblem, fraction: float, num_draws: int, first_seed: int = 0) -> Iterator[Gradient]:
    """The running mean of `Sampled(fraction)` gradients over 1, 2, ... draws; the last one is reused in place."""
    total: Gradient = {}
    for index in range(num_draws):
        drawn = problem.gradient(Sampled(fraction, seed=first_seed + index))
        total = {name: total[name] + g if total else g for name, g in drawn.items()}
        yield {name: value / (index + 1) for name, value in total.items()}


def adapter_views(policy: Policy, scopes: Sequence[str]) -> dict[str, Policy]:
    """The same model under other adapter scopes."""
    return {scope: Policy(policy.model, policy.tokenizer, adapter_scope=scope) for scope in scopes}


def scope_gradients(problem: ScopeProblem, parameters: ScopeParameters) -> Iterator[tuple[str, str, Gradient]]:
    """(scope, adapter scope, gradient): the cheaper scopes, means of sampled draws, and prefix-frozen adapters."""
    scopes: list[GradientScope] = ["response_only", *(Tail(chunks) for chunks in parameters.tails)]
    for scope in scopes:
        yield scope_name(scope), "all", problem.gradient(scope)
    for fraction in parameters.fractions:
        for number, mean in enumerate(mean_of_draws(problem, fraction, parameters.num_draws), start=1):
            if number & (number - 1) == 0:  # powers of two
                yield f"sampled:{fraction:g} x{number}", "all", mean
    for adapter_scope, view in adapter_views(problem.policy, parameters.adapter_scopes).items():
        yield "response_only", adapter_scope, problem.gradient("response_only", view)


# ---------------------------------------------------------------- rows


def scope_rows(parameters: ScopeParameters) -> Iterator[Row]:
    """Every setting against the full gradient: the whole, each layer, and each kind of module.

    Prompt length, response length and learning rate are varied one at a time around their middle value, which keeps
    the number of settings small.
    """
    runs = list(itertools.product(parameters.models, settings(parameters), parameters.seeds))
    for model, setting, seed in progress(runs, "scope settings", unit="setting"):
        prompt_tokens, response_tokens, learning_rate = setting
        policy = open_policy(model, lora_rank=parameters.lora_rank, seed=seed)
        problem = open_problem(
            policy,
            prompt_tokens=prompt_tokens,
            answer_style=parameters.answer_style,
            reward=parameters.reward,
            seed=seed,
        )
        group = ScopeProblem(policy, problem, parameters, response_tokens, seed)
        if learning_rate > 0.0:
            group.train(learning_rate, parameters.num_updates)
        full = group.gradient("full")
        common = {
            "model": model,
            "family": family_of(policy),
            "seed": seed,
            "prompt_tokens": problem.prompt_ids.numel(),
            "response_tokens": response_tokens,
            "learning_rate": learning_rate,
        }
        for scope, adapter_scope, gradient in scope_gradients(group, parameters):
            detailed = setting == middle_setting(parameters)
            for part in compared_parts(gradient, full) if detailed else [whole_part(gradient, full)]:
                yield common | {"scope": scope, "adapter_scope": adapter_scope} | part


def middle_setting(parameters: ScopeParameters) -> tuple[int, int, float]:
    """Prompt tokens and response tokens from the middle of what is studied, and the first learning rate."""
    prompts, responses = parameters.prompt_tokens, parameters.response_tokens
    return prompts[len(prompts) // 2], responses[len(responses) // 2], parameters.learning_rates[0]


def settings(parameters: ScopeParameters) -> list[tuple[int, int, float]]:
    """(prompt tokens, response tokens, learning rate): each one varied around the middle of the others."""
    prompt, response, rate = middle_setting(parameters)
    varied = [
        *((value, response, rate) for value in parameters.prompt_tokens),
        *((prompt, value, rate) for value in parameters.response_tokens),
        *((prompt, response, value) for value in parameters.learning_rates),
    ]
    return list(dict.fromkeys(varied))


def compared_parts(found: Gradient, full: Gradient) -> Iterator[Row]:
    """Columns layer, parameter_family, cosine, relative_l2: of the whole, of each layer, of each kind of module."""
    yield whole_part(found, full)
    groups: tuple[tuple[Callable[[str], Hashable], bool], ...] = ((layer_of, True), (parameter_family, False))
    for key, is_layer in groups:
        for name, comparison in sorted(compare_by(found, full, key).items(), key=str):
            if name is not None:
                yield _part(name, "all", comparison) if is_layer else _part(None, str(name), comparison)


def whole_part(found: Gradient, full: Gradient) -> Row:
    return _part(None, "all", compare_gradients(found, full))


def _part(layer: Any, family: str, comparison: GradientComparison) -> Row:
    return {
        "layer": layer,
        "parameter_family": family,
        "cosine": comparison.cosine,
        "relative_l2": comparison.relative_l2,
    }


# ---------------------------------------------------------------- what the rows say


def means_by(rows: Iterable[Row], key: str, column: str) -> dict[Any, tuple[float, float, float]]:
    """Lowest, mean and highest of `column` over the rows that share `key`; NaN and None are left out."""
    found: dict[Any, list[float]] = {}
    for row in rows:
        if row[column] is not None and row[column] == row[column]:
            found.setdefault(row[key], []).append(row[column])
    return {name: (min(v), sum(v) / len(v), max(v)) for name, v in found.items()}


def convergence_exponent(errors: Mapping[int, float]) -> float:
    """Slope of log error against log number of draws, by least squares: -1/2 for an unbiased estimate."""
    x, y = (torch.tensor([float(v) for v in values]).double().log() for values in (list(errors), list(errors.values())))
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


SCOPE_HEADINGS = ("model", "scope", "adapter", "cosine, lowest", "mean", "highest", "relative L2, mean")


def scope_table(recording: Recording) -> list[list[Any]]:
    """Cosine and relative L2 of each scope against the full gradient over all settings and seeds, for each model."""
    whole = [row for row in recording.rows if row["layer"] is None and row["parameter_family"] == "all"]
    names = dict.fromkeys((row["model"], row["scope"], row["adapter_scope"]) for row in whole)
    table = []
    for model, scope, adapter_scope in names:
        rows = [r for r in whole if (r["model"], r["scope"], r["adapter_scope"]) == (model, scope, adapter_scope)]
        for lowest, mean, highest in means_by(rows, "scope", "cosine").values():
            _, distance, _ = means_by(rows, "scope", "relative_l2")[scope]
            table.append([model, scope, adapter_scope, lowest, mean, highest, distance])
    return table


# ---------------------------------------------------------------- the recording

COMMAND = "python -m workbench.scope_study"
FILE = "gradient_scope.json"
TITLE = "Each gradient scope against the full gradient"
NOTES = (
    "scope 'sampled:f xN' is the mean of N draws of Sampled(f)",
    "adapter_scope other than 'all': the gradient of that policy at the same weights, against the full one of 'all'",
    "learning_rate 0: a fresh adapter; else after num_updates full-scope updates",
)


def record(
    parameters: ScopeParameters, folder: Path = RUNS_FOLDER, *, command: str = COMMAND, earlier: Sequence[Row] = ()
) -> Recording:
    """Measure and save; an interruption leaves the file with the rows so far, and a note that says so.

    earlier: rows of another model, kept in front.
    """
    settings_notes = [f"{name}: {value}" for name, value in parameters.model_dump().items()]
    rows: list[Row] = list(earlier)
    finished = False
    try:
        rows.extend(scope_rows(parameters))
        finished = True
    finally:
        if rows:
            partial = [] if finished else ["interrupted: the rows end where the run did"]
            notes = [*NOTES, *settings_notes, *partial]
            saved = save_recording(folder / FILE, "gradient_scope", rows, title=TITLE, command=command, notes=notes)
    return saved


def recorded_or_measured(parameters: ScopeParameters, *, rerun: bool, folder: Path) -> Recording:
    """The shipped recording, or with rerun a new one, measured here and saved in `folder`."""
    if rerun:
        return record(parameters, folder, command="notebooks/55_gradient_scope.ipynb with rerun = True")
    return load_recording(RUNS_FOLDER / FILE)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--out", type=Path, default=RUNS_FOLDER, help="folder of the recording")
    given = parser.parse_args(argv)
    print(f"{given.out / FILE}: {len(record(ScopeParameters(), given.out).rows)} rows")


if __name__ == "__main__":
    main()
