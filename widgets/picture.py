"""A view as a picture, for whoever cannot run scripts: GitHub, an e-mail, an untrusted notebook. By matplotlib."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from typing import Any

from widgets.view import COLORS, Panel, Series, View, distinct, number

# How an origin looks, as in shared.js: published is hollow and dotted, measured solid, modelled dashed or hatched.
_LINES: dict[str, dict[str, Any]] = {
    "published": {"linestyle": ":", "marker": "D", "markerfacecolor": "white", "markersize": 7, "linewidth": 1.4},
    "measured": {"linestyle": "-", "marker": "o", "markersize": 5, "linewidth": 2},
    "modelled": {"linestyle": "--", "marker": "", "linewidth": 2},
}
_BARS: dict[str, dict[str, Any]] = {
    "published": {"alpha": 0.35, "linewidth": 2},
    "measured": {},
    "modelled": {"alpha": 0.7, "hatch": "///"},
}


def png(view: View) -> bytes:
    """The charts side by side, as PNG."""
    # Its first picture on a machine would announce a font cache, on a page that people share.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)
    from matplotlib.figure import Figure

    panels = [panel for panel in view.panels if panel.series]
    figure = Figure(figsize=(5.4 * max(1, len(panels)), 4.3), layout="constrained", dpi=100)
    if not panels:
        figure.text(0.5, 0.5, view.says, ha="center", va="center", wrap=True)
    for number_of, panel in enumerate(panels):
        _draw(figure.add_subplot(1, len(panels), number_of + 1), panel)
    buffer = io.BytesIO()
    # Without a version or date in it, the same view gives the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw(axes: Any, panel: Panel) -> None:
    names = distinct(x for series in panel.series for x in series.x) if panel.x.scale == "band" else []
    bars = [series for series in panel.series if series.kind == "bars"]
    for series, base in _stacked(panel.series):
        style = {"color": COLORS[series.color], "label": f"{series.name} ({series.origin})"}
        if series.kind == "bars":
            width = 0.76 if series.stack else 0.76 / len(bars)
            shift = 0.0 if series.stack else width * (bars.index(series) - (len(bars) - 1) / 2)
            places = [names.index(x) + shift for x in series.x]
            heights = [y or 0.0 for y in series.y]
            axes.bar(
                places, heights, width * 0.95, bottom=base, edgecolor=style["color"], **style, **_BARS[series.origin]
            )
        elif series.kind == "area":
            top = [low + (y or 0.0) for low, y in zip(base, series.y, strict=True)]
            axes.fill_between(series.x, base, top, alpha=0.75, linewidth=0, **style)
        else:
            _draw_line(axes, series, style)
    for mark in panel.marks:
        (axes.axvline if mark.axis == "x" else axes.axhline)(
            mark.value,
            color="#333333",
            linewidth=1.2,
            linestyle=":" if mark.axis == "x" else (0, (6, 2)),
            label=f"{mark.label} ({mark.origin})" if mark.origin else mark.label,
        )
    _set_axes(axes, panel, names)


def _draw_line(axes: Any, series: Series, style: dict[str, Any]) -> None:
    if series.low is not None and series.high is not None:
        axes.fill_between(series.x, series.low, series.high, color=style["color"], alpha=0.18, linewidth=0)
    look = dict(_LINES[series.origin])
    if series.kind == "points":
        look |= {"linestyle": "", "marker": look["marker"] or "s"}
    elif len(series.x) > 40:
        look["marker"] = ""
    axes.plot(series.x, [float("nan") if y is None else y for y in series.y], **look, **style)


def _stacked(series: Any) -> Iterator[tuple[Series, list[float]]]:
    """Each series with what it stands on."""
    sums: dict[Any, float] = {}
    for one in series:
        piles = one.kind == "area" or one.stack
        base = [sums.get(x, 0.0) if piles else 0.0 for x in one.x]
        if piles:
            sums |= {x: low + (y or 0.0) for x, y, low in zip(one.x, one.y, base, strict=True)}
        yield one, base


def _set_axes(axes: Any, panel: Panel, names: list[str]) -> None:
    axes.set_title(panel.title, fontsize=10, fontweight="bold", loc="left")
    axes.set_xlabel(panel.x.label, fontsize=9)
    axes.set_ylabel(panel.y.label, fontsize=9)
    axes.tick_params(labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", alpha=0.25)
    if panel.y.scale == "log":
        axes.set_yscale("log")
        _few_ticks(axes.yaxis)
    for axis, asked in ((axes.xaxis, panel.x), (axes.yaxis, panel.y)):
        if asked.ticks == "whole":
            axis.get_major_locator().set_params(integer=True)
    if names:
        axes.set_xticks(range(len(names)), [_broken(name) for name in names])
    elif panel.x.scale == "log":
        axes.set_xscale("log")
        _few_ticks(axes.xaxis)
    if not names:
        axes.xaxis.set_major_formatter(lambda value, _: _short(value) if panel.x.ticks == "short" else _tick(value))
    axes.yaxis.set_major_formatter(lambda value, _: _tick(value))
    axes.legend(fontsize=7.5, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _few_ticks(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_minor_formatter(NullFormatter())


def _broken(name: str) -> str:
    words = name.split(" ")
    middle = -(-len(words) // 2)
    return name if len(name) < 12 else "\n".join([" ".join(words[:middle]), " ".join(words[middle:])])


def _short(value: float) -> str:
    if value >= 1e6:
        return f"{_tick(value / 1e6)}M"
    return f"{_tick(value / 1e3)}k" if value >= 1e3 else _tick(value)


def _tick(value: float) -> str:
    text = number(float(f"{value:.6g}"), 3)
    return text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
