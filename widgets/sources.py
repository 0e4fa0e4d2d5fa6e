"""Where the widgets' default records come from: published numbers, shipped recordings, and the planner."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from workbench.errors import InvalidInputError
from workbench.planner.sources import read_data
from workbench.recordings import COLUMNS, FORMAT, RUNS_FOLDER, Recording, load_recording

GB = 1e9
MB = 1e6


def recordings_of(kind: str, folder: Path | None = None) -> list[Recording]:
    """The recordings of one kind in a folder (default: `data/runs/`), in order of their files' names; may be empty."""
    if kind not in COLUMNS:
        raise InvalidInputError(f"recording kind {kind!r} is not one of {', '.join(COLUMNS)}")
    found = []
    for path in sorted((folder or RUNS_FOLDER).glob("*.json")):
        head = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(head, dict) and head.get("format") == FORMAT and head.get("kind") == kind:
            found.append(load_recording(path))
    return found


def missing_note(kind: str) -> str:
    """What a widget says when there is no recording to show."""
    return f"No recording of kind {kind} is in data/runs, so nothing measured here is shown."


def source_notes(recordings: Sequence[Recording]) -> tuple[str, ...]:
    """Where measured series come from, one line a recording."""
    return tuple(
        f"Measured: {recording.title} ({recording.command}). {'; '.join(recording.notes)}".strip()
        for recording in recordings
    )


@cache
def published() -> dict[str, Any]:
    """`data/published.json`."""
    return read_data("published.json")
