"""Drag the refresh interval: how far a reused prompt drifts from a fresh one, and what reuse saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, median
from typing import Any

import traitlets

from widgets.base import Control, Widget, checked
from widgets.sources import missing_note, published, recordings_of, source_notes
from widgets.view import Axis, Mark, Panel, Series, Table, View, distinct, exact, number
from workbench.recordings import Recording

PAPER_CASE = "LongStraw, 1M positions"
INTERVALS = tuple(range(1, 17))
STEPS = (4, 8, 16, 32, 64, 128, 256)
TOLERANCES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.02, 0.03, 0.05, 0.1, 0.3, 1.0, 3.0, 10.0)
METRICS = {
    "mean_abs_logprob_drift": ("Log-prob drift", "mean |difference| of log-prob, nats"),
    "loss_drift_pct": ("Loss drift", "|difference| of the loss, %"),
}


@dataclass(frozen=True, kw_only=True)
class DriftCurve:
    """One measure of drift by the state's age: the optimizer steps between its capture and its use.

    mean over runs, with the lowest and highest of them; runs: how many (seeds).
    """

    case: str
    origin: str
    metric: str
    ages: tuple[int, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    runs: int


@dataclass(frozen=True, kw_only=True)
class ReuseCost:
    """Median seconds of one capture and of one step without it."""

    case: str
    origin: str
    capture_seconds: float
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class DriftRecord:
    """Curves of every case, and what a capture costs where that is known."""

    curves: tuple[DriftCurve, ...]
    costs: tuple[ReuseCost, ...] = ()
    notes: tuple[str, ...] = ()


def published_curves() -> Iterator[DriftCurve]:
    """LongStraw's table, with one run a point."""
    table = published()["prefix_reuse"]
    names = {"mean_abs_logprob_drift": "mean_abs_logprob_difference", "loss_drift_pct": "loss_difference_pct"}
    for metric, name in names.items():
        values = tuple(table[name])
        yield DriftCurve(
            case=PAPER_CASE,
            origin="published",
            metric=metric,
            ages=tuple(table["steps_since_capture"]),
            mean=values,
            low=values,
            high=values,
            runs=1,
        )


def measured_curves(recordings: Sequence[Recording]) -> Iterator[DriftCurve]:
    """One curve per model, learning rate and measure, over seeds."""
    for recording in recordings:
        cases: dict[str, list[Mapping[str, Any]]] = {}
        for row in recording.rows:
            cases.setdefault(case_name(row), []).append(row)
        for case, rows in cases.items():
            for metric in METRICS:
                by_age: dict[int, list[float]] = {}
                for row in rows:
                    if row[metric] is not None:
                        by_age.setdefault(row["state_age"], []).append(abs(row[metric]))
                if not by_age:
                    continue
                ages = tuple(sorted(by_age))
                yield DriftCurve(
                    case=case,
                    origin=recording.origin,
                    metric=metric,
                    ages=ages,
                    mean=tuple(fmean(by_age[a]) for a in ages),
                    low=tuple(min(by_age[a]) for a in ages),
                    high=tuple(max(by_age[a]) for a in ages),
                    runs=len({row["seed"] for row in rows}),
                )


def measured_costs(recordings: Sequence[Recording]) -> Iterator[ReuseCost]:
    """Median seconds of captures and steps, by case."""
    for recording in recordings:
        for case in distinct(case_name(row) for row in recording.rows):
            rows = [row for row in recording.rows if case_name(row) == case]
            captures = [row["capture_seconds"] for row in rows if row["capture_seconds"]]
            steps = [row["step_seconds"] for row in rows if row["step_seconds"]]
            if captures and steps:
                yield ReuseCost(
                    case=case, origin=recording.origin, capture_seconds=median(captures), step_seconds=median(steps)
                )


def case_name(row: Mapping[str, Any]) -> str:
    """What a recorded run is called."""
    return f"{row['model']}, lr {row['learning_rate']:g}, {row['prompt_tokens']:,} tokens"


@cache
def shipped_record() -> DriftRecord:
    """The published table and the shipped recordings."""
    recordings = recordings_of("drift")
    return DriftRecord(
        curves=(*published_curves(), *measured_curves(recordings)),
        costs=tuple(measured_costs(recordings)),
        notes=(
            "Published: LongStraw v2 (reading note), a reused prefix against a freshly captured one.",
            "Age: optimizer steps between capture and use; with a refresh interval of k, ages run from 0 to k - 1.",
            *(source_notes(recordings) or (missing_note("drift"),)),
        ),
    )


class PrefixReuseDrift(Widget):
    """Drift of a reused prompt by its age, the interval that a tolerance allows, and the captures saved."""

    title = "Prefix reuse: how long a captured prompt stays good"
    script = "prefix_reuse_drift"
    record_type = DriftRecord

    interval = traitlets.Int(4).tag(sync=True)
    tolerance = traitlets.Float(0.05).tag(sync=True)
    steps = traitlets.Int(32).tag(sync=True)
    case = traitlets.Unicode(PAPER_CASE).tag(sync=True)
    _check = checked("interval", "tolerance", "steps", "case")

    def __init__(self, record: DriftRecord | None = None, **values: Any) -> None:
        super().__init__(shipped_record() if record is None else record, **values)

    @classmethod
    def controls(cls, record: DriftRecord) -> tuple[Control, ...]:
        return (
            Control(
                name="interval",
                label="Refresh interval",
                values=INTERVALS,
                texts=tuple("every step" if k == 1 else f"every {k} steps" for k in INTERVALS),
            ),
            Control(
                name="tolerance",
                label="Tolerated log-prob drift",
                values=TOLERANCES,
                texts=tuple(f"{number(t, 1)} nats" for t in TOLERANCES),
            ),
            Control(name="steps", label="Optimizer steps", values=STEPS, texts=tuple(f"{n} steps" for n in STEPS)),
            Control(name="case", label="Runs", values=tuple(distinct(c.case for c in record.curves)), kind="choice"),
        )

    @staticmethod
    def view_of(record: DriftRecord, state: Mapping[str, Any]) -> View:
        case, interval, tolerance = state["case"], state["interval"], state["tolerance"]
        curves = {c.metric: c for c in record.curves if c.case == case}
        panels = []
        for metric, (name, label) in METRICS.items():
            found = curves.get(metric)
            series = [] if found is None else [_series(found)]
            marks = [Mark(axis="x", value=interval - 1, label=f"oldest state, age {interval - 1}")]
            if metric == "mean_abs_logprob_drift":
                marks.append(Mark(axis="y", value=tolerance, label=f"tolerance {number(tolerance, 1)}"))
            x = Axis(label="age of the state, optimizer steps since capture", ticks="whole")
            scale = "log" if found is not None and min(found.low) > 0 else "linear"
            panels.append(Panel(title=name, x=x, y=Axis(label=label, scale=scale), series=series, marks=marks))
        drift = curves.get("mean_abs_logprob_drift")
        return View(
            says=_sentence(record, state, drift),
            panels=panels,
            table=Table(
                caption=f"{case}: drift by age",
                headings=[
                    "age, steps",
                    "origin",
                    *(label for _, label in METRICS.values()),
                    "used by this interval",
                    "within tolerance",
                ],
                rows=_rows(curves, interval, tolerance),
            ),
            notes=record.notes,
        )


def _series(curve: DriftCurve) -> Series:
    many = curve.runs > 1
    return Series(
        name=f"mean of {curve.runs} runs, band from lowest to highest" if many else curve.case,
        origin=curve.origin,
        color="blue" if curve.metric == "mean_abs_logprob_drift" else "orange",
        x=list(curve.ages),
        y=list(curve.mean),
        low=list(curve.low) if many else None,
        high=list(curve.high) if many else None,
    )


def recommended_interval(curve: DriftCurve, tolerance: float) -> int:
    """The longest interval whose recorded ages all stay within the tolerance, in the worst run.

    Ages that were not recorded count as no better than the next one that was: 1, 2, 4 with 4 too far gives 3.
    """
    allowed = 0
    for age, worst in zip(curve.ages, curve.high, strict=True):
        if worst > tolerance:
            break
        allowed = age
    return allowed + 1


def _sentence(record: DriftRecord, state: Mapping[str, Any], drift: DriftCurve | None) -> str:
    interval, steps, tolerance = state["interval"], state["steps"], state["tolerance"]
    captures = -(-steps // interval)
    saved = 100 * (1 - captures / steps)
    words = [
        f"A refresh every {interval} of {steps} steps makes {captures} captures instead of {steps}: "
        f"{number(saved, 3)} % of the capture time is saved"
    ]
    cost = next((c for c in record.costs if c.case == state["case"]), None)
    if cost is not None:
        seconds = (steps - captures) * cost.capture_seconds
        share = 100 * seconds / (steps * (cost.capture_seconds + cost.step_seconds))
        words.append(f", {number(seconds, 3)} s or {number(share, 3)} % of the whole ({cost.origin})")
    words.append(". ")
    if drift is not None:
        best = recommended_interval(drift, tolerance)
        all_within = all(worst <= tolerance for worst in drift.high)
        more = " or longer: no recorded age exceeds it" if all_within else ""
        words.append(
            f"Within a log-prob drift of {number(tolerance, 1)} nats the interval may be {best}{more} ({drift.origin})."
        )
    return "".join(words)


def _rows(curves: Mapping[str, DriftCurve], interval: int, tolerance: float) -> list[list[str]]:
    ages = sorted({age for curve in curves.values() for age in curve.ages})
    rows = []
    for age in ages:
        at = {m: curve.ages.index(age) for m, curve in curves.items() if age in curve.ages}
        cells = [_cell(curves[m], at[m]) if m in at else "–" for m in METRICS]
        drift = curves.get("mean_abs_logprob_drift")
        worst = (
            drift.high[at["mean_abs_logprob_drift"]] if drift is not None and "mean_abs_logprob_drift" in at else None
        )
        within = "–" if worst is None else "yes" if worst <= tolerance else "no"
        origin = next(iter(curves.values())).origin
        rows.append([str(age), origin, *cells, "yes" if age < interval else "no", within])
    return rows


def _cell(curve: DriftCurve, at: int) -> str:
    if curve.runs == 1:
        return exact(curve.mean[at]) if curve.origin == "published" else number(curve.mean[at])
    return f"{number(curve.mean[at])} ({number(curve.low[at], 3)} to {number(curve.high[at], 3)})"
