"""Attention of every query over its own selected rows, gathered from pages: one key head, the key is the value.

This is absorbed latent attention under sparse selection: rows are [latent, rotary key], a query's score is its product
with the row, its output the weighted mean of rows (the caller keeps the latent columns). Only selected rows are read;
queries are taken a few at a time, so that gathered rows stay within GATHER_BYTES; the backward gathers again and
scatters row gradients into the pages' sinks and the chunk's own rows. Nothing of the size of the prefix is made.

Shapes: B members, H query heads, T chunk tokens, N page rows, K selected rows per query, W row width.
Scores and softmax are float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workbench.ops.attention import AttentionMemo
from workbench.types import accumulation_dtype

GATHER_BYTES = 64 * 2**20

RowSink = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class RowPage:
    """rows: [B or 1, N, W] at positions start .. start + N - 1; sink receives (row indices [M], gradients [M, W])."""

    rows: Tensor
    start: int
    sink: RowSink | None = None


def selected_attention(
    query: Tensor,
    own: Tensor,
    *,
    pages: Sequence[RowPage],
    start: int,
    selection: Tensor,
    scaling: float,
    memo: AttentionMemo | None = None,
) -> Tensor:
    """Output [B, H, T, W] of a chunk at positions start .. start + T - 1.

    query: [B, H, T, W]; own: [B, T, W], the chunk's own rows; selection: int32 [B, T, K] positions, -1 for none.
    Every query must have at least one selected row. memo: as in `paged_attention`.
    """
    return _SelectedAttention.apply(query, own, tuple(pages), start, selection, scaling, memo)


def selected_attention_reference(
    query: Tensor, own: Tensor, *, pages: Sequence[RowPage], start: int, selection: Tensor, scaling: float
) -> Tensor:
    """The slow twin: all rows in one tensor, a mask, one softmax, plain autograd. Pages must be contiguous from 0."""
    batch = query.shape[0]
    rows = torch.cat([page.rows.expand(batch, -1, -1) for page in pages] + [own], dim=1)
    chosen = torch.zeros(*selection.shape[:2], rows.shape[1] + 1, dtype=torch.bool, device=query.device)
    chosen.scatter_(-1, torch.where(selection < 0, rows.shape[1], selection).long(), True)
    scores = (query @ rows[:, None].transpose(-1, -2)).to(accumulation_dtype(query.dtype)) * scaling
    scores = scores.masked_fill(~chosen[:, None, :, :-1], -math.inf)
    return (torch.softmax(scores, dim=-1) @ rows[:, None].to(scores.dtype)).to(query.dtype)


class _SelectedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, own, pages, start, selection, scaling, memo):  # type: ignore[override]
        if memo is not None and memo.result is not None:
            out = memo.result[0].view_as(memo.result[0])
        else:
            out = torch.empty_like(query)
            for part in _parts(query, own, pages, start, selection):
                weights = _weights(part, query, scaling)
                out[:, :, part.queries] = _weighted(weights, part.rows).to(query.dtype)
            if memo is not None:
                memo.result = out, out
        ctx.save_for_backward(query, own, selection)
        ctx.pages, ctx.start, ctx.scaling = pages, start, scaling
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[override]
        query, own, selection = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        grad_own = torch.zeros_like(own, dtype=accumulation_dtype(own.dtype))
        for part in _parts(query, own, ctx.pages, ctx.start, selection):
            weights = _weights(part, query, ctx.scaling)  # [B, H, t, K]
            grad = grad_out[:, :, part.queries].to(weights.dtype)
            dweights = torch.einsum("bhtw,btkw->bhtk", grad, part.rows.to(weights.dtype))
            dscores = weights * (dweights - (weights * dweights).sum(dim=-1, keepdim=True)) * ctx.scaling
            grad_query[:, :, part.queries] = _weighted(dscores, part.rows).to(query.dtype)
            grad_rows = torch.einsum("bhtk,bhtw->btkw", dscores, query[:, :, part.queries].to(weights.dtype))
            grad_rows += torch.einsum("bhtk,bhtw->btkw", weights, grad)
            _scatter(grad_rows, part, own, grad_own, ctx.pages, ctx.start)
        return grad_query, grad_own.to(own.dtype), None, None, None, None, None


@dataclass(frozen=True)
class _Part:
    """A few queries with their gathered rows [B, t, K, W] and the positions these came from [B, t, K]."""

    queries: slice
    rows: Tensor
    positions: Tensor


def _parts(query: Tensor, own: Tensor, pages: Sequence[RowPage], start: int, selection: Tensor) -> Iterator[_Part]:
    batch, _, tokens, width = query.shape
    row_bytes = batch * selection.shape[-1] * width * own.element_size()
    step = max(1, GATHER_BYTES // row_bytes)
    for first in range(0, tokens, step):
        queries = slice(first, min(first + step, tokens))
        positions = selection[:, queries]
        yield _Part(queries, _gather(positions, own, pages, start), positions)


def _gather(positions: Tensor, own: Tensor, pages: Sequence[RowPage], start: int) -> Tensor:
    """Rows [B, t, K, W] at `positions`; zeros where none is selected."""
    rows = own.new_zeros(*positions.shape, own.shape[-1])
    for page in [*pages, RowPage(own, start)]:
        member, query, slot, row = _in_page(positions, page)
        rows[member, query, slot] = page.rows[member if page.rows.shape[0] > 1 else 0, row]
    return rows


def _in_page(positions: Tensor, page: RowPage) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Indices (member, query, slot) of the selected positions that lie in a page, and the row of each."""
    inside = (positions >= page.start) & (positions < page.start + page.rows.shape[1])
    member, query, slot = inside.nonzero(as_tuple=True)
    return member, query, slot, (positions[member, query, slot] - page.start).long()


def _weights(part: _Part, query: Tensor, scaling: float) -> Tensor:
    """Softmax over each query's selected rows, [B, H, t, K]."""
    dtype = accumulation_dtype(query.dtype)
    scores = torch.einsum("bhtw,btkw->bhtk", query[:, :, part.queries].to(dtype), part.rows.to(dtype)) * scaling
    return torch.softmax(scores.masked_fill((part.positions < 0)[:, None], -math.inf), dim=-1)


def _weighted(weights: Tensor, rows: Tensor) -> Tensor:
    return torch.einsum("bhtk,btkw->bhtw", weights, rows.to(weights.dtype))


def _scatter(
    grad_rows: Tensor, part: _Part, own: Tensor, grad_own: Tensor, pages: Sequence[RowPage], start: int
) -> None:
    """Add row gradients [B, t, K, W] where the rows came from."""
    for page in pages:
        if page.sink is None:
            continue
        member, query, slot, row = _in_page(part.positions, page)
        if row.numel():
            page.sink(row, grad_rows[member, query, slot])
    member, query, slot, row = _in_page(part.positions, RowPage(own, start))
    grad_own.index_put_((member, row), grad_rows[member, query, slot], accumulate=True)
