"""The planner's answers for a grid of requests, so that a page without a kernel can look them up.

Everything is a number that `plan()` gave, except two closed forms of it: the verdict of another card, which differs in
its memory and reserve only, and seconds of another group size, which are linear in it. tests/widgets compares both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from widgets.base import Control
from widgets.view import distinct
from workbench.errors import InvalidInputError
from workbench.planner import FRAGMENTATION, PHASES, TERMS, find_gpu, find_model, plan, seconds_lines
from workbench.planner.questions import with_request

RESPONSE_TOKENS = 8192
GPUS = ("H20-3e-141", "H200-SXM", "H100-80-SXM", "B200")
RANKS = (1, 2, 4, 8, 16, 32)
SCOPES = ("full", "response_only", "prefix_frozen")
CHUNK_TOKENS = 8192  # near the lowest peak of long prompts, for these models
POSITIONS = (*(2**power for power in range(15, 23)), 4456448, 2**23)
ALLOCATED = tuple(term for term in TERMS if term != "outside")


@dataclass(frozen=True, kw_only=True)
class Card:
    """A GPU: memory as its driver reports it, and what torch's allocator never gets."""

    name: str
    memory_bytes: int
    reserve_bytes: int


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One planned request. terms: {phase: bytes of each of ALLOCATED}; peak_bytes, its band and phase: per rank.

    loaded_bytes: weights and adapter with their moments, before the step. seconds: {card: {phase: (fixed, per member)}}
    at half of the card's peak rate.
    """

    model: str
    context_parallel: int
    scope: str
    positions: int
    peak_bytes: int
    peak_low: int
    peak_high: int
    peak_phase: str
    loaded_bytes: int
    terms: dict[str, tuple[int, ...]]
    seconds: dict[str, dict[str, tuple[float, float]]]


def cell_controls(cells: Sequence[Cell], offered: Sequence[Card]) -> dict[str, Control]:
    """The inputs that choose a cell and a card, by name."""
    lengths = tuple(sorted({c.positions for c in cells}))
    ranks = tuple(sorted({c.context_parallel for c in cells}))
    found = (
        Control(name="positions", label="Positions", values=lengths, texts=tuple(f"{n:,}" for n in lengths)),
        Control(
            name="context_parallel",
            label="Context-parallel ranks",
            values=ranks,
            texts=tuple(f"{n} ranks" if n > 1 else "1 rank" for n in ranks),
        ),
        Control(name="model", label="Model", values=tuple(distinct(c.model for c in cells)), kind="choice"),
        Control(name="gpu", label="GPU", values=tuple(c.name for c in offered), kind="choice"),
        Control(name="scope", label="Gradient scope", values=tuple(distinct(c.scope for c in cells)), kind="choice"),
    )
    return {control.name: control for control in found}


def cards(names: Sequence[str]) -> tuple[Card, ...]:
    """Catalogue entries by name."""
    found = [find_gpu(name) for name in names]
    return tuple(Card(name=g.name, memory_bytes=g.memory_bytes, reserve_bytes=g.reserve_bytes) for g in found)


def plan_cells(
    model: str,
    *,
    gpus: Sequence[str] = GPUS,
    context_parallel: Sequence[int] = RANKS,
    scopes: Sequence[str] = SCOPES,
    positions: Sequence[int] = POSITIONS,
    with_terms: bool = True,
    response_tokens: int = RESPONSE_TOKENS,
    **options: Any,
) -> Iterator[Cell]:
    """Plans every combination; options: further arguments of `plan`. with_terms=False leaves terms and seconds out.

    Routed experts are shared by the same ranks as the prompt.
    """
    if not gpus or not context_parallel or not scopes or not positions:
        raise InvalidInputError("plan_cells: gpus, context_parallel, scopes and positions need at least one entry each")
    has_experts = find_model(model).num_experts > 0
    for ranks in context_parallel:
        for scope in scopes:
            for length in positions:
                planned = plan(
                    model,
                    gpus[0],
                    positions=length,
                    group_size=1,
                    response_tokens=response_tokens,
                    context_parallel=ranks,
                    gradient_scope=scope,
                    **({"expert_parallel": ranks if has_experts else 1} | options),
                )
                low, high = planned.peak_band
                terms = planned.terms
                seconds: dict[str, dict[str, tuple[float, float]]] = {}
                if with_terms:
                    pair = with_request(planned, group_size=2).request
                    for name in gpus:
                        card = find_gpu(name)
                        one = seconds_lines(planned.shape, card, planned.request, None)["half of peak"]
                        two = seconds_lines(planned.shape, card, pair, None)["half of peak"]
                        seconds[card.name] = {
                            phase: (2 * one[phase] - two[phase], two[phase] - one[phase]) for phase in one
                        }
                yield Cell(
                    model=planned.shape.name,
                    context_parallel=ranks,
                    scope=scope,
                    positions=length,
                    peak_bytes=planned.peak_bytes,
                    peak_low=low,
                    peak_high=high,
                    peak_phase=planned.peak_phase,
                    loaded_bytes=sum(terms["load"][term] for term in ALLOCATED),
                    terms={p: tuple(terms[p][t] for t in ALLOCATED) for p in PHASES} if with_terms else {},
                    seconds=seconds,
                )


def verdict(cell: Cell, card: Card) -> str:
    """What `Plan.verdict` says of this request on that card."""
    if cell.peak_bytes + card.reserve_bytes > card.memory_bytes:
        return "no"
    fragmentation = FRAGMENTATION if card.reserve_bytes else 1.0
    high = cell.loaded_bytes + (cell.peak_high - cell.loaded_bytes) * fragmentation
    return "fits" if high + card.reserve_bytes <= card.memory_bytes else "probe"
