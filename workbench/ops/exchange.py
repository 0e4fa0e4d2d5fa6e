"""Rows between ranks under autograd: one node of the graph for each exchange, however many tensors it carries.

One node matters: ranks must call their collectives in the same order in the backward too, and autograd orders nodes
that are ready at the same time by history, which differs between ranks whose shards do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.comm import Comm

Counts = Sequence[int]


def exchange_rows(
    comm: Comm, rows: Sequence[Tensor], send: Sequence[Counts], receive: Sequence[Counts], *, tag: str
) -> tuple[Tensor, ...]:
    """All-to-all over dimension 0: of tensor i, the first send[i][0] rows go to rank 0, the next send[i][1] to 1, ...

    Returns tensors of sum(receive[i]) rows in rank order. The backward sends gradients back the way rows came. The node
    is in the graph of every rank, also of one whose rows need no gradient: its peers would wait for it.
    """
    anchor = torch.empty(0, requires_grad=torch.is_grad_enabled())
    results: tuple[Tensor, ...] = _Exchange.apply(comm, send, receive, tag, anchor, *rows)
    return results


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, comm, send, receive, tag, anchor, *rows):  # type: ignore[override]
        ctx.comm, ctx.send, ctx.receive, ctx.tag = comm, send, receive, tag
        return tuple(_all_to_all(comm, t, s, r, tag) for t, s, r in zip(rows, send, receive, strict=True))

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[override]
        results = []
        for gradient, send, receive in zip(gradients, ctx.send, ctx.receive, strict=True):
            results.append(_all_to_all(ctx.comm, gradient, receive, send, ctx.tag))
        return None, None, None, None, None, *results


def _all_to_all(comm: Comm, rows: Tensor, send: Counts, receive: Counts, tag: str) -> Tensor:
    return torch.cat(comm.all_to_all(rows.split(list(send)), receive, tag))


def gather_rows(comm: Comm, rows: Tensor, counts: Counts, *, tag: str) -> Tensor:
    """All ranks' rows [counts[r], ...] in rank order; the backward returns to every rank the sum of what all ranks
    want of its rows, added in rank order in the gradient's dtype."""
    gathered: Tensor = _Gather.apply(rows, comm, list(counts), tag)
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, comm: Comm, counts: list[int], tag: str) -> Tensor:
        ctx.comm, ctx.counts, ctx.tag = comm, counts, tag
        return torch.cat(comm.all_gather(rows, counts, tag))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        own = [ctx.counts[ctx.comm.rank]] * ctx.comm.size
        wanted = ctx.comm.all_to_all(gradient.split(ctx.counts), own, ctx.tag)
        total = wanted[0]
        for part in wanted[1:]:
            total = total + part
        return total, None, None, None
