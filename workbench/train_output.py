"""The folder of a training run: who may write there, where a resumed run goes on, and what is written when."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from workbench.canonical import canonical
from workbench.checkpoint import (
    latest_checkpoint,
    load_checkpoint,
    model_identity,
    read_checkpoint,
    save_checkpoint,
)
from workbench.errors import InvalidInputError
from workbench.policy import Policy
from workbench.records import RunRecord, provenance, read_record, write_record
from workbench.train_batch import Task
from workbench.train_config import TrainConfig
from workbench.train_metrics import JsonLines

CONFIG, RECORD, METRICS, EVALUATIONS, CHECKPOINTS = (
    "config.json", "run.json", "metrics.jsonl", "evaluations.jsonl", "checkpoints",
)  # fmt: skip


@dataclass
class Position:
    """Where a run stands. weight_version: updates that changed the weights since the run began."""

    step: int = 0
    weight_version: int = 0


class RunOutput:
    """Everything that a run writes. Without a folder metrics stay in memory and nothing else happens.

    rewards: names of the reward functions; of what they compute a resumed run knows nothing.
    writes: False for all ranks but the first, which read what is there to go on from and leave it as it is.
    """

    def __init__(
        self,
        policy: Policy,
        tasks: Sequence[Task],
        config: TrainConfig,
        *,
        eval_tasks: Sequence[Task] | None = None,
        rewards: Sequence[str] = (),
        writes: bool = True,
    ) -> None:
        self._policy, self._config, self._writes = policy, config, writes
        self._provenance = provenance()
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self.folder = None if config.output_dir is None else Path(config.output_dir)
        self.metrics, self.evaluations = JsonLines(None), JsonLines(None)
        self.resumed = False
        if self.folder is None:
            return
        self._identity = {
            "config": config.identity(),
            "model": model_identity(policy),
            "reference": _reference_identity(policy, config),
            "rewards": list(rewards),
            "tasks": _tasks_digest(tasks),
            "eval_tasks": _tasks_digest(eval_tasks or ()),
        }
        self._refuse_other_runs(self.folder)

    def _refuse_other_runs(self, folder: Path) -> None:
        used = [name for name in (CONFIG, RECORD, METRICS, CHECKPOINTS) if (folder / name).exists()]
        if used and not self._config.resume:
            raise InvalidInputError(
                f"output_dir={str(folder)!r} holds a run already ({', '.join(used)}); resume=True goes on with it, "
                "another folder starts a new one"
            )
        if not used:
            return
        if not (folder / CONFIG).exists():
            raise InvalidInputError(f"output_dir={str(folder)!r} has no {CONFIG}: it is no run of train() to resume")
        before = read_record(folder / CONFIG)
        differing = _differences(before, self._identity)
        if differing:
            raise InvalidInputError(
                f"output_dir={str(folder)!r} holds a run that differs in {', '.join(differing)}; it can only go on "
                "unchanged"
            )

    def start(self, optimizer: torch.optim.Optimizer, scheduler: Any) -> Position:
        """Claim the folder, load the last checkpoint if there is one, and forget what was written after it."""
        if self.folder is None:
            return Position()
        position, kept, kept_evaluations = Position(), 0, 0
        latest = latest_checkpoint(self.folder / CHECKPOINTS) if self._config.resume else None
        if latest is not None:
            state = read_checkpoint(latest)
            differing = _differences(state["identity"], self._identity)
            if differing:
                raise InvalidInputError(
                    f"{latest} is a checkpoint of another run: it differs in {', '.join(differing)}"
                )
            kept, kept_evaluations = state["num_metrics"], state["num_evaluations"]
            position = Position(state["step"], state["weight_version"])
        self.metrics = JsonLines.read(self.folder / METRICS)
        self.evaluations = JsonLines.read(self.folder / EVALUATIONS)
        for lines, count in ((self.metrics, kept), (self.evaluations, kept_evaluations)):
            if len(lines.lines) < count:
                raise InvalidInputError(
                    f"{lines.path} has {len(lines.lines)} whole lines, but {latest} was written after {count}"
                )
        if latest is not None:
            load_checkpoint(latest, state, self._policy, optimizer, scheduler)
            self.resumed = True
        if not self._writes:
            self.metrics = JsonLines(None, self.metrics.lines[:kept])
            self.evaluations = JsonLines(None, self.evaluations.lines[:kept_evaluations])
            return position
        self.folder.mkdir(parents=True, exist_ok=True)
        write_record(self.folder / CONFIG, self._identity)
        self.metrics.truncate(kept)
        self.evaluations.truncate(kept_evaluations)
        for unfinished in (self.folder / CHECKPOINTS).glob(".writing-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        return position

    def due(self, step: int) -> bool:
        """Is there a checkpoint before step number `step`? Before the first one and at the end in any case."""
        every = self._config.checkpoint_every
        return step in (0, self._config.num_steps) or bool(every and step % every == 0)

    def checkpoint(self, position: Position, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        if self.folder is None or not self._writes:
            return
        save_checkpoint(
            self.folder / CHECKPOINTS,
            position.step,
            self._policy,
            optimizer,
            scheduler,
            {
                "identity": self._identity,
                "weight_version": position.weight_version,
                "num_metrics": len(self.metrics.lines),
                "num_evaluations": len(self.evaluations.lines),
            },
            keep=self._config.keep_checkpoints,
        )

    def record(self, status: str, error: str | None, step: int, seconds: float, ranks: Mapping[str, int]) -> RunRecord:
        """The record of the run so far, written too. step: steps done; seconds: since the run began or went on."""
        lines = self.metrics.lines
        by_stage: dict[str, float] = {"total": seconds}
        for line in lines:
            for stage, value in line["seconds"].items():
                by_stage[stage] = by_stage.get(stage, 0.0) + value
        results: dict[str, Any] = {
            "num_steps": step,
            "num_updates": len(lines),
            "ranks": ranks,
            "reward_mean": [line["reward_mean"] for line in lines if line["update"] == 0],
            "held_out": [{"step": e["step"], "reward_mean": e["reward_mean"]} for e in self.evaluations.lines],
        }
        if self.folder is None:
            results |= {"metrics": lines, "evaluations": self.evaluations.lines}
        record = RunRecord(
            name="train",
            status=status,
            error=error,
            parameters=self._config.identity(),
            seed=self._config.seed,
            device=str(self._policy.device),
            started_at=self._started,
            finished_at=None if status == "running" else datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=by_stage,
            memory={"peak_bytes": max((line["peak_bytes"] or 0 for line in lines), default=0)},
            evidence={"level": 1 if lines else 0, "checks": []},
            results=results,
            provenance=self._provenance,
        )
        if self.folder is not None and self._writes:
            write_record(self.folder / RECORD, record)
        return record


def _tasks_digest(tasks: Sequence[Task]) -> str:
    digest = hashlib.sha256()
    for task in tasks:
        digest.update(canonical((task.prompt_ids, task.columns)).encode())
    return digest.hexdigest()


def _reference_identity(policy: Policy, config: TrainConfig) -> dict[str, Any] | None:
    """Of a reference with weights of its own; one that is this model without its adapter is in the model's identity."""
    reference = policy.reference
    if config.objective.beta == 0.0 or reference is None or reference.model is policy.model:
        return None
    return model_identity(reference, trained=True)


def _differences(before: dict[str, Any], now: dict[str, Any], path: str = "") -> list[str]:
    """Dotted names of the entries in which two identities differ, with both values where they are short."""
    found = []
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found += _differences(old, new, f"{path}{name}.")
        elif old != new:
            values = f" ({old!r}, now {new!r})"
            found.append(f"{path}{name}" + (values if len(values) < 80 else ""))
    return found
