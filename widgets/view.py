"""What a widget shows, as data: a sentence, charts, one table. Drawn by `picture.py` here and `shared.js` in a browser.

Every widget has one function `view(record, state)`, in Python and again in JavaScript, where it runs without a kernel.
Both return this structure; the browser tests compare them value by value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, TypeVar

from workbench.errors import InvalidInputError
from workbench.recordings import ORIGINS

# Okabe and Ito's colour-blind-safe palette; shared.js has lighter variants for dark pages.
COLORS = {
    "blue": "#0072b2",
    "orange": "#d55e00",
    "green": "#00805f",
    "purple": "#a8568a",
    "sky": "#2f8fc4",
    "yellow": "#9a7d00",
    "grey": "#6f6f6f",
}
KINDS = ("line", "points", "bars", "area")
SCALES = ("linear", "log", "band")
Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """label: with its unit. scale "band": names, not numbers. ticks "short": 2,000,000 as 2M; "whole": no fractions."""

    label: str
    scale: str = "linear"
    ticks: str = "plain"

    def __post_init__(self) -> None:
        _one_of("scale", self.scale, SCALES)


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, set of points, set of bars or stacked area; y None: unknown there; low, high: its band."""

    name: str
    origin: str
    color: str
    x: Sequence[Any]
    y: Sequence[float | None]
    kind: str = "line"
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    stack: bool = False

    def __post_init__(self) -> None:
        _one_of("origin", self.origin, ORIGINS)
        _one_of("color", self.color, tuple(COLORS))
        _one_of("kind", self.kind, KINDS)


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A line across the chart at one value of "x" or "y"; origin "" for what the reader chose."""

    axis: str
    value: float
    label: str
    origin: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One chart. empty: what is said instead when there is no series."""

    title: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    empty: str = "Nothing recorded for this choice."


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells are text, as shown: numbers with their unit in the heading or the cell."""

    caption: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class View:
    """says: the answer in a sentence."""

    says: str
    panels: Sequence[Panel]
    table: Table
    notes: Sequence[str] = ()


def number(value: float | None, digits: int = 4) -> str:
    """`digits` significant digits with thousands separators, as `number` in shared.js writes them."""
    if value is None:
        return "–"
    if value == int(value):
        return f"{int(value):,}"
    size = abs(value)
    if size < 1e-3:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    # Ties as JavaScript rounds them; Python's own format takes the even digit.
    rounded = Decimal(value).quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_HALF_UP)
    return f"{rounded:,.{decimals}f}"


def exact(value: float) -> str:
    """All digits that a published number has."""
    return f"{int(value):,}" if value == int(value) else f"{value:,}"


def distinct(values: Iterable[Value]) -> list[Value]:
    """Distinct values in order of appearance."""
    return list(dict.fromkeys(values))


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise InvalidInputError(f"{name}={value!r} is not one of {', '.join(choices)}")
