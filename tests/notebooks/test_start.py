"""notebooks/00_start.ipynb: as committed it is clean, and at toy size it runs and says what it should."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

from workbench.publish import find_external_addresses
from workbench.records import read_record
from workbench.run import run_notebook

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
START = NOTEBOOKS / "00_start.ipynb"


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_committed_notebooks_are_essays(path):
    node = nbformat.read(path, as_version=4)
    nbformat.validate(node)
    code = [cell for cell in node.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code), "strip outputs before committing"
    assert "widgets" not in node.metadata
    assert [cell for cell in code if "parameters" in cell.metadata.get("tags", [])] == code[:1]
    assert all(before.cell_type == "markdown" for before, cell in pairwise(node.cells) if cell.cell_type == "code"), (
        "a piece of prose before each piece of code"
    )
    for cell in code[1:]:
        lines = [line for line in cell.source.splitlines() if line and not line.startswith(("from ", "import "))]
        assert len(lines) <= 8, cell.source
        assert not any(line.lstrip().startswith(("def ", "class ", "async def ")) for line in lines), cell.source


@pytest.fixture(scope="module")
def start_run(tmp_path_factory):
    """One run at toy size."""
    record, folder = run_notebook(START, {"setting": "tiny"}, runs=tmp_path_factory.mktemp("runs"))
    assert record.status == "completed", record.error
    return folder, read_record(folder / "run.json")


def test_the_record_reaches_the_level_that_was_checked(start_run):
    _, record = start_run
    assert record["evidence"]["level"] == 4
    assert [check["level"] for check in record["evidence"]["checks"]] == [1, 2, 4]
    assert all(check["passed"] for check in record["evidence"]["checks"])
    assert record["seed"] == 0
    assert {"load model", "capture", "sample", "check against autograd", "total"} <= record["seconds"].keys()


def test_memory_does_not_grow_with_the_group(start_run):
    _, record = start_run
    peaks = record["memory"]["peak_bytes_by_scope_and_group_size"]
    for scope in ("response_only", "full"):
        assert list(peaks[scope]) == ["1", "2", "4", "8"]
        # Measured on Linux x86-64: 0.4 % and 0.004 %; one more graph would be tens of per cent.
        assert peaks[scope]["8"] / peaks[scope]["2"] < 1.01
    assert peaks["full"]["8"] > peaks["response_only"]["8"]
    assert record["memory"]["peak_resident_bytes"] < 8e9


def test_the_omitted_term_and_the_step_are_measured(start_run):
    _, record = start_run
    results = record["results"]["start"]
    omitted = results["omitted_prompt_term"]
    assert omitted["cosine"] < 0.99
    assert omitted["relative_l2"] > 0.1
    assert len(set(results["rewards"])) > 1, "a group of equal rewards would teach nothing"
    # One step in the direction of the advantages: best and worst response move apart, in both scopes.
    best, worst = (results["rewards"].index(pick(results["rewards"])) for pick in (max, min))
    for changes in results["logprob_changes"].values():
        assert changes[best] > 0 > changes[worst]


def test_the_page_shows_its_figures_without_a_network(start_run):
    folder, _ = start_run
    page = (folder / "00_start.html").read_text()
    assert find_external_addresses(page) == []
    assert page.count('<div class="longstraw-figure">') >= 3
    assert "of which the captured prompt" in page
    node = nbformat.read(folder / "00_start.ipynb", as_version=4)
    errors = [o for c in node.cells for o in c.get("outputs", []) if o.get("name") == "stderr"]
    assert errors == [], "warnings do not belong on a page that people share"
    assert (folder / "00_start.ipynb").stat().st_size < 500_000
