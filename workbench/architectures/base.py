"""What an architecture adapter is: it turns a transformers model into `forward_chunk` and nothing else.

    forward_chunk(ids, context) -> ChunkOutput(hidden, layers)

Adapters drive transformers' own modules layer by layer, so that a chunk sees the resident pages and the carry of its
boundary. They know nothing of groups, objectives, scopes or memory; nothing else knows an architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from workbench.architectures.config_check import check_config
from workbench.comm import Shard, all_ranks
from workbench.errors import NonFiniteError
from workbench.ops.attention import AttentionMemo, AttentionPage
from workbench.ops.logprobs import Head, is_plain
from workbench.ops.selected_attention import RowPage
from workbench.ops.selection import fingerprint
from workbench.state.pages import GradientPages, LayerState, NamedTensors, Page
from workbench.state.placement import ON_DEVICE, RowSource
from workbench.types import Tally


@dataclass(frozen=True)
class ChunkContext:
    """Everything a chunk sees of what came before it.

    start: position of the chunk's first token.
    pages: all earlier pages in order of position.
    carry: per layer, the carry before the chunk's first token ({} at position 0 and for layers without one).
    gradients: where gradients of earlier rows go; None when no gradient is taken.
    keep_attention: keep each attention layer's output and statistics, to be used when a layer is run again.
    source: where rows come from when they do not live on the computing device.
    shard: this rank's part of the chunk, where ranks share it; then ids, rows and carry are this rank's.
    """

    start: int
    pages: Sequence[Page]
    carry: Sequence[NamedTensors]
    gradients: GradientPages | None = None
    keep_attention: bool = False
    source: RowSource = ON_DEVICE
    shard: Shard | None = None

    @property
    def first(self) -> int:
        """Position of the first token that this process runs."""
        return self.start if self.shard is None else self.shard.first

    def rows(self, page: Page, layer: int) -> NamedTensors:
        """The rows of one layer of a page, on the computing device."""
        return self.source.rows(self.pages, page, layer)


@dataclass(frozen=True)
class LayerView:
    """One layer's part of a `ChunkContext`.

    memo: the attention result of this layer in an earlier pass over the same chunk, or a place to keep it.
    """

    index: int
    context: ChunkContext
    memo: AttentionMemo | None = None

    @property
    def start(self) -> int:
        return self.context.start

    @property
    def carry(self) -> NamedTensors:
        return self.context.carry[self.index]

    @property
    def shard(self) -> Shard | None:
        return self.context.shard

    def real_rows(self, rows: Tensor) -> Tensor:
        """Rows [batch, heads, tokens, width] that are to be kept: those of this rank's tokens, without a ghost."""
        return rows if self.shard is None else self.shard.real(rows, 2)

    def attention_pages(self, key_name: str, value_name: str) -> list[AttentionPage]:
        """Pages as attention sees them; equal names mean that one tensor serves as key and value."""
        return [self._attention_page(page, key_name, value_name) for page in self._pages()]

    def rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        """(position of the first row, rows [1, heads, N, width]) of every page."""
        return ((page.rows_start(self.index), self.context.rows(page, self.index)[name]) for page in self._pages())

    def row_pages(self, name: str) -> list[RowPage]:
        """Pages of single-head rows as selected attention sees them."""
        return [self._row_page(page, name) for page in self._pages()]

    def _row_page(self, page: Page, name: str) -> RowPage:
        gradients = self.context.gradients
        rows = self.context.rows(page, self.index)[name][:, 0]
        sink = None
        if gradients is not None and gradients.wants(page):

            def sink(index: Tensor, gradient: Tensor) -> None:
                gradients.add_rows(page, self.index, name, index, gradient)

        return RowPage(rows, page.rows_start(self.index), sink)

    def _pages(self) -> Iterator[Page]:
        return (page for page in self.context.pages if page.layers[self.index])

    def _attention_page(self, page: Page, key_name: str, value_name: str) -> AttentionPage:
        gradients = self.context.gradients
        sink = None
        if gradients is not None and gradients.wants(page):

            def sink(dkey: Tensor, dvalue: Tensor) -> None:
                if key_name == value_name:
                    gradients.add(page, self.index, key_name, dkey + dvalue)
                else:
                    gradients.add(page, self.index, key_name, dkey)
                    gradients.add(page, self.index, value_name, dvalue)

        rows = self.context.rows(page, self.index)
        return AttentionPage(rows[key_name], rows[value_name], page.rows_start(self.index), sink)


@dataclass
class ChunkRun:
    """One pass of a chunk through the layers.

    rotary: position embeddings. layers: what each finished layer leaves behind. shared: what layers hand to each other
        besides hidden states, by layer index. memos: attention results kept for a second pass.
    choices: {(layer, "keys" or "experts"): hash of what the layer selected}, to be compared between passes.
    """

    context: ChunkContext
    rotary: Any
    layers: dict[int, LayerState] = field(default_factory=dict)
    shared: dict[int, Any] = field(default_factory=dict)
    memos: dict[int, AttentionMemo] = field(default_factory=dict)
    choices: dict[tuple[int, str], Tensor] = field(default_factory=dict)

    def note_choice(self, layer: int, kind: str, ids: Tensor) -> None:
        """Remember a hash of the keys or experts that a layer chose without a gradient."""
        self.choices[layer, kind] = fingerprint(ids)

    def view(self, index: int) -> LayerView:
        if self.context.keep_attention:
            self.memos.setdefault(index, AttentionMemo())
        return LayerView(index, self.context, self.memos.get(index))

    def again(self, context: ChunkContext) -> ChunkRun:
        """A second pass over the same chunk: same positions, selections and attention results."""
        return ChunkRun(context, self.rotary, shared=self.shared, memos=self.memos)


@dataclass(frozen=True)
class ChunkOutput:
    """hidden: [batch, tokens, hidden] after the final norm (before the last layer, if hidden was not needed).

    layers: {index: what the layer leaves behind}, graph attached.
    """

    hidden: Tensor
    layers: Mapping[int, LayerState]
    run: ChunkRun


class Adapter:
    """Base of all adapters; a family overrides the class variables and `run_layer`.

    handled: config fields the family's forward honours. ignored: {field: why it cannot matter here}.
    required: {field: the only values this adapter reproduces}. Any other field is refused with the list.
    applied_to_prompt_rows: projections that later tokens apply to resident rows again.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    handled: ClassVar[frozenset[str]] = frozenset()
    ignored: ClassVar[Mapping[str, str]] = {}
    required: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    applied_to_prompt_rows: ClassVar[tuple[str, ...]] = ()

    def __init__(self, causal_lm: Any) -> None:
        self.causal_lm = causal_lm
        self.config: Any = causal_lm.config
        check_config(self.config, type(self).handled, type(self).ignored, type(self).required)
        self.base: Any = causal_lm.model
        self.num_layers = len(self.base.layers)
        self.kernel_calls: Tally = Tally()  # by kernel, since the adapter was made: which of several ran

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def max_positions(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def attention_name(self) -> str | None:
        """Name of the registered attention function this family's stock modules must call; None: none is needed."""
        return None

    def row_limit(self, layer: int) -> int | None:
        """Most rows of an earlier page that a later token can see in this layer; None is unlimited."""
        return None

    def forward_chunk(
        self,
        ids: Tensor,
        context: ChunkContext,
        *,
        embedded: Tensor | None = None,
        need_hidden: bool = True,
        layer_inputs: list[Tensor] | None = None,
        locate: str | None = None,
    ) -> ChunkOutput:
        """Run ids [batch, tokens] at positions context.first .. through all layers.

        embedded: the embedded ids, when the caller has them. need_hidden=False: the last layer stops as soon as its
        rows and carry are there. layer_inputs: receives every layer's input, then the final norm's.
        locate: when given, every layer's output is checked and NonFiniteError names the first bad layer, with this
        text as the place (used to explain a failure after the fact: the check costs a synchronisation per layer).
        """
        positions = torch.arange(context.first, context.first + ids.shape[1], device=ids.device)[None]
        hidden = self.embed(ids) if embedded is None else embedded
        run = ChunkRun(context, self.rotary(hidden, positions))
        for index in range(self.num_layers):
            if layer_inputs is not None:
                layer_inputs.append(hidden)
            out = self.run_layer(index, hidden, run, state_only=not need_hidden and index == self.num_layers - 1)
            if locate is not None:
                self._require_finite(index, run.layers[index], out, locate, context.shard)
            if out is None:
                return ChunkOutput(hidden, run.layers, run)
            hidden = out
        if layer_inputs is not None:
            layer_inputs.append(hidden)
        return ChunkOutput(self.final_norm(hidden), run.layers, run)

    def _require_finite(
        self, index: int, state: LayerState, out: Tensor | None, place: str, shard: Shard | None
    ) -> None:
        tensors = [*state.rows.values(), *state.carry.values(), *([] if out is None else [out])]
        finite = all(bool(torch.isfinite(t).all()) for t in tensors)
        if not all_ranks(shard, finite, self.base.norm.weight.device):
            raise NonFiniteError(
                f"{place}: NaN or infinity first appears in the output of layer {index} "
                f"({type(self.base.layers[index]).__name__}); check that layer's weights and the numeric dtype"
            )

    def embed(self, ids: Tensor) -> Tensor:
        return self.base.embed_tokens(ids)

    def embedding_is_trainable(self) -> bool:
        return any(p.requires_grad for p in self.base.embed_tokens.parameters())

    def embedding_backward(self, ids: Tensor, gradient: Tensor) -> None:
        """Add the embedding's gradient, given that of its output [1, tokens, hidden].

        Rows are added in place: autograd's own backward would allocate a vocabulary x hidden tensor for every chunk.
        """
        embedding = self.base.embed_tokens
        plain = isinstance(embedding, nn.Embedding) and is_plain(embedding)
        if not plain or embedding.max_norm or embedding.scale_grad_by_freq:
            with torch.enable_grad():  # an adapter or hook on it, or an option that autograd knows better
                torch.autograd.backward(embedding(ids), gradient)
            return
        weight = embedding.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        flat = gradient.flatten(0, 1) * self.embedding_scale()
        if embedding.padding_idx is not None:
            flat = flat.masked_fill((ids.flatten() == embedding.padding_idx)[:, None], 0.0)
        weight.grad.index_add_(0, ids.flatten(), flat.to(weight.dtype))

    def embedding_scale(self) -> float | Tensor:
        """What the embedding module multiplies its rows by."""
        return 1.0

    def rotary(self, hidden: Tensor, positions: Tensor) -> Any:
        return self.base.rotary_emb(hidden, positions)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.base.norm(hidden)

    def run_layer(self, index: int, hidden: Tensor, run: ChunkRun, *, state_only: bool = False) -> Tensor | None:
        """Run one layer, leaving its rows and carry in run.layers[index].

        state_only: the output is not needed; stop when rows and carry are there and return None.
        """
        raise NotImplementedError

    @contextmanager
    def kernels(self, *, decoding: bool) -> Iterator[None]:
        """Replace kernels that the stock modules call, for the duration. decoding: single tokens without gradient."""
        yield

    def head(self) -> Head:
        """The language-model head: its module, and what the model does to the logits after it."""
        return Head(self.causal_lm.lm_head)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute for the duration."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def noted_routing(layer: Any, index: int, run: ChunkRun) -> Iterator[None]:
    """Note which experts a layer's router (mlp.gate, returning logits, weights, ids) chooses in this pass."""
    router = getattr(layer.mlp, "gate", None)
    if router is None:
        yield
        return
    handle = router.register_forward_hook(lambda _, __, routed: run.note_choice(index, "experts", routed[2]))
    try:
        yield
    finally:
        handle.remove()
