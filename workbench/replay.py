"""Responses from the boundary: graph-free scoring, and replay of one member under autograd.

A response y of R tokens is R forward positions: its inputs are the last prompt token and y[:-1], its targets are y.
Scoring and replay cut them into the same blocks and run the same operations, so a policy that has not changed scores a
response bitwise as it replays it.

A replay is two sweeps. Forward: every block in order, all but the last without a graph, collecting log-probabilities.
With all of them known the objective's derivative d(loss)/d(log-prob) is known too, and what remains is linear.
Backward: the blocks in reverse, each recomputed from its own boundary (the last one still has its graph), seeded with
those derivatives, with the gradient of its rows that later blocks left in gradient pages, and with the gradient of the
carry it hands on. That is `walk_segment`, and the prompt's chunks are walked by the same function (without a loss).

Under adapter_scope="response" the last prompt token is the base model's: it runs apart, ahead of the first block, and
takes no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from workbench.architectures import ChunkContext, ChunkOutput
from workbench.capture import chunk_spans, forward_checked, keep_carry, keep_page
from workbench.comm import digest, require_agreement
from workbench.errors import NonFiniteError
from workbench.inputs import (
    Ids,
    check_positive,
    check_resident_state,
    check_responses,
    check_temperature,
    entry_point,
)
from workbench.memory import NO_METER, MemoryMeter
from workbench.ops.logprobs import token_logprobs
from workbench.policy import Policy
from workbench.state.pages import GradientPages, Page
from workbench.state.placement import row_source
from workbench.state.resident import ResidentState
from workbench.types import Response, Tally, accumulation_dtype
from workbench.walk import CarryGradient, LiveSegment, Segment, run_segment, walk_segment

BLOCK_TOKENS = 2048


@entry_point
def score_responses(
    policy: Policy,
    state: ResidentState,
    responses: Sequence[Response | Ids],
    *,
    temperature: float = 1.0,
    block_tokens: int = BLOCK_TOKENS,
    allow_stale: bool = False,
) -> list[Tensor]:
    """Log-probabilities of every response token, one 1-D float32 tensor per response (float64 for float64 models).

    No graph is built. The scores are bitwise those of a replay with the same block_tokens and weights. Raises
    InvalidInputError, StaleStateError (unless allow_stale), NonFiniteError.
    """
    check_positive("block_tokens", block_tokens)
    check_temperature(temperature)
    check_resident_state(state)
    state.require_current(policy.state_key, policy.state_version, allow_stale=allow_stale, purpose="score_responses")
    checked = check_responses(policy, state.positions + 1, responses)
    arguments = digest(checked, temperature, block_tokens)
    require_agreement(state.comm, arguments, "score_responses' arguments", policy.device)
    scores = []
    with policy.active():
        for member, ids in enumerate(checked):
            branch = Branch(policy, state, ids, member, block_tokens, temperature)
            scores.append(branch.sweep_forward(keep_last_graph=False)[0])
    return scores


@dataclass
class ReplayResult:
    """loss: this member's share of the step's loss. logprobs, entropies: [R]. carry_gradient: at the boundary."""

    loss: float
    logprobs: Tensor
    entropies: Tensor
    carry_gradient: CarryGradient | None
    num_blocks: int


# member's log-probs [R] -> (loss, d loss / d log-probs [R])
Coefficients = Callable[[Tensor], tuple[float, Tensor]]


def replay_response(
    policy: Policy,
    state: ResidentState,
    ids: Tensor,
    *,
    member: int,
    coefficients: Coefficients,
    gradients: GradientPages,
    block_tokens: int = BLOCK_TOKENS,
    temperature: float = 1.0,
    checkpoint_layers: bool = False,
    meter: MemoryMeter,
    tally: Tally | None = None,
    on_graph: Callable[[Tensor], None] | None = None,
) -> ReplayResult:
    """Replay one member from the boundary and backward its loss; at most one block's graph is alive at any time.

    ids: [R] int64. on_graph: called with each block's graph output (tests count how many are alive).
    The policy must be active. Parameter gradients are added; gradients of resident rows go to `gradients`.
    """
    tally = Tally() if tally is None else tally
    branch = Branch(policy, state, ids, member, block_tokens, temperature, gradients, checkpoint_layers, meter, tally)
    logprobs, entropies, live = branch.sweep_forward(keep_last_graph=True)
    loss, weights = coefficients(logprobs)
    carry_gradient: CarryGradient | None = None
    for segment in reversed(branch.segments):
        first = segment.start - state.positions
        if live is None:
            live = run_segment(policy, segment, gradients, checkpoint_layers=checkpoint_layers)
        if on_graph is not None:
            on_graph(live.output.hidden)
        carry_gradient = walk_segment(
            policy,
            segment,
            live,
            gradients,
            carry_gradient,
            coefficients=weights[first : first + segment.ids.numel()],
            temperature=temperature,
            meter=meter,
        )
        live = None
    return ReplayResult(loss, logprobs, entropies, carry_gradient, len(branch.segments))


@dataclass
class Branch:
    """One member's continuation of the resident state; its pages are shared with the state, never copied."""

    policy: Policy
    state: ResidentState
    ids: Tensor
    member: int
    block_tokens: int
    temperature: float
    gradients: GradientPages | None = None
    checkpoint_layers: bool = False
    meter: MemoryMeter = NO_METER
    tally: Tally = field(default_factory=Tally)
    segments: list[Segment] = field(default_factory=list)  # those that take a gradient
    on_hidden: Callable[[Tensor], None] = lambda _hidden: None  # gets each block's final hidden states [T, hidden]

    def sweep_forward(self, *, keep_last_graph: bool) -> tuple[Tensor, Tensor, LiveSegment | None]:
        """Run all blocks in order; log-probs [R], entropies [R], and the last block's graph if asked."""
        boundary, count = self.state.positions, self.ids.numel()
        inputs = torch.cat([self.state.prompt_ids[-1:], self.ids[:-1]]) if count else self.ids
        pages, carry = list(self.state.pages), self.state.carry_at(boundary)
        source = row_source(self.state.placement, self.policy.device, self.tally)
        logprobs, entropies, live = [], [], None
        for start, stop in self._spans(boundary, count):
            first, last = start - boundary, stop - boundary
            place = f"response {self.member}, tokens [{first}, {last})"
            segment = Segment(
                inputs[first:last],
                start,
                tuple(pages),
                carry,
                place,
                self.ids[first:last],
                source,
                tally=self.tally,
                comm=self.state.comm,
            )
            frozen = start == boundary and self.policy.frozen_boundary
            if keep_last_graph and stop == boundary + count and not frozen:
                assert self.gradients is not None
                live = run_segment(self.policy, segment, self.gradients, checkpoint_layers=self.checkpoint_layers)
                output = live.output
                chosen, entropy = self._logprobs(output.hidden[0], segment, first)
            else:
                with self.policy.at_boundary() if frozen else nullcontext():
                    output = self._run_without_graph(segment)
                    chosen, entropy = self._logprobs(output.hidden[0], segment, first)
                segment = replace(segment, expected=output.run.choices)  # for when its graph is built
            if not frozen:
                self.segments.append(segment)
            self.on_hidden(output.hidden[0].detach())
            logprobs.append(chosen)
            entropies.append(entropy)
            if stop < boundary + count:
                pages.append(self._page(output, segment, stop))
                carry = keep_carry(output, self.meter)
        return _concatenate(logprobs, self.policy), _concatenate(entropies, self.policy), live

    def _spans(self, boundary: int, count: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of the blocks; a frozen last prompt token is one of its own."""
        stop, first = boundary + count, boundary + self.policy.frozen_boundary
        if boundary < min(first, stop):
            yield boundary, first
        yield from chunk_spans(first, stop, self.block_tokens)

    @torch.no_grad()
    def _run_without_graph(self, segment: Segment) -> ChunkOutput:
        context = ChunkContext(segment.start, segment.pages, segment.carry, source=segment.source, shard=segment.shard)
        return forward_checked(self.policy, segment.own_ids().to(self.policy.device)[None], context, segment.place)

    def _page(self, output: ChunkOutput, segment: Segment, stop: int) -> Page:
        return keep_page(self.policy, output, segment.start, stop, self.state.placement, self.meter, segment.shard)

    def _logprobs(self, hidden: Tensor, segment: Segment, first: int) -> tuple[Tensor, Tensor]:
        """Of all the segment's tokens, on every rank."""
        assert segment.targets is not None
        shard, targets = segment.shard, segment.targets
        if shard is not None:
            hidden, targets = shard.real(hidden, 0), shard.own(targets)
        with self.meter.ledger("logits"):
            chosen, entropy = token_logprobs(
                self.policy.head, hidden.detach(), targets.to(self.policy.device), temperature=self.temperature
            )
        if shard is not None:
            chosen, entropy = shard.gather(torch.stack([chosen, entropy]), 1, "log-probs").unbind()
        bad = (~torch.isfinite(chosen)).nonzero()
        if bad.numel():
            raise NonFiniteError(
                f"response {self.member}, token {first + int(bad[0])}: log-probability is {float(chosen[bad[0]])}; the "
                "language-model head gives NaN, or the policy gives this token probability 0"
            )
        return chosen, entropy


def _concatenate(parts: list[Tensor], policy: Policy) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=accumulation_dtype(policy.dtype), device=policy.device)
