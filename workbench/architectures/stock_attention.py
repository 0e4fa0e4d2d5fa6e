"""Bridge for families whose stock attention modules run unchanged.

transformers' attention modules call `cache.update(...)` and then a registered attention function. `ChunkCache` hands
the module its own new rows back (and keeps them); the attention function then attends over the resident pages of the
layer view that the adapter passes down as a keyword. Stock cache layers are not used: they copy recurrent state in
place, which breaks autograd, and concatenate keys and values, which copies the prompt.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from workbench.architectures.base import ChunkRun, LayerView, noted_routing
from workbench.errors import UnsupportedModelError
from workbench.ops.attention import paged_attention
from workbench.ops.exchange import gather_rows
from workbench.ops.sharded_attention import sharded_paged_attention
from workbench.state.pages import LayerState

ATTENTION_NAME = "longstraw_paged"
_HONOURED_KEYWORDS = {"position_ids", "use_cache", "is_causal"}


def paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    layer_view: LayerView,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """transformers' attention-function signature over resident pages. Output [batch, tokens, heads, width]."""
    unknown = {name for name, given in keywords.items() if given is not None} - _HONOURED_KEYWORDS
    if unknown or attention_mask is not None or dropout:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks attention for {sorted(unknown) or 'a mask or dropout'}, which paged "
            "attention does not reproduce"
        )
    pages, shard, memo = layer_view.attention_pages("keys", "values"), layer_view.shard, layer_view.memo
    options: dict[str, Any] = {"pages": pages, "scaling": scaling, "window": sliding_window, "memo": memo}
    if shard is None:
        out = paged_attention(query, key, value, start=layer_view.start, **options)
    else:
        out = sharded_paged_attention(query, key, value, shard=shard, **options)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)


class StateComplete(Exception):
    """Raised through a stock layer once its rows and carry are there, to skip what would not be used."""


class ChunkCache:
    """The part of transformers' Cache interface that one layer's modules call, without any in-place write.

    state_only: end the layer with StateComplete as soon as its rows or carry are complete.
    """

    def __init__(self, view: LayerView, *, state_only: bool = False) -> None:
        self._view = view
        self._state_only = state_only
        self._rows: dict[str, Tensor] = {}
        self._carry: dict[str, Tensor] = {}

    def layer_state(self) -> LayerState:
        return LayerState(self._rows, self._carry)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self._rows = {"keys": self._view.real_rows(keys), "values": self._view.real_rows(values)}
        if self._state_only:
            raise StateComplete
        return keys, values

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._view.carry.get("conv")

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._view.carry.get("recurrent")

    def is_recording_past(self, layer_idx: int) -> bool:
        """True keeps single-token chunks off the decode kernel that updates the convolution state in place."""
        return True

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **kwargs: Any
    ) -> Tensor:
        """Inputs [batch, channels, tail + tokens] of the causal convolution; keeps the last kernel - 1 columns."""
        if self._view.shard is not None:
            return self._conv_over_ranks(conv_states, conv_kernel_size - 1)
        tail = self.get_conv_state(layer_idx)
        full = conv_states if tail is None else torch.cat([tail, conv_states], dim=-1)
        width = conv_kernel_size - 1
        tail_out = full[..., max(0, full.shape[-1] - width) :]
        if tail_out.shape[-1] < width:  # zeros, as the convolution itself pads
            tail_out = nn.functional.pad(tail_out, (width - tail_out.shape[-1], 0))
        # without a graph a view would keep the whole input alive until the chunk ends, in every layer
        self._carry["conv"] = tail_out if torch.is_grad_enabled() else tail_out.clone()
        return full

    def _conv_over_ranks(self, own: Tensor, width: int) -> Tensor:
        """The last `width` columns before this rank's tokens, from whichever ranks hold them, then its own.

        Rank 0 keeps the tail [batch, channels, width] that the next chunk begins with, the others keep none of it: so
        its gradient exists once.
        """
        shard = self._view.shard
        assert shard is not None
        tail = self.get_conv_state(0)
        if tail is None:
            tail = own.new_zeros(*own.shape[:2], width if shard.comm.rank == 0 else 0)
        ends = [min(width, count) for count in shard.counts]
        last = shard.real(own, -1)[..., shard.count - ends[shard.comm.rank] :]
        sent = torch.cat([tail.expand(own.shape[0], -1, -1), last], dim=-1)
        counts = [end + width * (rank == 0) for rank, end in enumerate(ends)]
        columns = gather_rows(shard.comm, sent.movedim(-1, 0), counts, tag="convolution tails").movedim(0, -1)
        before = sum(counts[: shard.comm.rank]) + width * (shard.comm.rank == 0)
        kept = columns[..., columns.shape[-1] - width :]
        self._carry["conv"] = kept if shard.comm.rank == 0 else kept[..., :0]
        if not torch.is_grad_enabled():
            self._carry["conv"] = self._carry["conv"].clone()
        return torch.cat([columns[..., before - width : before], own], dim=-1)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self._carry["recurrent"] = recurrent_states
        if self._state_only:
            raise StateComplete
        return recurrent_states


def run_stock_layer(
    layer: nn.Module,
    index: int,
    hidden: Tensor,
    run: ChunkRun,
    *,
    state_only: bool,
    attends: bool = True,
    **inputs: Any,
) -> Tensor | None:
    """Run a stock decoder layer over one chunk: `Adapter.run_layer` for families whose layers run unchanged.

    attends: whether the layer calls the attention function, which needs the layer's view of the resident pages.
    """
    view = run.view(index)
    cache = ChunkCache(view, state_only=state_only)
    if attends:  # other token mixers hand unknown keywords to their kernels
        inputs["layer_view"] = view
    out: Tensor | None = None
    with suppress(StateComplete), noted_routing(layer, index, run):
        out = layer(hidden, cache=cache, **inputs)
    run.layers[index] = cache.layer_state()
    return out
