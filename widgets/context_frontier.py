"""How far a prompt can grow: peak bytes per rank against positions, the card's ceiling, the published points."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import traitlets

from widgets.base import Control, Widget, checked
from widgets.plan_cells import CHUNK_TOKENS, GPUS, Card, Cell, cards, cell_controls, plan_cells, verdict
from widgets.sources import GB, missing_note, published, recordings_of, source_notes
from widgets.view import Axis, Mark, Panel, Series, Table, View, exact, number
from workbench.recordings import Recording

MODELS = ("Qwen3.6-27B", "GLM-5.2", "Qwen3-8B")
SCOPES = ("response_only", "full")


@dataclass(frozen=True, kw_only=True)
class PublishedPeak:
    """One printed peak of LongStraw, on its own card and ranks."""

    model: str
    gpu: str
    context_parallel: int
    name: str
    positions: int
    group_size: int
    peak_gb: float


@dataclass(frozen=True, kw_only=True)
class Reach:
    """The longest context that was reached in some setting."""

    name: str
    origin: str
    positions: int


@dataclass(frozen=True, kw_only=True)
class FrontierRecord:
    """out_of_memory: positions at which LongStraw's train-block proxy failed."""

    cells: tuple[Cell, ...]
    cards: tuple[Card, ...]
    published: tuple[PublishedPeak, ...]
    out_of_memory: int
    reaches: tuple[Reach, ...]
    notes: tuple[str, ...] = ()


def published_peaks() -> Iterator[PublishedPeak]:
    """Every exactly reported peak."""
    for run in published()["runs"]:
        yield PublishedPeak(**{name: run[name] for name in PublishedPeak.__dataclass_fields__})


def reaches(recordings: Sequence[Recording]) -> Iterator[Reach]:
    """Published reaches, and the longest prompt of every recording."""
    for reach in published()["context_reach"]:
        yield Reach(name=reach["name"], origin="published", positions=reach["positions"])
    for recording in recordings:
        for model in recording.values("model"):
            longest = max(row["prompt_tokens"] for row in recording.select(model=model))
            yield Reach(name=f"{model} here", origin=recording.origin, positions=longest)


@cache
def shipped_record() -> FrontierRecord:
    """This engine's plans for three models, the published points, and what was reached here."""
    recordings = recordings_of("reach")
    return FrontierRecord(
        cells=tuple(
            cell
            for model in MODELS
            for cell in plan_cells(
                model, scopes=SCOPES, with_terms=False, checkpoint_layers=True, chunk_tokens=CHUNK_TOKENS
            )
        ),
        cards=cards(GPUS),
        published=tuple(published_peaks()),
        out_of_memory=next(one["value"] for one in published()["other"] if one["name"] == "out of memory"),
        reaches=tuple(reaches(recordings)),
        notes=(
            "Modelled: workbench.plan with NF4 weights, LoRA r16, layer checkpoints, chunks of 8,192, experts shared "
            "by the same ranks; the band is what its "
            "terms allow. A plan: several ranks were not measured.",
            "Published: LongStraw's own peaks, whatever scope is chosen; its proxies hold all rows' gradients.",
            *(source_notes(recordings) or (missing_note("reach"),)),
        ),
    )


class ContextFrontier(Widget):
    """Peak bytes per rank against positions for a model, a card, a number of ranks and a scope."""

    title = "Context frontier: how far the prompt can grow"
    script = "context_frontier"
    record_type = FrontierRecord

    positions = traitlets.Int(2097152).tag(sync=True)
    context_parallel = traitlets.Int(8).tag(sync=True)
    model = traitlets.Unicode("Qwen3.6-27B").tag(sync=True)
    gpu = traitlets.Unicode("H20-3e-141").tag(sync=True)
    scope = traitlets.Unicode("full").tag(sync=True)
    _check = checked("positions", "context_parallel", "model", "gpu", "scope")

    def __init__(self, record: FrontierRecord | None = None, **values: Any) -> None:
        super().__init__(shipped_record() if record is None else record, **values)

    @classmethod
    def controls(cls, record: FrontierRecord) -> tuple[Control, ...]:
        by_name = cell_controls(record.cells, record.cards)
        return tuple(by_name[name] for name in ("positions", "context_parallel", "model", "gpu", "scope"))

    @staticmethod
    def view_of(record: FrontierRecord, state: Mapping[str, Any]) -> View:
        wanted = (state["model"], state["context_parallel"], state["scope"])
        cells = [c for c in record.cells if (c.model, c.context_parallel, c.scope) == wanted]
        card = next(c for c in record.cards if c.name == state["gpu"])
        same = (state["model"], state["gpu"], state["context_parallel"])
        printed = [p for p in record.published if (p.model, p.gpu, p.context_parallel) == same]
        here = next(c for c in cells if c.positions == state["positions"])
        planned = Series(
            name="peak per rank",
            origin="modelled",
            color="blue",
            x=[c.positions for c in cells],
            y=[c.peak_bytes / GB for c in cells],
            low=[c.peak_low / GB for c in cells],
            high=[c.peak_high / GB for c in cells],
        )
        dots = Series(
            name="LongStraw's peaks",
            origin="published",
            color="orange",
            kind="points",
            x=[p.positions for p in printed],
            y=[p.peak_gb for p in printed],
        )
        usable = (card.memory_bytes - card.reserve_bytes) / GB
        marks = [
            Mark(axis="y", value=usable, label=f"{card.name}, {number(usable)} GB usable", origin="modelled"),
            Mark(axis="x", value=here.positions, label=number(here.positions)),
        ]
        if printed:
            marks.append(Mark(axis="x", value=record.out_of_memory, label="OOM (published)"))
        bars = [
            Series(
                name="context reached",
                origin=origin,
                color=color,
                kind="bars",
                x=[r.name for r in found],
                y=[r.positions / 1e6 for r in found],
                stack=True,
            )
            for origin, color in (("published", "orange"), ("measured", "blue"))
            if (found := [r for r in record.reaches if r.origin == origin])
        ]
        fitting = [c.positions for c in cells if verdict(c, card) == "fits"]
        return View(
            says=_sentence(here, card, fitting),
            panels=[
                Panel(
                    title="Peak memory per rank",
                    x=Axis(label="positions (prompt and one response)", scale="log", ticks="short"),
                    y=Axis(label="peak, GB", scale="log"),
                    series=[planned, *([dots] if printed else [])],
                    marks=marks,
                ),
                Panel(
                    title="Context reached",
                    x=Axis(label="setting", scale="band"),
                    y=Axis(label="million positions"),
                    series=bars,
                ),
            ],
            table=Table(
                caption=f"{here.model}, {number(here.context_parallel)} ranks of {card.name}, scope {here.scope}",
                headings=["positions", "origin", "peak per rank, GB", "band, GB", "verdict", "what"],
                rows=[*(_planned_row(c, card) for c in cells), *(_printed_row(p) for p in printed)],
            ),
            notes=record.notes,
        )


def _sentence(here: Cell, card: Card, fitting: Sequence[int]) -> str:
    answer = {"fits": "fits", "no": "does not fit", "probe": "may fit: probe it"}[verdict(here, card)]
    longest = (
        f"the longest planned here that surely fits is {number(max(fitting))}"
        if fitting
        else "none planned here surely fits"
    )
    return (
        f"{number(here.positions)} positions need {number(here.peak_bytes / GB)} GB per rank and "
        f"{number(card.reserve_bytes / GB, 3)} GB outside the allocator, of {number(card.memory_bytes / GB)} GB: "
        f"{answer}; "
        f"{longest} (modelled)."
    )


def _planned_row(cell: Cell, card: Card) -> list[str]:
    band = f"{number(cell.peak_low / GB)} to {number(cell.peak_high / GB)}"
    return [
        number(cell.positions),
        "modelled",
        number(cell.peak_bytes / GB),
        band,
        verdict(cell, card),
        "this engine's plan",
    ]


def _printed_row(peak: PublishedPeak) -> list[str]:
    return [number(peak.positions), "published", exact(peak.peak_gb), "–", "ran", peak.name]
