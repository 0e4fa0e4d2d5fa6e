"""The axes of a run: data x context = ranks, and experts spread over (a divisor of) the context axis."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate.parallelism_config import ParallelismConfig

from workbench.comm import Mesh, OneProcess
from workbench.errors import InvalidInputError
from workbench.parallel.accelerator import open_accelerator, refuse_wrappers
from workbench.parallel.ranks import Ranks
from workbench.parallel.status import Status

STATUS_VARIABLE = "LONGSTRAW_RANK_STATUS"
LISTENER_VARIABLE = "LONGSTRAW_RANK_LISTENER"


@dataclass(frozen=True)
class MeshSizes:
    """dp: data-parallel groups of prompts. cp: ranks that share a prompt's tokens. ep: ranks that share the experts.

    ep must divide cp: tokens of the ranks of one expert group meet the same experts, and a context axis holds
    cp / ep copies of them.
    """

    dp: int = 1
    cp: int = 1
    ep: int = 1

    def equation(self, ranks: int) -> str:
        """The products that must hold, with their numbers. Raises InvalidInputError where they do not."""
        said = f"dp {self.dp} x cp {self.cp} = {self.dp * self.cp} ranks, {ranks} started; ep {self.ep} divides cp"
        if min(self.dp, self.cp, self.ep) < 1:
            raise InvalidInputError(f"mesh: {said}: every degree must be >= 1")
        if self.dp * self.cp != ranks:
            raise InvalidInputError(f"mesh: {said}: the product is not the number of ranks")
        if self.cp % self.ep:
            raise InvalidInputError(f"mesh: {said}: it does not")
        return f"{said}, {self.cp // self.ep} x {self.dp} copies of the experts"


def open_mesh(
    *, dp: int = 1, cp: int | None = None, ep: int = 1, timeout_seconds: float = 600.0, debug: bool = False
) -> Mesh:
    """Join the process group that the environment describes (as torchrun or the launcher sets it) and lay out the axes.

    cp: default: all ranks of each data group. timeout_seconds: after which a rank that waits for a peer gives up
    (torch's own default is half an hour). debug: compare what ranks call before every collective.
    Rank 0 prints the equation of the degrees. On one process the mesh is the identity.
    Raises InvalidInputError for degrees that do not multiply to the ranks, and for what accelerate was configured to do
    and cannot do here (accelerator.py).
    """
    status = Status(Path(os.environ[STATUS_VARIABLE]) if STATUS_VARIABLE in os.environ else None)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = MeshSizes(dp, cp if cp is not None else max(1, world // max(1, dp)), ep)
    equation = sizes.equation(world)
    if world == 1:
        refuse_wrappers()
        return Mesh()
    if not dist.is_initialized():
        _join(timeout_seconds)
    if dist.get_world_size() != world:
        raise InvalidInputError(f"mesh: {world} ranks were asked for, {dist.get_world_size()} have joined")
    device_type = "cuda" if dist.get_backend() == "nccl" else "cpu"
    accelerator = open_accelerator(on_gpus=device_type == "cuda")
    device_mesh = _device_mesh(sizes, device_type)
    if dist.get_rank() == 0:
        print(f"mesh: {equation}", flush=True)

    def ranks(group: dist.ProcessGroup | None, name: str) -> Ranks | OneProcess:
        if group is None or dist.get_world_size(group) == 1:
            return OneProcess()
        return Ranks(group, name=name, status=status, debug=debug)

    groups = _expert_groups(sizes)
    return Mesh(
        world=ranks(dist.group.WORLD, "all ranks"),
        data=ranks(device_mesh["dp_replicate"].get_group() if dp > 1 else None, "data ranks"),
        context=ranks(device_mesh["cp"].get_group() if sizes.cp > 1 else None, "context ranks"),
        experts=ranks(groups[0], "expert ranks"),
        expert_replicas=ranks(groups[1], "expert replicas"),
        on_stage=status.stage,
        prepare_optimizer=partial(accelerator.prepare_optimizer, device_placement=False),
    )


def close_mesh() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(timeout_seconds: float) -> None:
    """NCCL where every rank of this machine has a GPU of its own, else gloo on the CPU."""
    timeout = timedelta(seconds=timeout_seconds)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif int(os.environ["WORLD_SIZE"]) == local_ranks:  # one machine, whose own name may resolve to anything
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = "nccl" if on_gpus else "gloo"
    if LISTENER_VARIABLE in os.environ:
        rank, ranks = _place()
        store = _launched_store(timeout)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=ranks)
    else:
        dist.init_process_group(backend, timeout=timeout)


def _launched_store(timeout: timedelta) -> dist.TCPStore:
    """The launcher opened the port and handed the open socket to rank 0: nobody else can take it in between."""
    rank, ranks = _place()
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        ranks,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=int(os.environ[LISTENER_VARIABLE]) if rank == 0 else None,
    )


def _place() -> tuple[int, int]:
    """This process's rank and the number of ranks."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _device_mesh(sizes: MeshSizes, device_type: str) -> dist.device_mesh.DeviceMesh:
    """Data outermost, context innermost, as accelerate lays them out.

    Its ParallelismConfig has a mesh for either axis, and refuses replicated data with context (it means DDP by it).
    """
    if sizes.dp > 1 and sizes.cp > 1:
        return dist.device_mesh.init_device_mesh(
            device_type, (sizes.dp, sizes.cp), mesh_dim_names=("dp_replicate", "cp")
        )
    degrees = {}
    if sizes.dp > 1:
        degrees["dp_replicate_size"] = sizes.dp
    if sizes.cp > 1:
        degrees["cp_size"] = sizes.cp
    return ParallelismConfig(**degrees).build_device_mesh(device_type)


def _expert_groups(sizes: MeshSizes) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's experts and expert_replicas groups; expert groups are runs of ep consecutive ranks."""
    if sizes.ep == 1:
        return None, dist.group.WORLD
    world, ep = sizes.dp * sizes.cp, sizes.ep
    runs = [list(range(first, first + ep)) for first in range(0, world, ep)]
    copies = [list(range(first, world, ep)) for first in range(ep)]
    experts, _ = dist.new_subgroups_by_enumeration(runs)
    replicas, _ = dist.new_subgroups_by_enumeration(copies)
    return experts, replicas


def joined_ranks() -> int:
    """How many ranks this process has met; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1
