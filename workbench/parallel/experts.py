"""Experts spread over ranks: each holds a slice of the expert weights, and tokens travel to their experts and back.

A rank's routed (token, expert) pairs are sorted by the rank that holds the expert and sent there in one all-to-all;
transformers' own experts module runs on what arrives, with its own slice; results return by a second all-to-all and are
weighted and summed at home. Routing itself is not changed.

Bytes that one rank sends in a forward: pairs that leave x hidden x b, and as much for the results of pairs that came;
a backward sends both again. How many pairs leave is the router's choice: on average (n - 1) / n of tokens x top-k.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.comm import Comm, Mesh, is_expert_shard
from workbench.errors import InvalidInputError, UnsupportedModelError
from workbench.ops.exchange import exchange_rows

_WEIGHTS = ("gate_up_proj", "down_proj")


def expert_ranges(experts: int, ranks: int) -> list[tuple[int, int]]:
    """Experts [first, last) of every rank: contiguous, within one of each other, empty where there are too few."""
    return [(experts * rank // ranks, experts * (rank + 1) // ranks) for rank in range(ranks)]


def shard_experts(causal_lm: nn.Module, mesh: Mesh) -> int:
    """Keep this rank's slice of every experts module's weights, in place; returns the bytes freed here.

    Before the policy is used and before an optimizer is made: parameters keep their names and are replaced. From then
    on the model runs only with comm=mesh. Raises UnsupportedModelError for experts with adapters or quantised weights.
    """
    comm = mesh.experts
    if comm.size == 1:
        return 0
    modules = [(name, module) for name, module in causal_lm.named_modules() if _is_experts(module)]
    if not modules:
        raise InvalidInputError(f"{type(causal_lm).__name__} has no routed experts: open the mesh with ep=1")
    if getattr(causal_lm, "expert_comm", None) is not None:
        raise InvalidInputError("this model's experts are spread over ranks already")
    for name, module in modules:
        if not all(p.is_floating_point() for p in module.parameters()) or "forward" in vars(module):
            raise UnsupportedModelError(f"{name}: quantised or patched experts cannot be spread over ranks; use ep=1")
    if any(type(module).__name__ == "ParamWrapper" for module in causal_lm.modules()):  # PEFT's LoRA on parameters
        raise UnsupportedModelError("experts with adapters cannot be spread over ranks; use ep=1")
    freed = 0
    for _, module in modules:
        freed += _shard(module, comm)
    causal_lm.expert_comm = comm  # type: ignore[assignment]
    return freed


def gather_experts(name_to_tensor: dict[str, Tensor], causal_lm: nn.Module, mesh: Mesh) -> dict[str, Tensor]:
    """The same tensors (weights, or gradients by parameter name) with every slice of experts joined, on every rank."""
    joined = dict(name_to_tensor)
    for name, parameter in causal_lm.named_parameters():
        if is_expert_shard(parameter) and name in name_to_tensor:
            counts = [last - first for first, last in parameter.expert_shard]  # type: ignore[attr-defined]
            joined[name] = torch.cat(mesh.experts.all_gather(name_to_tensor[name], counts, "gather experts"))
    return joined


def _is_experts(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return "experts" in type(module).__name__.lower() and all(name in own and own[name].dim() == 3 for name in _WEIGHTS)


def _shard(module: Any, comm: Comm) -> int:
    ranges = expert_ranges(module.num_experts, comm.size)
    first, last = ranges[comm.rank]
    freed = 0
    for name, parameter in list(module.named_parameters(recurse=False)):
        own = nn.Parameter(parameter.detach()[first:last].clone(), requires_grad=parameter.requires_grad)
        own.expert_shard = ranges  # type: ignore[attr-defined]
        freed += parameter.nbytes - own.nbytes
        setattr(module, name, own)
    module.num_experts = last - first
    module.forward = partial(_dispatch, module, type(module).forward, comm, ranges)
    return freed


def _dispatch(
    module: Any,
    forward: Any,
    comm: Comm,
    ranges: list[tuple[int, int]],
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """The stock signature: hidden [N, H], ids [N, k] and weights [N, k] of global experts -> [N, H]."""
    top_k = top_k_index.shape[1]
    ids = top_k_index.flatten()
    starts = torch.tensor([first for first, _ in ranges], device=ids.device)
    lasts = torch.tensor([last for _, last in ranges], device=ids.device)
    owner = torch.bucketize(ids, lasts, right=True)
    order = torch.argsort(owner, stable=True)
    send = torch.bincount(owner, minlength=comm.size)
    table = torch.stack(comm.all_gather(send, [comm.size] * comm.size, "expert counts"))
    receive = table[:, comm.rank].tolist()
    sent = send.tolist()

    arrived_ids = torch.cat(comm.all_to_all((ids - starts[owner])[order].split(sent), receive, "expert ids"))
    rows = hidden_states[order // top_k]
    (arrived,) = exchange_rows(comm, [rows], [sent], [receive], tag="expert tokens")
    if arrived.shape[0]:
        ones = torch.ones_like(arrived_ids, dtype=top_k_weights.dtype)
        arrived = forward(module, arrived, arrived_ids[:, None], ones[:, None])
    (returned,) = exchange_rows(comm, [arrived], [receive], [sent], tag="expert results")

    back = torch.argsort(order)
    results = returned[back].unflatten(0, (-1, top_k))
    return (results * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)
