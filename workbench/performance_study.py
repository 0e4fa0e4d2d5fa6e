"""What notebooks/70_performance.ipynb does between its prose: recorded rows, targets, a small measurement."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from workbench import Policy, update_step
from workbench.errors import InvalidInputError
from workbench.model_sources import tiny_model
from workbench.recordings import RUNS_FOLDER, Recording, load_recording

MB = 1e6
FULL, PLAIN, RESPONSE = "full, chunk 512, layer checkpoints", "full, chunk 1024", "response_only, chunk 512"
OURS = (FULL, PLAIN, RESPONSE)
MODE_HEADINGS = (
    "mode", "P", "G", "CPU s", "from", "to", "runs", "peak MB", "times the floor", "% of the limit", "gradient error",
)  # fmt: skip
TARGET_HEADINGS = ("target", "asked", "measured", "met", "why not")
REACH_HEADINGS = ("P", "G", "R", "peak MB", "floor MB", "peak / floor", "wall s")

Row = Mapping[str, Any]


class PerformanceParameters(BaseModel):
    """The parameters of notebooks/70_performance.ipynb; an unknown name, or a value that does not fit, is refused.

    folder: where performance.json and reach.json lie; empty: the recorded runs of this repository.
    measure_prompt_tokens: lengths of a small measurement on this machine; none: recorded runs only.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    folder: str = ""
    measure_prompt_tokens: tuple[PositiveInt, ...] = ()
    measure_group_size: int = Field(ge=1)
    seed: int = Field(ge=0)

    def recording(self, name: str) -> Recording:
        return load_recording(self._path(name))

    def reach(self) -> Recording | None:
        """The recorded reach of this machine; None where none was recorded."""
        path = self._path("reach")
        return load_recording(path) if path.exists() else None

    def _path(self, name: str) -> Path:
        return (Path(self.folder) if self.folder else RUNS_FOLDER) / f"{name}.json"


# ---------------------------------------------------------------- rows


def mode_rows(recording: Recording, family: str) -> list[list[Any]]:
    """One line for each mode and case of a family."""
    return [_mode_row(row) for row in recording.select(family=family)]


def _mode_row(row: Row) -> list[Any]:
    return [
        row["mode"],
        row["prompt_tokens"],
        row["group_size"],
        round(row["cpu_seconds"], 1),
        round(row["cpu_seconds_min"], 1),
        round(row["cpu_seconds_max"], 1),
        row["repeats"],
        round(row["peak_bytes"] / MB, 1),
        row["peak_bytes"] / row["floor_bytes"],
        100 * limit_share(row),
        row["gradient_error"],
    ]


def limit_share(row: Row) -> float:
    """The least operations an exact gradient needs, at the rate of a large matrix product, over the time it took."""
    return row["limit_flops"] / row["matmul_flops_per_second"] / row["cpu_seconds"]


def reach_rows(recording: Recording | None) -> list[list[Any]]:
    """One line for each length that completed; none without a recording."""
    return [
        [
            row["prompt_tokens"],
            row["group_size"],
            row["response_tokens"],
            round(row["peak_bytes"] / MB, 1),
            round(row["floor_bytes"] / MB, 1),
            row["peak_bytes"] / row["floor_bytes"],
            row["step_seconds"],
        ]
        for row in (recording.rows if recording is not None else ())
    ]


# ---------------------------------------------------------------- targets


@dataclass(frozen=True)
class Target:
    """One figure that was asked for. value: from the rows; None where a run it needs was not recorded.

    at_most: the value asked for is an upper bound, else a lower one. reason: found by profiling, shown if it is missed.
    """

    name: str
    asked: float
    value: float | None
    at_most: bool = True
    reason: str = ""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.asked if self.at_most else self.value >= self.asked

    def cells(self) -> list[Any]:
        sign = "<=" if self.at_most else ">="
        measured = "not recorded" if self.value is None else _short(self.value)
        return [self.name, f"{sign} {_short(self.asked)}", measured, self.met, self.reason if self.met is False else ""]


def _short(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 0.01 else f"{value:.3g}"


ACCOUNT = "python -m tests.benchmarks.profile {} --account"
SHARE_REASON = (
    "matrix products and attention are about half of the time, the rest reads and writes memory: norms, gates, "
    "activations, copies, the short convolution (python -m tests.benchmarks.profile hybrid:4096:8); the limit counts "
    "operations at the rate of a large product"
)
TIME_REASON = (
    "a prompt chunk is computed three times forward with layer checkpoints, a peer's once or twice; the machine's load "
    "while recording, in the recording's notes, moves the ratio by a tenth or two"
)
SERIAL_REASON = "near its bound, since the serial peer too has this repository's recurrence; runs spread by 10 to 20 %"
SHARED_TIME_REASON = (
    "layer checkpoints do 356 GFLOP where one graph needs 226, 1.58 times as many; without them 292 "
    f"({ACCOUNT.format('hybrid:4096:2')})"
)
SHARED_MEMORY_REASON = (
    "peers get this repository's recurrence, which took this one from 2,289 MB to 1,356 MB after the target was set: "
    "1/18 of that is 75 MB, of which the floor alone takes 67 MB"
)
SCOPE_REASON = (
    "the operations alone are 0.258: 518 of 2,005 GFLOP, of which capturing the prompt takes 378 "
    f"({ACCOUNT.format('hybrid:16384:8')})"
)
STATE_REASON = (
    "beyond the floor lie the carries of 32 chunk starts, 15 MB, and what does not grow with the prompt, 29 MB: a "
    "chunk's layer inputs and one layer's graph. Longer chunks trade the one for the other "
    f"({ACCOUNT.format('hybrid:16384:8')})"
)
GROWTH_REASON = "a member must leave nothing but its log-probs (tests/test_memory_bounds.py)"


def targets(recording: Recording) -> list[Target]:
    """The targets of the performance work, from the recorded rows."""
    find = _Finder(recording)
    peak_at_4k = find("hybrid", FULL, 4096, 8, lambda row: row["peak_bytes"] / MB)
    return [
        *find.pair("TRL + checkpointing", 4096, 8, 1 / 7, 1 / 30),
        *find.pair("serial + checkpointing", 4096, 8, 1 / 6, 1 / 4, time_reason=SERIAL_REASON),
        *find.pair("shared prefix + checkpointing", 16384, 8, 0.9, 1 / 18, memory_reason=SHARED_MEMORY_REASON),
        *find.pair("shared prefix", 4096, 2, 1.2, 1 / 28, time_reason=SHARED_TIME_REASON),
        Target(
            "response_only / full, 16k G8, time",
            0.25,
            find.ratio(RESPONSE, FULL, 16384, 8, "cpu_seconds"),
            reason=SCOPE_REASON,
        ),
        Target("response_only / full, 16k G8, memory", 1.0, find.ratio(RESPONSE, FULL, 16384, 8, "peak_bytes")),
        Target("full peak / floor, 16k", 1.6, find("hybrid", FULL, 16384, 8, _over_floor), reason=STATE_REASON),
        Target("full peak / floor, 64k", 1.3, find("small-hybrid", FULL, 65536, 2, _over_floor), reason=STATE_REASON),
        *[
            Target(
                f"{mode.split(',')[0]}: peak growth from G 2 to 8, 4k, %",
                0.02,
                find.growth_pct(mode),
                reason=GROWTH_REASON,
            )
            for mode in (FULL, RESPONSE)
        ],
        Target(
            f"full, % of the limit at {'?' if peak_at_4k is None else round(peak_at_4k, 1)} MB, 4k G8 (60 MB asked)",
            45.0,
            find("hybrid", FULL, 4096, 8, lambda row: 100 * limit_share(row)),
            at_most=False,
            reason=SHARE_REASON,
        ),
        Target(
            "response_only, % of the limit, 4k G8",
            60.0,
            find("hybrid", RESPONSE, 4096, 8, lambda row: 100 * limit_share(row)),
            at_most=False,
            reason=SHARE_REASON,
        ),
        Target("gradient error of the exact modes", 5e-6, find.largest_error()),
    ]


def _over_floor(row: Row) -> float:
    return row["peak_bytes"] / row["floor_bytes"]


class _Finder:
    """Looks figures up in a recording; None where there is no such row."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def __call__(
        self, family: str, mode: str, prompt_tokens: int, group_size: int, figure: Callable[[Row], float]
    ) -> float | None:
        found = self._recording.select(family=family, mode=mode, prompt_tokens=prompt_tokens, group_size=group_size)
        return figure(found[0]) if found else None

    def ratio(self, mode: str, other: str, prompt_tokens: int, group_size: int, column: str) -> float | None:
        values = [self("hybrid", m, prompt_tokens, group_size, lambda row: row[column]) for m in (mode, other)]
        return None if values[0] is None or values[1] is None else values[0] / values[1]

    def pair(
        self,
        other: str,
        prompt_tokens: int,
        group_size: int,
        time: float,
        memory: float,
        *,
        time_reason: str = TIME_REASON,
        memory_reason: str = "",
    ) -> list[Target]:
        """The time and the memory of FULL over another mode's."""
        name = f"full / {other}, {prompt_tokens // 1024}k G{group_size}"
        seconds, peak = (self.ratio(FULL, other, prompt_tokens, group_size, c) for c in ("cpu_seconds", "peak_bytes"))
        return [
            Target(f"{name}, time", time, seconds, reason=time_reason),
            Target(f"{name}, memory", memory, peak, reason=memory_reason),
        ]

    def growth_pct(self, mode: str) -> float | None:
        two, eight = (self("hybrid", mode, 4096, group, lambda row: row["peak_bytes"]) for group in (2, 8))
        return None if two is None or eight is None else 100 * (eight / two - 1)

    def largest_error(self) -> float:
        rows = [row for row in self._recording.rows if not row["mode"].startswith("response_only")]
        return max(row["gradient_error"] for row in rows)


# ---------------------------------------------------------------- measured again, small


def measure_again(parameters: PerformanceParameters) -> list[dict[str, Any]]:
    """A tiny hybrid's step in both scopes at each length: CPU seconds, and peak bytes by the engine's own meter."""
    transformers.logging.set_verbosity_error()
    draw = torch.Generator().manual_seed(parameters.seed)
    policy = Policy(tiny_model("qwen3_5"))
    rows = []
    for tokens in parameters.measure_prompt_tokens:
        prompt = torch.randint(3, 101, (tokens,), generator=draw)
        responses = [torch.randint(3, 101, (16,), generator=draw) for _ in range(parameters.measure_group_size)]
        rows += [
            {"scope": scope, "prompt_tokens": tokens} | _one_step(policy, prompt, responses, scope)
            for scope in ("full", "response_only")
        ]
    return rows


def _one_step(policy: Policy, prompt: torch.Tensor, responses: list[torch.Tensor], scope: str) -> dict[str, Any]:
    started = time.process_time()
    report = update_step(
        policy,
        prompt,
        responses,
        advantages=[1.0 if member % 2 else -1.0 for member in range(len(responses))],
        gradient_scope=scope,
        chunk_tokens=128,
        checkpoint_layers=True,
    )
    policy.model.zero_grad(set_to_none=True)
    return {"cpu_seconds": time.process_time() - started, "peak_bytes": report.memory["peak_bytes"]}


def again_rows(measured: Sequence[Row]) -> list[list[Any]]:
    return [[r["scope"], r["prompt_tokens"], r["cpu_seconds"], r["peak_bytes"] / MB] for r in measured]


def performance_results(
    parameters: PerformanceParameters, found: Sequence[Target], measured: Sequence[Row]
) -> dict[str, Any]:
    """What the notebook shows, as `workbench.records.save_results` takes it."""
    if not found:
        raise InvalidInputError("no target was evaluated: the recording is empty")
    return {
        "seed": parameters.seed,
        "evidence": {"level": 1, "checks": [{"level": 1, "what": "executed", "passed": True}]},
        "settings": parameters.model_dump(),
        "targets": {
            target.name: {"asked": target.asked, "measured": target.value, "met": target.met} for target in found
        },
        "measured_again": list(measured),
    }
