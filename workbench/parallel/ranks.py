"""`Comm` over a torch.distributed process group.

Everything is built from two collectives that gloo and NCCL both have: `all_gather` of equal parts (unequal ones are
padded) and `all_to_all_single`. Tensors are made contiguous first: gloo reduces and sends raw memory, whatever the
strides say.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workbench.errors import RankFailedError, RanksDisagreeError, first_line
from workbench.parallel.status import Status

DEBUG_TAG = "debug"


class Ranks:
    """Collectives over one process group.

    status: where this rank says what it waits for, for the launcher's watchdog. debug: before every collective, compare
        what all ranks are about to call; a mismatch is an error that says who called what, instead of mixed values or
        a hang. It costs one more small collective each time.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, name: str, status: Status | None = None, debug: bool = False
    ) -> None:
        self._group, self._name, self._debug = group, name, debug
        self._status = status or Status(None)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.bytes_sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._log = hashlib.sha256()
        # gloo has no all-to-all for GPU tensors: they go through host memory (ranks that share one GPU)
        self._through_host = dist.get_backend(group) == "gloo"

    def all_gather(self, tensor: Tensor, counts: Sequence[int], tag: str) -> list[Tensor]:
        self._check_counts(tensor.shape[0], counts[self.rank], "all_gather", tag)
        most = max(counts)
        if self.size == 1 or most == 0:
            return [tensor] * self.size
        self._begin("all_gather", tensor, tag, tensor.nbytes * (self.size - 1))
        mine = self._outgoing(tensor)
        if mine.shape[0] < most:
            mine = torch.cat([mine, mine.new_zeros(most - mine.shape[0], *mine.shape[1:])])
        gathered = [torch.empty_like(mine) for _ in counts]
        with self._watched("all_gather", tag):
            dist.all_gather(gathered, mine, group=self._group)
        return [part[:count].to(tensor.device) for part, count in zip(gathered, counts, strict=True)]

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int], tag: str) -> list[Tensor]:
        self._check_counts(parts[self.rank].shape[0], counts[self.rank], "all_to_all", tag)
        if self.size == 1:
            return list(parts)
        sent = sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        self._begin("all_to_all", parts[0], tag, sent)
        outgoing = self._outgoing(torch.cat([part.detach() for part in parts]))
        incoming = outgoing.new_empty(sum(counts), *outgoing.shape[1:])
        send = [part.shape[0] for part in parts]
        with self._watched("all_to_all", tag):
            dist.all_to_all_single(incoming, outgoing, list(counts), send, group=self._group)
        return list(incoming.to(parts[0].device).split(list(counts)))

    def _outgoing(self, tensor: Tensor) -> Tensor:
        tensor = tensor.detach().contiguous()
        return tensor.cpu() if self._through_host else tensor

    def log_hash(self) -> str:
        """Hash of everything called so far: operation, trailing shape, dtype and tag, in order."""
        return self._log.hexdigest()

    def _check_counts(self, own: int, declared: int, operation: str, tag: str) -> None:
        if own != declared:
            raise RanksDisagreeError(
                f"{operation} '{tag}' over {self._name}: this rank brings {own} rows, its count says {declared}"
            )

    def _begin(self, operation: str, tensor: Tensor, tag: str, sent: int) -> None:
        entry = f"{operation} '{tag}' [*, {', '.join(map(str, tensor.shape[1:]))}] {tensor.dtype} over {self._name}"
        self._log.update(entry.encode())
        self.bytes_sent[tag] += sent
        self.calls[tag] += 1
        if self._debug:
            self._compare(entry, torch.device("cpu") if self._through_host else tensor.device)

    def _compare(self, entry: str, device: torch.device) -> None:
        """All ranks are about to call the same; else RanksDisagreeError on every rank."""
        own = torch.tensor([int.from_bytes(self._log.digest()[:7], "big")], dtype=torch.int64, device=device)
        hashes = [torch.empty_like(own) for _ in range(self.size)]
        with self._watched("all_gather", DEBUG_TAG):
            dist.all_gather(hashes, own, group=self._group)
        if all(torch.equal(h, hashes[0]) for h in hashes):
            return
        entries: list[str] = [""] * self.size
        dist.all_gather_object(entries, entry, group=self._group)
        calls = "; ".join(f"rank {rank}: {called}" for rank, called in enumerate(entries))
        raise RanksDisagreeError(f"ranks called different collectives, or in another order before this one: {calls}")

    def _watched(self, operation: str, tag: str) -> _Watched:
        return _Watched(self._status, f"{operation} '{tag}' over {self._name}")


class _Watched:
    """Says in the status that this rank waits for others, and names the collective in errors of the transport."""

    def __init__(self, status: Status, what: str) -> None:
        self._status, self._what = status, what

    def __enter__(self) -> None:
        self._status.waiting(self._what)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._status.running()
        elif isinstance(error, RuntimeError):
            raise RankFailedError(
                f"rank {dist.get_rank()}: {self._what} failed, so a peer is gone: {first_line(error)}"
            ) from error
