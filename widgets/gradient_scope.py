"""What a cheaper gradient scope leaves out: cosine and relative L2 against the full gradient."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Any

import traitlets

from widgets.base import Control, Widget, checked
from widgets.sources import missing_note, recordings_of, source_notes
from widgets.view import Axis, Mark, Panel, Series, Table, View, distinct, number
from workbench.recordings import Recording

METRICS = {"cosine": "cosine with the full gradient", "relative_l2": "relative L2 distance from the full gradient"}
# The published gate for parity of gradients.
GATES = {"cosine": 0.999, "relative_l2": 0.01}
DETAILS = {"layer": "decoder layer", "parameter_family": "kind of parameter"}
PALETTE = ("orange", "blue", "green", "purple", "sky", "yellow", "grey")
NOTHING = "nothing recorded"


@dataclass(frozen=True, kw_only=True)
class ScopePoint:
    """One scope's gradient against the full one, over seeds: mean, lowest, highest of both measures.

    case: model and setting; layer: None for the whole; parameter_family: "all" for the whole.
    """

    case: str
    origin: str
    scope: str
    prompt_tokens: int
    layer: int | None
    parameter_family: str
    cosine: tuple[float, float, float]
    relative_l2: tuple[float, float, float]
    runs: int


@dataclass(frozen=True, kw_only=True)
class ScopeRecord:
    """All points; notes say where they come from."""

    points: tuple[ScopePoint, ...]
    notes: tuple[str, ...] = ()


def measured_points(recordings: Sequence[Recording]) -> Iterator[ScopePoint]:
    """Rows of `gradient_scope` recordings, gathered over seeds."""
    for recording in recordings:
        groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for row in recording.rows:
            key = (case_name(row), scope_name(row), row["prompt_tokens"], row["layer"], row["parameter_family"])
            groups.setdefault(key, []).append(row)
        for (case, scope, prompt_tokens, layer, family), rows in groups.items():
            yield ScopePoint(
                case=case,
                origin=recording.origin,
                scope=scope,
                prompt_tokens=prompt_tokens,
                layer=layer,
                parameter_family=family,
                cosine=_spread(rows, "cosine"),
                relative_l2=_spread(rows, "relative_l2"),
                runs=len(rows),
            )


def _spread(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float, float]:
    values = [row[name] for row in rows]
    return fmean(values), min(values), max(values)


def case_name(row: Mapping[str, Any]) -> str:
    """What a recorded setting is called."""
    rate = "" if row["learning_rate"] in (None, 0) else f", after updates at lr {row['learning_rate']:g}"
    return f"{row['model']}, responses of {row['response_tokens']} tokens{rate}"


def scope_name(row: Mapping[str, Any]) -> str:
    """The scope, with the adapter's where it is not everywhere."""
    return row["scope"] if row["adapter_scope"] == "all" else f"{row['scope']}, adapter {row['adapter_scope']}"


@cache
def shipped_record() -> ScopeRecord:
    """The shipped recordings."""
    recordings = recordings_of("gradient_scope")
    return ScopeRecord(
        points=tuple(measured_points(recordings)),
        notes=(
            "The paper claims no parity with the full gradient; its gate is cosine >= 0.999 and relative L2 <= 0.01.",
            *(source_notes(recordings) or (missing_note("gradient_scope"),)),
        ),
    )


class GradientScope(Widget):
    """Cosine and relative L2 of each gradient scope against the full gradient: whole, by length, by layer or kind."""

    title = "Gradient scope: what a cheaper gradient leaves out"
    script = "gradient_scope"
    record_type = ScopeRecord

    prompt_tokens = traitlets.Int(0).tag(sync=True)
    metric = traitlets.Unicode("cosine").tag(sync=True)
    detail = traitlets.Unicode("layer").tag(sync=True)
    case = traitlets.Unicode("").tag(sync=True)
    _check = checked("prompt_tokens", "metric", "detail", "case")

    def __init__(self, record: ScopeRecord | None = None, **values: Any) -> None:
        super().__init__(shipped_record() if record is None else record, **values)

    @classmethod
    def controls(cls, record: ScopeRecord) -> tuple[Control, ...]:
        lengths = tuple(sorted({p.prompt_tokens for p in record.points})) or (0,)
        cases = tuple(distinct(p.case for p in record.points)) or (NOTHING,)
        return (
            Control(
                name="prompt_tokens",
                label="Prompt length",
                values=lengths,
                texts=tuple(f"{n:,} tokens" for n in lengths),
            ),
            Control(
                name="metric", label="Measure", values=tuple(METRICS), texts=tuple(METRICS.values()), kind="choice"
            ),
            Control(
                name="detail", label="In detail by", values=tuple(DETAILS), texts=tuple(DETAILS.values()), kind="choice"
            ),
            Control(name="case", label="Model", values=cases, kind="choice"),
        )

    @staticmethod
    def view_of(record: ScopeRecord, state: Mapping[str, Any]) -> View:
        metric, length, detail = state["metric"], state["prompt_tokens"], state["detail"]
        own = [p for p in record.points if p.case == state["case"]]
        whole = [p for p in own if p.layer is None and p.parameter_family == "all"]
        scopes = distinct(p.scope for p in whole)
        label = METRICS[metric]
        by_length = [_by_length([p for p in whole if p.scope == s], s, at, metric) for at, s in enumerate(scopes)]
        parts = [p for p in own if p.prompt_tokens == length and _is_part(p, detail)]
        by_part = [
            _by_part([p for p in parts if p.scope == s], s, at, metric, detail)
            for at, s in enumerate(scopes)
            if any(p.scope == s for p in parts)
        ]
        here = [p for p in whole if p.prompt_tokens == length]
        gate = Mark(axis="y", value=GATES[metric], label=f"parity gate {GATES[metric]}", origin="published")
        y = Axis(label=label)
        band = Axis(label=DETAILS[detail], scale="linear" if detail == "layer" else "band", ticks="whole")
        return View(
            says=_sentence(here, length),
            panels=[
                Panel(
                    title="By prompt length",
                    x=Axis(label="prompt, tokens", scale="log", ticks="short"),
                    y=y,
                    series=by_length,
                    marks=[gate, *([Mark(axis="x", value=length, label=f"{length:,} tokens")] if length else [])],
                ),
                Panel(title=f"By {DETAILS[detail]}, {length:,} tokens", x=band, y=y, series=by_part, marks=[gate]),
            ],
            table=Table(
                caption=f"Against the full gradient, {length:,} prompt tokens",
                headings=["scope", "origin", "cosine", "relative L2", "runs"],
                rows=[[p.scope, p.origin, _cell(p.cosine), _cell(p.relative_l2), str(p.runs)] for p in here],
            ),
            notes=record.notes,
        )


def _is_part(point: ScopePoint, detail: str) -> bool:
    if detail == "layer":
        return point.layer is not None and point.parameter_family == "all"
    return point.layer is None and point.parameter_family != "all"


def _by_length(points: Sequence[ScopePoint], scope: str, at: int, metric: str) -> Series:
    ordered = sorted(points, key=lambda p: p.prompt_tokens)
    values = [getattr(p, metric) for p in ordered]
    return Series(
        name=scope,
        origin=ordered[0].origin,
        color=PALETTE[at % len(PALETTE)],
        x=[p.prompt_tokens for p in ordered],
        y=[v[0] for v in values],
        low=[v[1] for v in values],
        high=[v[2] for v in values],
    )


def _by_part(points: Sequence[ScopePoint], scope: str, at: int, metric: str, detail: str) -> Series:
    ordered = sorted(points, key=lambda p: p.layer or 0) if detail == "layer" else list(points)
    return Series(
        name=scope,
        origin=ordered[0].origin,
        color=PALETTE[at % len(PALETTE)],
        x=[getattr(p, detail) for p in ordered],
        y=[getattr(p, metric)[0] for p in ordered],
        kind="line" if detail == "layer" else "bars",
    )


def _sentence(here: Sequence[ScopePoint], length: int) -> str:
    short = next((p for p in here if p.scope == "response_only"), None)
    if short is None:
        return "No gradient of scope response_only is recorded for this choice."
    return (
        f"With a prompt of {length:,} tokens, response_only has cosine {number(short.cosine[0], 3)} "
        f"with the full gradient and relative L2 {number(short.relative_l2[0], 3)}: that "
        f"much of the update is missing ({short.origin})."
    )


def _cell(values: tuple[float, float, float]) -> str:
    mean, low, high = values
    return number(mean) if low == high else f"{number(mean)} ({number(low, 3)} to {number(high, 3)})"
