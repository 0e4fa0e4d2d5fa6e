"""The planner as a form: a machine, a prompt, a group in; what each phase holds, the verdict and the time out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import traitlets

from widgets.base import Control, Widget, checked
from widgets.plan_cells import (
    ALLOCATED,
    CHUNK_TOKENS,
    GPUS,
    RESPONSE_TOKENS,
    Card,
    Cell,
    cards,
    cell_controls,
    plan_cells,
    verdict,
)
from widgets.sources import GB
from widgets.view import Axis, Mark, Panel, Series, Table, View, number
from workbench.planner import PHASES

GROUP_SIZES = (1, 2, 4, 8, 16, 32, 64)
# Terms that are drawn as one, with their colour; in the order in which they are stacked.
GROUPS: Mapping[str, tuple[tuple[str, ...], str]] = {
    "weights": (("weights",), "grey"),
    "adapter and optimizer": (("adapter", "optimizer"), "yellow"),
    "rows": (("rows",), "blue"),
    "carries": (("carry", "boundary_carries"), "sky"),
    "gradient pages": (("gradient_pages",), "purple"),
    "graph": (("graph",), "orange"),
    "logits and workspace": (("logits", "workspace"), "green"),
}
ANSWERS = {
    "fits": "It fits, even at the upper end of all bands",
    "probe": "It may fit: the middle of the bands does, the upper end does not; run one short step to know",
    "no": "It does not fit",
}


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """Planned cells of one model or several, and the cards they are held against."""

    cells: tuple[Cell, ...]
    cards: tuple[Card, ...]
    response_tokens: int
    notes: tuple[str, ...] = ()


def plan_record(
    *models: str, gpus: Sequence[str] = GPUS, response_tokens: int = RESPONSE_TOKENS, **options: Any
) -> PlanRecord:
    """Plans a grid for the widget: about a second per model. options: those of `plan_cells`, and so of `plan`."""
    cells = tuple(
        cell for model in models for cell in plan_cells(model, gpus=gpus, response_tokens=response_tokens, **options)
    )
    asked = ", ".join(f"{name}={value!r}" for name, value in options.items() if not isinstance(value, tuple | list))
    return PlanRecord(
        cells=cells,
        cards=cards(gpus),
        response_tokens=response_tokens,
        notes=(
            f"Modelled: workbench.plan({asked or 'defaults'}), responses of {response_tokens:,} tokens; seconds at "
            "half of the card's peak rate. A plan: nothing here ran on these cards.",
        ),
    )


@cache
def shipped_record() -> PlanRecord:
    """Qwen3.6-27B with layer checkpoints."""
    return plan_record("Qwen3.6-27B", checkpoint_layers=True, chunk_tokens=CHUNK_TOKENS)


class Plan(Widget):
    """Bytes of every phase against the card, the verdict, and seconds; answers are those of `workbench.plan`."""

    title = "Plan: will it fit, what binds, how long is a step"
    script = "plan"
    record_type = PlanRecord

    positions = traitlets.Int(2097152).tag(sync=True)
    group_size = traitlets.Int(8).tag(sync=True)
    context_parallel = traitlets.Int(8).tag(sync=True)
    gpu = traitlets.Unicode("H20-3e-141").tag(sync=True)
    scope = traitlets.Unicode("full").tag(sync=True)
    model = traitlets.Unicode("Qwen3.6-27B").tag(sync=True)
    _check = checked("positions", "group_size", "context_parallel", "gpu", "scope", "model")

    def __init__(self, record: PlanRecord | None = None, **values: Any) -> None:
        super().__init__(shipped_record() if record is None else record, **values)

    @classmethod
    def controls(cls, record: PlanRecord) -> tuple[Control, ...]:
        sizes = Control(
            name="group_size",
            label="Group size G",
            values=GROUP_SIZES,
            texts=tuple(f"{n} responses" for n in GROUP_SIZES),
        )
        by_name = {"group_size": sizes, **cell_controls(record.cells, record.cards)}
        order = ("positions", "group_size", "context_parallel", "gpu", "scope", "model")
        return tuple(by_name[name] for name in order)

    @staticmethod
    def view_of(record: PlanRecord, state: Mapping[str, Any]) -> View:
        keys = ("model", "context_parallel", "scope", "positions")
        cell = next(c for c in record.cells if all(getattr(c, key) == state[key] for key in keys))
        card = next(c for c in record.cards if c.name == state["gpu"])
        phases = [_words(phase) for phase in PHASES]
        stacked = []
        for name, (terms, color) in GROUPS.items():
            values = [_sum(cell, phase, terms) for phase in PHASES]
            if any(values):
                gb = [value / GB for value in values]
                stacked.append(
                    Series(name=name, origin="modelled", color=color, kind="bars", stack=True, x=phases, y=gb)
                )
        seconds = phase_seconds(cell, card, state["group_size"])
        times = Series(
            name="seconds",
            origin="modelled",
            color="blue",
            kind="bars",
            x=[_words(phase) for phase in seconds],
            y=list(seconds.values()),
        )
        usable = (card.memory_bytes - card.reserve_bytes) / GB
        band = Axis(label="phase of the step", scale="band")
        return View(
            says=_sentence(cell, card, sum(seconds.values())),
            panels=[
                Panel(
                    title="Bytes per rank by phase",
                    x=band,
                    y=Axis(label="GB"),
                    series=stacked,
                    marks=[
                        Mark(
                            axis="y", value=usable, label=f"{card.name}, {number(usable)} GB usable", origin="modelled"
                        )
                    ],
                ),
                Panel(title="Time of one step", x=band, y=Axis(label="seconds"), series=[times]),
            ],
            table=Table(
                caption=f"{cell.model}, {number(cell.positions)} positions, G = {state['group_size']}, "
                f"{number(cell.context_parallel)} ranks of {card.name}, scope {cell.scope}",
                headings=["phase", "origin", "GB per rank", "largest term", "of it, GB", "seconds"],
                rows=[_row(cell, phase, seconds) for phase in PHASES],
            ),
            notes=record.notes,
        )


def phase_seconds(cell: Cell, card: Card, group_size: int) -> dict[str, float]:
    """Seconds by phase: what is fixed, and what each member adds."""
    return {phase: fixed + group_size * member for phase, (fixed, member) in cell.seconds[card.name].items()}


def binding_term(cell: Cell, phase: str) -> str:
    """The largest term of a phase."""
    sizes = cell.terms[phase]
    return ALLOCATED[sizes.index(max(sizes))]


def _sum(cell: Cell, phase: str, terms: Sequence[str]) -> int:
    return sum(cell.terms[phase][ALLOCATED.index(term)] for term in terms)


def _words(name: str) -> str:
    return name.replace("_", " ")


def _sentence(cell: Cell, card: Card, seconds: float) -> str:
    return (
        f"{ANSWERS[verdict(cell, card)]}: {number(cell.peak_bytes / GB)} GB per rank "
        f"({number(cell.peak_low / GB)} to {number(cell.peak_high / GB)}) of {number(card.memory_bytes / GB)}, "
        f"in the phase {_words(cell.peak_phase)}, bound by {_words(binding_term(cell, cell.peak_phase))}; "
        f"{number(seconds)} s a step (modelled)."
    )


def _row(cell: Cell, phase: str, seconds: Mapping[str, float]) -> list[str]:
    largest = binding_term(cell, phase)
    return [
        _words(phase),
        "modelled",
        number(_sum(cell, phase, ALLOCATED) / GB),
        _words(largest),
        number(_sum(cell, phase, [largest]) / GB),
        number(seconds[phase]) if phase in seconds else "–",
    ]
