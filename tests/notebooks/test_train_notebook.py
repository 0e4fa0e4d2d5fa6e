"""notebooks/40_train.ipynb: it trains at toy size, says what is not recorded, and its run can be watched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

import widgets
from widgets.run_monitor import read_run
from workbench.live_training import TrainParameters, train_live
from workbench.publish import find_external_addresses
from workbench.recordings import RUNS_FOLDER, load_recording
from workbench.records import RUN_FOLDER_VARIABLE, read_record
from workbench.run import run_notebook
from workbench.training_curves import arm_results

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "40_train.ipynb"
TINY: dict[str, Any] = {
    "model": "tiny-hybrid-half", "kind": "multi_key", "answer_style": "sentence", "prompt_tokens": 120,
    "num_needles": 2, "scope": "full", "learning_rate": 1e-3, "lora_rank": 0, "num_steps": 2, "prompts_per_step": 2,
    "group_size": 2, "chunk_tokens": 64, "eval_every": 1, "num_held_out": 2, "seed": 0,
}  # fmt: skip
RECORDINGS = ("training", "training_scopes", "training_gemma")


def test_it_trains_and_its_run_goes_on_and_can_be_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: str(value) for name, value in TINY.items()} | {"recordings": str(tmp_path)}
    record, folder = run_notebook(NOTEBOOK, texts, runs=tmp_path / "runs")
    assert record.status == "completed", record.error
    page = (folder / "40_train.html").read_text(encoding="utf-8")
    assert find_external_addresses(page) == []
    for name in RECORDINGS:
        assert f"{name}.json: not recorded yet" in page, "no recording, no curve"
    kept = read_record(folder / "run.json")["results"]["training"]
    assert kept["recorded"] == {"improve": None, "scopes": None, "gemma": None}
    assert [row["step"] for row in kept["live"]] == [0, 1, 2]
    assert all(row["held_out_reward"] is not None for row in kept["live"])

    # The monitor reads what train() wrote, not an imitation of it
    run = folder / TrainParameters(**TINY).run.name
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    read = read_run(run)
    assert read.status == "completed"
    steps, rewards = read.metrics["reward_mean"]
    assert (list(steps), list(rewards)) == ([0, 1], [line["reward_mean"] for line in lines])
    assert read.metrics["grad_norm"][1] == tuple(line["grad_norm"] for line in lines)
    assert {"loss", "entropy_mean", "tokens_per_second", "seconds.replay"} <= set(read.metrics)
    assert "completed" in widgets.RunMonitor(run).html()

    # The cell again: nothing is trained twice
    monkeypatch.setenv(RUN_FOLDER_VARIABLE, str(folder))
    before = (run / "metrics.jsonl").read_bytes()
    assert [dict(row) for row in train_live(TrainParameters(**TINY))] == kept["live"]
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    "wrong",
    [{"group_size": 1}, {"scope": "all"}, {"learning_rate": 0.0}, {"scope": "prefix_frozen"}, {"learning_rte": 1.0}],
)
def test_wrong_parameters_stop_before_any_work(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        TrainParameters(**TINY | wrong)


@pytest.mark.parametrize("name", RECORDINGS)
def test_the_shipped_recordings_hold_what_the_notebook_reads(name: str) -> None:
    path = RUNS_FOLDER / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{name}.json is not recorded yet: python -m workbench.training_study")
    recording = load_recording(path)
    assert recording.origin == "measured"
    for arm in arm_results(recording):
        assert all(0.0 <= value <= 1.0 for value in (*arm.before.values(), *arm.after.values()))
        assert arm.step_seconds > 0.0
