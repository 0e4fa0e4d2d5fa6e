"""notebooks/55_gradient_scope.ipynb: it runs, needs no network, measures by itself and reads what is recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from workbench.publish import find_external_addresses
from workbench.recordings import RUNS_FOLDER, load_recording
from workbench.records import read_record
from workbench.run import run_notebook

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "55_gradient_scope.ipynb"
TINY = {
    "models": '["random:qwen3"]', "seeds": "[0]", "prompt_tokens": "[500]", "response_tokens": "[2]",
    "learning_rates": "[0.0]", "tails": "[1, 3]", "fractions": "[0.5]", "num_draws": "2", "group_size": "2",
    "chunk_tokens": "200", "lora_rank": "2", "live_draws": "4", "rerun": "true",
}  # fmt: skip


def test_it_measures_again_at_toy_size(tmp_path: Path) -> None:
    record, folder = run_notebook(NOTEBOOK, TINY, runs=tmp_path)
    assert record.status == "completed", record.error
    assert find_external_addresses((folder / "55_gradient_scope.html").read_text(encoding="utf-8")) == []
    kept = read_record(folder / "run.json")["results"]["gradient_scope"]
    scopes = {(scope, adapter): cosine for _, scope, adapter, _, cosine, *_ in kept["scopes"]["rows"]}
    assert 0.0 < scopes["response_only", "all"] < 1.0
    assert scopes["tail:3", "all"] > 0.999999  # the whole prompt
    assert list(kept["sampled_errors"]["Sampled(0.5)"]) == ["1", "2", "4"]


def test_the_shipped_recording_holds_what_the_notebook_reads() -> None:
    if not (RUNS_FOLDER / "gradient_scope.json").is_file():
        pytest.skip("not recorded yet: python -m workbench.scope_study")
    recording = load_recording(RUNS_FOLDER / "gradient_scope.json")
    for model in recording.values("model"):
        rows = recording.select(model=model)
        whole = [row for row in rows if row["layer"] is None and row["parameter_family"] == "all"]
        assert {"response_only", "tail:1"} <= {row["scope"] for row in whole}
        assert all(-1.0 <= row["cosine"] <= 1.0 and row["relative_l2"] >= 0.0 for row in rows)
        assert any(row["layer"] is not None for row in rows)
