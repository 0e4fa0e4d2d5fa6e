"""The gated delta rule with its heads spread over ranks, for callers whose tokens are.

A recurrence over tokens cannot be cut by tokens, but its heads are independent: rows travel from token shards to the
ranks of their value heads, the rule runs there over all tokens of the chunk, and outputs travel back. The recurrent
state never travels: rank r keeps value heads [first, last) of it, [batch, Hv_r, Dk, Dv], which may be none. A key head
that serves value heads of two ranks is sent to both.

Bytes that one rank sends, of its c tokens, b bytes per element, to the ranks that own the other heads:
    c (sum over other ranks of Hk_r 2 Dk b + Hv_r (Dv b + 2 a))  and back  (C - c) Hv_own Dv b; the backward the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from workbench.comm import Shard
from workbench.ops.exchange import exchange_rows

Rule = Callable[..., tuple[Tensor, Tensor | None]]


def head_ranges(heads: int, ranks: int) -> list[tuple[int, int]]:
    """Value heads [first, last) of every rank: contiguous, within one of each other, empty where there are too few."""
    return [(heads * rank // ranks, heads * (rank + 1) // ranks) for rank in range(ranks)]


def over_ranks(shard: Shard, chunk_rule: Rule, step_rule: Rule) -> Rule:
    """A rule of transformers' signature over token shards. step_rule: for a single token that continues a state."""

    def rule(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        heads = _Heads(shard, value.shape[2], key.shape[2])
        query, key, value, g, beta = heads.from_tokens(query, key, value, g, beta)
        local = step_rule if shard.tokens == 1 and initial_state is not None else chunk_rule
        if value.shape[2]:
            out, state = local(
                query, key, value, g=g, beta=beta, initial_state=initial_state, output_final_state=True, **options
            )
        else:  # no heads here, but the graph must be there: peers wait for its exchanges
            out, state = value, torch.einsum("bthk,bthv->bhkv", key, value).to(g.dtype)
        return heads.to_tokens(out), state if output_final_state else None

    return rule


class _Heads:
    """Which heads go where, for one layer."""

    def __init__(self, shard: Shard, value_heads: int, key_heads: int) -> None:
        self._shard, self._groups = shard, value_heads // key_heads
        self._ranges = head_ranges(value_heads, shard.comm.size)

    def _key_range(self, rank: int) -> tuple[int, int]:
        first, last = self._ranges[rank]
        return (first // self._groups, -(-last // self._groups)) if last > first else (0, 0)

    def from_tokens(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """query, key, value, g, beta of this rank's tokens -> of all tokens and this rank's value heads.

        Query and key come back with one head for each value head.
        """
        shard, (first, last) = self._shard, self._ranges[self._shard.comm.rank]
        query, key, value, g, beta = (shard.real(t, 1) for t in tensors)
        width, value_width = key.shape[-1], value.shape[-1]
        payload, gates = [], []
        for rank, (a, b) in enumerate(self._ranges):
            low, high = self._key_range(rank)
            payload += [query[:, :, low:high].flatten(), key[:, :, low:high].flatten(), value[:, :, a:b].flatten()]
            gates += [g[:, :, a:b].flatten(), beta[:, :, a:b].to(g.dtype).flatten()]
        low, high = self._key_range(shard.comm.rank)
        shapes = [(high - low, width), (high - low, width), (last - first, value_width)], [(last - first,)] * 2
        rows, gate = exchange_rows(
            shard.comm,
            [torch.cat(payload), torch.cat(gates)],
            [_sizes(payload, 3), _sizes(gates, 2)],
            [[query.shape[0] * count * sum(map(math.prod, of)) for count in shard.counts] for of in shapes],
            tag="delta heads",
        )
        query, key, value = self._unpacked(rows, query.shape[0], shapes[0])
        g, beta_rows = self._unpacked(gate, query.shape[0], shapes[1])
        owner = torch.arange(first, last, device=key.device) // self._groups - low
        return query[:, :, owner], key[:, :, owner], value, g, beta_rows.to(beta.dtype)

    def _unpacked(self, flat: Tensor, batch: int, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """What every rank sent, one flat tensor after the other -> tensors [batch, T, *shape]."""
        sizes = [batch * count * math.prod(shape) for count in self._shard.counts for shape in shapes]
        pieces = flat.split(sizes)
        return [
            torch.cat(
                [
                    piece.view(batch, count, *shape)
                    for piece, count in zip(pieces[index :: len(shapes)], self._shard.counts, strict=True)
                ],
                dim=1,
            )
            for index, shape in enumerate(shapes)
        ]

    def to_tokens(self, out: Tensor) -> Tensor:
        """Outputs of all tokens and this rank's heads -> of this rank's tokens (or ghost) and all heads."""
        shard, batch, width = self._shard, out.shape[0], out.shape[-1]
        counts, own = shard.counts, shard.count
        num_own = out.shape[2]
        send = [batch * count * num_own for count in counts]
        receive = [batch * own * (last - first) for first, last in self._ranges]
        rows = torch.cat([part.reshape(-1, width) for part in out.split(counts, dim=1)])
        (received,) = exchange_rows(shard.comm, [rows], [send], [receive], tag="delta outputs")
        parts = [
            part.view(batch, own, last - first, width)
            for part, (first, last) in zip(received.split(receive), self._ranges, strict=True)
        ]
        return shard.with_ghost(torch.cat(parts, dim=2), 1)


def _sizes(pieces: Sequence[Tensor], for_each_rank: int) -> list[int]:
    return [sum(p.numel() for p in pieces[i : i + for_each_rank]) for i in range(0, len(pieces), for_each_rank)]
