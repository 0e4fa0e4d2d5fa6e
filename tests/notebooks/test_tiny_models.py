"""notebooks/45_tiny_models.ipynb: it runs with a few steps, needs no network, and leaves the shipped models alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from workbench import InvalidInputError
from workbench.model_sources import BUNDLED_FOLDER
from workbench.publish import find_external_addresses
from workbench.records import read_record
from workbench.run import run_notebook
from workbench.tiny_models.study import TinyModelParameters

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "45_tiny_models.ipynb"
PARAMETERS: dict[str, Any] = {
    "name": "tiny-glm-dsa",
    "max_steps": 2,
    "prompt_tokens": [400],
    "num_tasks": 2,
    "seed": 1,
}


def test_it_runs_and_keeps_what_it_shows(tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in BUNDLED_FOLDER.rglob("*")}
    texts = {name: str(value) for name, value in PARAMETERS.items()}
    record, folder = run_notebook(NOTEBOOK, texts, runs=tmp_path)
    assert record.status == "completed", record.error
    assert find_external_addresses((folder / "45_tiny_models.html").read_text(encoding="utf-8")) == []
    results = read_record(folder / "run.json")["results"]["tiny_models"]
    assert [point["stage"] for point in results["curve"]] == ["copying", "curriculum", "cooldown", "index", "sparse"]
    assert {found["kind"] for found in results["accuracies"]} == {"needle", "multi_key"}
    assert {path: path.stat().st_mtime_ns for path in BUNDLED_FOLDER.rglob("*")} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [({"max_steps": -1}, "greater than or equal to 0"), ({"prompt_tokens": []}, "at least 1"), ({"nam": "x"}, "Extra")],
)
def test_wrong_parameters_stop_the_notebook(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TinyModelParameters(**PARAMETERS | change)


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(InvalidInputError, match="no bundled model is called 'tiny'; there are tiny-hybrid"):
        TinyModelParameters(**PARAMETERS | {"name": "tiny"}).recipe()
