"""Run records: whole or not at all, plain JSON, and nothing about the person or the place."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.errors import InvalidInputError
from workbench.records import (
    RunRecord,
    gather_results,
    git_state,
    plain,
    provenance,
    read_record,
    save_results,
    write_record,
)

ROOT = Path(__file__).resolve().parents[1]


def test_records_are_written_whole_and_hold_only_json(tmp_path):
    path = tmp_path / "run.json"
    record = RunRecord(
        name="x", status="failed", results={"a": torch.tensor([1.5, float("nan")]), "b": Path("c"), "d": {1}}
    )
    write_record(path, record)
    assert json.loads(path.read_text())["results"] == {"a": [1.5, None], "b": "c", "d": [1]}
    loop: list = []
    loop.append(loop)
    with pytest.raises(RecursionError):
        write_record(path, loop)
    assert read_record(path)["name"] == "x", "a failed write must leave the old file"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(InvalidInputError, match="status='done'"):
        RunRecord(name="x", status="done")


def test_outside_a_run_results_go_nowhere(monkeypatch):
    monkeypatch.delenv("LONGSTRAW_RUN_DIR", raising=False)
    monkeypatch.setattr("workbench.records.write_record", lambda *_: pytest.fail("wrote a record"))
    save_results("toy", {"a": 1})


def test_provenance_names_no_place_and_no_person():
    text = json.dumps(provenance())
    assert str(ROOT) not in text
    assert str(Path.home()) not in text


def test_a_record_does_not_make_its_own_checkout_dirty(monkeypatch, tmp_path):
    (tmp_path / "workbench").mkdir()
    kept, other = tmp_path / "runs.json", tmp_path / "other.py"
    kept.write_text("1")
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "x"]):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True)
    monkeypatch.setattr("workbench.records.__file__", str(tmp_path / "workbench" / "records.py"))
    assert git_state()["dirty"] is False
    kept.write_text("2")
    assert git_state()["dirty"] is True
    assert git_state(leave_out=kept)["dirty"] is False
    assert git_state(leave_out=tmp_path.parent / "elsewhere.json")["dirty"] is True
    other.write_text("3")
    assert git_state(leave_out=kept)["dirty"] is True


def test_inside_a_run_results_are_left_for_the_runner(monkeypatch, tmp_path):
    monkeypatch.setenv("LONGSTRAW_RUN_DIR", str(tmp_path))
    save_results("b", {"x": 1})
    save_results("a", {"y": torch.ones(2)})
    assert gather_results(tmp_path) == {"a": {"y": [1.0, 1.0]}, "b": {"x": 1}}


def test_numbers_of_numpy_stay_numbers() -> None:
    given = {
        "loss": np.float32(1.5),
        "n": np.int64(3),
        "curve": np.arange(3, dtype="float32"),
        "nan": np.float32("nan"),
    }
    assert plain(given) == {"loss": 1.5, "n": 3, "curve": [0.0, 1.0, 2.0], "nan": None}


@pytest.mark.parametrize(
    ("name", "results", "message"),
    [
        ("a/b", {}, "without folders"),
        ("", {}, "without folders"),
        ("a", [1], "results are a list"),
        ("a", {"seconds": 12.5}, "'seconds' belongs to the record"),
        ("a", {"seconds": {"fit": {"inner": 1.0}}}, r"seconds\['fit'\]=.* is no number"),
        ("a", {"memory": 3}, "'memory' belongs to the record"),
    ],
)
def test_results_that_would_not_come_back_are_refused_at_once(name: str, results: object, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        save_results(name, results)  # type: ignore[arg-type]
