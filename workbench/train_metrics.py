"""Metrics of a training run: one JSON line per optimizer update."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workbench.records import plain
from workbench.rewards import RewardTable
from workbench.train_batch import Batch
from workbench.types import StepReport

MEASURED = ("seconds", "cpu_seconds", "tokens_per_second", "peak_bytes", "memory")
"""Entries of a line that a repetition of the run does not reproduce; all others are bitwise the same."""
_TOKEN_MEANS = ("ratio_mean", "abs_log_ratio_mean", "clip_fraction_low", "clip_fraction_high", "entropy_mean")


@dataclass(frozen=True)
class GroupUpdate:
    """What one group's part of an update reports, as JSON knows it: over ranks, every rank gets those of all groups.

    loss, metrics, peak_bytes: of its StepReport. state_age, state_decision: of the state that it was replayed on.
    """

    loss: float
    metrics: Mapping[str, Any]
    peak_bytes: int | None
    state_age: int
    state_decision: str

    @classmethod
    def of(cls, report: StepReport, state_age: int, state_decision: str) -> GroupUpdate:
        return cls(report.loss, report.metrics, report.memory.get("peak_bytes"), state_age, state_decision)


def reward_metrics(table: RewardTable) -> dict[str, Any]:
    """Mean and sample standard deviation of the totals and of every function, over members that have one."""
    metrics: dict[str, Any] = {}
    for name, values in {"reward": table.totals, **{f"reward/{k}": v for k, v in table.by_function.items()}}.items():
        valid = [value for value in values if value is not None]
        metrics[f"{name}_mean"] = mean = sum(valid) / len(valid) if valid else None
        spread = sum((value - mean) ** 2 for value in valid) if mean is not None else 0.0
        metrics[f"{name}_std"] = math.sqrt(spread / (len(valid) - 1)) if len(valid) > 1 else 0.0
    metrics["num_excluded_members"] = sum(value is None for value in table.totals)
    for name, logged in table.logged.items():
        numbers = [value for value in logged if isinstance(value, int | float)]
        if numbers:
            metrics[f"logged/{name}"] = sum(numbers) / len(numbers)
    return metrics


def batch_metrics(batch: Batch) -> dict[str, Any]:
    """What sampling and rewards say, the same for every update on the batch."""
    responses = [response for group in batch.groups for response in group.responses]
    lengths = [len(response) for response in responses]
    return {
        **reward_metrics(batch.rewards),
        "response_tokens_mean": sum(lengths) / len(lengths),
        "response_tokens_max": max(lengths),
        "truncated_fraction": sum(not response.finished for response in responses) / len(responses),
        "num_zero_variance_groups": batch.num_zero_variance,
        "num_skipped_groups": sum(not group.learns for group in batch.groups),
    }


def update_metrics(parts: Sequence[GroupUpdate]) -> dict[str, Any]:
    """The parts of a batch's groups as one: sums of shares of the loss, means over all replayed tokens."""
    tokens = sum(part.metrics["num_tokens"] for part in parts)

    def token_mean(name: str, empty: float) -> float:
        total = sum(part.metrics[name] * part.metrics["num_tokens"] for part in parts)
        return total / tokens if tokens else empty

    metrics: dict[str, Any] = {"loss": math.fsum(part.loss for part in parts), "num_tokens": tokens}
    metrics |= {name: token_mean(name, 1.0 if name == "ratio_mean" else 0.0) for name in _TOKEN_MEANS}
    metrics["ratio_max"] = max((part.metrics["ratio_max"] for part in parts), default=1.0)
    metrics["ratio_min"] = min((part.metrics["ratio_min"] for part in parts), default=1.0)
    if any("kl_mean" in part.metrics for part in parts):
        with_kl = [part for part in parts if "kl_mean" in part.metrics]
        metrics["kl_mean"] = sum(p.metrics["kl_mean"] * p.metrics["num_tokens"] for p in with_kl) / max(1, tokens)
    metrics["state_ages"] = [part.state_age for part in parts]
    metrics["state_decisions"] = [part.state_decision for part in parts]
    return metrics


def measured_metrics(
    parts: Sequence[GroupUpdate], seconds: Mapping[str, float], cpu_seconds: float, num_tokens: int
) -> dict[str, Any]:
    """Seconds by stage and CPU seconds (all threads) of this process, tokens (prompts and responses) per second,
    highest peak of any group. An update counts from the end of the one before, a batch's first one with its sampling.
    """
    total = sum(seconds.values())
    return {
        "seconds": dict(seconds),
        "cpu_seconds": cpu_seconds,
        "tokens_per_second": num_tokens / total if total else None,
        "peak_bytes": max((part.peak_bytes for part in parts if part.peak_bytes is not None), default=None),
    }


class JsonLines:
    """A file of one JSON object per line; every line is on disk when `append` returns. Without a path: in memory."""

    def __init__(self, path: Path | None, kept: Iterable[Mapping[str, Any]] = ()) -> None:
        self.lines: list[dict[str, Any]] = [dict(line) for line in kept]
        self.path = path

    def append(self, line: Mapping[str, Any]) -> None:
        entry = plain(line)
        self.lines.append(entry)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())

    def truncate(self, keep: int) -> None:
        """Only the first `keep` lines stay; the file is replaced as a whole."""
        del self.lines[keep:]
        if self.path is not None:
            temporary = self.path.with_name(f".{self.path.name}-kept")
            temporary.write_text("".join(json.dumps(line) + "\n" for line in self.lines), encoding="utf-8")
            temporary.replace(self.path)

    @classmethod
    def read(cls, path: Path) -> JsonLines:
        """The complete lines of a file, however its writer ended; no file reads as no line."""
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                lines.append(json.loads(line))
            except ValueError:  # the line during which the writer was killed, and it is the last
                break
        return cls(path, lines)
