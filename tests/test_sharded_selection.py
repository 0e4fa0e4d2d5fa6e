"""Selection over ranks (threads here): the strict order of one process, ties included."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from workbench.comm import Shard
from workbench.ops.selection import select_topk
from workbench.ops.sharded_selection import sharded_topk

QUERIES, CHUNK, TOP_K = 7, 7, 5


class ThreadComm:
    """A rank that is a thread: all ranks of a world share its table and meet at its barrier."""

    def __init__(self, rank: int, size: int, table: list[Sequence[Tensor]], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, size
        self._table, self._barrier = table, barrier
        self.bytes_sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def all_gather(self, tensor: Tensor, counts: Sequence[int], tag: str) -> list[Tensor]:
        return self.all_to_all([tensor] * self.size, counts, tag)

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int], tag: str) -> list[Tensor]:
        self._table[self.rank] = parts
        self._barrier.wait(timeout=20)
        received = [sent[self.rank] for sent in self._table]
        self._barrier.wait(timeout=20)
        assert [len(part) for part in received] == list(counts)
        return received


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("prefix", [0, 3, 29])
@pytest.mark.parametrize("seed", range(4))
def test_the_same_set_as_one_process_with_ties(size: int, prefix: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    # few distinct values, zeros of both signs and a whole row of ties
    scores = torch.randint(-1, 3, (1, QUERIES, prefix + CHUNK), generator=draw).double() * torch.tensor([0.5])
    scores[0, 0] = 0.0
    scores[scores == 0] *= torch.where(torch.rand(scores.shape, generator=draw) < 0.5, -1.0, 1.0)[scores == 0]
    positions = torch.arange(prefix + CHUNK)
    visible = positions <= torch.arange(prefix, prefix + QUERIES)[:, None]
    truth = select_topk(scores, visible, TOP_K)
    table: list[Sequence[Tensor]] = [()] * size
    barrier = threading.Barrier(size)

    def select(rank: int) -> Tensor:
        comm = ThreadComm(rank, size, table, barrier)
        shard = Shard(comm, prefix, prefix + CHUNK)
        chunks = [(a, min(a + CHUNK, prefix)) for a in range(0, prefix, CHUNK)]
        owned = [Shard(comm, a, b) for a, b in chunks] + [shard]
        parts = [
            (own.first, scores[..., own.first : own.last], visible[:, own.first : own.last])
            for own in owned
            if own.count
        ]
        return sharded_topk(parts, TOP_K, shard, like=scores[..., 0])

    with ThreadPoolExecutor(size) as pool:
        found = list(pool.map(select, range(size)))
    for chosen in found:
        assert torch.equal(chosen, found[0]), "every rank has the selection of all tokens"
    mask = torch.zeros(1, QUERIES, prefix + CHUNK + 1, dtype=torch.bool)
    mask.scatter_(-1, torch.where(found[0] < 0, prefix + CHUNK, found[0]).long(), True)
    assert torch.equal(mask[..., :-1], truth)
