"""Recorded tables: one set of columns a kind, whole files, and one clear error for a damaged one."""

from __future__ import annotations

import json

import pytest

from workbench.errors import InvalidInputError
from workbench.recordings import COLUMNS, FORMAT, RUNS_FOLDER, Recording, load_recording, save_recording

ROWS = [dict.fromkeys(COLUMNS["reach"], 1) | {"model": name} for name in ("a", "b", "a")]


def test_a_recording_survives_its_file(tmp_path):
    path = tmp_path / "reach.json"
    saved = save_recording(path, "reach", ROWS, title="Reach", command="python -m x", notes=["one"])
    assert load_recording(path) == saved
    assert saved.origin == "measured"
    assert saved.values("model") == ["a", "b"]
    assert len(saved.select(model="a")) == 2
    with pytest.raises(InvalidInputError, match="no column \\['scoop'\\]"):
        saved.select(scoop="full")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "reech"}, "kind 'reech'"),
        ({"origin": "guessed"}, "origin 'guessed'"),
        ({"rows": []}, "no rows"),
        ({"rows": [{"model": "a"}]}, "row 0: missing"),
        ({"rows": [ROWS[0] | {"colour": 1}]}, "unknown \\['colour'\\]"),
    ],
)
def test_wrong_tables_are_refused(change, message):
    with pytest.raises(InvalidInputError, match=message):
        Recording(**({"kind": "reach", "origin": "measured", "title": "t", "command": "c", "rows": ROWS} | change))


@pytest.mark.parametrize("text", ["", "[1]", "{}", json.dumps({"format": FORMAT}), json.dumps({"format": "other"})])
def test_damaged_files_name_themselves(tmp_path, text):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(InvalidInputError, match=r"bad\.json"):
        load_recording(path)


def test_shipped_recordings_load():
    for path in sorted(RUNS_FOLDER.glob("*.json")):
        if json.loads(path.read_text()).get("format") == FORMAT:
            assert load_recording(path).provenance["versions"]["torch"], path
