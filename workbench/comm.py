"""What the engine knows of other ranks: a small `Comm`, the `Mesh` of its axes, and the `Shard` of a chunk's tokens.

No `torch.distributed` here: `workbench.parallel` makes real ones. On one process there is no communicator at all
(`comm=None`) or `OneProcess`, under which every collective is the identity.

Counts: rows of dimension 0 that each rank sends or owns, in rank order; every rank knows all of them, so that unequal
and empty parts need no negotiation. Every collective has a tag; a debug mode compares what the ranks asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from workbench.canonical import canonical
from workbench.errors import RanksDisagreeError

Number = TypeVar("Number", int, float)


class Comm(Protocol):
    """Collectives over the ranks of one axis. bytes_sent, calls: by tag, this rank's own."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def bytes_sent(self) -> Counter[str]: ...

    @property
    def calls(self) -> Counter[str]: ...

    def all_gather(self, tensor: Tensor, counts: Sequence[int], tag: str) -> list[Tensor]:
        """Every rank's tensor; rank r's is [counts[r], ...]. Each rank sends (size - 1) x its own bytes."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int], tag: str) -> list[Tensor]:
        """parts[r] goes to rank r; what came from rank r is [counts[r], ...]. Sent: the parts of other ranks."""
        ...


class OneProcess:
    """The identity: an axis of one rank."""

    rank = 0
    size = 1

    def __init__(self) -> None:
        self.bytes_sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def all_gather(self, tensor: Tensor, counts: Sequence[int], tag: str) -> list[Tensor]:
        return [tensor]

    def all_to_all(self, parts: Sequence[Tensor], counts: Sequence[int], tag: str) -> list[Tensor]:
        return list(parts)


@dataclass(frozen=True)
class Traffic:
    """Collectives called and bytes sent by one rank, by tag."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes_sent: Counter[str] = field(default_factory=Counter)

    def since(self, before: Traffic) -> dict[str, dict[str, int]]:
        """{tag: {"calls", "bytes"}} of what happened after `before` was taken."""
        calls, sent = self.calls - before.calls, self.bytes_sent - before.bytes_sent
        return {tag: {"calls": count, "bytes": sent[tag]} for tag, count in calls.items()}


def _nowhere(stage: str) -> None:
    pass


def _unchanged(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer


@dataclass(frozen=True)
class Mesh:
    """The axes over which one step runs; num_ranks = data.size x context.size, and experts.size divides context.size.

    world: all ranks. data: ranks that hold the same tokens of different prompts. context: the ranks that share one
    prompt's tokens. experts: the ranks that share one set of expert weights (consecutive ranks of a context axis).
    expert_replicas: the ranks that hold the same expert weights.
    on_stage: is told the stage that begins. prepare_optimizer: what accelerate makes of an optimizer over these ranks.
    verified: {policy: weight version} of replicas that were compared.
    sums_gradients: False for one group of an accumulated step (`for_accumulation`).
    """

    world: Comm = field(default_factory=OneProcess)
    data: Comm = field(default_factory=OneProcess)
    context: Comm = field(default_factory=OneProcess)
    experts: Comm = field(default_factory=OneProcess)
    expert_replicas: Comm = field(default_factory=OneProcess)
    on_stage: Callable[[str], None] = field(default=_nowhere, repr=False, compare=False)
    prepare_optimizer: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = field(
        default=_unchanged, repr=False, compare=False
    )
    verified: WeakKeyDictionary[object, int] = field(default_factory=WeakKeyDictionary, repr=False, compare=False)
    sums_gradients: bool = True

    def for_accumulation(self) -> Mesh:
        """The context ranks of one group of a step of several: each keeps its own part of the gradient in `.grad`.

        Nothing here waits for other data ranks, which may have another number of groups. After the last group
        `finalize.sum_gradients` sums over the whole mesh, once.
        """
        return replace(self, world=self.context, data=OneProcess(), expert_replicas=OneProcess(), sums_gradients=False)

    def comms(self) -> tuple[Comm, ...]:
        return self.world, self.data, self.context, self.experts, self.expert_replicas

    def traffic(self) -> Traffic:
        """What this rank has sent so far, over all axes."""
        comms = {id(comm): comm for comm in self.comms()}.values()
        return Traffic(sum((c.calls for c in comms), Counter()), sum((c.bytes_sent for c in comms), Counter()))


@dataclass(frozen=True)
class Shard:
    """The tokens of a chunk [start, stop) that this rank owns: positions first .. last - 1, contiguous in rank order.

    The remainder of tokens / ranks goes round: over consecutive chunks no rank ever owns more than one token more than
    another. turn: the position whose owner is rank 0's turn (default: position 0).
    A rank without tokens runs one *ghost* row through the model, because modules cannot reshape nothing; it is never
    kept, sent or scored.
    """

    comm: Comm
    start: int
    stop: int
    turn: int = 0

    @property
    def tokens(self) -> int:
        return self.stop - self.start

    @property
    def counts(self) -> list[int]:
        """Tokens of every rank."""
        size = self.comm.size
        each, rest = divmod(self.tokens, size)
        return [each + ((rank - self.start + self.turn) % size < rest) for rank in range(size)]

    @property
    def offsets(self) -> list[int]:
        """Where every rank's tokens begin within the chunk, and the end: size + 1 numbers."""
        ends = [0]
        for count in self.counts:
            ends.append(ends[-1] + count)
        return ends

    @property
    def first(self) -> int:
        return self.start + self.offsets[self.comm.rank]

    @property
    def last(self) -> int:
        return self.start + self.offsets[self.comm.rank + 1]

    @property
    def count(self) -> int:
        return self.counts[self.comm.rank]

    def own(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This rank's part of a tensor over all tokens of the chunk."""
        return whole.narrow(dim, self.first - self.start, self.count)

    def own_ids(self, ids: Tensor) -> Tensor:
        """This rank's ids of [T], or one ghost."""
        return self.own(ids) if self.count else ids[:1]

    def real(self, rows: Tensor, dim: int) -> Tensor:
        """`rows` of the model without the ghost."""
        return rows.narrow(dim, 0, self.count)

    def with_ghost(self, rows: Tensor, dim: int) -> Tensor:
        """The inverse of `real`: a ghost of zeros where this rank has no tokens."""
        if self.count:
            return rows
        shape = list(rows.shape)
        shape[dim] = 1
        return torch.cat([rows, rows.new_zeros(shape)], dim=dim)

    def gather(self, own: Tensor, dim: int, tag: str) -> Tensor:
        """All ranks' rows (without ghosts) along `dim`, in order of position. No graph."""
        parts = self.comm.all_gather(own.movedim(dim, 0), self.counts, tag)
        return torch.cat(parts).movedim(0, dim)

    def send_home(self, rows: Tensor, dim: int, tag: str) -> list[Tensor]:
        """Rows for every token of the chunk, computed here, go to the tokens' ranks: what every rank sent to this one,
        in rank order, each with this rank's tokens along `dim`. No graph."""
        parts = list(rows.movedim(dim, 0).split(self.counts))
        received = self.comm.all_to_all(parts, [self.count] * self.comm.size, tag)
        return [part.movedim(0, dim) for part in received]


def shard_of(comm: Comm | None, start: int, stop: int, *, turn: int = 0) -> Shard | None:
    """The shard of a chunk; None where one process has all of it."""
    return None if comm is None or comm.size == 1 else Shard(comm, start, stop, turn)


def all_ranks(shard: Shard | None, fine: bool, device: torch.device) -> bool:
    """Whether it is so on every rank of the shard: a rank that alone raised an error would leave its peers waiting."""
    return fine if shard is None else all(every_rank(shard.comm, fine, device, tag="finite"))


def every_rank(comm: Comm | None, value: Number, device: torch.device | None = None, *, tag: str) -> list[Number]:
    """One number (an integer of 64 bits, or a float) of every rank, in rank order."""
    if comm is None or comm.size == 1:
        return [value]
    own = torch.tensor([value], dtype=torch.float64 if isinstance(value, float) else torch.int64, device=device)
    return torch.cat(comm.all_gather(own, [1] * comm.size, tag)).tolist()


def every_value(comm: Comm, value: Any, device: torch.device | None = None, *, tag: str) -> list[Any]:
    """A value that JSON knows, of every rank, in rank order; floats keep their bits, tuples come back as lists."""
    if comm.size == 1:
        return [value]
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    counts = every_rank(comm, text.numel(), device, tag=tag)
    return [json.loads(part.cpu().numpy().tobytes()) for part in comm.all_gather(text, counts, tag)]


def require_agreement(comm: Comm | None, value: int, what: str, device: torch.device | None = None) -> None:
    """Raise RanksDisagreeError, on every rank, unless all ranks bring the same value."""
    values = every_rank(comm, value, device, tag="agreement")
    if len(set(values)) > 1:
        common = Counter(values).most_common(1)[0][0]
        odd = [rank for rank, found in enumerate(values) if found != common]
        raise RanksDisagreeError(
            f"ranks disagree on {what}: rank {odd[0] if len(odd) == 1 else odd} of {len(values)} differs from the "
            "others; every rank must be given the same"
        )


def is_expert_shard(parameter: Tensor) -> bool:
    """Whether this rank holds a slice of the parameter and other ranks the rest of it (parallel/experts.py)."""
    return getattr(parameter, "expert_shard", None) is not None


def digest(*values: object) -> int:
    """A 63-bit hash of arguments: tensors by their numbers, anything else by its text; the same in every process."""
    return int.from_bytes(hashlib.sha256(canonical(values).encode()).digest()[:8], "big") >> 1
