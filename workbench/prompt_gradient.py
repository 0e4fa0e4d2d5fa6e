"""How far the gradient goes back into the prompt, and the walk that carries it there."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from workbench.errors import InvalidInputError
from workbench.memory import MemoryMeter
from workbench.policy import Policy
from workbench.progress import progress
from workbench.state.pages import GradientPages
from workbench.state.placement import row_source
from workbench.state.resident import ResidentState
from workbench.types import GradientScope, Sampled, Tail, Tally
from workbench.walk import CarryGradient, Segment, run_segment, walk_segment


@dataclass(frozen=True)
class WalkPlan:
    """Which prompt chunks are walked. starts: their start positions; scale: 1 / probability of each being walked."""

    starts: frozenset[int]
    scale: float = 1.0

    def wants(self, start: int, boundary: int) -> bool:
        """Does the page at `start` take a gradient? Pages of the response (from the boundary on) always do."""
        return start >= boundary or start in self.starts


def check_scope(scope: GradientScope) -> None:
    if scope not in ("full", "response_only") and not isinstance(scope, Tail | Sampled):
        raise InvalidInputError(
            f"gradient_scope={scope!r} is not one of 'full', 'response_only', Tail(chunks), Sampled(fraction, seed)"
        )


def scope_to_walk(policy: Policy, scope: GradientScope) -> GradientScope:
    """How far the walk has to go for `scope`: nowhere if nothing trainable acts at prompt positions."""
    if not policy.frozen_prompt:
        return scope
    if isinstance(scope, Tail | Sampled):
        raise InvalidInputError(
            f"gradient_scope={scope!r} reaches nothing with adapter_scope={policy.adapter_scope!r}: the adapter is off "
            "at prompt positions, so 'response_only' is the full gradient"
        )
    return "response_only"


def needs_boundaries(scope: GradientScope) -> bool:
    return scope != "response_only"


def plan_walk(scope: GradientScope, state: ResidentState) -> WalkPlan:
    """The chunks that `scope` walks. Fails if the state did not keep what the walk needs."""
    starts = [page.start for page in state.pages]
    if needs_boundaries(scope) and not state.boundaries:
        raise InvalidInputError(
            f"gradient_scope={scope!r} walks back through the prompt, but this state was captured with "
            "keep_boundaries=False; capture it again with keep_boundaries=True"
        )
    if scope == "full":
        return WalkPlan(frozenset(starts))
    if isinstance(scope, Tail):
        return WalkPlan(frozenset(starts[max(0, len(starts) - scope.chunks) :]))
    if isinstance(scope, Sampled):
        draw = random.Random(scope.seed)
        return WalkPlan(frozenset(s for s in starts if draw.random() < scope.fraction), 1.0 / scope.fraction)
    return WalkPlan(frozenset())


def walk_prompt(
    policy: Policy,
    state: ResidentState,
    plan: WalkPlan,
    gradients: GradientPages,
    carry_gradient: CarryGradient | None,
    *,
    checkpoint_layers: bool = False,
    release: bool = False,
    stop_at: int | None = None,
    after_chunk: Callable[[int, CarryGradient | None], None] | None = None,
    meter: MemoryMeter,
    tally: Tally | None = None,
    on_graph: Callable[[Tensor], None] | None = None,
) -> list[int]:
    """Walk the planned prompt chunks from last to first, adding parameter gradients; returns the starts walked.

    gradients: what the responses left for the prompt's rows, consumed page by page. carry_gradient: gradient of the
    carry where the walk begins, summed over the group. A chunk that is not walked passes nothing on. One chunk's graph
    is alive at a time. The policy must be active.
    stop_at: walk only chunks before this position, where an interrupted walk had come to.
    release: free the state's pages and carries as the walk passes them; the state is of no other use afterwards.
    after_chunk: called with the start of every chunk that was passed and the gradient of the carry there.
    """
    walked: list[int] = []
    tally = Tally() if tally is None else tally
    source = row_source(state.placement, policy.device, tally)
    spans = [(page.start, page.stop) for page in state.pages if stop_at is None or page.start < stop_at]
    for index in progress(range(len(spans))[::-1], "prompt gradient", unit="chunk"):
        start, stop = spans[index]
        if release:  # the walk makes this chunk's own rows again
            state.release_from(start)
        if start not in plan.starts:
            carry_gradient = None
            continue
        segment = Segment(
            state.prompt_ids[start:stop],
            start,
            state.pages[:index],
            state.carry_at(start),
            f"prompt gradient, chunk [{start}, {stop})",
            source=source,
            expected=state.choices_of(index),
            tally=tally,
            comm=state.comm,
        )
        live = run_segment(policy, segment, gradients, checkpoint_layers=checkpoint_layers)
        if on_graph is not None:
            on_graph(live.output.hidden)
        carry_gradient = walk_segment(policy, segment, live, gradients, carry_gradient, scale=plan.scale, meter=meter)
        del live, segment  # the graph and its pages must be gone before the next chunk's are built
        walked.append(start)
        if after_chunk is not None:
            after_chunk(start, carry_gradient)
    return walked


def add_carry_gradients(total: CarryGradient | None, more: CarryGradient | None) -> CarryGradient | None:
    """Sum over members; gradients of the same boundary carry."""
    if total is None or more is None:
        return total if more is None else more
    return tuple(
        {name: a[name] + b[name] if name in a and name in b else (a if name in a else b)[name] for name in {**a, **b}}
        for a, b in zip(total, more, strict=True)
    )
