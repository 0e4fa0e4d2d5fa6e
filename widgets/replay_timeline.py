"""One step as it ran: live bytes by ledger over time, the walk over the sequence, and how many graphs are alive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import traitlets

from widgets.base import Control, Widget, checked
from widgets.sources import MB, missing_note, recordings_of, source_notes
from widgets.view import Axis, Mark, Panel, Series, Table, View, distinct, number
from workbench.recordings import Recording

LEDGERS = {
    "rows": "blue",
    "carry": "sky",
    "gradient_pages": "purple",
    "gradients": "yellow",
    "logits": "green",
    "optimizer": "grey",
    "graph": "orange",
}
GHOSTS = {
    "all_graphs": "every response's graph held",
    "conventional": "conventional autograd, all graphs held",
    "none": "nothing beside it",
}
MOMENTS = tuple(range(0, 101, 2))  # per cent of the step


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One step: at each of `seconds` its stage, the first token of the segment in work, graphs, bytes by ledger."""

    case: str
    origin: str
    mode: str
    scope: str
    seconds: tuple[float, ...]
    stages: tuple[str, ...]
    positions: tuple[int, ...]
    graphs_alive: tuple[int, ...]
    ledgers: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class TimelineRecord:
    """One serial replay per case and scope, and the ways that hold all graphs, as one total each."""

    traces: tuple[Trace, ...]
    notes: tuple[str, ...] = ()


def measured_traces(recordings: Sequence[Recording]) -> Iterator[Trace]:
    """Rows of `timeline` recordings, one trace for each model, way and scope."""
    for recording in recordings:
        groups: dict[tuple[str, str, str], dict[float, list[Mapping[str, Any]]]] = {}
        for row in recording.rows:
            samples = groups.setdefault((row["model"], row["mode"], row["scope"]), {})
            samples.setdefault(row["seconds"], []).append(row)
        for (model, mode, scope), samples in groups.items():
            at = sorted(samples)
            names = distinct(row["ledger"] for seconds in at for row in samples[seconds])
            sizes = {s: {row["ledger"]: row["live_bytes"] for row in samples[s]} for s in at}
            first = [samples[seconds][0] for seconds in at]
            yield Trace(
                case=f"{model}, measured here",
                origin=recording.origin,
                mode=mode,
                scope=scope,
                seconds=tuple(at),
                stages=tuple(row["stage"] for row in first),
                positions=tuple(row["position"] for row in first),
                graphs_alive=tuple(row["graphs_alive"] for row in first),
                ledgers={name: tuple(sizes[s].get(name, 0) for s in at) for name in names},
            )


def timeline_record(recordings: Sequence[Recording]) -> TimelineRecord:
    """What was measured."""
    return TimelineRecord(
        traces=tuple(measured_traces(recordings)), notes=source_notes(recordings) or (missing_note("timeline"),)
    )


@cache
def shipped_record() -> TimelineRecord:
    """`timeline_record` of the shipped recordings."""
    return timeline_record(recordings_of("timeline"))


class ReplayTimeline(Widget):
    """Live bytes, place in the sequence and graphs alive over one step, with a ghost that holds every graph."""

    title = "Replay timeline: one step as it ran"
    script = "replay_timeline"
    record_type = TimelineRecord

    moment = traitlets.Int(50).tag(sync=True)
    scope = traitlets.Unicode("full").tag(sync=True)
    ghost = traitlets.Unicode("all_graphs").tag(sync=True)
    case = traitlets.Unicode("").tag(sync=True)
    _check = checked("moment", "scope", "ghost", "case")

    def __init__(self, record: TimelineRecord | None = None, **values: Any) -> None:
        super().__init__(shipped_record() if record is None else record, **values)

    @classmethod
    def controls(cls, record: TimelineRecord) -> tuple[Control, ...]:
        cases = tuple(distinct(t.case for t in record.traces)) or ("nothing recorded",)
        return (
            Control(name="moment", label="Moment of the step", values=MOMENTS, texts=tuple(f"{m} %" for m in MOMENTS)),
            Control(name="scope", label="Gradient scope", values=("full", "response_only"), kind="choice"),
            Control(name="ghost", label="Beside it", values=tuple(GHOSTS), texts=tuple(GHOSTS.values()), kind="choice"),
            Control(name="case", label="Model", values=cases, kind="choice"),
        )

    @staticmethod
    def view_of(record: TimelineRecord, state: Mapping[str, Any]) -> View:
        own = {t.mode: t for t in record.traces if t.case == state["case"] and t.scope == state["scope"]}
        serial, ghost = own.get("serial_replay"), own.get(state["ghost"])
        if serial is None:
            nothing = Panel(title="Live bytes", x=Axis(label="seconds"), y=Axis(label="MB"), series=[])
            table = Table(caption="No step", headings=["ledger", "origin", "MB"], rows=[])
            return View(says="No step is recorded for this choice.", panels=[nothing], table=table, notes=record.notes)
        at = _index(serial, state["moment"])
        now = serial.seconds[at]
        name = GHOSTS[state["ghost"]]
        marks = [Mark(axis="x", value=now, label=f"{number(now, 3)} s")]
        areas = [
            Series(
                name=ledger.replace("_", " "),
                origin=serial.origin,
                color=color,
                kind="area",
                x=list(serial.seconds),
                y=[size / MB for size in serial.ledgers[ledger]],
            )
            for ledger, color in LEDGERS.items()
            if any(serial.ledgers.get(ledger, ()))
        ]
        graphs = [_line("serial replay", "blue", serial, serial.graphs_alive)]
        if ghost is not None:
            totals = [size / MB for size in ghost.ledgers["total"]]
            areas.append(_line(f"total, {name}", "grey", ghost, totals))
            graphs.append(_line(name, "grey", ghost, ghost.graphs_alive))
        seconds = Axis(label="seconds since the step's start")
        return View(
            says=_sentence(serial, ghost, at, name),
            panels=[
                Panel(
                    title="Live bytes above the weights, by ledger",
                    x=seconds,
                    y=Axis(label="MB"),
                    series=areas,
                    marks=marks,
                ),
                Panel(
                    title="Complete graphs alive",
                    x=seconds,
                    y=Axis(label="graphs", ticks="whole"),
                    series=graphs,
                    marks=marks,
                ),
                Panel(
                    title="Where in the sequence: chunks forward, responses, chunks back",
                    x=seconds,
                    y=Axis(label="first token"),
                    series=[_line("segment in work", "blue", serial, serial.positions)],
                    marks=marks,
                ),
            ],
            table=Table(
                caption=f"At {number(now, 3)} s: stage {serial.stages[at].replace('_', ' ') or 'none'}, "
                f"segment at token {number(serial.positions[at])}, {serial.graphs_alive[at]} graphs alive",
                headings=["ledger", "origin", "MB now", "MB at most"],
                rows=_rows(serial, at, ghost, state["moment"], name),
            ),
            notes=record.notes,
        )


def _index(trace: Trace, moment: int) -> int:
    """The last sample not after this share of the step."""
    wanted = trace.seconds[0] + moment / 100 * (trace.seconds[-1] - trace.seconds[0])
    return max(index for index, seconds in enumerate(trace.seconds) if index == 0 or seconds <= wanted)


def _line(name: str, color: str, trace: Trace, values: Sequence[float]) -> Series:
    return Series(name=name, origin=trace.origin, color=color, x=list(trace.seconds), y=list(values))


def _total(trace: Trace, at: int) -> int:
    return sum(sizes[at] for sizes in trace.ledgers.values())


def _peak(trace: Trace) -> int:
    return max(_total(trace, at) for at in range(len(trace.seconds)))


def _sentence(serial: Trace, ghost: Trace | None, at: int, name: str) -> str:
    words = (
        f"The step peaks at {number(_peak(serial) / MB)} MB with at most {max(serial.graphs_alive)} graph alive "
        f"({serial.origin}); now {number(_total(serial, at) / MB)} MB."
    )
    if ghost is None:
        return words
    return (
        f"{words} With {name} it peaks at {number(_peak(ghost) / MB)} MB, with {max(ghost.graphs_alive)} graphs alive "
        f"({ghost.origin})."
    )


def _rows(serial: Trace, at: int, ghost: Trace | None, moment: int, name: str) -> list[list[str]]:
    rows = [
        [ledger.replace("_", " "), serial.origin, number(sizes[at] / MB), number(max(sizes) / MB)]
        for ledger in LEDGERS
        if any(sizes := serial.ledgers.get(ledger, ()))
    ]
    rows.append(["all ledgers", serial.origin, number(_total(serial, at) / MB), number(_peak(serial) / MB)])
    if ghost is not None:
        now = _total(ghost, _index(ghost, moment))
        rows.append(
            [f"{name}, at the same share of its step", ghost.origin, number(now / MB), number(_peak(ghost) / MB)]
        )
    return rows
