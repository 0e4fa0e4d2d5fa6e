"""notebooks/10_plan.ipynb: it runs, needs no network, and its record says what the planner says."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench import InvalidInputError, Sampled, Tail
from workbench.plan_study import PlanParameters, frontier, make_plan
from workbench.planner import find_gpu
from workbench.publish import find_external_addresses
from workbench.records import read_record
from workbench.run import run_notebook

PLAN = Path(__file__).resolve().parents[2] / "notebooks" / "10_plan.ipynb"
PARAMETERS = {
    "model": "Qwen3.5-0.8B", "gpu": "RTX-4090", "prompt_tokens": 65_536, "group_size": 8, "response_tokens": 1024,
    "context_parallel": 2, "expert_parallel": 1, "gradient_scope": "full", "weights": "nf4", "chunk_tokens": 0,
    "checkpoint_layers": True, "placement": "device", "calibration": None,
}  # fmt: skip


def parameters(**changes: object) -> PlanParameters:
    return PlanParameters(**(PARAMETERS | changes))  # type: ignore[arg-type]


def test_it_runs_and_keeps_what_it_shows(tmp_path: Path) -> None:
    texts = {name: str(value) for name, value in PARAMETERS.items() if name not in ("calibration", "checkpoint_layers")}
    record, folder = run_notebook(PLAN, texts, runs=tmp_path)
    assert record.status == "completed", record.error
    assert find_external_addresses((folder / "10_plan.html").read_text(encoding="utf-8")) == []
    planned = make_plan(parameters())
    kept = read_record(folder / "run.json")["results"]["plan"]
    assert kept["verdict"] == planned.verdict == "fits"
    assert kept["peak_bytes"] == planned.peak_bytes < find_gpu("RTX-4090").memory_bytes
    assert kept["answers"]["largest group"] == "any"
    assert kept["terms"]["replay"]["rows"] == planned.terms["replay"]["rows"]


def test_scopes_by_name() -> None:
    assert parameters(gradient_scope="tail:3").scope() == Tail(3)
    assert parameters(gradient_scope="sampled:0.25").scope() == Sampled(0.25)
    assert make_plan(parameters(gradient_scope="prefix_frozen")).request.adapter_scope == "response"
    with pytest.raises(InvalidInputError, match="tail:many"):
        parameters(gradient_scope="tail:many").scope()


def test_the_frontier_rises_with_the_ranks() -> None:
    points = frontier(make_plan(parameters()))
    for by_ranks in points.values():
        assert list(by_ranks) == [1, 2, 4, 8, 16]
        assert sorted(by_ranks.values()) == list(by_ranks.values())
    assert all(points["response_only"][n] > points["full"][n] for n in points["full"])
