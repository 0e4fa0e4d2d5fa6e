"""What one step works on: its checked inputs, what its stages share, and its all-or-nothing gradients."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from workbench.advantages import Rewards, group_advantages, zero_variance_members
from workbench.comm import Mesh, digest, every_rank, require_agreement
from workbench.config import ObjectiveConfig
from workbench.errors import InvalidInputError, NonFiniteError
from workbench.inputs import Ids, check_positive, check_prompt, check_ranks, check_resident_state, check_responses
from workbench.memory import MemoryMeter
from workbench.objective import StepDenominators, TokenSums
from workbench.policy import Policy
from workbench.prompt_gradient import check_scope, plan_walk, scope_to_walk
from workbench.replicas import require_same_weights
from workbench.state.placement import check_placement
from workbench.state.resident import ResidentState
from workbench.types import GradientScope, Response, Tally

CHUNK_TOKENS = 1024


class GraphCensus:
    """Counts how many segment graphs are alive whenever a new one is there (by weak references)."""

    def __init__(self) -> None:
        self._outputs: list[weakref.ref[Tensor]] = []
        self.most_alive = 0

    def register(self, output: Tensor) -> None:
        self._outputs = [ref for ref in self._outputs if ref() is not None] + [weakref.ref(output)]
        self.most_alive = max(self.most_alive, len(self._outputs))

    @property
    def alive(self) -> int:
        """Graphs alive now."""
        return sum(ref() is not None for ref in self._outputs)


@dataclass
class Step:
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
    census: GraphCensus = field(default_factory=GraphCensus)
    tally: Tally = field(default_factory=Tally)
    kernel_calls: Tally = field(default_factory=Tally)
    reduction: dict[str, dict[str, Any]] = field(default_factory=dict)


def checked_step(
    policy: Policy,
    prompt_ids: Ids,
    responses: Sequence[Response | Ids],
    rewards: Sequence[float | None] | Tensor | None,
    advantages: Sequence[float] | Tensor | None,
    objective: ObjectiveConfig,
    old_logprobs: Sequence[Tensor] | None,
    denominators: StepDenominators | None = None,
) -> Step:
    if not isinstance(objective, ObjectiveConfig):
        raise InvalidInputError(
            f"objective={objective!r} is not an ObjectiveConfig, such as ObjectiveConfig(loss='dapo')"
        )
    prompt = check_prompt(policy, prompt_ids)
    checked = check_responses(policy, prompt.numel(), responses)
    values, kept = _advantages(len(checked), rewards, advantages, objective)
    own = StepDenominators.from_lengths(checked[i].numel() for i in kept)
    all_responses = all(isinstance(r, Response) for r in responses)
    return Step(
        prompt=prompt,
        responses=checked,
        advantages=values,
        kept=kept,
        rewards=rewards,
        finished=[r.finished for r in responses] if all_responses else None,  # type: ignore[union-attr]
        objective=objective,
        denominators=own if denominators is None else _checked_denominators(denominators, own),
        old_logprobs=_checked_old(old_logprobs, checked),
    )


def _advantages(
    num_responses: int,
    rewards: Rewards | None,
    advantages: Sequence[float] | Tensor | None,
    objective: ObjectiveConfig,
) -> tuple[list[float], list[int]]:
    """Every member's advantage, and the members that take part."""
    given = advantages if rewards is None else rewards
    if given is None or (rewards is not None and advantages is not None):
        raise InvalidInputError("give exactly one of rewards and advantages")
    _check_one_per_response("advantages" if rewards is None else "rewards", given, num_responses)
    everyone = list(range(num_responses))
    if rewards is not None:
        values = group_advantages(rewards, scale=objective.advantage_scale, eps=objective.advantage_eps)
        dropped = zero_variance_members(rewards) if objective.drop_zero_variance_groups else ()
        return values.tolist(), [i for i in everyone if not (dropped and dropped[i])]
    if objective.drop_zero_variance_groups:
        raise InvalidInputError("drop_zero_variance_groups reaches nothing when advantages are given; give rewards")
    try:
        numbers = torch.as_tensor(advantages, dtype=torch.float64).tolist()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"advantages must be numbers, one per response: {error}") from None
    if not all(isinstance(a, float) and math.isfinite(a) for a in numbers):
        raise InvalidInputError(f"advantages must be finite numbers, one per response; got {numbers}")
    return numbers, everyone


def _checked_denominators(given: StepDenominators, own: StepDenominators) -> StepDenominators:
    if not isinstance(given, StepDenominators):
        raise InvalidInputError(f"denominators is a {type(given).__name__}; StepDenominators.from_lengths makes one")
    if given.num_members < own.num_members or given.total_tokens < own.total_tokens:
        raise InvalidInputError(
            f"denominators of {given.num_members} members and {given.total_tokens} tokens cannot include this group of "
            f"{own.num_members} members and {own.total_tokens} tokens: build them from all groups of the step"
        )
    return given


def _check_one_per_response(name: str, given: Any, num_responses: int) -> None:
    try:
        count = len(given)
    except TypeError:
        raise InvalidInputError(f"{name} must be a sequence, one per response; got {given!r}") from None
    if count != num_responses:
        raise InvalidInputError(f"{num_responses} responses but {count} {name}: give one per response")


def _checked_old(old_logprobs: Sequence[Tensor] | None, responses: list[Tensor]) -> list[Tensor] | None:
    if old_logprobs is None:
        return None
    _check_one_per_response("old_logprobs", old_logprobs, len(responses))
    try:
        checked = [torch.as_tensor(values) for values in old_logprobs]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(f"old_logprobs must be tensors of numbers, one per response: {error}") from None
    for member, (values, ids) in enumerate(zip(checked, responses, strict=True)):
        if values.shape != ids.shape:
            raise InvalidInputError(
                f"old_logprobs of response {member} have shape {tuple(values.shape)}, its ids {tuple(ids.shape)}"
            )
        if not values.dtype.is_floating_point or values.is_meta:
            raise InvalidInputError(
                f"old_logprobs of response {member} have dtype {values.dtype} on {values.device}; give real numbers"
            )
        bad = (~torch.isfinite(values)).nonzero()
        if bad.numel():
            raise NonFiniteError(
                f"old_logprobs of response {member} at position {int(bad[0])}: {float(values[bad[0]])}"
            )
    return checked


def check_options(
    policy: Policy,
    scope: GradientScope,
    placement: str,
    chunk_tokens: int,
    block_tokens: int,
    state: ResidentState | None,
    optimizer: torch.optim.Optimizer | None,
    objective: ObjectiveConfig,
    comm: Mesh | None,
) -> None:
    check_scope(scope)
    scope_to_walk(policy, scope)
    check_placement(placement)
    check_positive("chunk_tokens", chunk_tokens)
    check_positive("block_tokens", block_tokens)
    ranks = check_ranks(policy, comm)
    if state is not None and isinstance(state, ResidentState) and state.comm is not ranks:
        raise InvalidInputError("the given state is spread over other ranks than comm; capture it with the same comm")
    if comm is not None and comm.data.size > 1 and objective.advantage_scale == "batch":
        raise InvalidInputError(
            "advantage_scale='batch' over data-parallel ranks would scale by this rank's group only; compute the "
            "advantages over all groups and give them"
        )
    if state is not None:
        check_resident_state(state)
    if state is not None and chunk_tokens not in (CHUNK_TOKENS, state.chunk_tokens):
        raise InvalidInputError(
            f"chunk_tokens={chunk_tokens} reaches nothing: the given state has chunks of {state.chunk_tokens}"
        )
    if state is not None and placement not in ("device", state.placement):
        raise InvalidInputError(
            f"placement={placement!r} reaches nothing: the given state lives on the {state.placement}"
        )
    trainable = {id(p) for _, p in policy.trainable_parameters()}
    if not trainable:
        raise InvalidInputError("the policy has no trainable parameter: nothing requires a gradient")
    if any(getattr(p, "_post_accumulate_grad_hooks", None) for _, p in policy.trainable_parameters()):
        raise InvalidInputError(
            "a parameter has a post-accumulate-grad hook: it would run once for every block and chunk, on parts of the "
            "gradient; remove it, and use the gradient after the step"
        )
    _check_optimizer(optimizer, objective, comm, trainable)
    check_reference(policy, objective)


def _check_optimizer(
    optimizer: torch.optim.Optimizer | None, objective: ObjectiveConfig, comm: Mesh | None, trainable: set[int]
) -> None:
    if optimizer is not None and comm is not None and not comm.sums_gradients:
        raise InvalidInputError(
            "an optimizer with a mesh for_accumulation() would step on this rank's part of the gradient; leave it out, "
            "then finalize.sum_gradients and apply_gradients with the whole mesh"
        )
    if optimizer is None:
        if objective.max_grad_norm is not None:
            raise InvalidInputError("max_grad_norm reaches nothing without an optimizer")
    elif not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInputError(
            f"optimizer is {type(optimizer).__name__}; give a torch.optim.Optimizer whose step needs no closure"
        )
    elif not trainable & {id(p) for group in optimizer.param_groups for p in group["params"]}:
        raise InvalidInputError("the optimizer holds none of the policy's trainable parameters")


def check_reference(policy: Policy, objective: ObjectiveConfig) -> None:
    """A KL term needs a reference that stands still: InvalidInputError without one, or if training would move it."""
    if objective.beta == 0.0:
        return
    if policy.reference is None:
        raise InvalidInputError(
            f"beta={objective.beta} needs a reference: give Policy(..., reference=<a frozen copy>), or use a LoRA "
            "policy, whose base model is the reference"
        )
    moving = policy.moving_base_parameters()
    if moving:
        raise InvalidInputError(
            f"beta={objective.beta}: the reference is the same model without the adapter, but {moving[0]} outside the "
            "adapter is trained too, so the reference would move; freeze it, or give a frozen copy as reference"
        )


def check_state(
    policy: Policy,
    step: Step,
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
    state.require_current(policy.state_key, policy.state_version, allow_stale=stale_ok, purpose=purpose)
    if not torch.equal(state.prompt_ids, step.prompt):
        raise InvalidInputError("the given state was captured from another prompt than prompt_ids")
    plan_walk(scope_to_walk(policy, scope), state)


def agree_on_step(policy: Policy, step: Step, comm: Mesh, *options: object, sum_denominators: bool) -> None:
    """Before any work: all ranks mean the same step, with the same weights.

    sum_denominators: the step is the data ranks' groups together; False where the caller gave the whole step's.
    """
    require_same_weights(policy, comm)
    what = "update_step's options"
    require_agreement(comm.world, digest(*options, step.objective), what, policy.device)
    own = digest(step.prompt, step.responses, step.advantages, step.kept, step.old_logprobs or ())
    require_agreement(comm.context, own, "the prompt, responses, rewards or old log-probs", policy.device)
    if not sum_denominators:
        return
    lengths = step.denominators.num_members, step.denominators.total_tokens
    sums = [sum(every_rank(comm.data, length, policy.device, tag="denominators")) for length in lengths]
    step.denominators = StepDenominators(*sums)


# ---------------------------------------------------------------- measuring and undoing


@dataclass
class StageClock:
    """Seconds and peak bytes by stage."""

    meter: MemoryMeter
    on_stage: Callable[[str], None] | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        if self.on_stage is not None:
            self.on_stage(name)
        try:
            with self.meter.stage(name):
                yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


class GradientsOrNothing:
    """Collects this step's gradients apart from earlier ones: added on success, dropped on any error."""

    def __init__(self, policy: Policy) -> None:
        self._parameters = [p for _, p in policy.trainable_parameters()]
        self._earlier: list[Tensor | None] = []

    def __enter__(self) -> GradientsOrNothing:
        self._earlier = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return self

    def merge(self) -> None:
        """Add the earlier gradients; from here on only the optimizer can fail, and then they are put back."""
        for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
            if earlier is not None:
                # a copy where nothing is added: clipping writes into it, and the earlier one may have to come back
                parameter.grad = earlier.clone() if parameter.grad is None else parameter.grad.add_(earlier)

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is not None:
            for parameter, earlier in zip(self._parameters, self._earlier, strict=True):
                parameter.grad = earlier
        self._earlier = []
