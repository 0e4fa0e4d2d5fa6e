"""One group of responses whose gradient can be taken in any scope: what the scope study compares."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

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
    load_policy,
    sample_responses,
    update_step,
)
from workbench.gradients import (
    Gradient,
    gradients_set_aside,
    take_gradient,
)
from workbench.study_problems import Problem, open_policy, open_problem
from workbench.types import GradientScope


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
    fractions: tuple[float, ...] = (0.5,)
    num_draws: PositiveInt = 2  # of `Sampled`, averaged: powers of two up to this
    live_draws: PositiveInt = 16  # the same, for what the notebook measures itself
    adapter_scopes: tuple[Literal["response", "replay"], ...] = ()  # policies whose adapter is off at the prompt
    answer_style: Literal["token", "sentence"] = "sentence"
    reward: Literal["exact_answer", "answer_similarity"] = "answer_similarity"
    group_size: int = Field(default=3, ge=2)
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

    @property
    def prompt_tokens(self) -> int:
        return int(self._prompt.numel())

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


def open_group(model: str, parameters: ScopeParameters, *, seed: int) -> ScopeProblem:
    """The middle setting: a fresh adapter, a prompt and a group, all of this seed."""
    prompt_tokens, response_tokens, _ = middle_setting(parameters)
    return open_setting(model, parameters, prompt_tokens, response_tokens, seed)


def open_setting(
    model: str, parameters: ScopeParameters, prompt_tokens: int, response_tokens: int, seed: int
) -> ScopeProblem:
    policy = open_policy(model, lora_rank=parameters.lora_rank, seed=seed)
    problem = open_problem(
        policy,
        prompt_tokens=prompt_tokens,
        answer_style=parameters.answer_style,
        reward=parameters.reward,
        seed=seed,
    )
    return ScopeProblem(policy, problem, parameters, response_tokens, seed)


def mean_of_draws(problem: ScopeProblem, fraction: float, num_draws: int, first_seed: int = 0) -> Iterator[Gradient]:
    """The running mean of `Sampled(fraction)` gradients over 1, 2, ... draws; the last one is reused in place."""
    total: Gradient = {}
    for index in range(num_draws):
        drawn = problem.gradient(Sampled(fraction, seed=first_seed + index))
        total = {name: total[name] + g if total else g for name, g in drawn.items()}
        yield {name: value / (index + 1) for name, value in total.items()}


def adapter_views(policy: Policy, scopes: Sequence[str]) -> dict[str, Policy]:
    """The same model under other adapter scopes."""
    return {scope: load_policy(policy.model, adapter_scope=scope) for scope in scopes}


def scope_gradients(
    problem: ScopeProblem, parameters: ScopeParameters, seed: int
) -> Iterator[tuple[str, str, Gradient]]:
    """(scope, adapter scope, gradient): the cheaper scopes, means of sampled draws, and prefix-frozen adapters."""
    scopes: list[GradientScope] = ["response_only", *(Tail(chunks) for chunks in parameters.tails)]
    for scope in scopes:
        yield scope_name(scope), "all", problem.gradient(scope)
    for fraction in parameters.fractions:
        means = mean_of_draws(problem, fraction, parameters.num_draws, first_seed=seed * parameters.num_draws)
        for number, mean in enumerate(means, start=1):
            if number & (number - 1) == 0:  # powers of two
                yield f"sampled:{fraction:g} x{number}", "all", mean
    for adapter_scope, view in adapter_views(problem.policy, parameters.adapter_scopes).items():
        yield "response_only", adapter_scope, problem.gradient("response_only", view)


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
