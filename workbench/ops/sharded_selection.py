"""Top-k selection over keys that are spread over ranks: the same set, in the same strict order, as on one process.

Every rank finds the k best of its own keys for every query and sends (score, position) to the query's rank, which takes
the k best of all by (score descending, position ascending) and tells everybody. The order is strict, so the result does
not depend on how keys are spread. Scores keep their dtype: nothing is packed into fewer bits.

Bytes that one rank sends, n ranks, C tokens of which it owns c: (C - c) k (a + 4) there, (n - 1) c k 4 back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from workbench.comm import Shard
from workbench.ops.selection import UNSELECTED, stream_best


@torch.no_grad()
def sharded_topk(parts: Iterable[tuple[int, Tensor, Tensor | None]], k: int, shard: Shard, *, like: Tensor) -> Tensor:
    """Positions of the k best visible keys of every token of the chunk, int32 [batch, T, k], the same on every rank.

    parts: as for `stream_topk`, of this rank's keys and all ranks' queries; there may be none. like: [batch, T], its
    dtype is that of the scores.
    """
    scores, positions = stream_best(parts, k)
    if scores is None or positions is None:
        scores = like.new_full((*like.shape, k), -math.inf)
        positions = torch.full_like(scores, UNSELECTED, dtype=torch.int32)
    missing = k - scores.shape[-1]
    scores = torch.nn.functional.pad(scores, (0, missing), value=-math.inf)
    positions = torch.nn.functional.pad(positions, (0, missing), value=UNSELECTED)

    scores = torch.cat(shard.send_home(scores, 1, "index candidates"), dim=-1)
    positions = torch.cat(shard.send_home(positions, 1, "index candidates"), dim=-1)
    by_position = torch.sort(positions, dim=-1, stable=True).indices
    scores, positions = scores.gather(-1, by_position), positions.gather(-1, by_position)
    best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :k]
    chosen = positions.gather(-1, best).masked_fill(scores.gather(-1, best) == -math.inf, UNSELECTED)
    return shard.gather(chosen, 1, "selections")
