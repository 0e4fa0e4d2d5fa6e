"""One GRPO step over one group: capture, score, replay, prompt gradient, one optimizer call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from workbench.budget import Schedule, fit_schedule
from workbench.capture import capture_prompt
from workbench.comm import Mesh, Traffic
from workbench.config import ObjectiveConfig
from workbench.errors import InvalidInputError
from workbench.finalize import finalize, report_over_ranks, sum_over_ranks
from workbench.inputs import Ids, entry_point
from workbench.memory import MemoryMeter
from workbench.objective import StepDenominators, aggregate_metrics, loss_and_coefficients
from workbench.policy import Policy
from workbench.progress import progress
from workbench.prompt_gradient import add_carry_gradients, needs_boundaries, plan_walk, scope_to_walk, walk_prompt
from workbench.quantization import quantization_notes
from workbench.replay import BLOCK_TOKENS, replay_response, score_responses
from workbench.state.pages import GradientPages, total_nbytes
from workbench.state.placement import HOST
from workbench.state.resident import ResidentState
from workbench.step import (
    CHUNK_TOKENS,
    GradientsOrNothing,
    StageClock,
    Step,
    agree_on_step,
    check_options,
    check_state,
    checked_step,
)
from workbench.types import GradientScope, Response, StepReport
from workbench.walk import CarryGradient
from workbench.walk_checkpoint import WalkCheckpoint, WalkKeeper, open_walk, step_identity

DEFAULT_OBJECTIVE = ObjectiveConfig()
COUNTED = ("choices_verified", "rows_on_host_bytes", "layers_staged", "bytes_staged")


@entry_point
def update_step(
    policy: Policy,
    prompt_ids: Ids,
    responses: Sequence[Response | Ids],
    *,
    rewards: Sequence[float | None] | Tensor | None = None,
    advantages: Sequence[float] | Tensor | None = None,
    objective: ObjectiveConfig = DEFAULT_OBJECTIVE,
    gradient_scope: GradientScope = "full",
    chunk_tokens: int = CHUNK_TOKENS,
    block_tokens: int = BLOCK_TOKENS,
    checkpoint_layers: bool = False,
    placement: str = "device",
    memory_budget: int | str | None = None,
    walk_checkpoint: WalkCheckpoint | str | Path | None = None,
    state: ResidentState | None = None,
    old_logprobs: Sequence[Tensor] | None = None,
    denominators: StepDenominators | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    comm: Mesh | None = None,
    allow_stale: bool = False,
    measure_memory: bool | MemoryMeter = True,
) -> StepReport:
    """One step of group-relative policy optimisation on one prompt, in memory that does not grow with the group.

    prompt_ids: [P] ids; responses: G responses, each 1-D ids or a `Response`. Give either rewards (None or NaN: that
        member gets advantage 0) or advantages, one per response.
    gradient_scope: "full" (exact, the default), "response_only", Tail(chunks) or Sampled(fraction, seed).
    state: a captured prompt to reuse; default: captured here. It must be of this policy's current weight version;
        allow_stale=True lets "response_only" use an older one, and no other scope.
    checkpoint_layers: keep only layer inputs of the live segment and rebuild one layer's graph at a time: several times
        less graph for one more forward pass without its attention.
    placement: "host" keeps rows and their gradients in host memory and stages one layer at a time; it implies
        checkpoint_layers. A given state keeps the placement it was captured with.
    old_logprobs: per response, [R] log-probs of the policy that sampled; default: the current policy's own, so that
        every ratio is exactly 1.
    denominators: what the loss divides by, of all groups of a step that is accumulated over several calls; default:
        of this group alone.
    memory_budget: bytes, or text such as "40GB": chunk_tokens, block_tokens, checkpoint_layers and placement are chosen
        so that the step's peak above its start stays below it (budget.py); naming one of them as well is an error.
    walk_checkpoint: a folder, or WalkCheckpoint(folder, every_chunks): the prompt walk is saved between chunks, and the
        same call goes on from there after an interruption (walk_checkpoint.py).
    measure_memory: False for no measurement; or a MemoryMeter of the caller's own, not yet entered.
    comm: the mesh of ranks (workbench.parallel.open_mesh). Ranks of its context axis share this prompt's tokens and
        must be given the same arguments; ranks of its data axis may bring other prompts, which the step's denominators
        and gradients then cover too. Every rank gets the same loss and gradient norm, bitwise the same gradients, and
        calls its own optimizer; seconds, memory and metrics of members are its own.
    optimizer: called once, then gradients are set to None. Without it gradients stay in `.grad`; a second call adds.

    Departures from the LongStraw paper: the prompt's gradient is kept unless a cheaper scope is named; log-probs and
    normalisers of a whole response are known before its backward, which is what lets blocks be walked in reverse for
    sequence-level losses too; when old_logprobs is None the old policy is the replayed one and is not scored apart.

    On any error, Ctrl-C included, gradients are as they were before the call and the optimizer was not called (unless
    the error is the optimizer's own).
    Raises InvalidInputError, StaleStateError, NonFiniteError, UnsupportedModelError.
    """
    # 1. Refuse what cannot work, before anything is computed
    step = checked_step(policy, prompt_ids, responses, rewards, advantages, objective, old_logprobs, denominators)
    check_options(policy, gradient_scope, placement, chunk_tokens, block_tokens, state, optimizer, objective, comm)
    check_state(policy, step, state, gradient_scope, chunk_tokens, allow_stale)
    walked_scope = scope_to_walk(policy, gradient_scope)
    schedule = Schedule(chunk_tokens, block_tokens, checkpoint_layers, placement)
    if comm is not None and comm.context.size > 1 and (memory_budget is not None or walk_checkpoint is not None):
        raise InvalidInputError("memory_budget and walk_checkpoint work on one process only; leave them out with comm")
    if memory_budget is not None:
        schedule = _fitted(policy, step, schedule, memory_budget, walked_scope, optimizer, state)
    sent_before = Traffic() if comm is None else comm.traffic()
    calls_before = policy.adapter.kernel_calls.copy()
    if comm is not None:
        agree_on_step(policy, step, comm, gradient_scope, schedule, sum_denominators=denominators is None)
    schedule = _resolved(schedule, state)
    keeper = _walk_keeper(policy, step, schedule, walk_checkpoint, walked_scope)

    if not isinstance(measure_memory, MemoryMeter):
        measure_memory = MemoryMeter(policy.device, enabled=measure_memory)
    clock = StageClock(measure_memory, None if comm is None else comm.on_stage)
    with clock.meter as meter, GradientsOrNothing(policy) as gradients_or_nothing:
        meter.adopt("weights", policy.model.parameters())
        # 2. Reference log-probs, from the reference's own capture, freed before the policy's begins
        if objective.beta > 0.0 and not keeper.resumes:
            with clock.stage("reference"):
                step.ref_logprobs = _reference_logprobs(policy, step, state, schedule, meter, comm)
        # 3. Capture the prompt without a graph
        captured = state is None
        if state is None:
            with clock.stage("capture"):
                state = capture_prompt(
                    policy,
                    step.prompt,
                    chunk_tokens=schedule.chunk_tokens,
                    keep_boundaries=needs_boundaries(walked_scope),
                    placement=schedule.placement,
                    comm=comm,
                    meter=meter,
                    tally=step.tally,
                )
        num_chunks = len(state.pages) if captured else 0
        plan = plan_walk(walked_scope, state)
        boundary, on_host = state.positions, schedule.placement == "host"
        replayed_from = boundary + policy.frozen_boundary
        step.tally["rows_on_host_bytes"] = total_nbytes(state.row_tensors()) if on_host else 0
        pages = GradientPages(
            lambda start: plan.wants(start, replayed_from),
            lambda: meter.ledger("gradient_pages"),
            HOST if on_host else None,
        )
        # 4. Replay the members one at a time
        with clock.stage("replay"), policy.active():
            if keeper.resumes:
                carry_gradient = keeper.restore(policy, step, pages)
            else:
                carry_gradient = _replay_members(policy, state, step, pages, schedule, meter)
                keeper.passed(policy, step, pages, boundary, carry_gradient)
        meter.tag("gradients", (p.grad for _, p in policy.trainable_parameters() if p.grad is not None))
        # 5. Carry the gradient back through the prompt, once for the whole group
        with clock.stage("prompt_gradient"), policy.active():
            walk_prompt(
                policy,
                state,
                plan,
                pages,
                carry_gradient,
                checkpoint_layers=schedule.checkpoint_layers,
                release=captured,
                stop_at=keeper.position,
                after_chunk=partial(keeper.passed, policy, step, pages),
                meter=meter,
                tally=step.tally,
                on_graph=step.census.register,
            )
        del state, carry_gradient  # a state captured here is freed before the optimizer allocates its own
        # 6. Finalize: sum over ranks, all gradients finite, clip, one optimizer call
        if comm is not None:
            with clock.stage("reduction"):
                sum_over_ranks(policy, step, comm)
        with clock.stage("optimizer"), meter.ledger("optimizer"):
            grad_norm = finalize(policy, gradients_or_nothing, optimizer, objective, comm)
    keeper.discard()
    step.kernel_calls = policy.adapter.kernel_calls - calls_before
    report = _report(policy, step, gradient_scope, schedule, clock, grad_norm, keeper.walked, num_chunks, pages)
    return report if comm is None else report_over_ranks(report, step, comm, sent_before)


# ---------------------------------------------------------------- stages


def _fitted(
    policy: Policy,
    step: Step,
    given: Schedule,
    memory_budget: int | str,
    scope: GradientScope,
    optimizer: torch.optim.Optimizer | None,
    state: ResidentState | None,
) -> Schedule:
    """The schedule that a budget chooses; what it chooses must not be given as well."""
    chunk = CHUNK_TOKENS if state is None else given.chunk_tokens
    for name, default in vars(Schedule(chunk, BLOCK_TOKENS, False, "device")).items():
        if getattr(given, name) != default:
            raise InvalidInputError(f"memory_budget chooses {name}: give one of the two, not {name} as well")
    return fit_schedule(
        policy,
        memory_budget,
        prompt_tokens=step.prompt.numel(),
        response_tokens=max(ids.numel() for ids in step.responses),
        group_size=len(step.responses),
        gradient_scope=scope,
        optimizer=optimizer,
        state=state,
        reference_captures=step.objective.beta > 0.0 and not _shares_states(policy),
    )


def _resolved(schedule: Schedule, state: ResidentState | None) -> Schedule:
    """What a given state decides, and what the host implies, for the reference's pass as for the policy's."""
    if state is not None:
        schedule = replace(schedule, chunk_tokens=state.chunk_tokens, placement=state.placement)
    return replace(schedule, checkpoint_layers=schedule.checkpoint_layers or schedule.placement == "host")


def _shares_states(policy: Policy) -> bool:
    """Do policy and reference continue the same prompt, the base model's?"""
    return policy.reference is not None and policy.reference.state_key is policy.state_key


def _walk_keeper(
    policy: Policy,
    step: Step,
    schedule: Schedule,
    options: WalkCheckpoint | str | Path | None,
    scope: GradientScope,
) -> WalkKeeper:
    """What saves the walk; without a folder it only remembers which chunks were walked."""
    if options is None:
        return WalkKeeper()
    if scope == "response_only":
        raise InvalidInputError("walk_checkpoint reaches nothing: gradient_scope='response_only' walks no prompt")
    schedule = replace(schedule, planned_bytes=None)
    options = options if isinstance(options, WalkCheckpoint) else WalkCheckpoint(options)
    return open_walk(options, step_identity(policy, step, gradient_scope=scope, schedule=schedule))


def _reference_logprobs(
    policy: Policy,
    step: Step,
    state: ResidentState | None,
    schedule: Schedule,
    meter: MemoryMeter,
    comm: Mesh | None,
) -> list[Tensor]:
    reference = policy.reference
    assert reference is not None
    if state is None or not _shares_states(policy):
        state = capture_prompt(
            reference,
            step.prompt,
            chunk_tokens=schedule.chunk_tokens,
            keep_boundaries=False,
            placement=schedule.placement,
            comm=comm,
            meter=meter,
        )
    return score_responses(
        reference, state, step.responses, temperature=step.objective.temperature, block_tokens=schedule.block_tokens
    )


def _replay_members(
    policy: Policy,
    state: ResidentState,
    step: Step,
    pages: GradientPages,
    schedule: Schedule,
    meter: MemoryMeter,
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
            block_tokens=schedule.block_tokens,
            temperature=step.objective.temperature,
            checkpoint_layers=schedule.checkpoint_layers,
            meter=meter,
            tally=step.tally,
            on_graph=step.census.register,
        )
        with meter.ledger("carry"):
            total = add_carry_gradients(total, result.carry_gradient)
        step.loss += result.loss
        step.logprobs.append(result.logprobs.cpu())
        step.entropy_sum += float(result.entropies.sum())
        step.num_blocks += result.num_blocks
        del result  # its carry's gradient is in the sum: it must be gone before the next member's graph is built
    return total


def _report(
    policy: Policy,
    step: Step,
    scope: GradientScope,
    schedule: Schedule,
    clock: StageClock,
    grad_norm: float,
    walked: list[int],
    num_chunks: int,
    pages: GradientPages,
) -> StepReport:
    metrics = aggregate_metrics(step.sums, rewards=step.rewards, finished=step.finished, config=step.objective)
    metrics["grad_norm"] = grad_norm
    metrics["notes"] += [*_scope_notes(policy, scope), *quantization_notes(policy.model)]
    metrics["entropy_mean"] = step.entropy_sum / max(1, metrics["num_tokens"])
    if schedule.planned_bytes is not None:
        metrics["notes"].append(
            f"memory_budget chose {schedule}; planned peak at most {schedule.planned_bytes:,} bytes"
        )
    counters = {
        "prompt_chunks_captured": num_chunks,
        "responses_replayed": len(step.kept),
        "response_blocks_replayed": step.num_blocks,
        "prompt_chunks_walked": len(walked),
        "prompt_chunk_starts_walked": tuple(walked),
        "gradient_page_tensors": pages.num_allocated,
        "most_graphs_alive": step.census.most_alive,
        **{name: step.tally[name] for name in COUNTED},
        "kernel_calls": dict(step.kernel_calls),
        **asdict(schedule),
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


def _scope_notes(policy: Policy, scope: GradientScope) -> list[str]:
    if not policy.frozen_prompt:
        return []
    notes = []
    if scope == "full":
        notes.append(
            f"adapter_scope={policy.adapter_scope!r}: nothing trainable acts at prompt positions, so the full gradient "
            "ends at the boundary and the prompt was not walked"
        )
    if policy.frozen_boundary:
        notes.append("adapter_scope='response': the first response token is the base model's and takes no gradient")
    return notes
