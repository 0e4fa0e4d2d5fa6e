"""What recorded rows of drift and of refresh rules say, as bands over seeds and as tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from workbench.drift import DriftReport
from workbench.recordings import Recording

Row = Mapping[str, Any]
CASE_HEADINGS = ("case", "state age at each step", "largest |log-prob drift|, nats")


def seed_bands(rows: Iterable[Row], column: str) -> dict[int, tuple[float, float, float]]:
    """Lowest, mean and highest over the seeds at each state age; rows without the value (None) are left out."""
    by_age: dict[int, list[float]] = {}
    for row in rows:
        if row[column] is not None:
            by_age.setdefault(row["state_age"], []).append(row[column])
    return {age: (min(v), sum(v) / len(v), max(v)) for age, v in sorted(by_age.items())}


def falls(rows: Sequence[Row], column: str) -> tuple[int, int]:
    """How often the value falls from one step to the next of a run, and how many such pairs there are."""
    fell = pairs = 0
    ordered = sorted(rows, key=_run_and_step)
    for earlier, later in itertools.pairwise(ordered):
        if _run_and_step(earlier)[:-1] == _run_and_step(later)[:-1] and None not in (earlier[column], later[column]):
            fell += later[column] < earlier[column]
            pairs += 1
    return fell, pairs


def _run_and_step(row: Row) -> tuple[Any, ...]:
    return row["model"], row["learning_rate"], row["seed"], row["step"]


def rank_correlation(rows: Iterable[Row], one: str, other: str) -> float:
    """Spearman's, over rows of stale states that have both values: does a larger `one` go with a larger `other`?"""
    pairs = [(row[one], row[other]) for row in rows if row["state_age"] > 0 and None not in (row[one], row[other])]
    ranks = [
        torch.tensor(values, dtype=torch.float64).argsort().argsort().double() for values in zip(*pairs, strict=True)
    ]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


TRIGGER_HEADINGS = (
    "model", "loss drift: falls between steps", "log-prob drift: falls between steps",
    "rank correlation with 1 - gradient cosine: of loss drift", "of log-prob drift",
)  # fmt: skip


def trigger_table(recording: Recording) -> list[list[Any]]:
    """Which of loss drift and log-prob drift is the steadier sign of staleness, for each model."""
    table = []
    for model in recording.values("model"):
        rows = [
            dict(row) | {"gradient_error": None if row["gradient_cosine"] is None else 1 - row["gradient_cosine"]}
            for row in recording.select(model=model)
            if row["learning_rate"] > 0
        ]
        columns = ("loss_drift_pct", "mean_abs_logprob_drift")
        table.append(
            [
                model,
                *("{} of {}".format(*falls(rows, column)) for column in columns),
                *(rank_correlation(rows, column, "gradient_error") for column in columns),
            ]
        )
    return table


RULE_HEADINGS = (
    "model", "rule", "steps", "captures", "steps within the threshold, %", "largest drift", "probe, % of a capture",
)  # fmt: skip


def rule_table(recording: Recording) -> list[list[Any]]:
    """What each refresh rule keeps and costs on the held-out prompts, for each model."""
    table = []
    for model, rule in itertools.product(recording.values("model"), recording.values("rule")):
        rows = recording.select(model=model, rule=rule)
        if not rows:  # models need not have been recorded with the same intervals
            continue
        within = sum(row["mean_abs_logprob_drift"] <= row["max_logprob_drift"] for row in rows)
        captures = sum(row["refreshed"] for row in rows)
        probe = sum(row["probe_seconds"] for row in rows) / sum(row["capture_seconds"] for row in rows)
        largest = max(row["mean_abs_logprob_drift"] for row in rows)
        table.append([model, rule, len(rows), captures, 100 * within / len(rows), largest, 100 * probe])
    return table


def report_rows(report: DriftReport) -> list[list[Any]]:
    """One report in words and numbers."""
    return [
        ["mean |log-prob drift| per token, nats", report.mean_abs_logprob_drift],
        ["largest |log-prob drift|", report.max_abs_logprob_drift],
        ["KL(reused || fresh) per token, exact", report.kl],
        ["the same, sampled (k3)", report.kl_sampled],
        ["loss on the reused state", report.loss_reused],
        ["loss on the fresh state", report.loss_fresh],
        ["gradient cosine", report.gradient_cosine],
        ["gradient norm, reused / fresh", report.gradient_norm_ratio],
        ["cost of this measurement, s", report.seconds["total"]],
        ["its peak above the start, MB", _megabytes(report.memory.get("peak_bytes"))],
    ]


def _megabytes(nbytes: object) -> float | str:
    return nbytes / 1e6 if isinstance(nbytes, int) else "not measured"
