"""Every widget over synthetic recordings, marked as such: for tests of drawing and looking up, not of results."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import widgets
from widgets import context_frontier, gradient_scope, group_serialization, prefix_reuse_drift, replay_timeline
from widgets.base import Widget
from widgets.plan import plan_record
from workbench.recordings import COLUMNS, Recording

NOTE = "Synthetic, for a test."


def synthetic(kind: str, rows: list[dict[str, Any]]) -> Recording:
    filled = [dict.fromkeys(COLUMNS[kind]) | row for row in rows]
    return Recording(kind=kind, origin="measured", title="Synthetic", command="none", rows=filled)


def drift_recording() -> Recording:
    draw = random.Random(0)
    return synthetic(
        "drift",
        [
            {
                "model": "made up", "learning_rate": rate, "seed": seed, "prompt_tokens": 256, "refresh_interval": 8,
                "step": age, "state_age": age, "loss_drift_pct": (-1) ** age * rate * age * draw.uniform(500, 1000),
                "mean_abs_logprob_drift": rate * age * draw.uniform(5, 10), "capture_seconds": 0.5, "step_seconds": 1.5,
            }
            for rate in (1e-3, 1e-2) for seed in range(3) for age in range(8)
        ],
    )  # fmt: skip


def scope_recording() -> Recording:
    draw = random.Random(1)
    parts = [(None, "all"), *((layer, "all") for layer in range(3)), (None, "attention"), (None, "feed forward")]
    return synthetic(
        "gradient_scope",
        [
            {
                "model": "made up", "seed": seed, "scope": scope, "adapter_scope": "all", "prompt_tokens": tokens,
                "response_tokens": 32, "learning_rate": 0.0, "layer": layer, "parameter_family": family,
                "cosine": draw.uniform(0.5, 1.0), "relative_l2": draw.uniform(0.0, 0.9),
            }
            for scope in ("response_only", "tail:1") for tokens in (256, 1024) for seed in range(2)
            for layer, family in parts
        ],
    )  # fmt: skip


def group_recording() -> Recording:
    return synthetic(
        "group_memory",
        [
            {
                "model": "made up", "mode": mode, "scope": scope, "prompt_tokens": 64, "response_tokens": 128,
                "group_size": size, "peak_bytes": 2e6 + 1e4 * size * slope, "step_seconds": 0.1 * size,
            }
            for mode, slope in (("serial_replay", 0), ("all_graphs", 50), ("conventional", 500))
            for scope in ("full", "response_only") for size in (1, 2, 4, 8)
            if mode != "conventional" or scope == "full"
        ],
    )  # fmt: skip


def timeline_recording() -> Recording:
    draw = random.Random(2)
    rows = []
    for scope in ("full", "response_only"):
        for mode, ledgers in (("serial_replay", ("rows", "graph")), ("all_graphs", ("total",))):
            for at in range(20):
                rows += [
                    {
                        "model": "made up", "mode": mode, "scope": scope, "stage": "capture" if at < 9 else "replay",
                        "position": 16 * min(at, 20 - at), "seconds": 0.1 * at, "ledger": ledger,
                        "live_bytes": draw.randint(0, 10**7), "graphs_alive": at % 2,
                    }
                    for ledger in ledgers
                ]  # fmt: skip
    return synthetic("timeline", rows)


def write_run(folder: Path, updates: int = 30, status: str = "running") -> Path:
    """A run folder as train() leaves it, with one line half written."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"name": "train", "status": status, "parameters": {"learning_rate": 1e-4}, "seconds": {"total": 12.5}}
    (folder / "run.json").write_text(json.dumps(record))
    lines = [
        {"step": n, "reward_mean": n / 50, "grad_norm": None if n == 3 else 1 / (n + 1), "seconds": {"replay": 0.1}}
        for n in range(updates)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"step": 99, "rew')
    return folder


def example_widgets(folder: Path) -> dict[str, Widget]:
    """One of each; folder: where a run may be written."""
    drift, scope = drift_recording(), scope_recording()
    groups = group_serialization.GroupRecord(
        points=(
            *group_serialization.published_points(),
            *group_serialization.modelled_points(),
            *group_serialization.measured_points([group_recording()]),
        ),
        ceilings={group_serialization.PAPER_CASE: 150.755e9},
        notes=(NOTE,),
    )
    reach = synthetic("reach", [{"model": "made up", "prompt_tokens": n} for n in (1000, 300000)])
    frontier = context_frontier.shipped_record()
    return {
        "group_serialization": widgets.GroupSerialization(groups),
        "prefix_reuse_drift": widgets.PrefixReuseDrift(
            prefix_reuse_drift.DriftRecord(
                curves=(*prefix_reuse_drift.published_curves(), *prefix_reuse_drift.measured_curves([drift])),
                costs=tuple(prefix_reuse_drift.measured_costs([drift])),
                notes=(NOTE,),
            )
        ),
        "context_frontier": widgets.ContextFrontier(
            context_frontier.FrontierRecord(
                cells=frontier.cells,
                cards=frontier.cards,
                published=frontier.published,
                out_of_memory=frontier.out_of_memory,
                reaches=tuple(context_frontier.reaches([reach])),
                notes=(NOTE,),
            )
        ),
        "replay_timeline": widgets.ReplayTimeline(
            replay_timeline.TimelineRecord(
                traces=tuple(replay_timeline.measured_traces([timeline_recording()])), notes=(NOTE,)
            )
        ),
        "gradient_scope": widgets.GradientScope(
            gradient_scope.ScopeRecord(points=tuple(gradient_scope.measured_points([scope])), notes=(NOTE,))
        ),
        "plan": widgets.Plan(
            plan_record(
                "Qwen3.6-27B", context_parallel=(1, 8), scopes=("full", "response_only"), positions=(2**18, 2**21)
            )
        ),
        "run_monitor": widgets.RunMonitor(write_run(folder / "a-run")),
    }


def random_states(widget: Widget, count: int, seed: int = 0) -> Iterator[Mapping[str, Any]]:
    """The widget's own state, then values drawn from its controls."""
    draw = random.Random(seed)
    yield widget.state()
    for _ in range(count - 1):
        yield {control.name: draw.choice(control.values) for control in widget.controls(widget.record)}
