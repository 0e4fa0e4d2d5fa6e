"""Drag the group's size: serial replay stays at one response's memory, holding every graph does not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import traitlets

from widgets.base import Control, Widget, checked
from widgets.sources import MB, missing_note, published, recordings_of, source_notes
from widgets.view import Axis, Mark, Panel, Series, Table, View, distinct, exact, number
from workbench.planner import graph, plan
from workbench.recordings import Recording

PAPER_CASE = "Qwen3.6-27B on 8 x H20, 2,097,152 positions"
PAPER_POSITIONS = 2097152
GROUP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
RESPONSE_TOKENS = (2048, 8192, 32768)
SCOPES = ("response_only", "full")
# Ways to hold a group's graphs, with their colour.
MODES = {
    "serial_replay": ("serial replay", "blue"),
    "all_graphs": ("every response's graph held", "orange"),
    "conventional": ("conventional autograd, all graphs held", "purple"),
}


@dataclass(frozen=True, kw_only=True)
class GroupPoint:
    """One step: peak_bytes per rank (of tensors above the weights where measured, of the allocator elsewhere)."""

    case: str
    origin: str
    mode: str
    scope: str
    response_tokens: int
    group_size: int
    peak_bytes: float
    step_seconds: float | None


@dataclass(frozen=True, kw_only=True)
class GroupRecord:
    """ceilings: case -> bytes that one rank has for it, where it has a limit."""

    points: tuple[GroupPoint, ...]
    ceilings: Mapping[str, float]
    notes: tuple[str, ...] = ()


def published_points() -> Iterator[GroupPoint]:
    """LongStraw's two response-only steps at 2,097,152 positions."""
    for run in published()["runs"]:
        if run["positions"] == PAPER_POSITIONS:
            yield GroupPoint(
                case=PAPER_CASE,
                origin="published",
                mode="serial_replay",
                scope="response_only",
                response_tokens=run["response_tokens"],
                group_size=run["group_size"],
                peak_bytes=round(run["peak_gb"] * 1e9),
                step_seconds=run["seconds"]["total"],
            )


def modelled_points() -> Iterator[GroupPoint]:
    """This engine's plan of the same step, and the same with every response's saved activations held at once.

    Held are the activations that layer checkpoints keep between layers, of whole responses: the least that a step which
    runs all responses before any backward has to hold.
    """
    for scope in SCOPES:
        for response_tokens in RESPONSE_TOKENS:
            asked: dict[str, Any] = {
                "positions": PAPER_POSITIONS,
                "response_tokens": response_tokens,
                "context_parallel": 8,
                "gradient_scope": scope,
                "checkpoint_layers": True,
            }
            whole = plan("Qwen3.6-27B", "H20-3e-141", group_size=1, block_tokens=response_tokens, **asked)
            per_token = sum(
                n * graph.kept_between_layers_bytes(layer, whole.request) for layer, n in whole.shape.groups
            )
            held = per_token * response_tokens / whole.request.context_parallel
            for size in GROUP_SIZES:
                serial = plan("Qwen3.6-27B", "H20-3e-141", group_size=size, **asked)
                together = max(whole.peak_bytes, _replay_bytes(whole.terms["replay"]) + (size - 1) * held)
                seconds = sum(serial.seconds.values())
                for mode, peak in (("serial_replay", serial.peak_bytes), ("all_graphs", together)):
                    yield GroupPoint(
                        case=PAPER_CASE,
                        origin="modelled",
                        mode=mode,
                        scope=scope,
                        response_tokens=response_tokens,
                        group_size=size,
                        peak_bytes=peak,
                        step_seconds=seconds if mode == "serial_replay" else None,
                    )


def _replay_bytes(terms: Mapping[str, int]) -> int:
    return sum(size for term, size in terms.items() if term != "outside")


def measured_points(recordings: Sequence[Recording]) -> Iterator[GroupPoint]:
    """Rows of `group_memory` recordings."""
    for recording in recordings:
        for row in recording.rows:
            yield GroupPoint(
                case=f"{row['model']}, {row['prompt_tokens']:,} prompt tokens, measured here",
                origin=recording.origin,
                mode=row["mode"],
                scope=row["scope"],
                response_tokens=row["response_tokens"],
                group_size=row["group_size"],
                peak_bytes=row["peak_bytes"],
                step_seconds=row["step_seconds"],
            )


def group_record(recordings: Sequence[Recording]) -> GroupRecord:
    """Published points, this engine's plan of the same step, and what was measured."""
    measured = tuple(measured_points(recordings))
    ceiling = next(one["value"] for one in published()["other"] if one["name"] == "ceiling")
    return GroupRecord(
        points=(*published_points(), *modelled_points(), *measured),
        ceilings={PAPER_CASE: ceiling * 1e9},
        notes=(
            "Published: LongStraw (arXiv 2607.14952), peak allocated per rank; its peaks hold gradients of all prompt "
            "rows and the logits of a whole response, which this engine's plan does not.",
            "Modelled: workbench.plan with layer checkpoints, seconds at half of the card's peak rate.",
            *(source_notes(recordings) or (missing_note("group_memory"),)),
        ),
    )


@cache
def shipped_record() -> GroupRecord:
    """`group_record` of the shipped recordings."""
    return group_record(recordings_of("group_memory"))


class GroupSerialization(Widget):
    """Peak memory and step time against the group's size, for serial replay and for holding all graphs."""

    title = "Group serialization: what one more response costs"
    script = "group_serialization"
    record_type = GroupRecord

    case = traitlets.Unicode(PAPER_CASE).tag(sync=True)
    group_size = traitlets.Int(8).tag(sync=True)
    response_tokens = traitlets.Int(8192).tag(sync=True)
    scope = traitlets.Unicode("response_only").tag(sync=True)
    _check = checked("case", "group_size", "response_tokens", "scope")

    def __init__(self, record: GroupRecord | None = None, **values: Any) -> None:
        super().__init__(shipped_record() if record is None else record, **values)

    @classmethod
    def controls(cls, record: GroupRecord) -> tuple[Control, ...]:
        tokens = tuple(sorted({p.response_tokens for p in record.points}))
        sizes = tuple(sorted({p.group_size for p in record.points} | set(GROUP_SIZES)))
        return (
            Control(
                name="group_size", label="Group size G", values=sizes, texts=tuple(f"{n} responses" for n in sizes)
            ),
            Control(
                name="response_tokens",
                label="Response length R",
                values=tokens,
                texts=tuple(f"{n:,} tokens" for n in tokens),
                applies={"control": "case", "values": [PAPER_CASE], "otherwise": "as recorded"},
            ),
            Control(name="scope", label="Gradient scope", values=SCOPES, kind="choice"),
            Control(name="case", label="Setting", values=tuple(distinct(p.case for p in record.points)), kind="choice"),
        )

    @staticmethod
    def view_of(record: GroupRecord, state: Mapping[str, Any]) -> View:
        ceiling = record.ceilings.get(state["case"])
        gb = ceiling is not None
        unit, scale = ("GB", 1e9) if gb else ("MB", MB)
        own = [p for p in record.points if p.case == state["case"] and p.scope == state["scope"]]
        tokens = state["response_tokens"]
        if own and all(p.response_tokens != tokens for p in own):
            tokens = own[0].response_tokens  # a recording has the lengths that it has
        shown = [p for p in own if p.response_tokens == tokens]
        size = state["group_size"]
        memory, seconds, rows = [], [], []
        for origin, mode in distinct((p.origin, p.mode) for p in shown):
            points = [p for p in shown if (p.origin, p.mode) == (origin, mode)]
            name, color = MODES[mode]
            sizes = [p.group_size for p in points]
            memory.append(
                Series(name=name, origin=origin, color=color, x=sizes, y=[p.peak_bytes / scale for p in points])
            )
            timed = [p for p in points if p.step_seconds is not None]
            if timed:
                times = [p.step_seconds for p in timed]
                seconds.append(Series(name=name, origin=origin, color=color, x=[p.group_size for p in timed], y=times))
            here = next((p for p in points if p.group_size == size), None)
            # The first response brings the adapter's own gradient with it: growth counts from the second.
            first, last = next((p for p in points if p.group_size > 1), points[0]), points[-1]
            growth = 100 * (last.peak_bytes / first.peak_bytes - 1)
            rows.append(
                [
                    name,
                    origin,
                    _peak(here, scale) if here else f"not {origin} at this G",
                    ("yes" if here.peak_bytes <= ceiling else "no") if here and ceiling is not None else "–",
                    number(here.step_seconds) if here else "–",
                    f"{number(growth, 3)} % from G = {first.group_size} to {last.group_size}",
                ]
            )
        chosen = Mark(axis="x", value=size, label=f"G = {size}")
        limit = (
            [Mark(axis="y", value=ceiling / scale, label=f"the card, {exact(ceiling / scale)} GB", origin="published")]
            if ceiling is not None
            else []
        )
        x = Axis(label="group size G, responses", scale="log")
        says = _sentence(shown, size, tokens, scale, unit)
        return View(
            says=says,
            panels=[
                Panel(
                    title="Peak memory",
                    x=x,
                    y=Axis(label=f"peak, {unit}", scale="log"),
                    series=memory,
                    marks=[*limit, chosen],
                ),
                Panel(
                    title="Time of one step", x=x, y=Axis(label="seconds", scale="log"), series=seconds, marks=[chosen]
                ),
            ],
            table=Table(
                caption=f"At G = {size}, responses of {number(tokens)} tokens, scope {state['scope']}",
                headings=["way", "origin", f"peak, {unit}", "within the card", "step, s", "growth of the peak"],
                rows=rows,
            ),
            notes=record.notes,
        )


def _peak(point: GroupPoint, scale: float) -> str:
    value = point.peak_bytes / scale
    return exact(value) if point.origin == "published" else number(value, 5)


def _sentence(shown: Sequence[GroupPoint], size: int, tokens: int, scale: float, unit: str) -> str:
    """The two ways at this size, from one origin."""
    here = {p.mode: p for p in shown if p.group_size == size and p.origin != "published"}
    serial = here.get("serial_replay")
    held = here.get("conventional") or here.get("all_graphs")
    if serial is None or held is None:
        return (
            f"No step with G = {size} was {shown[0].origin if shown else 'recorded'} for this choice; see the curves."
        )
    way = MODES[held.mode][0]
    return (
        f"With {size} responses of {number(tokens)} tokens, serial replay needs "
        f"{number(serial.peak_bytes / scale)} {unit} "
        f"({serial.origin}) and {way} {number(held.peak_bytes / scale)} {unit} ({held.origin}): "
        f"{number(held.peak_bytes / serial.peak_bytes, 3)} times as much."
    )
