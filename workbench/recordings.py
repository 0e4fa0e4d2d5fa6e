"""Recorded measurements: one tidy table a file, shipped in `data/runs/` and read by widgets and notebooks.

A recording is rows of plain columns (text, numbers, booleans, null) plus where they come from: the command that makes
them again, the machine and the versions. One kind of table has one set of columns, listed in `COLUMNS`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workbench.errors import InvalidInputError
from workbench.records import provenance, write_record

FORMAT = "longstraw-recording-1"
RUNS_FOLDER = Path(__file__).resolve().parents[1] / "data" / "runs"
ORIGINS = ("published", "measured", "modelled")

COLUMNS: Mapping[str, tuple[str, ...]] = {
    # One row: one optimizer step of one reuse run, the reused state against a fresh capture.
    "drift": (
        "model", "family", "learning_rate", "seed", "prompt_tokens", "response_tokens", "refresh_interval", "step",
        "state_age", "loss_drift_pct", "mean_abs_logprob_drift", "max_abs_logprob_drift", "kl", "gradient_cosine",
        "gradient_norm_ratio", "capture_seconds", "step_seconds",
    ),
    # One row: one optimizer step as one refresh rule saw it; predicted_drift and measured_drift: null without a probe.
    "refresh": (
        "model", "family", "learning_rate", "seed", "prompt_tokens", "rule", "max_logprob_drift", "step", "state_age",
        "refreshed", "predicted_drift", "measured_drift", "mean_abs_logprob_drift", "capture_seconds", "probe_seconds",
    ),
    # One row: one scope's gradient against the full one; layer null and parameter_family "all" are the whole.
    "gradient_scope": (
        "model", "family", "seed", "scope", "adapter_scope", "prompt_tokens", "response_tokens", "learning_rate",
        "layer", "parameter_family", "cosine", "relative_l2",
    ),
    # One row: one optimizer step of one training run; held_out_reward is null where it was not evaluated.
    "training": (
        "model", "task", "answer", "scope", "adapter_scope", "learning_rate", "seed", "step", "reward_mean",
        "held_out_reward", "step_seconds",
    ),
    # One row: one step at one group size; mode is "serial_replay", "all_graphs" (every response's graph held over the
    # same captured prompt) or "conventional" (whole-sequence autograd, every response's graph held).
    "group_memory": (
        "model", "mode", "scope", "prompt_tokens", "response_tokens", "group_size", "state_bytes", "peak_bytes",
        "step_seconds",
    ),
    # One row: one sample of live bytes in one stage of one step, by ledger; mode as above; position: first token of the
    # chunk or block in work.
    "timeline": ("model", "mode", "scope", "stage", "position", "seconds", "ledger", "live_bytes", "graphs_alive"),
    # One row: one prompt length that completed on a machine, with the peak of the step above the weights.
    "reach": (
        "model", "scope", "prompt_tokens", "group_size", "response_tokens", "peak_bytes", "floor_bytes", "step_seconds",
        "grad_norm",
    ),
    # One row: one mode of one benchmark case. flops: counted, null where not; limit_flops: what an exact gradient needs
    # at least; floor_bytes: rows and their gradients; memory_source: "malloc" (to the byte), "rss" or "torch.cuda".
    "performance": (
        "family", "mode", "prompt_tokens", "group_size", "response_tokens", "cpu_seconds", "cpu_seconds_min",
        "cpu_seconds_max", "peak_bytes", "memory_source", "flops", "limit_flops", "matmul_flops_per_second",
        "floor_bytes", "gradient_error", "repeats",
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A recorded table. rows: one mapping each, with exactly the columns of its kind; origin: one of ORIGINS."""

    kind: str
    origin: str
    title: str
    command: str
    rows: Sequence[Mapping[str, Any]]
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.kind not in COLUMNS:
            raise InvalidInputError(f"recording kind {self.kind!r} is not one of {', '.join(COLUMNS)}")
        if self.origin not in ORIGINS:
            raise InvalidInputError(f"recording origin {self.origin!r} is not one of {', '.join(ORIGINS)}")
        if not self.rows:
            raise InvalidInputError(f"recording {self.title!r} has no rows")
        expected = set(COLUMNS[self.kind])
        for number, row in enumerate(self.rows):
            if set(row) != expected:
                missing, unknown = sorted(expected - set(row)), sorted(set(row) - expected)
                raise InvalidInputError(
                    f"recording {self.title!r} ({self.kind}), row {number}: missing {missing}, unknown {unknown}"
                )

    def select(self, **equal: Any) -> list[Mapping[str, Any]]:
        """The rows whose columns equal the given values; an unknown column is an error."""
        if unknown := sorted(set(equal) - set(COLUMNS[self.kind])):
            raise InvalidInputError(f"{self.kind} has no column {unknown}; it has {', '.join(COLUMNS[self.kind])}")
        return [row for row in self.rows if all(row[name] == value for name, value in equal.items())]

    def values(self, column: str) -> list[Any]:
        """The distinct values of a column, in order of appearance."""
        return list(dict.fromkeys(row[column] for row in self.rows))


def save_recording(
    path: Path,
    kind: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    title: str,
    command: str,
    notes: Sequence[str] = (),
) -> Recording:
    """Writes measured rows with this machine's provenance, whole or not at all. command: what makes them again."""
    recording = Recording(
        kind=kind,
        origin="measured",
        title=title,
        command=command,
        rows=list(rows),
        provenance=provenance(written_to=path),
        notes=notes,
    )
    write_record(path, {"format": FORMAT} | vars(recording))
    return recording


def load_recording(path: Path) -> Recording:
    """Reads one recording. Raises InvalidInputError, naming the file, if it is missing, damaged or another format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InvalidInputError(f"{path}: not a readable recording ({error})") from error
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise InvalidInputError(f"{path}: not a recording of format {FORMAT}")
    try:
        return Recording(**content)
    except (TypeError, AttributeError) as error:
        raise InvalidInputError(f"{path}: fields of a recording are missing or of the wrong type ({error})") from error
