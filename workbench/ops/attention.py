"""Causal attention of one chunk over resident pages plus its own rows, as one autograd function.

Nothing of the size of the prompt is concatenated, repeated over heads or returned: each page is attended on its own,
the partial results are merged by their log-sum-exp, and the backward hands dK and dV of a page straight to that page's
gradient sink. The merge is exact: softmax over a union is the log-sum-exp weighted mean of the softmaxes over its
parts (the identity behind FlashAttention and ring attention). In the backward a part needs only the *merged* output
and log-sum-exp, so every part's dQ, dK, dV come from the same flash kernel without further correction.

Shapes: B batch, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), T chunk tokens, N page rows, D head width.
Statistics accumulate in float32 (float64 for float64 inputs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from workbench.ops import attention_kernels as kernels
from workbench.types import accumulation_dtype

GradientSink = Callable[[Tensor, Tensor], None]


@dataclass
class AttentionMemo:
    """Output and log-sum-exp of one attention, kept so that a second pass over the same inputs need not repeat it."""

    result: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class AttentionPage:
    """Rows of one page as attention sees them.

    key, value: [1, Hkv, N, D] at positions start .. start + N - 1, all before the chunk.
    sink: receives (dkey, dvalue), each [1, Hkv, N, D]; None when this page's gradient is not wanted.
    """

    key: Tensor
    value: Tensor
    start: int
    sink: GradientSink | None = None


def paged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pages: Sequence[AttentionPage],
    start: int,
    scaling: float,
    window: int | None = None,
    selection: Tensor | None = None,
    memo: AttentionMemo | None = None,
) -> Tensor:
    """Attention output [B, Hq, T, D] of a chunk at positions start .. start + T - 1.

    query: [B, Hq, T, D]; key, value: [B, Hkv, T, D], the chunk's own rows. Every page must lie before `start`;
    pages have batch 1 and are shared by all B members.
    window: a query at position q sees keys at positions > q - window (transformers' sliding window).
    selection: bool [B, T, pages' rows in order + T], True where a query may attend (sparse attention); causality
    and window still apply.
    memo: an empty one receives the result, a filled one replaces the computation (the backward is the same).
    """
    return _PagedAttention.apply(query, key, value, tuple(pages), start, scaling, window, selection, memo)


def paged_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    pages: Sequence[AttentionPage],
    start: int,
    scaling: float,
    window: int | None = None,
    selection: Tensor | None = None,
) -> Tensor:
    """The slow twin: concatenate everything and take one softmax under plain autograd."""
    batch, query_heads, tokens, _ = query.shape
    keys = torch.cat([page.key.expand(batch, -1, -1, -1) for page in pages] + [key], dim=2)
    values = torch.cat([page.value.expand(batch, -1, -1, -1) for page in pages] + [value], dim=2)
    groups = query_heads // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    positions = torch.cat(
        [torch.arange(page.start, page.start + page.key.shape[2]) for page in pages]
        + [torch.arange(start, start + tokens)]
    ).to(query.device)
    rows = torch.arange(start, start + tokens, device=query.device)[:, None]
    visible = positions <= rows
    if window is not None:
        visible = visible & (positions > rows - window)
    visible = visible.expand(batch, 1, -1, -1)
    if selection is not None:
        visible = visible & selection[:, None]
    scores = (query @ keys.transpose(-1, -2)) * scaling
    scores = scores.to(accumulation_dtype(query.dtype)).masked_fill(~visible, -math.inf)
    return (torch.softmax(scores, dim=-1) @ values.to(scores.dtype)).to(query.dtype)


class _PagedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, pages, start, scaling, window, selection, memo):  # type: ignore[override]
        plan = (pages, start, window, selection)
        if memo is not None and memo.result is not None:
            out, lse = memo.result
            out = out.view_as(out)  # the graph must not own the memo's own tensor
        else:
            out, lse = _forward(query, key, value, plan, scaling)
            if memo is not None:
                memo.result = out, lse
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.plan, ctx.scaling = plan, scaling
        return out

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[override]
        query, key, value, out, lse = ctx.saved_tensors
        grad_out = grad_out.contiguous()
        # masks are planned again rather than kept: they are as large as the scores
        parts = _plan_parts(query, key, *ctx.plan)
        grad_query, *own = _backward_parts(parts, grad_out, query, key, value, out, lse, ctx.scaling)
        return grad_query.to(query.dtype), *own, None, None, None, None, None, None


def _forward(query: Tensor, key: Tensor, value: Tensor, plan: Any, scaling: float) -> tuple[Tensor, Tensor]:
    """Merged output in query's dtype and log-sum-exp in the accumulation dtype."""
    partials = (_part_forward(query, key, value, part, scaling) for part in _plan_parts(query, key, *plan))
    out, lse = reduce(lambda merged, part: _merge(*merged, *part), partials)
    return out.to(query.dtype), lse


def _backward_parts(
    parts: Iterator[_Part],
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dQ over all parts, in the accumulation dtype, and dK, dV of the own rows (None without such a part).

    dK, dV of pages go to their sinks; a page without one takes no gradient, and only its share of dQ is computed.
    """
    grad_query = torch.zeros_like(query, dtype=accumulation_dtype(query.dtype))
    grad_key = grad_value = None
    for part in parts:
        if part.page is not None and part.page.sink is None:
            rows = part.page.key, part.page.value
            grad_query += kernels.query_gradient(grad_out, query, *rows, out, lse, part.mask, scaling)
            continue
        dq, dk, dv = _part_backward(grad_out, query, key, value, out, lse, part, scaling)
        grad_query += dq
        if part.page is None:
            grad_key, grad_value = dk, dv
        elif part.page.sink is not None:
            part.page.sink(dk, dv)
    return grad_query, grad_key, grad_value


@dataclass(frozen=True)
class _Part:
    """One softmax part: a page, or the chunk's own rows (page None). mask: additive [B or 1, 1, T, N] or None."""

    page: AttentionPage | None
    causal: bool
    mask: Tensor | None
    empty_rows: Tensor | None  # bool [B or 1, 1, T]: queries that see nothing in this part

    def rows(self, own_key: Tensor, own_value: Tensor) -> tuple[Tensor, Tensor]:
        return (own_key, own_value) if self.page is None else (self.page.key, self.page.value)


def _plan_parts(
    query: Tensor,
    key: Tensor,
    pages: Sequence[AttentionPage],
    start: int,
    window: int | None,
    selection: Tensor | None,
) -> Iterator[_Part]:
    """One part at a time, as masks are large: own rows first (never empty without a selection), then each page that
    some query can see."""
    tokens = query.shape[2]
    own_selection = None if selection is None else selection[..., selection.shape[-1] - tokens :]
    plain_own = selection is None and (window is None or window >= tokens)
    own = (
        _Part(None, True, None, None)
        if plain_own
        else _masked_part(None, query, start, start, tokens, window, own_selection)
    )
    yield own
    yield from page_parts(query, pages, start, window, selection)


def page_parts(
    query: Tensor, pages: Sequence[AttentionPage], start: int, window: int | None, selection: Tensor | None = None
) -> Iterator[_Part]:
    """One part for each page that some query of a chunk at `start` can see."""
    tokens = query.shape[2]
    offset = 0
    for page in pages:
        rows = page.key.shape[2]
        unseen = 0 if window is None else min(rows, max(0, start - window + 1 - page.start))
        part_selection = None if selection is None else selection[..., offset + unseen : offset + rows]
        offset += rows
        if unseen == rows:
            continue
        seen = _without_first_rows(page, unseen)
        fully_visible = window is None or seen.start > start + tokens - 1 - window
        if part_selection is None and fully_visible:
            yield _Part(seen, False, None, None)
        else:
            yield _masked_part(seen, query, start, seen.start, rows - unseen, window, part_selection)


def _without_first_rows(page: AttentionPage, count: int) -> AttentionPage:
    """The page without rows that a window hides from every query; their gradient is zero.

    Less work, and the same bits whether a state still holds those rows or has forgotten them.
    """
    if count == 0:
        return page
    sink = page.sink

    def padded(dkey: Tensor, dvalue: Tensor) -> None:
        assert sink is not None
        sink(*(torch.nn.functional.pad(gradient, (0, 0, count, 0)) for gradient in (dkey, dvalue)))

    key, value = page.key[:, :, count:], page.value[:, :, count:]
    return AttentionPage(key, value, page.start + count, None if sink is None else padded)


def _masked_part(
    page: AttentionPage | None,
    query: Tensor,
    start: int,
    key_start: int,
    rows: int,
    window: int | None,
    selection: Tensor | None,
) -> _Part:
    tokens = query.shape[2]
    queries = torch.arange(start, start + tokens, device=query.device)[:, None]
    keys = torch.arange(key_start, key_start + rows, device=query.device)
    visible = keys <= queries
    if window is not None:
        visible = visible & (keys > queries - window)
    visible = visible[None, None]
    if selection is not None:
        visible = visible & selection[:, None]
    mask = torch.zeros(visible.shape, dtype=query.dtype, device=query.device).masked_fill_(~visible, -math.inf)
    return _Part(page, False, mask, ~visible.any(dim=-1))


def _merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp weighted mean of two partial softmaxes; a part that a query does not see has lse = -inf."""
    merged = torch.logaddexp(lse, part_lse)
    safe = merged.masked_fill(merged == -math.inf, 0.0)
    out = out * torch.exp(lse - safe)[..., None] + part_out * torch.exp(part_lse - safe)[..., None]
    return out, merged


def _fold_members(tensor: Tensor) -> Tensor:
    """[B, H, T, ...] -> [1, H, B * T, ...]: members share a page, so they are just more queries of one problem."""
    return tensor.transpose(0, 1).flatten(1, 2)[None]


def _unfold_members(tensor: Tensor, batch: int) -> Tensor:
    return tensor[0].unflatten(1, (batch, -1)).transpose(0, 1)


def _fold_mask(mask: Tensor | None, batch: int) -> Tensor | None:
    if mask is None:
        return None
    return mask.expand(batch, -1, -1, -1).transpose(0, 1).flatten(1, 2)[None]


def _part_forward(query: Tensor, key: Tensor, value: Tensor, part: _Part, scaling: float) -> tuple[Tensor, Tensor]:
    """Output [B, Hq, T, D] and log-sum-exp [B, Hq, T] of one part, both in the accumulation dtype."""
    key, value = part.rows(key, value)
    batch, dtype = query.shape[0], accumulation_dtype(query.dtype)
    fold = batch > 1 and key.shape[0] == 1
    q, mask = (_fold_members(query), _fold_mask(part.mask, batch)) if fold else (query, part.mask)
    out, lse = kernels.forward(q, key, value, part.causal, mask, scaling)
    if fold:
        out, lse = _unfold_members(out, batch), _unfold_members(lse, batch)
    out, lse = out.to(dtype), lse.to(dtype)
    if part.empty_rows is not None:  # kernels disagree on what a fully masked row returns
        lse = lse.masked_fill(part.empty_rows, -math.inf)
        out = out.masked_fill(part.empty_rows[..., None], 0.0)
    return out, lse


def _part_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    part: _Part,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dQ [B, Hq, T, D] and dK, dV in the part's own shape, from the merged output and log-sum-exp."""
    key, value = part.rows(key, value)
    batch = query.shape[0]
    fold = batch > 1 and key.shape[0] == 1
    if not fold:
        return kernels.backward(grad_out, query, key, value, out, lse, part.causal, part.mask, scaling)
    grad_out, query, out, lse = (_fold_members(x) for x in (grad_out, query, out, lse))
    dq, dk, dv = kernels.backward(grad_out, query, key, value, out, lse, False, _fold_mask(part.mask, batch), scaling)
    return _unfold_members(dq, batch), dk, dv
