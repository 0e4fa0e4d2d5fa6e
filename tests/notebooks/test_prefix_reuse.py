"""notebooks/50_prefix_reuse.ipynb: it runs, needs no network, measures by itself and reads what is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.publish import find_external_addresses
from workbench.recordings import RUNS_FOLDER, load_recording
from workbench.records import read_record
from workbench.run import run_notebook

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "50_prefix_reuse.ipynb"
TINY = {
    "models": '["random:qwen3"]', "learning_rates": "[0.003, 0.01]", "seeds": "[0]", "prompt_tokens": "500",
    "group_size": "2", "max_new_tokens": "3", "chunk_tokens": "200", "lora_rank": "2", "num_steps": "3",
    "refresh_steps": "4", "refresh_prompts": "1", "intervals": "[2]", "rerun": "true",
}  # fmt: skip


def test_it_measures_again_at_toy_size(tmp_path: Path) -> None:
    record, folder = run_notebook(NOTEBOOK, TINY, runs=tmp_path)
    assert record.status == "completed", record.error
    assert find_external_addresses((folder / "50_prefix_reuse.html").read_text(encoding="utf-8")) == []
    kept = read_record(folder / "run.json")["results"]["prefix_reuse"]
    cases = {case: (ages, largest) for case, ages, largest in kept["exact_cases"]}
    assert cases["captured every 4 steps"][0] == "0, 1, 2, 3, 0"
    assert cases["captured every 4 steps"][1] > 0.0
    assert {largest for case, (_, largest) in cases.items() if "every 4" not in case} == {0.0}
    drift = load_recording(folder / "drift.json")
    assert len(drift.rows) == 2 * 3
    assert [row[:2] for row in kept["rules"]["rows"]] == [["random:qwen3", "drift"], ["random:qwen3", "interval 2"]]


def test_the_shipped_recordings_hold_what_the_notebook_reads() -> None:
    """Three learning rates and three seeds of either family; ages that the published table has too."""
    if not all((RUNS_FOLDER / f"{kind}.json").is_file() for kind in ("drift", "refresh")):
        pytest.skip("not recorded yet: python -m workbench.drift_study")
    drift, refresh = (load_recording(RUNS_FOLDER / f"{kind}.json") for kind in ("drift", "refresh"))
    for model in drift.values("model"):
        rows = drift.select(model=model)
        assert len({row["learning_rate"] for row in rows}) >= 3
        assert len({row["seed"] for row in rows}) >= 3
        assert {1, 2, 4, 8} <= {row["state_age"] for row in rows}
        assert all(row["mean_abs_logprob_drift"] == 0.0 for row in rows if row["state_age"] == 0)
        assert any(row["rule"] == "drift" for row in refresh.select(model=model))
