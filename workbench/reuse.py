"""Online GRPO on one prompt whose captured state is reused: a small driver with the drift oracle at every step.

One step: decide whether the prompt is captured again, sample a group from the state in hand, measure drift if asked,
take one response_only optimizer step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from workbench.advantages import group_advantages
from workbench.config import ObjectiveConfig
from workbench.drift import DriftReport, measure_drift
from workbench.errors import InvalidInputError
from workbench.inputs import Ids, check_positive, check_seed, entry_point
from workbench.policy import Policy
from workbench.progress import progress
from workbench.refresh import Decision, PromptReuse, RefreshPolicy, ReuseReport
from workbench.rollout import sample_responses
from workbench.seeds import scope_at
from workbench.types import GradientScope, Response, StepReport
from workbench.update import DEFAULT_OBJECTIVE, update_step

RewardOfResponses = Callable[[Sequence[Response]], Sequence[float | None]]


@dataclass(frozen=True)
class ReuseStep:
    """One step of a reuse run.

    state_age: optimizer steps between the capture of the state that this step used and this step.
    drift: the oracle's report, before the step's update; None where it was not asked for.
    update: of the optimizer step. seconds: wall time of the step without the oracle. reuse: the run so far.
    """

    step: int
    state_age: int
    decision: Decision
    drift: DriftReport | None
    rewards: tuple[float | None, ...]
    update: StepReport
    seconds: float
    reuse: ReuseReport


@dataclass(frozen=True)
class OracleGroup:
    """A group that drift is measured on.

    synthetic: the rewards do not vary, so the advantages are +1, -1, +1, ... instead.
    """

    responses: tuple[Response, ...]
    advantages: Tensor
    synthetic: bool

    @classmethod
    def of(cls, responses: Sequence[Response], rewards: Sequence[float | None]) -> OracleGroup:
        advantages = group_advantages(rewards)
        synthetic = not bool(advantages.any())
        if synthetic:
            advantages = torch.tensor([1.0 - 2.0 * (i % 2) for i in range(len(responses))])
        return cls(tuple(responses), advantages, synthetic)


@entry_point
def reuse_run(
    policy: Policy,
    prompt_ids: Ids,
    reward: RewardOfResponses,
    *,
    refresh: RefreshPolicy,
    optimizer: torch.optim.Optimizer,
    scheduler: Any = None,
    num_steps: int,
    group_size: int,
    max_new_tokens: int,
    objective: ObjectiveConfig = DEFAULT_OBJECTIVE,
    gradient_scope: GradientScope = "response_only",
    chunk_tokens: int = 1024,
    eos_token_ids: Sequence[int] | None = (),
    oracle: Literal["first", "current"] | None = "first",
    oracle_gradient: bool | Collection[int] = True,
    seed: int = 0,
) -> Iterator[ReuseStep]:
    """Train on one prompt with reuse; yields every step as it is done, so an interrupted run keeps what it has.

    reward: one number (None: excluded) per response. scheduler: a torch learning-rate scheduler, stepped after the
    optimizer. oracle: measure drift at every step, on the group of the "first" step, the same tokens throughout, or on
    the "current" step's own; None: not at all. The sampling log-probs are the old ones. oracle_gradient: also compare
    loss and gradient, at every step or at these state ages only.
    eos_token_ids: as in `sample_responses`. seed: step t samples with seed x 100,003 + t. `Sampled` draws other chunks
    at every step.

    Raises InvalidInputError before any work if reuse could meet a gradient scope that walks the prompt.
    """
    if oracle not in ("first", "current", None):
        raise InvalidInputError(f"oracle={oracle!r} is not one of 'first', 'current', None")
    for name, count in (("num_steps", num_steps), ("group_size", group_size), ("max_new_tokens", max_new_tokens)):
        check_positive(name, count)
    check_seed(seed)
    reuse = PromptReuse(
        policy,
        prompt_ids,
        refresh=refresh,
        chunk_tokens=chunk_tokens,
        keep_boundaries=gradient_scope != "response_only",
        temperature=objective.temperature,
    )
    if gradient_scope != "response_only" and refresh.interval != 1:
        raise InvalidInputError(
            f"gradient_scope={gradient_scope!r} walks the prompt as the current weights read it, which a reused state "
            "does not hold; use gradient_scope='response_only', or RefreshPolicy(interval=1)"
        )

    def steps() -> Iterator[ReuseStep]:
        group: OracleGroup | None = None
        for index in progress(range(num_steps), "reuse", unit="step"):
            started = time.perf_counter()
            state = reuse.state_for_step()
            age, decision = reuse.state_age, reuse.last_decision
            responses = sample_responses(
                policy,
                state,
                group_size,
                max_new_tokens=max_new_tokens,
                temperature=objective.temperature,
                eos_token_ids=eos_token_ids,
                seed=seed * 100_003 + index,
                allow_stale=True,
            )
            reuse.note_responses(responses)
            rewards = tuple(reward(responses))
            if group is None or oracle == "current":
                group = OracleGroup.of(responses, rewards)
            seconds = time.perf_counter() - started
            drift = None
            if oracle is not None:
                drift = measure_drift(
                    policy,
                    state,
                    prompt_ids,
                    group.responses,
                    advantages=group.advantages,
                    old_logprobs=[response.logprobs for response in group.responses],
                    objective=objective,
                    gradient=oracle_gradient if isinstance(oracle_gradient, bool) else age in oracle_gradient,
                    measure_memory=False,
                )
            started = time.perf_counter()
            update = update_step(
                policy,
                prompt_ids,
                responses,
                rewards=rewards,
                objective=objective,
                gradient_scope=scope_at(gradient_scope, seed, index),
                state=state,
                allow_stale=gradient_scope == "response_only",
                optimizer=optimizer,
                measure_memory=False,
            )
            if scheduler is not None:
                scheduler.step()
            del state  # so that a refresh can free it before it captures
            assert decision is not None
            seconds += time.perf_counter() - started
            yield ReuseStep(index, age, decision, drift, rewards, update, seconds, reuse.report())

    return steps()
