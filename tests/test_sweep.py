"""Sweeps: which texts make one, every run is checked first, and what a failure or an interruption leaves."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.test_run import make_notebook
from workbench.errors import InvalidInputError
from workbench.notebook_parameters import expand_sweep
from workbench.publish import find_external_addresses
from workbench.records import RunRecord, read_record
from workbench.run import main
from workbench.sweep import run_sweep, sweep_status


@pytest.mark.parametrize(
    ("texts", "listed", "runs"),
    [
        ({"size": "2,4, 8"}, {}, [{"size": "2"}, {"size": "4"}, {"size": "8"}]),
        ({"rate": "1e-5,1e-4"}, {}, [{"rate": "1e-5"}, {"rate": "1e-4"}]),
        ({"flag": "true,false"}, {}, [{"flag": "true"}, {"flag": "false"}]),
        ({"size": "1,2", "rate": "1"}, {}, [{"size": "1", "rate": "1"}, {"size": "2", "rate": "1"}]),
        ({"name": "a,b"}, {}, [{"name": "a,b"}]),  # text may hold commas
        ({"items": "[1, 2]"}, {}, [{"items": "[1, 2]"}]),
        ({"size": "a,b"}, {}, [{"size": "a,b"}]),  # no numbers: the notebook's validation refuses it
        ({}, {"name": "a, b"}, [{"name": "a"}, {"name": "b"}]),
        ({"size": "1,2"}, {"name": "a,b"}, [{"size": s, "name": n} for s in "12" for n in "ab"]),
        ({}, {}, [{}]),
    ],
)
def test_numbers_between_commas_are_swept(tmp_path, texts, listed, runs):
    assert expand_sweep(make_notebook(tmp_path), texts, listed) == runs


@pytest.mark.parametrize(
    ("texts", "listed", "message"),
    [
        ({"sise": "1,2"}, {}, r"no parameter 'sise': did you mean size\?"),
        ({}, {"nane": "a,b"}, r"no parameter 'nane': did you mean name\?"),
        ({"size": "1,2"}, {"size": "3"}, "with -p and with --sweep"),
        ({"size": "1,,2"}, {}, "an empty value"),
        ({"size": "1,2,1"}, {}, "listed twice"),
        ({"size": ",".join(map(str, range(300)))}, {}, "300 runs, more than 256"),
    ],
)
def test_a_wrong_sweep_is_an_error_before_anything_starts(tmp_path, texts, listed, message):
    with pytest.raises(InvalidInputError, match=message):
        expand_sweep(make_notebook(tmp_path), texts, listed)


def test_a_damaged_notebook_is_named(tmp_path):
    path = tmp_path / "bad.ipynb"
    path.write_text("{")
    with pytest.raises(InvalidInputError, match=r"bad\.ipynb: not a readable notebook"):
        expand_sweep(path, {})


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.links: list[str] = []
        self.inside = True
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "a":
            self.links.append(dict(attrs)["href"])

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "table"

    def handle_data(self, data):
        if self.inside and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def test_a_sweep_leaves_a_page_that_compares(tmp_path, capsys):
    notebook = make_notebook(
        tmp_path,
        "assert size != 3, 'not three'",
        "from workbench.records import save_results\nsave_results('toy', {'square': size**2, 'same': 1})",
    )
    assert main([str(notebook), "-p", "size", "2,3", "--runs", str(tmp_path / "runs")]) == 1
    (folder,) = (tmp_path / "runs").iterdir()
    text = (folder / "index.html").read_text()
    page = _Page(text)
    assert page.rows[0] == ["run", "size", "status", "seconds", "toy.square", "toy.same"]
    assert [row[1:3] for row in page.rows[1:]] == [["2", "completed"], ["3", "failed"]]
    assert page.rows[1][4:] == ["4", "1"]
    assert page.rows[2][4:] == ["–", "–"]
    assert "not three" in text
    assert all((folder / link).is_file() for link in page.links)
    assert len(page.links) == 2
    assert find_external_addresses(text) == []
    written = read_record(folder / "sweep.json")
    assert written["status"] == "failed"
    assert [run["parameters"] for run in written["runs"]] == [{"size": 2}, {"size": 3}]
    assert "failed: 1 of 2 runs completed" in capsys.readouterr().out


def test_an_interrupted_sweep_keeps_what_is_done(tmp_path):
    statuses = iter(["completed", "interrupted", "completed"])

    def run_one(notebook: Path, texts, *, runs: Path, argv):
        record = RunRecord(
            name="toy", status=next(statuses), parameters={"size": int(texts["size"])}, seconds={"total": 1}
        )
        return record, runs / f"toy-{texts['size']}"

    done, folder = run_sweep(run_one, tmp_path / "toy.ipynb", [{"size": s} for s in "123"], runs=tmp_path)
    assert [run.record.status for run in done] == ["completed", "interrupted"]
    assert sweep_status(done, 3) == "interrupted"
    assert read_record(folder / "sweep.json")["status"] == "interrupted"
    assert "2 of 3 runs" in (folder / "index.html").read_text()
