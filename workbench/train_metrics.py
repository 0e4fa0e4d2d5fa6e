"""Metrics of a training run: one JSON line per optimizer update."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from workbench.records import plain
from workbench.rewards import RewardTable
from workbench.train_batch import Batch
from workbench.types import StepReport

MEASURED = ("seconds", "tokens_per_second", "peak_bytes", "memory")
"""Entries of a line that a repetition of the run does not reproduce; all others are bitwise the same."""
_TOKEN_MEANS = ("ratio_mean", "abs_log_ratio_mean", "clip_fraction_low", "clip_fraction_high", "entropy_mean")


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


def update_metrics(reports: Sequence[StepReport]) -> dict[str, Any]:
    """The reports of a batch's groups as one: sums of shares of the loss, means over all replayed tokens."""
    tokens = sum(report.metrics["num_tokens"] for report in reports)

    def token_mean(name: str, empty: float) -> float:
        total = sum(report.metrics[name] * report.metrics["num_tokens"] for report in reports)
        return total / tokens if tokens else empty

    metrics: dict[str, Any] = {"loss": math.fsum(report.loss for report in reports), "num_tokens": tokens}
    metrics |= {name: token_mean(name, 1.0 if name == "ratio_mean" else 0.0) for name in _TOKEN_MEANS}
    metrics["ratio_max"] = max((report.metrics["ratio_max"] for report in reports), default=1.0)
    metrics["ratio_min"] = min((report.metrics["ratio_min"] for report in reports), default=1.0)
    if any("kl_mean" in report.metrics for report in reports):
        with_kl = [report for report in reports if "kl_mean" in report.metrics]
        metrics["kl_mean"] = sum(r.metrics["kl_mean"] * r.metrics["num_tokens"] for r in with_kl) / max(1, tokens)
    return metrics


def measured_metrics(reports: Sequence[StepReport], seconds: Mapping[str, float], num_tokens: int) -> dict[str, Any]:
    """Seconds by stage, tokens (prompts and responses) per second, and the highest peak of the groups' updates."""
    by_stage = dict(seconds)
    for report in reports:
        for stage, value in report.seconds.items():
            by_stage[stage] = by_stage.get(stage, 0.0) + value
    total = sum(by_stage.values())
    peaks = [report.memory["peak_bytes"] for report in reports if "peak_bytes" in report.memory]
    return {
        "seconds": by_stage,
        "tokens_per_second": num_tokens / total if total else None,
        "peak_bytes": max(peaks, default=None),
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
