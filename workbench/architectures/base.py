"""What an architecture adapter is: it turns a transformers model into `forward_chunk` and nothing else.

    forward_chunk(ids, context) -> ChunkOutput(hidden, layers)

Adapters drive transformers' own modules layer by layer, so that a chunk sees the resident pages and the carry of its
boundary. They know nothing of groups, objectives, scopes or memory; nothing else knows an architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.architectures.config_check import check_config
from workbench.errors import NonFiniteError
from workbench.ops.attention import AttentionPage
from workbench.state.pages import GradientPages, LayerState, NamedTensors, Page


@dataclass(frozen=True)
class ChunkContext:
    """Everything a chunk sees of what came before it.

    start: position of the chunk's first token.
    pages: all earlier pages in order of position.
    carry: per layer, the carry before the chunk's first token ({} at position 0 and for layers without one).
    gradients: where gradients of earlier rows go; None when no gradient is taken.
    """

    start: int
    pages: Sequence[Page]
    carry: Sequence[NamedTensors]
    gradients: GradientPages | None = None

    def layer(self, index: int) -> LayerView:
        return LayerView(index, self)


@dataclass(frozen=True)
class LayerView:
    """One layer's part of a `ChunkContext`."""

    index: int
    context: ChunkContext

    @property
    def start(self) -> int:
        return self.context.start

    @property
    def carry(self) -> NamedTensors:
        return self.context.carry[self.index]

    def attention_pages(self, key_name: str, value_name: str) -> list[AttentionPage]:
        """Pages as attention sees them; equal names mean that one tensor serves as key and value."""
        return [self._attention_page(page, key_name, value_name) for page in self._pages()]

    def rows(self, name: str) -> list[Tensor]:
        return [page.layers[self.index][name] for page in self._pages()]

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

        rows = page.layers[self.index]
        return AttentionPage(rows[key_name], rows[value_name], page.rows_start(self.index), sink)


@dataclass(frozen=True)
class ChunkOutput:
    """hidden: [batch, tokens, hidden] after the final norm; layers: what each layer leaves behind (graph attached)."""

    hidden: Tensor
    layers: tuple[LayerState, ...]


@dataclass
class ChunkScratch:
    """What layers of one chunk hand to each other besides hidden states; dies with the chunk."""

    new: list[LayerState] = field(default_factory=list)
    shared: dict[str, Any] = field(default_factory=dict)


class Adapter:
    """Base of all adapters; a family overrides the class variables and `run_layer`.

    handled: config fields the family's forward honours. ignored: {field: why it cannot matter here}.
    required: {field: the only values this adapter reproduces}. Any other field is refused with the list.
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    handled: ClassVar[frozenset[str]] = frozenset()
    ignored: ClassVar[Mapping[str, str]] = {}
    required: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def __init__(self, causal_lm: Any) -> None:
        self.causal_lm = causal_lm
        self.config: Any = causal_lm.config
        check_config(self.config, type(self).handled, type(self).ignored, type(self).required)
        self.base: Any = causal_lm.model
        self.num_layers = len(self.base.layers)

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

    def forward_chunk(self, ids: Tensor, context: ChunkContext, *, locate: str | None = None) -> ChunkOutput:
        """Run ids [batch, tokens] at positions context.start .. through all layers.

        locate: when given, every layer's output is checked and NonFiniteError names the first bad layer, with this
        text as the place (used to explain a failure after the fact: the check costs a synchronisation per layer).
        """
        positions = torch.arange(context.start, context.start + ids.shape[1], device=ids.device)[None]
        hidden = self.base.embed_tokens(ids)
        rotary = self.rotary(hidden, positions)
        scratch = ChunkScratch()
        for index in range(self.num_layers):
            hidden = self.run_layer(index, hidden, rotary, context.layer(index), scratch)
            if locate is not None and not torch.isfinite(hidden).all():
                raise NonFiniteError(
                    f"{locate}: NaN or infinity first appears in the output of layer {index} "
                    f"({type(self.base.layers[index]).__name__}); check that layer's weights and the numeric dtype"
                )
        return ChunkOutput(self.base.norm(hidden), tuple(scratch.new))

    def rotary(self, hidden: Tensor, positions: Tensor) -> Any:
        return self.base.rotary_emb(hidden, positions)

    def run_layer(self, index: int, hidden: Tensor, rotary: Any, view: LayerView, scratch: ChunkScratch) -> Tensor:
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [rows, V] of final hidden states [rows, hidden], as the model's own head gives them."""
        return self.causal_lm.lm_head(hidden)
