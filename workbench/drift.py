"""How far a reused resident state is from a fresh capture of the same prompt: the drift oracle.

A state captured under earlier weights is stale: responses replayed on it see a prompt that the current policy would
read differently. `measure_drift` captures the prompt again and compares everything that a step takes from it: the
responses' log-probabilities and distributions, the loss, the response_only gradient, and the state itself.

It costs one capture, two scoring passes and, with the gradient, two response_only steps; the report says how much that
was. `workbench.refresh` decides when to capture again without that cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from workbench.capture import capture_prompt
from workbench.config import ObjectiveConfig
from workbench.errors import InvalidInputError
from workbench.gradients import Gradient, compare_gradients, gradients_set_aside, take_gradient
from workbench.inputs import Ids, check_positive, check_resident_state, entry_point
from workbench.memory import MemoryMeter
from workbench.objective import kl_terms
from workbench.ops.logprobs import token_kl
from workbench.policy import Policy
from workbench.replay import BLOCK_TOKENS, Branch
from workbench.state.resident import ResidentState
from workbench.step import StageClock, Step, checked_step
from workbench.types import Response
from workbench.update import DEFAULT_OBJECTIVE, update_step


@dataclass(frozen=True)
class StateDistance:
    """Relative L2 distance |reused - fresh| / |fresh| of one layer's rows (all pages) or carry (at the boundary).

    kind: "rows" or "carry"; name: which of them, such as "keys" or "recurrent".
    """

    layer: int
    kind: str
    name: str
    relative_l2: float


@dataclass(frozen=True, kw_only=True)
class DriftReport:
    """A reused state against a fresh capture of the same prompt, under the current weights.

    state_age: weight versions since the state was captured (0: current, or its weights do not move it).
    mean_abs_logprob_drift, max_abs_logprob_drift: over all response tokens, of |reused - fresh| log-probability.
    logprob_drift: reused - fresh, per response a [R] tensor on the CPU; its means by response and by position follow.
    kl: mean over tokens of KL(reused || fresh), exact over the whole vocabulary; kl_by_token: per response, [R].
    kl_sampled: mean of the k3 estimate at the response's own tokens; unbiased only if they were sampled from the reused
        state under the current weights.
    ratio_mean, ratio_min, ratio_max: of fresh / reused probability per token, the importance ratios of reuse.
    loss_reused, loss_fresh: of one response_only step on either state, the same old log-probs; loss_drift_pct: their
        difference in per cent of the fresh one, None where that is 0 and they differ. None if not measured.
    gradient_cosine, gradient_norm_ratio, gradient_relative_l2: the step's gradient on the reused state against the one
        on the fresh state; None if not measured, NaN where a gradient is 0 (see GradientComparison).
    state_distance: by layer and kind of state.
    seconds, memory: this measurement's own cost by stage; memory as in StepReport.
    """

    state_age: int
    num_tokens: int
    mean_abs_logprob_drift: float
    max_abs_logprob_drift: float
    kl: float
    kl_sampled: float
    ratio_mean: float
    ratio_min: float
    ratio_max: float
    loss_reused: float | None
    loss_fresh: float | None
    loss_drift_pct: float | None
    gradient_cosine: float | None
    gradient_norm_ratio: float | None
    gradient_relative_l2: float | None
    state_distance: tuple[StateDistance, ...]
    seconds: Mapping[str, float]
    memory: Mapping[str, object]
    logprob_drift: tuple[Tensor, ...] = field(repr=False)
    kl_by_token: tuple[Tensor, ...] = field(repr=False)

    @property
    def mean_by_response(self) -> tuple[float, ...]:
        """Mean |log-prob drift| of each response; 0 for an empty one."""
        return tuple(float(d.abs().mean()) if d.numel() else 0.0 for d in self.logprob_drift)

    @property
    def mean_by_position(self) -> tuple[float, ...]:
        """Mean |log-prob drift| of each response position, over the responses that reach it."""
        longest = max((d.numel() for d in self.logprob_drift), default=0)
        columns = (torch.stack([d[t] for d in self.logprob_drift if d.numel() > t]) for t in range(longest))
        return tuple(float(column.abs().mean()) for column in columns)

    def distance_by_kind(self) -> dict[str, float]:
        """Largest relative L2 over the layers, by "rows" and "carry"; a kind that the model lacks is absent."""
        kinds: dict[str, float] = {}
        for distance in self.state_distance:
            kinds[distance.kind] = max(kinds.get(distance.kind, 0.0), distance.relative_l2)
        return kinds


@entry_point
def measure_drift(
    policy: Policy,
    state: ResidentState,
    prompt_ids: Ids,
    responses: Sequence[Response | Ids],
    *,
    rewards: Sequence[float | None] | Tensor | None = None,
    advantages: Sequence[float] | Tensor | None = None,
    objective: ObjectiveConfig = DEFAULT_OBJECTIVE,
    old_logprobs: Sequence[Tensor] | None = None,
    gradient: bool = True,
    chunk_tokens: int | None = None,
    block_tokens: int = BLOCK_TOKENS,
    fresh: ResidentState | None = None,
    measure_memory: bool = True,
) -> DriftReport:
    """The reused `state` against a fresh capture of `prompt_ids` under the current weights, on given responses.

    rewards, advantages, objective: as in `update_step`; with neither, every advantage is 1 and the gradient is that of
        the responses' log-likelihood.
    old_logprobs: per response [R], of the policy that sampled, for the loss and the gradient. Default: those on the
        reused state under the current weights, as if the group had just been sampled from it.
    gradient: also compare loss and gradient; `.grad` of the parameters is left as it was.
    chunk_tokens: the state's own; another value is an error. fresh: a current capture to compare with, made with the
        same chunks; default: made here.
    measure_memory: False leaves the report's memory out; on small models metering takes half of the time.

    A state of the current weight version has drift exactly 0: the same operations run on the same numbers.
    Raises InvalidInputError, StaleStateError (a stale `fresh`), NonFiniteError; weights, gradients and states are
    unchanged.
    """
    if rewards is None and advantages is None:
        advantages = [1.0] * len(responses)
    step = checked_step(policy, prompt_ids, responses, rewards, advantages, objective, old_logprobs)
    _check_states(policy, step, state, fresh, chunk_tokens)
    check_positive("block_tokens", block_tokens)
    clock = StageClock(MemoryMeter(policy.device, enabled=measure_memory))
    with clock.meter as meter:
        meter.adopt("weights", policy.model.parameters())
        if fresh is None:
            with clock.stage("capture"):
                fresh = capture_prompt(
                    policy,
                    step.prompt,
                    chunk_tokens=state.chunk_tokens,
                    keep_boundaries=state.boundaries,
                    placement=state.placement,
                    meter=meter,
                )
        with clock.stage("score"):
            scores = [
                _score_both(policy, state, fresh, step, member, block_tokens) for member in range(len(step.responses))
            ]
        reused_logprobs = [score.reused for score in scores]
        compared = _ComparedSteps()
        if gradient:
            old = reused_logprobs if old_logprobs is None else step.old_logprobs
            with clock.stage("gradient"):
                compared = _compare_steps(policy, state, fresh, step, responses, rewards, advantages, old, block_tokens)
        with clock.stage("state_distance"):
            distance = tuple(_state_distance(state, fresh))
    age = policy.state_version - state.weight_version
    return _report(age, scores, compared, distance, clock)


def _check_states(
    policy: Policy, step: Step, state: ResidentState, fresh: ResidentState | None, chunk_tokens: int | None
) -> None:
    check_resident_state(state)
    if state.comm is not None or (fresh is not None and getattr(fresh, "comm", None) is not None):
        raise InvalidInputError("measure_drift works on one process; this state's rows are spread over ranks")
    purpose = "measure_drift"
    state.require_current(policy.state_key, policy.state_version, allow_stale=True, purpose=purpose)
    if not torch.equal(state.prompt_ids, step.prompt):
        raise InvalidInputError("measure_drift: the state was captured from another prompt than prompt_ids")
    if chunk_tokens not in (None, state.chunk_tokens):
        raise InvalidInputError(
            f"measure_drift: chunk_tokens={chunk_tokens!r}, but the state has chunks of {state.chunk_tokens}; a fresh "
            "capture must have the same ones to be compared page by page"
        )
    if fresh is None:
        return
    check_resident_state(fresh)
    fresh.require_current(policy.state_key, policy.state_version, allow_stale=False, purpose=f"{purpose}(fresh=...)")
    same = torch.equal(fresh.prompt_ids, state.prompt_ids) and (fresh.chunk_tokens, fresh.boundaries) == (
        state.chunk_tokens,
        state.boundaries,
    )
    if not same:
        raise InvalidInputError(
            "measure_drift: fresh must be captured from the same prompt with the same chunk_tokens and keep_boundaries "
            f"as the state ({state.chunk_tokens}, {state.boundaries})"
        )


# ---------------------------------------------------------------- log-probabilities and distributions


@dataclass(frozen=True)
class _Score:
    """One response on both states: log-probs [R] and KL(reused || fresh) [R], on the CPU."""

    reused: Tensor
    fresh: Tensor
    kl: Tensor


def _score_both(
    policy: Policy, state: ResidentState, fresh: ResidentState, step: Step, member: int, block_tokens: int
) -> _Score:
    temperature, ids = step.objective.temperature, step.responses[member]
    logprobs: list[Tensor] = []
    final: list[Tensor] = []  # hidden states [R, width] on either state
    with policy.active():
        for either in (state, fresh):
            blocks: list[Tensor] = []
            branch = Branch(policy, either, ids, member, block_tokens, temperature, on_hidden=blocks.append)
            logprobs.append(branch.sweep_forward(keep_last_graph=False)[0])
            final += [torch.cat(blocks)] if blocks else []
        kl = token_kl(policy.head, *final, temperature=temperature) if final else logprobs[0]
    reused, current = logprobs
    return _Score(reused.cpu(), current.cpu(), kl.cpu())


# ---------------------------------------------------------------- loss and gradient


@dataclass(frozen=True)
class _ComparedSteps:
    """One response_only step on either state; all None if that was not measured."""

    loss_reused: float | None = None
    loss_fresh: float | None = None
    loss_drift_pct: float | None = None
    cosine: float | None = None
    norm_ratio: float | None = None
    relative_l2: float | None = None


def _compare_steps(
    policy: Policy,
    state: ResidentState,
    fresh: ResidentState,
    step: Step,
    responses: Sequence[Response | Ids],
    rewards: Sequence[float | None] | Tensor | None,
    advantages: Sequence[float] | Tensor | None,
    old_logprobs: Sequence[Tensor] | None,
    block_tokens: int,
) -> _ComparedSteps:
    """The response_only step that training would take, on both states and without an optimizer."""
    losses: list[float] = []
    gradients: list[Gradient] = []
    with gradients_set_aside(policy):
        for either in (state, fresh):
            report = update_step(
                policy,
                step.prompt,
                responses,
                rewards=rewards,
                advantages=advantages,
                objective=replace(step.objective, max_grad_norm=None),
                gradient_scope="response_only",
                block_tokens=block_tokens,
                state=either,
                old_logprobs=old_logprobs,
                allow_stale=True,
                measure_memory=False,
            )
            losses.append(report.loss)
            gradients.append(take_gradient(policy))
    (reused, right), compared = losses, compare_gradients(*gradients)
    pct = _difference_pct(reused, right)
    return _ComparedSteps(reused, right, pct, compared.cosine, compared.norm_ratio, compared.relative_l2)


# ---------------------------------------------------------------- the state itself


def _state_distance(state: ResidentState, fresh: ResidentState) -> Iterator[StateDistance]:
    boundary = state.positions
    num_layers = len(fresh.carry_at(boundary))
    for layer in range(num_layers):
        pages = [(a.layers[layer], b.layers[layer]) for a, b in zip(state.pages, fresh.pages, strict=True)]
        carry = [(state.carry_at(boundary)[layer], fresh.carry_at(boundary)[layer])]
        for kind, pairs in (("rows", pages), ("carry", carry)):
            names = dict.fromkeys(name for _, new in pairs for name in new)
            for name in names:
                yield StateDistance(layer, kind, name, _relative_l2((a[name], b[name]) for a, b in pairs if name in b))


def _relative_l2(pairs: Iterator[tuple[Tensor, Tensor]]) -> float:
    """Over all pairs together; one page in float64 at a time."""
    difference = total = 0.0
    for reused, fresh in pairs:
        difference += float((reused.double() - fresh.double()).square().sum())
        total += float(fresh.double().square().sum())
    return math.sqrt(difference / total) if total > 0.0 else (0.0 if difference == 0.0 else math.inf)


# ---------------------------------------------------------------- report


def _report(
    age: int,
    scores: Sequence[_Score],
    compared: _ComparedSteps,
    distance: tuple[StateDistance, ...],
    clock: StageClock,
) -> DriftReport:
    drift = tuple(score.reused - score.fresh for score in scores)
    every = torch.cat(drift).double()
    num_tokens = every.numel()

    def mean(values: Tensor) -> float:
        return float(values.mean()) if num_tokens else 0.0

    ratio = torch.exp(-every)
    reused, fresh = (torch.cat([getattr(s, name) for s in scores]).double() for name in ("reused", "fresh"))
    return DriftReport(
        state_age=age,
        num_tokens=num_tokens,
        mean_abs_logprob_drift=mean(every.abs()),
        max_abs_logprob_drift=float(every.abs().max()) if num_tokens else 0.0,
        kl=mean(torch.cat([score.kl for score in scores]).double()),
        kl_sampled=mean(kl_terms(reused, fresh, "k3")),
        ratio_mean=mean(ratio) if num_tokens else 1.0,
        ratio_min=float(ratio.min()) if num_tokens else 1.0,
        ratio_max=float(ratio.max()) if num_tokens else 1.0,
        loss_reused=compared.loss_reused,
        loss_fresh=compared.loss_fresh,
        loss_drift_pct=compared.loss_drift_pct,
        gradient_cosine=compared.cosine,
        gradient_norm_ratio=compared.norm_ratio,
        gradient_relative_l2=compared.relative_l2,
        state_distance=distance,
        seconds={**clock.seconds, "total": sum(clock.seconds.values())},
        memory=clock.meter.report(),
        logprob_drift=drift,
        kl_by_token=tuple(score.kl for score in scores),
    )


def _difference_pct(found: float, right: float) -> float | None:
    if found == right:
        return 0.0
    return 100.0 * abs(found - right) / abs(right) if right != 0.0 else None
