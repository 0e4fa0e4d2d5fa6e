"""One GRPO step over one group: capture, score, replay, prompt gradient, one optimizer call."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.capture import capture_prompt
from workbench.config import ObjectiveConfig
from workbench.errors import InvalidInputError, NonFiniteError
from workbench.inputs import Ids, check_positive, check_prompt, check_responses
from workbench.memory import MemoryMeter
from workbench.objective import (
    StepDenominators,
    TokenSums,
    aggregate_metrics,
    group_advantages,
    loss_and_coefficients,
    zero_variance_members,
)
from workbench.policy import Policy
from workbench.progress import progress
from workbench.prompt_gradient import add_carry_gradients, check_scope, needs_boundaries, plan_walk, walk_prompt
from workbench.replay import BLOCK_TOKENS, CarryGradient, replay_response, score_responses
from workbench.state.pages import GradientPages
from workbench.state.resident import ResidentState
from workbench.types import GradientScope, Response, StepReport

CHUNK_TOKENS = 1024


def update_step(
    policy: Policy,
    prompt_ids: Ids,
    responses: Sequence[Response | Ids],
    *,
    rewards: Sequence[float | None] | Tensor | None = None,
    advantages: Sequence[float] | Tensor | None = None,
    objective: ObjectiveConfig = ObjectiveConfig(),
    gradient_scope: GradientScope = "full",
    chunk_tokens: int = CHUNK_TOKENS,
    block_tokens: int = BLOCK_TOKENS,
    state: ResidentState | None = None,
    old_logprobs: Sequence[Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    comm: None = None,
    allow_stale: bool = False,
    measure_memory: bool = True,
) -> StepReport:
    """One step of group-relative policy optimisation on one prompt, in memory that does not grow with the group.

    prompt_ids: [P] ids; responses: G responses, each 1-D ids or a `Response`. Give either rewards (None or NaN: that
        member gets advantage 0) or advantages, one per response.
    gradient_scope: "full" (exact, the default), "response_only", Tail(chunks) or Sampled(fraction, seed).
    state: a captured prompt to reuse; default: captured here. It must be of this policy's current weight version;
        allow_stale=True lets "response_only" use an older one, and no other scope.
    old_logprobs: per response, [R] log-probs of the policy that sampled; default: the current policy's own, so that
        every ratio is exactly 1.
    optimizer: called once, then gradients are set to None. Without it gradients stay in `.grad`; a second call adds.

    Departures from the LongStraw paper: the prompt's gradient is kept unless a cheaper scope is named; log-probs and
    normalisers of a whole response are known before its backward, which is what lets blocks be walked in reverse for
    sequence-level losses too; when old_logprobs is None the old policy is the replayed one and is not scored apart.

    On any error, Ctrl-C included, gradients are as they were before the call and the optimizer was not called.
    Raises InvalidInputError, StaleStateError, NonFiniteError, UnsupportedModelError.
    """
    # 1. Refuse what cannot work, before anything is computed
    step = _checked_step(policy, prompt_ids, responses, rewards, advantages, objective, old_logprobs)
    _check_options(policy, gradient_scope, chunk_tokens, block_tokens, state, optimizer, objective, comm)
    _check_state(policy, step, state, gradient_scope, chunk_tokens, allow_stale)

    clock = _Clock(MemoryMeter(policy.device, enabled=measure_memory))
    with clock.meter as meter, _GradientsOrNothing(policy) as gradients_or_nothing:
        meter.adopt("weights", policy.model.parameters())
        # 2. Reference log-probs, from the reference's own capture, freed before the policy's begins
        if objective.beta > 0.0:
            with clock.stage("reference"):
                step.ref_logprobs = _reference_logprobs(policy, step, chunk_tokens, block_tokens, meter)
        # 3. Capture the prompt without a graph
        captured = state is None
        if state is None:
            with clock.stage("capture"):
                state = capture_prompt(
                    policy,
                    step.prompt,
                    chunk_tokens=chunk_tokens,
                    keep_boundaries=needs_boundaries(gradient_scope),
                    meter=meter,
                )
        plan = plan_walk(gradient_scope, state)
        boundary = state.positions
        pages = GradientPages(lambda start: plan.wants(start, boundary), lambda: meter.ledger("gradient_pages"))
        # 4. Replay the members one at a time
        with clock.stage("replay"), policy.active():
            carry_gradient = _replay_members(policy, state, step, pages, block_tokens, meter)
        meter.tag("gradients", (p.grad for _, p in policy.trainable_parameters() if p.grad is not None))
        # 5. Carry the gradient back through the prompt, once for the whole group
        with clock.stage("prompt_gradient"), policy.active():
            walked = walk_prompt(
                policy, state, plan, pages, carry_gradient, meter=meter, on_graph=step.census.register
            )
        num_chunks = len(state.pages) if captured else 0
        del state, carry_gradient  # a state captured here is freed before the optimizer allocates its own
        # 6. Finalize: all gradients finite, clip, one optimizer call
        with clock.stage("optimizer"), meter.ledger("optimizer"):
            grad_norm = _finalize(policy, gradients_or_nothing, optimizer, objective)
    return _report(policy, step, gradient_scope, clock, grad_norm, walked, num_chunks, pages)


# ---------------------------------------------------------------- one step's data


class _GraphCensus:
    """Counts how many segment graphs are alive whenever a new one is there (by weak references)."""

    def __init__(self) -> None:
        self._outputs: list[weakref.ref[Tensor]] = []
        self.most_alive = 0

    def register(self, output: Tensor) -> None:
        self._outputs = [ref for ref in self._outputs if ref() is not None] + [weakref.ref(output)]
        self.most_alive = max(self.most_alive, len(self._outputs))


@dataclass
class _Step:
    """What the stages of one step share."""

    prompt: Tensor
    responses: list[Tensor]
    advantages: list[float]
    kept: list[int]
    rewards: Any
    finished: list[bool] | None
    objective: ObjectiveConfig
    denominators: StepDenominators
    old_logprobs: list[Tensor] | None
    ref_logprobs: list[Tensor] | None = None
    loss: float = 0.0
    sums: list[TokenSums] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    entropy_sum: float = 0.0
    num_blocks: int = 0
    census: _GraphCensus = field(default_factory=_GraphCensus)


def _checked_step(
    policy: Policy,
    prompt_ids: Ids,
    responses: Sequence[Response | Ids],
    rewards: Sequence[float | None] | Tensor | None,
    advantages: Sequence[float] | Tensor | None,
    objective: ObjectiveConfig,
    old_logprobs: Sequence[Tensor] | None,
) -> _Step:
    prompt = check_prompt(policy, prompt_ids)
    checked = check_responses(policy, prompt.numel(), responses)
    if (rewards is None) == (advantages is None):
        raise InvalidInputError("give exactly one of rewards and advantages")
    name, given = ("rewards", rewards) if rewards is not None else ("advantages", advantages)
    assert given is not None
    if len(given) != len(checked):
        raise InvalidInputError(f"{len(checked)} responses but {len(given)} {name}: give one per response")
    kept = list(range(len(checked)))
    if rewards is not None:
        values = group_advantages(rewards, scale=objective.advantage_scale, eps=objective.advantage_eps).tolist()
        if objective.drop_zero_variance_groups:
            kept = [i for i, dropped in enumerate(zero_variance_members(rewards)) if not dropped]
    else:
        if objective.drop_zero_variance_groups:
            raise InvalidInputError("drop_zero_variance_groups reaches nothing when advantages are given; give rewards")
        values = [float(a) for a in given]
        if not all(math.isfinite(a) for a in values):
            raise InvalidInputError(f"advantages must be finite numbers; got {values}")
    all_responses = all(isinstance(r, Response) for r in responses)
    return _Step(
        prompt=prompt,
        responses=checked,
        advantages=values,
        kept=kept,
        rewards=rewards,
        finished=[r.finished for r in responses] if all_responses else None,  # type: ignore[union-attr]
        objective=objective,
        denominators=StepDenominators.from_lengths(checked[i].numel() for i in kept),
        old_logprobs=_checked_old(old_logprobs, checked),
    )


def _checked_old(old_logprobs: Sequence[Tensor] | None, responses: list[Tensor]) -> list[Tensor] | None:
    if old_logprobs is None:
        return None
    if len(old_logprobs) != len(responses):
        raise InvalidInputError(f"{len(responses)} responses but {len(old_logprobs)} old_logprobs: give one per response")
    checked = [torch.as_tensor(values) for values in old_logprobs]
    for member, (values, ids) in enumerate(zip(checked, responses, strict=True)):
        if values.shape != ids.shape:
            raise InvalidInputError(
                f"old_logprobs of response {member} have shape {tuple(values.shape)}, its ids {tuple(ids.shape)}"
            )
        bad = (~torch.isfinite(values)).nonzero()
        if bad.numel():
            raise NonFiniteError(f"old_logprobs of response {member} at position {int(bad[0])}: {float(values[bad[0]])}")
    return checked


def _check_options(
    policy: Policy,
    scope: GradientScope,
    chunk_tokens: int,
    block_tokens: int,
    state: ResidentState | None,
    optimizer: torch.optim.Optimizer | None,
    objective: ObjectiveConfig,
    comm: None,
) -> None:
    check_scope(scope)
    check_positive("chunk_tokens", chunk_tokens)
    check_positive("block_tokens", block_tokens)
    if comm is not None:
        raise InvalidInputError("comm: updates over several ranks are not implemented; leave comm=None")
    if state is not None and chunk_tokens not in (CHUNK_TOKENS, state.chunk_tokens):
        raise InvalidInputError(
            f"chunk_tokens={chunk_tokens} reaches nothing: the given state was captured in chunks of {state.chunk_tokens}"
        )
    trainable = {id(p) for _, p in policy.trainable_parameters()}
    if not trainable:
        raise InvalidInputError("the policy has no trainable parameter: nothing requires a gradient")
    if optimizer is None:
        if objective.max_grad_norm is not None:
            raise InvalidInputError("max_grad_norm reaches nothing without an optimizer")
    elif not trainable & {id(p) for group in optimizer.param_groups for p in group["params"]}:
        raise InvalidInputError("the optimizer holds none of the policy's trainable parameters")
    if objective.beta > 0.0 and policy.reference is None:
        raise InvalidInputError(
            f"beta={objective.beta} needs a reference: give Policy(..., reference=<a frozen copy>), or use a LoRA policy, "
            "whose base model is the reference"
        )


def _check_state(
    policy: Policy,
    step: _Step,
    state: ResidentState | None,
    scope: GradientScope,
    chunk_tokens: int,
    allow_stale: bool,
) -> None:
    if state is None:
        if allow_stale:
            raise InvalidInputError("allow_stale reaches nothing: no state was given")
        return
    stale_ok = allow_stale and scope == "response_only"
    purpose = f"update_step with gradient_scope={scope!r}"
    state.require_current(policy.state_key, policy.weight_version, allow_stale=stale_ok, purpose=purpose)
    if not torch.equal(state.prompt_ids, step.prompt):
        raise InvalidInputError("the given state was captured from another prompt than prompt_ids")
    plan_walk(scope, state)


# ---------------------------------------------------------------- stages


@dataclass
class _Clock:
    """Seconds and peak bytes by stage."""

    meter: MemoryMeter
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            with self.meter.stage(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


class _GradientsOrNothing:
    """Collects this step's gradients apart from earlier ones: added on success, dropped on any error."""

    def __init__(self, policy: Policy) -> None:
        self._parameters = [p for _, p in policy.trainable_parameters()]
        self._earlier: list[Tensor | None] = []

    def __enter__(self) -> _GradientsOrNothing:
        self._earlier = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return self

    def merge(self) -> None:
        """Add the earlier gradients; from here on nothing can fail but the optimizer."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else parameter.grad.add_(earlier)
        self._earlier = []

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None and self._earlier:
            for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
                parameter.grad = earlier


def _reference_logprobs(
    policy: Policy, step: _Step, chunk_tokens: int, block_tokens: int, meter: MemoryMeter
) -> list[Tensor]:
    reference = policy.reference
    assert reference is not None
    state = capture_prompt(reference, step.prompt, chunk_tokens=chunk_tokens, keep_boundaries=False, meter=meter)
    return score_responses(
        reference, state, step.responses, temperature=step.objective.temperature, block_tokens=block_tokens
    )


def _replay_members(
    policy: Policy, state: ResidentState, step: _Step, pages: GradientPages, block_tokens: int, meter: MemoryMeter
) -> CarryGradient | None:
    """Replay every member that takes part; returns the summed gradient of the boundary carry."""
    total: CarryGradient | None = None
    for member in progress(step.kept, "replay", unit="response"):

        def coefficients(logprobs: Tensor, member: int = member) -> tuple[float, Tensor]:
            loss, weights, sums = loss_and_coefficients(
                logprobs,
                advantage=step.advantages[member],
                config=step.objective,
                denominators=step.denominators,
                old_logprobs=None if step.old_logprobs is None else step.old_logprobs[member],
                ref_logprobs=None if step.ref_logprobs is None else step.ref_logprobs[member],
                member=member,
            )
            step.sums.append(sums)
            return loss, weights

        result = replay_response(
            policy,
            state,
            step.responses[member],
            member=member,
            coefficients=coefficients,
            gradients=pages,
            block_tokens=block_tokens,
            temperature=step.objective.temperature,
            meter=meter,
            on_graph=step.census.register,
        )
        with meter.ledger("carry"):
            total = add_carry_gradients(total, result.carry_gradient)
        step.loss += result.loss
        step.logprobs.append(result.logprobs.cpu())
        step.entropy_sum += float(result.entropies.sum())
        step.num_blocks += result.num_blocks
    return total


def _finalize(
    policy: Policy,
    gradients: _GradientsOrNothing,
    optimizer: torch.optim.Optimizer | None,
    objective: ObjectiveConfig,
) -> float:
    """Check and merge gradients, clip, call the optimizer; returns the norm of this step's own gradient."""
    named = [(name, p) for name, p in policy.trainable_parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(p.grad.to(torch.float32)) for _, p in named]
    for (name, _), norm in zip(named, norms, strict=True):
        if not torch.isfinite(norm):
            raise NonFiniteError(
                f"the gradient of {name} is not finite; gradients were left as before the step and no update was made"
            )
    gradients.merge()
    if optimizer is not None:
        if objective.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for _, p in policy.trainable_parameters()], objective.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def _report(
    policy: Policy,
    step: _Step,
    scope: GradientScope,
    clock: _Clock,
    grad_norm: float,
    walked: list[int],
    num_chunks: int,
    pages: GradientPages,
) -> StepReport:
    metrics = aggregate_metrics(step.sums, rewards=step.rewards, finished=step.finished, config=step.objective)
    metrics["grad_norm"] = grad_norm
    metrics["entropy_mean"] = step.entropy_sum / max(1, metrics["num_tokens"])
    counters = {
        "prompt_chunks_captured": num_chunks,
        "responses_replayed": len(step.kept),
        "response_blocks_replayed": step.num_blocks,
        "prompt_chunks_walked": len(walked),
        "prompt_chunk_starts_walked": tuple(walked),
        "gradient_page_tensors": pages.num_allocated,
        "most_graphs_alive": step.census.most_alive,
    }
    return StepReport(
        loss=step.loss,
        gradient_scope=scope,
        weight_version=policy.weight_version,
        seconds=dict(clock.seconds),
        memory=clock.meter.report(),
        metrics=metrics,
        counters=counters,
        logprobs=tuple(step.logprobs),
    )
