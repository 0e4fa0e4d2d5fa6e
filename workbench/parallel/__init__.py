"""Real ranks: the only part that knows `torch.distributed`. gloo on CPUs, NCCL on GPUs, the same code."""

from __future__ import annotations

from workbench.parallel.experts import gather_experts, shard_experts
from workbench.parallel.mesh import MeshSizes, close_mesh, open_mesh
from workbench.parallel.ranks import Ranks

__all__ = ["MeshSizes", "Ranks", "close_mesh", "gather_experts", "open_mesh", "shard_experts"]
