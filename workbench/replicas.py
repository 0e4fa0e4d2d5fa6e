"""What ranks must hold in common: the sum of their gradients, and bitwise the same weights.

A parameter that every rank holds gets the sum of all ranks' gradients: each saw its own tokens. A parameter of which
ranks hold different slices (experts, see parallel/experts.py) already has the gradient of all tokens, because tokens
came to it; it is summed over the ranks that hold the same slice only. A parameter without a gradient on any rank keeps
none: zeros would let an optimizer decay it. Sums are made once, in rank order, in float32 (float64 for float64), and
handed to everybody, so every rank has the same bits.

Bytes that one rank sends to sum N elements over n ranks, a bytes per accumulated element: 2 N (n - 1) / n a.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from workbench.comm import Comm, Mesh, every_rank, is_expert_shard
from workbench.errors import NonFiniteError, RanksDisagreeError
from workbench.ops.selection import fingerprint
from workbench.policy import Policy
from workbench.types import accumulation_dtype

BUCKET_ELEMENTS = 2**22  # 16 MiB of float32 at a time
HASH_ELEMENTS = 2**20
NamedParameters = Sequence[tuple[str, nn.Parameter]]


# ---------------------------------------------------------------- gradients


def reduce_gradients(named: NamedParameters, mesh: Mesh) -> dict[str, dict[str, Any]]:
    """Sum every parameter's `.grad` over the ranks that hold it; returns an audit by family of parameters.

    The audit: {family: {"parameters", "elements", "without_gradient", "summed_over" ranks, "ranks_with_gradient" (the
    fewest of any of its parameters)}}; a family is a parameter's name without the number of its layer.
    """
    device = named[0][1].device
    own = torch.tensor([p.grad is not None for _, p in named], dtype=torch.uint8, device=device)
    present = torch.stack(mesh.world.all_gather(own, [len(named)] * mesh.world.size, "gradient presence"))
    ranks_with = present.sum(dim=0, dtype=torch.int64).tolist()
    audit: dict[str, dict[str, Any]] = {}
    for (name, parameter), count in zip(named, ranks_with, strict=True):
        if count and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        comm = mesh.expert_replicas if is_expert_shard(parameter) else mesh.world
        _note(audit.setdefault(family_of(name), {}), parameter, count, comm)
    with torch.no_grad():
        for comm, shards in ((mesh.world, False), (mesh.expert_replicas, True)):
            gradients = [p.grad for _, p in named if p.grad is not None and is_expert_shard(p) is shards]
            for bucket in _buckets(gradients):
                _sum_over_ranks(bucket, comm)
    return audit


def family_of(name: str) -> str:
    """A parameter's name without the number of its layer and the model's prefix."""
    return re.sub(r"^.*\.layers\.\d+\.", "", name)


def _note(entry: dict[str, Any], parameter: nn.Parameter, ranks_with_gradient: int, comm: Comm) -> None:
    entry["parameters"] = entry.get("parameters", 0) + 1
    entry["elements"] = entry.get("elements", 0) + parameter.numel()
    entry["without_gradient"] = entry.get("without_gradient", 0) + (ranks_with_gradient == 0)
    entry["summed_over"] = comm.size
    entry["ranks_with_gradient"] = min(entry.get("ranks_with_gradient", ranks_with_gradient), ranks_with_gradient)


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Flat views of gradients of one dtype, BUCKET_ELEMENTS together."""
    bucket: list[Tensor] = []
    room = BUCKET_ELEMENTS
    for gradient in gradients:
        if not gradient.is_contiguous():
            raise AssertionError("a gradient is not contiguous in memory, so a flat view of it is a copy")
        for piece in gradient.view(-1).split(BUCKET_ELEMENTS):
            if bucket and (piece.numel() > room or piece.dtype != bucket[0].dtype):
                yield bucket
                bucket, room = [], BUCKET_ELEMENTS
            bucket.append(piece)
            room -= piece.numel()
    if bucket:
        yield bucket


def _sum_over_ranks(pieces: list[Tensor], comm: Comm) -> None:
    """Replace flat pieces by their sum over ranks: each rank sums one part of them, in rank order, for everybody."""
    if comm.size == 1:
        return
    flat = torch.cat(pieces).to(accumulation_dtype(pieces[0].dtype))
    cuts = [flat.numel() * rank // comm.size for rank in range(comm.size + 1)]
    counts = [b - a for a, b in pairwise(cuts)]
    received = comm.all_to_all(flat.split(counts), [counts[comm.rank]] * comm.size, "gradients")
    total = received[0].clone()
    for part in received[1:]:
        total += part
    summed = torch.cat(comm.all_gather(total, counts, "gradients"))
    for piece, values in zip(pieces, summed.split([piece.numel() for piece in pieces]), strict=True):
        piece.copy_(values)


def global_norm(named: NamedParameters, mesh: Mesh | None) -> float:
    """Norm of the whole gradient, slices on other ranks included. Raises NonFiniteError on every rank."""
    total, shards, bad = 0.0, 0.0, ""
    for name, parameter in named:
        if parameter.grad is None:
            continue
        norm = float(torch.linalg.vector_norm(parameter.grad, dtype=accumulation_dtype(parameter.grad.dtype)))
        bad = bad or ("" if math.isfinite(norm) else name)
        if is_expert_shard(parameter):
            shards = math.hypot(shards, norm)
        else:
            total = math.hypot(total, norm)
    if mesh is not None:
        shards = math.hypot(*every_rank(mesh.experts, shards, named[0][1].device, tag="gradient norm"))
    total = math.hypot(total, shards)
    if not math.isfinite(total):
        raise NonFiniteError(
            f"the gradient of {bad or 'an expert on another rank'} is not finite; gradients were left as before the "
            "step and no update was made"
        )
    return total


# ---------------------------------------------------------------- replicas


@torch.no_grad()
def tensor_hash(tensor: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits, 0-dim int64 on its device; block by block, so it needs little memory."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block in tensor.detach().contiguous().view(-1).view(integer).split(HASH_ELEMENTS):
        total = total * 0x100000001B3 + fingerprint(block)
    return total


def require_same(named: Sequence[tuple[str, Tensor]], comm: Comm, what: str) -> None:
    """Raise RanksDisagreeError, on every rank, naming the first tensor whose bits differ between ranks."""
    if comm.size == 1 or not named:
        return
    device = named[0][1].device
    own = torch.stack([tensor_hash(tensor).to(device) for _, tensor in named])
    everyone = torch.stack(comm.all_gather(own, [len(named)] * comm.size, "replica hashes"))
    differs = (everyone != everyone[0]).any(dim=0).nonzero()
    if differs.numel():
        first = int(differs[0])
        ranks = (everyone[:, first] != everyone[0, first]).nonzero().flatten().tolist()
        raise RanksDisagreeError(
            f"{what} differ between ranks: {named[first][0]} on rank {ranks} is not rank 0's (and {len(differs) - 1} "
            "more tensors); load the same weights and seeds on every rank, and update them only through update_step"
        )


def require_same_weights(policy: Policy, mesh: Mesh) -> None:
    """All ranks hold the same weights; looked at once for every version of them."""
    version = policy.weight_version
    if mesh.verified.get(policy) == version:
        return
    require_same_parameters(list(policy.model.named_parameters()), mesh, "weights")
    mesh.verified[policy] = version


def require_same_parameters(named: NamedParameters, mesh: Mesh, what: str, *, gradients: bool = False) -> None:
    for comm, shards in ((mesh.world, False), (mesh.expert_replicas, True)):
        chosen = [(name, p.grad if gradients else p) for name, p in named if is_expert_shard(p) is shards]
        require_same([(name, tensor) for name, tensor in chosen if tensor is not None], comm, what)
