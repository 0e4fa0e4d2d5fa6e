"""Training over ranks: who works on which prompt, and how every rank comes to know the whole step.

Data ranks divide a step's prompts and the held-out tasks, the context ranks of each share a prompt's tokens
(comm.py). A prompt keeps its slot, from which its seeds derive, so responses are those of one process. Rank 0 alone
calls the reward functions, once, with all responses, and alone writes. Numbers travel as JSON, in which floats keep
their bits; tensors of the model never do.

On one process everything here is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from workbench.comm import Mesh, digest, every_value, is_expert_shard, require_agreement
from workbench.errors import InvalidInputError
from workbench.inputs import check_ranks
from workbench.policy import Policy
from workbench.replicas import require_same_weights
from workbench.rewards import RewardTable
from workbench.train_batch import Task
from workbench.train_config import TrainConfig
from workbench.types import Response, accumulation_dtype


@dataclass(frozen=True)
class TrainRanks:
    """The ranks of one run as its stages see them. mesh: None for one process."""

    policy: Policy
    mesh: Mesh | None = None

    @property
    def first(self) -> bool:
        """Rank 0: it rewards, writes and draws progress."""
        return self.mesh is None or self.mesh.world.rank == 0

    @property
    def several(self) -> bool:
        return self.mesh is not None and self.mesh.world.size > 1

    @property
    def degrees(self) -> dict[str, int]:
        """Ranks of every axis, for the record."""
        mesh = self.mesh or Mesh()
        return {"data": mesh.data.size, "context": mesh.context.size, "experts": mesh.experts.size}

    @property
    def of_a_prompt(self) -> Mesh | None:
        """The ranks that share one prompt's tokens, for all that is done on it; None where one process has them."""
        return None if self.mesh is None or self.mesh.context.size == 1 else self.mesh.for_accumulation()

    def stage(self, name: str) -> None:
        """Tell the launcher's watchdog what begins."""
        if self.mesh is not None:
            self.mesh.on_stage(name)

    def require_same(self, what: str, *values: object) -> None:
        """RanksDisagreeError, on every rank, unless all were given the same."""
        if self.mesh is not None:
            require_agreement(self.mesh.world, digest(*values), what, self.policy.device)

    def require_same_weights(self) -> None:
        if self.mesh is not None:
            for policy in filter(None, (self.policy, self.policy.reference)):
                require_same_weights(policy, self.mesh)

    # ---------------------------------------------------------------- division and union

    def takes(self, slot: int, num_slots: int) -> bool:
        """Is this one of a step's `num_slots` prompts that this rank works on? Contiguous, within one of each other."""
        if self.mesh is None:
            return True
        rank, size = self.mesh.data.rank, self.mesh.data.size
        return num_slots * rank // size <= slot < num_slots * (rank + 1) // size

    def takes_task(self, task: int) -> bool:
        """The same where a task's state is to be met again: it stays with one data rank, whatever its slot."""
        return self.mesh is None or task % self.mesh.data.size == self.mesh.data.rank

    def union(self, own: Mapping[int, Any], tag: str) -> list[Any]:
        """What all data ranks have, {slot: JSON value}, in order of slots; the ranks of a prompt bring the same."""
        if self.mesh is None or self.mesh.data.size == 1:
            return [own[slot] for slot in sorted(own)]
        parts = every_value(self.mesh.data, list(own.items()), self.policy.device, tag=tag)
        return [value for _, value in sorted((item for part in parts for item in part), key=lambda item: item[0])]

    def all_responses(self, own: Mapping[int, Sequence[Response]]) -> list[list[Response]]:
        """The groups of all slots, sampled by whichever ranks had them."""
        if self.mesh is None or self.mesh.data.size == 1:
            return [list(own[slot]) for slot in sorted(own)]
        dtype = accumulation_dtype(self.policy.dtype)
        plain = {
            slot: [(response.ids.tolist(), response.logprobs.tolist(), response.finished) for response in group]
            for slot, group in own.items()
        }
        return [
            [
                Response(torch.tensor(ids, dtype=torch.int64), torch.tensor(logprobs, dtype=dtype), finished)
                for ids, logprobs, finished in group
            ]
            for group in self.union(plain, "responses")
        ]

    def rewards_of_first(self, reward: Callable[[], RewardTable]) -> RewardTable:
        """`reward()` on rank 0, its table on every rank. Of what functions logged, others get the numbers only."""
        if self.mesh is None or self.mesh.world.size == 1:
            return reward()
        table = reward() if self.first else None
        numbers = None
        if table is not None:
            logged = {k: tuple(v for v in values if isinstance(v, int | float)) for k, values in table.logged.items()}
            numbers = asdict(RewardTable(table.totals, table.by_function, table.excluded, logged))
        told = every_value(self.mesh.world, numbers, self.policy.device, tag="rewards")[0]
        return table or RewardTable(
            tuple(told["totals"]),
            {name: tuple(values) for name, values in told["by_function"].items()},
            tuple(told["excluded"]),
            {name: tuple(values) for name, values in told["logged"].items()},
        )


def open_train_ranks(policy: Policy, config: TrainConfig, comm: Mesh | None) -> TrainRanks:
    """Refuse what a run cannot do over these ranks, before any work."""
    check_ranks(policy, comm)
    if comm is None:
        return TrainRanks(policy)
    if config.prompts_per_step < comm.data.size:
        raise InvalidInputError(
            f"prompts_per_step={config.prompts_per_step} over {comm.data.size} data ranks leaves ranks without work; "
            "give more prompts, or open the mesh with a smaller dp"
        )
    if config.output_dir is not None and any(is_expert_shard(p) for p in policy.model.parameters()):
        raise InvalidInputError(
            "output_dir: checkpoints of experts that are spread over ranks are not implemented; open the mesh with "
            "ep=1, or train with output_dir=None"
        )
    return TrainRanks(policy, comm)


def require_same_run(ranks: TrainRanks, config: TrainConfig, *tasks: Sequence[Task] | None) -> None:
    """All ranks were given the same configuration, tasks and weights."""
    ranks.require_same("train's configuration", config.identity(), config.output_dir, config.resume)
    require_same_tasks(ranks, "train's tasks", *tasks)
    ranks.require_same_weights()


def require_same_tasks(ranks: TrainRanks, what: str, *tasks: Sequence[Task] | None) -> None:
    ranks.require_same(what, [(t.prompt_ids, t.columns) for some in tasks for t in some or ()])
