"""What notebooks/90_report.ipynb does between its prose: a run folder, read into tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from workbench.errors import InvalidInputError
from workbench.records import RunRecord, read_record

LEVELS = {
    1: "executed",
    2: "forward fidelity",
    3: "ranks agree",
    4: "full-gradient parity",
}


class ReportParameters(BaseModel):
    """The parameters of notebooks/90_report.ipynb; an unknown name, or a value that does not fit, is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run_folder: str

    def folder(self) -> Path:
        """The run folder; with an empty name, the newest under runs/. Raises InvalidInputError if there is none."""
        if self.run_folder:
            folder = Path(self.run_folder)
            if not (folder / "run.json").is_file():
                raise InvalidInputError(f"run_folder={self.run_folder!r}: no run.json there; name a folder under runs/")
            return folder
        own = [path.parent for path in Path("runs").glob("*/run.json") if not path.parent.name.startswith("90_report")]
        if not own:
            raise InvalidInputError(
                "run_folder is empty and runs/ holds no run: run a notebook first, or name a folder"
            )
        return max(own, key=lambda folder: (folder / "run.json").stat().st_mtime)


def load_run(folder: Path) -> RunRecord:
    """The record of a run folder. Raises InvalidInputError if it is damaged or of another layout."""
    try:
        content = read_record(folder / "run.json")
        known = {name: content[name] for name in RunRecord.__dataclass_fields__ if name in content}
        return RunRecord(**known)
    except (OSError, ValueError, TypeError) as error:
        raise InvalidInputError(f"{folder / 'run.json'}: not a run's record ({error})") from error


def summary_rows(record: RunRecord) -> list[list[Any]]:
    """What ran, how it ended, and with which versions."""
    versions, git = record.provenance.get("versions", {}), record.provenance.get("git", {})
    machine = record.provenance.get("machine", {})
    rows: list[list[Any]] = [
        ["run", record.name],
        ["status", record.status],
        ["error", record.error or "none"],
        ["started", record.started_at],
        ["finished", record.finished_at or "not recorded"],
        ["seconds in all", record.seconds.get("total", 0.0)],
        ["device", record.device or "not recorded"],
        ["seed", "not recorded" if record.seed is None else record.seed],
        ["revision", f"{git.get('revision')}{', with changes' if git.get('dirty') else ''}"],
        ["processors", machine.get("cpus", "not recorded")],
    ]
    rows += [[f"{name} version", versions[name]] for name in ("torch", "transformers", "peft") if versions.get(name)]
    return rows + [[f"parameter {name}", str(value)] for name, value in record.parameters.items()]


def evidence_rows(record: RunRecord) -> list[list[Any]]:
    """Every check that ran, with its measured figure, and a line for each level that none reached."""
    checks = record.evidence.get("checks", [])
    rows: list[list[Any]] = [
        [f"{c['level']} {LEVELS[c['level']]}", c["what"], c.get("measured", ""), c.get("bound", ""), c["passed"]]
        for c in checks
    ]
    reached = {check["level"] for check in checks}
    return rows + [
        [f"{n} {name}", "no check of this level ran", "", "", False] for n, name in LEVELS.items() if n not in reached
    ]


def seconds_rows(record: RunRecord) -> list[list[Any]]:
    """Stages by time, the longest first; share of the whole in per cent."""
    total = record.seconds.get("total", 0.0)
    stages = sorted(((s, t) for s, t in record.seconds.items() if s != "total"), key=lambda pair: -pair[1])
    return [[stage, seconds, 100 * seconds / total if total else 0.0] for stage, seconds in stages] or [
        ["total", total, 100.0]
    ]


def number_rows(values: Mapping[str, Any]) -> list[list[Any]]:
    """Every single number of nested results, by dotted name; a row that says so if there is none."""
    return [list(pair) for pair in _numbers(values)] or [["no number was recorded", ""]]


def _numbers(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _numbers(item, f"{prefix}{name}.")
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield f"{prefix}{name}", item
