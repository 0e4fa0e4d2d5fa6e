"""Attention of a chunk whose tokens, and whose past, are spread over ranks: rows stay with their owner, queries travel.

Forward: all queries of the chunk are gathered; every rank attends with them over the rows that it owns (pages, and its
own tokens' rows) and sends the partial outputs with their log-sum-exp to the queries' ranks, which merge them in rank
order, in float32 (float64 for float64 inputs). Backward: queries, output gradients and statistics are gathered; dK and
dV go straight to the owner's gradient sinks; dQ returns to the queries' ranks and is summed there in rank order.

Bytes that one rank sends for one call, with n ranks, C tokens of which it owns c, Hq heads of width D, b bytes per
element and a bytes per accumulated element (4, or 8 for float64):

    forward:   (n - 1) c Hq D b  +  (C - c) Hq (D + 1) a
    backward:  (n - 1) c Hq (3 D b + a)  +  (C - c) Hq D a          (dense: query, output, its gradient, log-sum-exp)
               (n - 1) c Hq (2 D b + 2 a)  +  (C - c) Hq D a        (selected rows: delta instead of the output)

`attention_bytes_sent` is that formula. Nothing depends on the length of the prompt; moving the past instead would cost
(n - 1) P Hkv 2 D b / n, which is more as soon as P > ~1.5 C Hq / Hkv.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from workbench.comm import Shard
from workbench.ops.attention import (
    AttentionMemo,
    AttentionPage,
    _backward_parts,
    _masked_part,
    _merge,
    _Part,
    _part_forward,
    page_parts,
)
from workbench.ops.selected_attention import RowPage, _parts, _scatter
from workbench.types import accumulation_dtype


def attention_bytes_sent(
    *, ranks: int, tokens: int, own_tokens: int, heads: int, width: int, element_bytes: int, backward: bool
) -> int:
    """Bytes that one rank sends in one `sharded_paged_attention` call (see the module's docstring)."""
    accumulated = max(4, element_bytes)
    others, foreign = (ranks - 1) * own_tokens, tokens - own_tokens
    if backward:
        return others * heads * (3 * width * element_bytes + accumulated) + foreign * heads * width * accumulated
    return others * heads * width * element_bytes + foreign * heads * (width + 1) * accumulated


def sharded_paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    shard: Shard,
    pages: Sequence[AttentionPage],
    scaling: float,
    window: int | None = None,
    memo: AttentionMemo | None = None,
) -> Tensor:
    """`paged_attention` of this rank's tokens: output [B, Hq, rows, D], zeros for a ghost.

    query [B, Hq, rows, D], key, value [B, Hkv, rows, D]: of this rank's tokens (a ghost row may be there). pages: the
    rows that this rank owns. Every rank of the shard must call it, in the same order as every other.
    """
    own = (shard.real(x, 2).contiguous() for x in (query, key, value))
    out: Tensor = _ShardedPagedAttention.apply(*own, shard, tuple(pages), scaling, window, memo)
    return shard.with_ghost(out, 2)


class _ShardedPagedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, key, value, shard, pages, scaling, window, memo):  # type: ignore[override]
        if memo is not None and memo.result is not None:
            out, lse = memo.result
            out = out.view_as(out)
        else:
            everyone = shard.gather(query, 2, "attention queries").contiguous()
            parts = _owned_parts(everyone, shard, pages, window)
            out, lse = _merge_parts(
                (_part_forward(everyone, key, value, part, scaling) for part in parts), everyone, value.shape[-1]
            )
            out, lse = _merge_home(shard, out, lse)
            out = out.to(query.dtype)
            if memo is not None:
                memo.result = out, lse
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.shard, ctx.pages, ctx.scaling, ctx.window = shard, pages, scaling, window
        return out

    @staticmethod
    def backward(ctx: Any, grad_out):  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        shard = ctx.shard
        widths = [query.shape[-1], grad_out.shape[-1], out.shape[-1]]
        together = torch.cat([query, grad_out.to(query.dtype), out], dim=-1)
        together = shard.gather(together, 2, "attention gradients")
        query, grad_out, out = (x.contiguous() for x in together.split(widths, dim=-1))
        lse = shard.gather(lse, 2, "attention gradients").contiguous()
        parts = _owned_parts(query, shard, ctx.pages, ctx.window)
        grad_query, grad_key, grad_value = _backward_parts(parts, grad_out, query, key, value, out, lse, ctx.scaling)
        if grad_key is None or grad_value is None:  # of no rows: this rank owns no token of the chunk
            grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        summed = _sum_in_order(shard.send_home(grad_query, 2, "attention query gradients"))
        return summed.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), *[None] * 5


def _owned_parts(query: Tensor, shard: Shard, pages: Sequence[AttentionPage], window: int | None) -> Iterator[_Part]:
    """The parts of this rank, for the queries of all ranks: its tokens' own rows (page None), then its pages."""
    if shard.count:
        yield _masked_part(None, query, shard.start, shard.first, shard.count, window, None)
    yield from page_parts(query, [page for page in pages if page.key.shape[2]], shard.start, window)


def _merge_parts(partials: Iterator[tuple[Tensor, Tensor]], query: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Partial outputs merged; a rank that owns nothing contributes nothing (log-sum-exp -inf)."""
    first = next(partials, None)
    if first is None:
        dtype = accumulation_dtype(query.dtype)
        return query.new_zeros(*query.shape[:3], width, dtype=dtype), query.new_full(
            query.shape[:3], -math.inf, dtype=dtype
        )
    return reduce(lambda merged, part: _merge(*merged, *part), partials, first)


def _merge_home(shard: Shard, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Send partial outputs [B, H, T, W] and statistics [B, H, T] to the queries' ranks; merge there in rank order."""
    parts = shard.send_home(torch.cat([out, lse[..., None]], dim=-1), 2, "attention outputs")
    merged = parts[0][..., :-1], parts[0][..., -1]
    for part in parts[1:]:
        merged = _merge(*merged, part[..., :-1], part[..., -1])
    return merged[0].contiguous(), merged[1].contiguous()


def _sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


# ---------------------------------------------------------------- selected rows


def sharded_selected_attention(
    query: Tensor,
    own: Tensor,
    *,
    shard: Shard,
    pages: Sequence[RowPage],
    selection: Tensor,
    scaling: float,
    memo: AttentionMemo | None = None,
) -> Tensor:
    """`selected_attention` of this rank's tokens: output [B, H, rows, W], zeros for a ghost.

    query [B, H, rows, W], own [B, rows, W]: of this rank's tokens. selection: int32 [B, T, K] of *all* tokens of the
    chunk, the same on every rank. pages: the rows that this rank owns.
    """
    query, own = shard.real(query, 2), shard.real(own, 1)
    out: Tensor = _ShardedSelectedAttention.apply(query, own, shard, tuple(pages), selection, scaling, memo)
    return shard.with_ghost(out, 2)


class _ShardedSelectedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query, own, shard, pages, selection, scaling, memo):  # type: ignore[override]
        if memo is not None and memo.result is not None:
            out, lse = memo.result
            out = out.view_as(out)
        else:
            everyone = shard.gather(query, 2, "attention queries")
            partial = _selected_forward(everyone, own, shard, pages, selection, scaling)
            out, lse = _merge_home(shard, *partial)
            out = out.to(query.dtype)
            if memo is not None:
                memo.result = out, lse
        ctx.save_for_backward(query, own, selection, out, lse)
        ctx.shard, ctx.pages, ctx.scaling = shard, pages, scaling
        return out

    @staticmethod
    def backward(ctx: Any, grad_out):  # type: ignore[override]
        query, own, selection, out, lse = ctx.saved_tensors
        shard, pages, width = ctx.shard, ctx.pages, query.shape[-1]
        dtype = accumulation_dtype(query.dtype)
        delta = (grad_out.to(dtype) * out.to(dtype)).sum(dim=-1)
        together = shard.gather(torch.cat([query, grad_out.to(query.dtype)], dim=-1), 2, "attention gradients")
        statistics = shard.gather(torch.stack([lse, delta], dim=-1), 2, "attention gradients")
        query, grad_out = together[..., :width], together[..., width:]
        lse, delta = statistics.unbind(-1)
        grad_query = torch.zeros_like(query, dtype=dtype)
        grad_own = torch.zeros_like(own, dtype=dtype)
        for part in _parts(query, own, pages, shard.first, _compact(selection, own, shard, pages)):
            weights = torch.exp(_selected_scores(part, query, ctx.scaling) - lse[:, :, part.queries, None])
            grad = grad_out[:, :, part.queries].to(dtype)
            dweights = torch.einsum("bhtw,btkw->bhtk", grad, part.rows.to(dtype))
            dscores = weights * (dweights - delta[:, :, part.queries, None]) * ctx.scaling
            grad_query[:, :, part.queries] = torch.einsum("bhtk,btkw->bhtw", dscores, part.rows.to(dtype))
            grad_rows = torch.einsum("bhtk,bhtw->btkw", dscores, query[:, :, part.queries].to(dtype))
            grad_rows += torch.einsum("bhtk,bhtw->btkw", weights, grad)
            _scatter(grad_rows, part, own, grad_own, pages, shard.first)
        summed = _sum_in_order(shard.send_home(grad_query, 2, "attention query gradients"))
        return summed.to(query.dtype), grad_own.to(own.dtype), *[None] * 5


def _selected_forward(
    query: Tensor, own: Tensor, shard: Shard, pages: Sequence[RowPage], selection: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """Partial output and log-sum-exp over the selected rows that this rank owns, for the queries of all ranks."""
    dtype = accumulation_dtype(query.dtype)
    out = torch.zeros_like(query, dtype=dtype)
    lse = query.new_full(query.shape[:3], -math.inf, dtype=dtype)
    for part in _parts(query, own, pages, shard.first, _compact(selection, own, shard, pages)):
        scores = _selected_scores(part, query, scaling)
        part_lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - part_lse.masked_fill(part_lse == -math.inf, 0.0)[..., None])
        out[:, :, part.queries] = torch.einsum("bhtk,btkw->bhtw", weights, part.rows.to(dtype))
        lse[:, :, part.queries] = part_lse
    return out, lse


def _selected_scores(part: Any, query: Tensor, scaling: float) -> Tensor:
    dtype = accumulation_dtype(query.dtype)
    scores = torch.einsum("bhtw,btkw->bhtk", query[:, :, part.queries].to(dtype), part.rows.to(dtype)) * scaling
    return scores.masked_fill((part.positions < 0)[:, None], -math.inf)


def _compact(selection: Tensor, own: Tensor, shard: Shard, pages: Sequence[RowPage]) -> Tensor:
    """Of every query's selection [B, T, K] the positions that this rank owns, in order, -1 behind them: [B, T, k]."""
    owned = torch.zeros_like(selection, dtype=torch.bool)
    for page in [*pages, RowPage(own, shard.first)]:
        owned |= (selection >= page.start) & (selection < page.start + page.rows.shape[1])
    most = max(1, int(owned.sum(dim=-1).max()))
    order = torch.sort(owned, dim=-1, descending=True, stable=True).indices[..., :most]
    return selection.masked_fill(~owned, -1).gather(-1, order)
