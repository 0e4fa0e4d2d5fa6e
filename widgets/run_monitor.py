"""A run folder, live or finished: its state and the curves of its metrics."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import traitlets

from widgets.base import Control, Widget, checked
from widgets.view import Axis, Mark, Panel, Series, Table, View, number
from workbench.errors import InvalidInputError
from workbench.records import read_record

METRICS_FILE = "metrics.jsonl"
PREFERRED = ("reward_mean", "grad_norm", "loss")
STEP_NAMES = ("step", "update")
NO_METRIC = "no metric"
MOST_POINTS = 1000  # per curve on the page; a longer run is thinned evenly, and says so


@dataclass(frozen=True, kw_only=True)
class MonitorRecord:
    """What a run folder held when it was read. metrics: name -> (steps, values), None where a value is missing.

    summaries: name -> last, lowest, highest and number of all values, also those that are not among the shown.
    """

    name: str
    status: str
    started_at: str
    error: str | None
    facts: tuple[tuple[str, str], ...]
    metrics: Mapping[str, tuple[tuple[float, ...], tuple[float | None, ...]]]
    summaries: Mapping[str, tuple[float, float, float, int]]
    notes: tuple[str, ...] = ()


def read_run(folder: Path) -> MonitorRecord:
    """Reads `run.json` and `metrics.jsonl` (one JSON object a line) of a run folder; either may be missing.

    A last line that is still being written is left for the next reading.
    Raises InvalidInputError for a missing folder, one that holds neither file, and a damaged file.
    """
    if not folder.is_dir():
        raise InvalidInputError(f"no run folder at {folder}")
    run, lines = folder / "run.json", folder / METRICS_FILE
    if not run.is_file() and not lines.is_file():
        raise InvalidInputError(f"{folder} holds neither run.json nor {METRICS_FILE}: it is no run folder")
    try:
        record = read_record(run) if run.is_file() else {}
    except json.JSONDecodeError as error:
        raise InvalidInputError(f"{run}: not readable ({error})") from error
    rows = _rows(lines) if lines.is_file() else []
    metrics, notes = _curves(rows)
    if not metrics:
        notes.append(f"No numbers in {METRICS_FILE}." if lines.is_file() else f"The run has no {METRICS_FILE}.")
    return MonitorRecord(
        name=str(record.get("name", folder.name)),
        status=str(record.get("status", "not recorded")),
        started_at=str(record.get("started_at", "")),
        error=record.get("error"),
        facts=tuple(_facts(record)),
        metrics=metrics,
        summaries=_summaries(rows),
        notes=tuple(notes),
    )


def _rows(path: Path) -> list[dict[str, float]]:
    """The numbers of every line."""
    rows = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number_of, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            rows.append(dict(_flat(json.loads(line))))
        except (json.JSONDecodeError, AttributeError) as error:
            if number_of == len(lines) - 1:  # no line end yet: being written
                break
            raise InvalidInputError(f"{path}, line {number_of + 1}: not a JSON object ({error})") from error
    return rows


def _metric_names(rows: Sequence[Mapping[str, float]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row if name not in STEP_NAMES))


def _curves(
    rows: Sequence[Mapping[str, float]],
) -> tuple[dict[str, tuple[tuple[float, ...], tuple[float | None, ...]]], list[str]]:
    """Steps and values by name, thinned evenly, the last update always among them; and a note if they are."""
    every = -(-len(rows) // MOST_POINTS) if rows else 1
    shown = sorted({*range(0, len(rows), every), len(rows) - 1}) if rows else []
    counted = next((name for name in STEP_NAMES if all(name in row for row in rows)), None)
    steps = tuple(index if counted is None else rows[index][counted] for index in shown)
    notes = []
    if every > 1:
        notes = [f"One of every {every} of {len(rows)} updates is shown, and means are of those; the table is of all."]
    return {name: (steps, tuple(rows[at].get(name) for at in shown)) for name in _metric_names(rows)}, notes


def _summaries(rows: Sequence[Mapping[str, float]]) -> dict[str, tuple[float, float, float, int]]:
    found = {name: [row[name] for row in rows if name in row] for name in _metric_names(rows)}
    return {name: (known[-1], min(known), max(known), len(known)) for name, known in found.items()}


def _flat(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Numbers of a line by name, those of inner objects as outer.inner."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


def _facts(record: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name in ("started_at", "finished_at", "device", "seed"):
        if record.get(name) not in (None, ""):
            yield name.replace("_", " "), str(record[name])
    if "total" in record.get("seconds", {}):
        yield "seconds", number(record["seconds"]["total"])
    if record.get("evidence", {}).get("checks"):
        yield "evidence level", str(record["evidence"]["level"])
    for name, value in record.get("parameters", {}).items():
        yield f"parameter {name}", str(value)


class RunMonitor(Widget):
    """Two metrics of a run over its steps, and its state. `refresh()` reads the folder again, `follow()` keeps on."""

    title = "Run monitor"
    script = "run_monitor"
    record_type = MonitorRecord

    metric = traitlets.Unicode("").tag(sync=True)
    second_metric = traitlets.Unicode("").tag(sync=True)
    window = traitlets.Int(1).tag(sync=True)
    _check = checked("metric", "second_metric", "window")

    def __init__(self, folder: str | Path, **values: Any) -> None:
        self.folder = Path(folder)
        self._stop = threading.Event()
        super().__init__(read_run(self.folder), **values)

    @classmethod
    def controls(cls, record: MonitorRecord) -> tuple[Control, ...]:
        names = tuple(record.metrics) or (NO_METRIC,)
        windows = (1, 3, 5, 10, 20, 50)
        return (
            Control(name="metric", label="Metric", values=names, kind="choice"),
            Control(name="second_metric", label="Second metric", values=names, kind="choice"),
            Control(
                name="window",
                label="Mean over",
                values=windows,
                texts=tuple(f"{n} updates" if n > 1 else "1 update" for n in windows),
            ),
        )

    @classmethod
    def defaults(cls, record: MonitorRecord) -> dict[str, Any]:
        names = list(record.metrics) or [NO_METRIC]
        first, second, *_ = [*(name for name in PREFERRED if name in names), *names, names[0]]
        return {"metric": first, "second_metric": second, "window": 1}

    def refresh(self) -> None:
        """Reads the folder again; the picture follows."""
        record = read_run(self.folder)
        if record == self.record:
            return
        known = self._by_name["metric"].values
        self._by_name = {control.name: control for control in self.controls(record)}
        chosen = {} if known == self._by_name["metric"].values else self.defaults(record)
        kept = {name: getattr(self, name) for name in chosen if getattr(self, name) in self._by_name[name].values}
        with self.hold_sync():
            self.record = record
            self._controls = [control.plain() for control in self._by_name.values()]
            for name, value in (chosen | kept).items():
                setattr(self, name, value)

    def follow(self, seconds: float = 2.0) -> RunMonitor:
        """Refreshes in the background until the run is over or `stop()` is called."""
        if not seconds > 0:
            raise InvalidInputError(f"follow(seconds={seconds!r}): a pause between readings must be > 0")
        self._stop.clear()

        def work() -> None:
            while not self._stop.wait(seconds):
                self.refresh()
                if self.record.status != "running":
                    return

        threading.Thread(target=work, name="run monitor", daemon=True).start()
        return self

    def stop(self) -> None:
        """Ends `follow`."""
        self._stop.set()

    @staticmethod
    def view_of(record: MonitorRecord, state: Mapping[str, Any]) -> View:
        window, panels, rows = state["window"], [], []
        for name, color in ((state["metric"], "blue"), (state["second_metric"], "orange")):
            steps, values = record.metrics.get(name, ((), ()))
            series = []
            if steps:
                shown = [_mean(values, at, window) for at in range(len(values))]
                label = name if window == 1 else f"{name}, mean of {window}"
                series.append(Series(name=label, origin="measured", color=color, x=list(steps), y=shown))
                rows.append([name, "measured", *map(number, record.summaries[name])])
            marks = [Mark(axis="x", value=steps[-1], label=f"last: {number(steps[-1])}")] if steps else []
            panels.append(
                Panel(title=name, x=Axis(label="update", ticks="whole"), y=Axis(label=name), series=series, marks=marks)
            )
        rows += [[name, "–", value, "–", "–", "–"] for name, value in record.facts]
        error = f" Error: {record.error}" if record.error else ""
        latest = next((steps[-1] for steps, _ in record.metrics.values() if steps), None)
        reached = "no update recorded" if latest is None else f"update {number(latest)} was the last recorded"
        return View(
            says=f"{record.name} is {record.status}; {reached}.{error}",
            panels=panels,
            table=Table(
                caption="Latest values", headings=["what", "origin", "last", "lowest", "highest", "count"], rows=rows
            ),
            notes=record.notes,
        )


def _mean(values: tuple[float | None, ...], at: int, window: int) -> float | None:
    """Mean of the known values among the last `window`."""
    known = [value for value in values[max(0, at + 1 - window) : at + 1] if value is not None]
    return sum(known) / len(known) if known else None
