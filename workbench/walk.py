"""The reverse walk: forward one segment of a sequence again and carry gradients back through it.

A segment is a response block, with a loss, or a prompt chunk, without. What its later neighbours and the loss want of
it arrives as the gradient of three things: its final hidden states, its rows and its carry. What it passes on goes to
the parameters' `.grad`, to the gradient pages of earlier rows, and into the gradient of the carry it started from.
Walking segments from last to first is backpropagation through the whole sequence with one segment's graph alive.

Two ways to hold that one graph, with the same result:

- `_WholeGraph`: one autograd graph through all layers; least work.
- `_LayerByLayer` (checkpoint_layers=True): only the input of each layer is kept; backward rebuilds one layer's graph
  at a time. The attention output and log-sum-exp of the first pass are kept as well, so attention is not repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from workbench.architectures import Adapter, ChunkContext, ChunkOutput, ChunkRun
from workbench.capture import forward_checked, own_ids
from workbench.comm import Comm, Shard, every_rank, shard_of
from workbench.errors import NonDeterministicError
from workbench.memory import MemoryMeter
from workbench.ops.logprobs import backward_logprobs
from workbench.policy import Policy
from workbench.state.pages import GradientPages, Page
from workbench.state.placement import ON_DEVICE, RowSource
from workbench.state.resident import Carry, Choices
from workbench.types import Tally

CarryGradient = tuple[dict[str, Tensor], ...]
# What a walk begins with; None stands for zeros, where only another rank has a gradient.
RowGradients = Mapping[int, Mapping[str, Tensor | None]]
CarryGradients = Sequence[Mapping[str, Tensor | None]]


@dataclass(frozen=True)
class Segment:
    """One piece of a walk: a response block (with targets) or a prompt chunk (without).

    ids: [T]; start: position of the first; pages: all earlier pages; carry: before the first token; place: for errors.
    expected: what an earlier pass over the same tokens selected. tally: gets "choices_verified".
    comm: the ranks that share its tokens; pages and carry are then this rank's.
    """

    ids: Tensor
    start: int
    pages: Sequence[Page]
    carry: Carry
    place: str
    targets: Tensor | None = None
    source: RowSource = ON_DEVICE
    expected: Choices | None = None
    tally: Tally = field(default_factory=Tally)
    comm: Comm | None = None

    @property
    def shard(self) -> Shard | None:
        return shard_of(self.comm, self.start, self.start + self.ids.numel())

    def own_ids(self) -> Tensor:
        """The ids that this process runs."""
        return own_ids(self.ids, self.shard)

    def verify(self, found: Choices, expected: Choices) -> None:
        self.tally["choices_verified"] += require_same_choices(found, expected, self.place, self.comm)


class LiveSegment(Protocol):
    """A segment that was run forward and can be walked back once."""

    @property
    def output(self) -> ChunkOutput: ...

    @property
    def state_names(self) -> Sequence[tuple[int, str, str]]: ...

    def backward(
        self, hidden_gradient: Tensor | None, row_gradients: RowGradients, carry_gradient: CarryGradients | None
    ) -> CarryGradient | None:
        """Consume the segment; returns the gradient of the carry it started from, None if nothing reaches it."""
        ...


def run_segment(
    policy: Policy, segment: Segment, gradients: GradientPages, *, checkpoint_layers: bool = False
) -> LiveSegment:
    """Forward one segment so that it can be walked; earlier rows will report their gradients to `gradients`.

    Raises NonDeterministicError if it selects other keys or experts than `segment.expected`.
    """
    live = (_LayerByLayer if checkpoint_layers else _WholeGraph)(policy, segment, gradients)
    if segment.expected is not None:
        segment.verify(live.output.run.choices, segment.expected)
    return live


def walk_segment(
    policy: Policy,
    segment: Segment,
    live: LiveSegment,
    gradients: GradientPages,
    carry_gradient: CarryGradient | None,
    *,
    scale: float = 1.0,
    coefficients: Tensor | None = None,
    temperature: float = 1.0,
    meter: MemoryMeter,
) -> CarryGradient | None:
    """Backward through one segment; parameter gradients are added, earlier rows' gradients go to `gradients`.

    coefficients: d(loss)/d(log-prob) of the segment's targets, for response blocks.
    carry_gradient: gradient of the carry after the segment; scale multiplies it and the rows' gradients.
    Returns the gradient of the carry before the segment, or None when nothing reaches it.
    """
    hidden_gradient = None
    shard = segment.shard
    if coefficients is not None and segment.targets is not None:
        hidden, targets = live.output.hidden[0].detach(), segment.targets
        if shard is not None:
            hidden, targets, coefficients = shard.real(hidden, 0), shard.own(targets), shard.own(coefficients)
        with meter.ledger("logits"):
            hidden_gradient = backward_logprobs(
                policy.head, hidden, targets.to(policy.device), coefficients, temperature=temperature
            )[None]
            if shard is not None:
                hidden_gradient = shard.with_ghost(hidden_gradient, 1)
    rows: dict[int, dict[str, Tensor | None]] = {}
    carry: CarryGradients | None = carry_gradient
    for (layer, name), gradient in gradients.take(segment.start).items():
        rows.setdefault(layer, {})[name] = gradient if scale == 1.0 else gradient.mul_(scale)
    if carry_gradient is not None and scale != 1.0:
        carry = tuple({name: g * scale for name, g in layer.items()} for layer in carry_gradient)
    if shard is not None:  # every rank must walk the same graph
        rows, carry = _wanted_anywhere(shard.comm, live.state_names, rows, carry, policy.device)
    if hidden_gradient is None and not rows and carry is None:
        return None
    before = live.backward(hidden_gradient, rows, carry)
    return before if before is not None and any(before) else None


# ---------------------------------------------------------------- the two ways to hold the graph


class _WholeGraph:
    """One autograd graph from the embedding to the final norm."""

    def __init__(self, policy: Policy, segment: Segment, gradients: GradientPages) -> None:
        self._adapter, self._segment = policy.adapter, segment
        self._carry = _leaves(segment.carry)
        context = ChunkContext(
            segment.start, segment.pages, self._carry, gradients, source=segment.source, shard=segment.shard
        )
        self._ids = segment.own_ids().to(policy.device)[None]
        self._embedded = _embedded_leaf(self._adapter, self._ids)
        with torch.enable_grad():
            self.output = forward_checked(
                policy, self._ids, context, segment.place, embedded=self._embedded, need_hidden=_needs_hidden(segment)
            )
        self.state_names = _state_names(self.output)

    def backward(
        self, hidden_gradient: Tensor | None, row_gradients: RowGradients, carry_gradient: CarryGradients | None
    ) -> CarryGradient | None:
        roots = [] if hidden_gradient is None else [(self.output.hidden, hidden_gradient)]
        for index in range(self._adapter.num_layers):
            roots += _state_roots(self.output, index, row_gradients, carry_gradient)
        if not _run_backward(roots):
            return None
        _embedding_backward(self._adapter, self._ids, self._embedded)
        return _leaf_gradients(self._carry)


class _LayerByLayer:
    """Layer inputs only; one layer's graph at a time in the backward."""

    def __init__(self, policy: Policy, segment: Segment, gradients: GradientPages) -> None:
        self._adapter, self._segment = policy.adapter, segment
        self._ids = segment.own_ids().to(policy.device)[None]
        self._embedded = _embedded_leaf(self._adapter, self._ids)
        self._context = ChunkContext(
            segment.start,
            segment.pages,
            segment.carry,
            gradients,
            keep_attention=True,
            source=segment.source,
            shard=segment.shard,
        )
        self._inputs: list[Tensor] = []
        with torch.no_grad():
            self.output = forward_checked(
                policy,
                self._ids,
                self._context,
                segment.place,
                embedded=self._embedded.detach(),
                need_hidden=_needs_hidden(segment),
                layer_inputs=self._inputs,
            )
        self.state_names = _state_names(self.output)
        self._run: ChunkRun = self.output.run
        self._run.layers.clear()  # each layer's rows and carry are made again with its graph

    def backward(
        self, hidden_gradient: Tensor | None, row_gradients: RowGradients, carry_gradient: CarryGradients | None
    ) -> CarryGradient | None:
        before: list[dict[str, Tensor]] = [{} for _ in range(self._adapter.num_layers)]
        gradient = self._through_final_norm(hidden_gradient)
        for index in reversed(range(self._adapter.num_layers)):
            if gradient is None and not row_gradients.get(index) and not (carry_gradient and carry_gradient[index]):
                self._inputs.pop()
                continue
            gradient, before[index] = self._through_layer(index, gradient, row_gradients, carry_gradient)
        if gradient is not None and self._embedded.requires_grad:
            self._embedded.grad = gradient
            _embedding_backward(self._adapter, self._ids, self._embedded)
        return tuple(before)

    def _through_final_norm(self, hidden_gradient: Tensor | None) -> Tensor | None:
        if hidden_gradient is None:
            return None
        leaf = self._inputs.pop().requires_grad_()
        with torch.enable_grad():
            hidden = self._adapter.final_norm(leaf)
        torch.autograd.backward(hidden, hidden_gradient.to(hidden.dtype))
        return leaf.grad

    def _through_layer(
        self, index: int, gradient: Tensor | None, row_gradients: RowGradients, carry_gradient: CarryGradients | None
    ) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Rebuild one layer's graph and walk it: gradients of the layer's input and of its carry."""
        leaf = self._inputs.pop()
        if index > 0 or self._embedded.requires_grad:
            leaf.requires_grad_()
        carry = _leaves(self._segment.carry)
        run = self._run.again(replace(self._context, carry=carry, keep_attention=False))
        with torch.enable_grad():
            out = self._adapter.run_layer(index, leaf, run, state_only=gradient is None)
        self._segment.verify(run.choices, self._run.choices)
        output = ChunkOutput(leaf, {index: run.layers[index]}, run)
        roots = [] if gradient is None or out is None else [(out, gradient)]
        roots += _state_roots(output, index, row_gradients, carry_gradient)
        _run_backward(roots)
        self._run.memos.pop(index, None)
        return leaf.grad, {name: t.grad for name, t in carry[index].items() if t.grad is not None}


# ---------------------------------------------------------------- pieces


def require_same_choices(found: Choices, expected: Choices, place: str, comm: Comm | None = None) -> int:
    """Every key or expert choice of a recomputed pass must be the earlier pass's; returns how many were compared."""
    changed = [at for at, hashed in found.items() if int(hashed) != int(expected[at])]
    if found and comm is not None:
        device = next(iter(found.values())).device
        elsewhere = max(every_rank(comm, bool(changed), device, tag="choices"))
        if elsewhere and not changed:
            raise NonDeterministicError(f"{place}: another rank selects other keys or experts than in the earlier pass")
    for layer, kind in changed:
        raise NonDeterministicError(
            f"{place}: layer {layer} selects other {kind} than in the pass it repeats, so its gradient would "
            "belong to another computation; run with torch.use_deterministic_algorithms(True) and unchanged weights"
        )
    return len(found)


def _needs_hidden(segment: Segment) -> bool:
    """Prompt chunks need no hidden states: their last layer stops once its rows and carry are there."""
    return segment.targets is not None


def _leaves(carry: Carry) -> Carry:
    return tuple({name: t.detach().requires_grad_() for name, t in layer.items()} for layer in carry)


def _leaf_gradients(leaves: Carry) -> CarryGradient:
    return tuple({name: t.grad for name, t in layer.items() if t.grad is not None} for layer in leaves)


def _embedded_leaf(adapter: Adapter, ids: Tensor) -> Tensor:
    """Embedded tokens as a leaf, so that the embedding's gradient is added row by row and never materialised."""
    with torch.no_grad():
        embedded = adapter.embed(ids)
    return embedded.requires_grad_(adapter.embedding_is_trainable())


def _embedding_backward(adapter: Adapter, ids: Tensor, embedded: Tensor) -> None:
    if embedded.grad is not None:
        adapter.embedding_backward(ids, embedded.grad)
        embedded.grad = None


def _state_roots(
    output: ChunkOutput, index: int, row_gradients: RowGradients, carry_gradient: CarryGradients | None
) -> list[tuple[Tensor, Tensor]]:
    """(rows or carry of one layer, its gradient); rows that no later token sees have no gradient."""
    layer = output.layers[index]
    roots = []
    for name, gradient in row_gradients.get(index, {}).items():
        rows = layer.rows[name]
        if gradient is None:
            gradient = torch.zeros_like(rows)
        roots.append((rows[..., rows.shape[-2] - gradient.shape[-2] :, :], gradient))
    for name, gradient in (carry_gradient[index] if carry_gradient is not None else {}).items():
        roots.append((layer.carry[name], torch.zeros_like(layer.carry[name]) if gradient is None else gradient))
    return roots


def _state_names(output: ChunkOutput) -> list[tuple[int, str, str]]:
    """(layer, "rows" or "carry", name) of everything that a segment leaves behind."""
    return [
        (index, kind, name)
        for index, layer in sorted(output.layers.items())
        for kind, tensors in (("rows", layer.rows), ("carry", layer.carry))
        for name in tensors
    ]


def _wanted_anywhere(
    comm: Comm,
    names: Sequence[tuple[int, str, str]],
    rows: RowGradients,
    carry: CarryGradients | None,
    device: torch.device,
) -> tuple[dict[int, dict[str, Tensor | None]], CarryGradients | None]:
    """The same with zeros (None) for what only other ranks have a gradient of: their walks meet in collectives."""

    def found(index: int, kind: str, name: str) -> Tensor | None:
        layer = rows.get(index, {}) if kind == "rows" else carry[index] if carry is not None else {}
        return layer.get(name)

    own = torch.tensor([found(*at) is not None for at in names], dtype=torch.uint8, device=device)
    anywhere = torch.stack(comm.all_gather(own, [len(names)] * comm.size, "walk")).amax(dim=0).tolist()
    wanted = [at for at, flag in zip(names, anywhere, strict=True) if flag]
    new_rows: dict[int, dict[str, Tensor | None]] = {}
    new_carry: list[dict[str, Tensor | None]] = [{} for _ in range(1 + max(index for index, _, _ in names))]
    for index, kind, name in wanted:
        target = new_rows.setdefault(index, {}) if kind == "rows" else new_carry[index]
        target[name] = found(index, kind, name)
    return new_rows, tuple(new_carry) if any(new_carry) else None


def _run_backward(roots: list[tuple[Tensor, Tensor]]) -> bool:
    """Backward from all roots that depend on anything trainable; False if none does."""
    live = [(root, gradient.to(root.device, root.dtype)) for root, gradient in roots if root.requires_grad]
    if live:
        torch.autograd.backward([root for root, _ in live], [gradient for _, gradient in live])
    return bool(live)
