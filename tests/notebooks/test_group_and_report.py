"""notebooks/30_group_serialization.ipynb and 90_report.ipynb: a small run, and the report of it."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from workbench.errors import InvalidInputError
from workbench.publish import find_external_addresses, github_notebook
from workbench.records import read_record, write_record
from workbench.report_study import ReportParameters, evidence_rows, load_run
from workbench.run import run_notebook

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
SMALL = {
    "family": "qwen3",
    "prompt_tokens": "96",
    "response_tokens": "24",
    "chunk_tokens": "32",
    "group_sizes": "[1, 2, 4]",
}


@pytest.fixture(scope="module")
def group_run(tmp_path_factory):
    """One run at toy size."""
    runs = tmp_path_factory.mktemp("runs")
    record, folder = run_notebook(NOTEBOOKS / "30_group_serialization.ipynb", SMALL, runs=runs)
    assert record.status == "completed", record.error
    return folder


def test_serial_replay_stays_flat_where_held_graphs_grow(group_run):
    record = read_record(group_run / "run.json")
    assert record["evidence"]["level"] == 4
    peaks = record["memory"]["peak_bytes_by_way"]
    # Measured on Linux x86-64: 0.1 % for serial replay from G = 2 to 4, 60 % and 90 % for the others.
    assert peaks["serial_replay"]["full"]["4"] / peaks["serial_replay"]["full"]["2"] < 1.01
    for way in ("all_graphs", "conventional"):
        assert peaks[way]["full"]["4"] / peaks[way]["full"]["2"] > 1.3


def test_the_page_is_interactive_small_and_alone(group_run):
    page = (group_run / "30_group_serialization.html").read_text()
    assert find_external_addresses(page) == []
    assert len(page) <= 2_500_000
    assert page.count('<div id="lsw-') == page.count("show(document.getElementById(") == 3
    node = nbformat.read(group_run / "30_group_serialization.ipynb", as_version=4)
    kinds = {kind for cell in node.cells for output in cell.get("outputs", []) for kind in output.get("data", {})}
    assert "application/vnd.jupyter.widget-view+json" not in kinds, "its kernel is gone"
    safe = github_notebook(node)
    text = nbformat.writes(safe)
    assert text.count('"image/png"') == 3
    assert "<script" not in text


def test_a_report_names_every_level(group_run, tmp_path):
    record, folder = run_notebook(NOTEBOOKS / "90_report.ipynb", {"run_folder": str(group_run)}, runs=tmp_path)
    assert record.status == "completed", record.error
    assert record.results["report"] == {"of": group_run.name, "status": "completed", "reported_level": 4}
    page = (folder / "90_report.html").read_text()
    assert find_external_addresses(page) == []
    assert "3 ranks agree" in page
    assert "no check of this level ran" in page
    rows = evidence_rows(load_run(group_run))
    assert [row[0][0] for row in rows] == ["1", "4", "2", "3"]


def test_a_folder_that_is_no_run_is_refused(tmp_path, monkeypatch):
    with pytest.raises(InvalidInputError, match=r"no run\.json there"):
        ReportParameters(run_folder=str(tmp_path)).folder()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="runs/ holds no run"):
        ReportParameters(run_folder="").folder()
    write_record(tmp_path / "runs" / "a" / "run.json", {"name": "a", "status": "completed"})
    assert ReportParameters(run_folder="").folder() == Path("runs/a")
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InvalidInputError, match="not a run's record"):
        load_run(tmp_path)
