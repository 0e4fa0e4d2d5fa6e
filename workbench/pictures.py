"""A plotly figure as a PNG drawn by matplotlib, for places that show no scripts; no browser is started.

Drawn are the parts that this project's figures use: lines, markers, filled outlines, bars (grouped, stacked, lying),
straight lines across, linear and logarithmic axes, names. A figure with another kind of trace has no picture.
"""

from __future__ import annotations

import base64
import io
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

DRAWN_TRACES = ("scatter", "bar")
_DASHES = {"dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3))}
_MARKERS = {"circle": "o", "diamond": "D", "square": "s", "x": "x", "cross": "P", "triangle-up": "^"}
_TAGS = re.compile(r"<br\s*/?>|<[^>]+>")


def figure_png(figure: Mapping[str, Any]) -> bytes | None:
    """The picture of a figure given as plotly's JSON; None if it holds a kind of trace that is not drawn."""
    traces, layout = figure["data"], figure.get("layout", {})
    if any(trace.get("type", "scatter") not in DRAWN_TRACES or "xaxis" in trace for trace in traces):
        return None
    logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)  # it would announce its font cache
    from matplotlib.figure import Figure

    picture = Figure(figsize=(8, max(3.2, layout.get("height", 400) / 100)), layout="constrained", dpi=100)
    axes = picture.add_subplot()
    _draw_bars(axes, [trace for trace in traces if trace.get("type") == "bar"], layout.get("barmode", "group"))
    for trace in traces:
        if trace.get("type", "scatter") == "scatter":
            _draw_scatter(axes, trace)
    for shape in layout.get("shapes", ()):
        _draw_shape(axes, shape)
    _set_axis(axes, "x", layout.get("xaxis", {}))
    _set_axis(axes, "y", layout.get("yaxis", {}))
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _draw_scatter(axes: Any, trace: Mapping[str, Any]) -> None:
    line, marker = trace.get("line", {}), trace.get("marker", {})
    color = line.get("color") or _one(marker.get("color")) or trace.get("fillcolor")
    x, y = _values(trace, "x"), _values(trace, "y")
    label = _label(trace)
    if trace.get("fill") == "toself":
        axes.fill(x, y, color=_color(trace.get("fillcolor") or color), linewidth=0, label=label)
        return
    mode = trace.get("mode", "lines")
    symbol = str(_one(marker.get("symbol", "circle"))).removesuffix("-open")
    axes.plot(
        x,
        y,
        color=_color(color),
        linestyle=_DASHES.get(line.get("dash", ""), "-") if "lines" in mode else "",
        linewidth=line.get("width", 2),
        marker=_MARKERS.get(symbol, "o") if "markers" in mode else "",
        label=label,
    )
    errors = trace.get("error_y", {})
    if errors.get("array") is not None:
        axes.errorbar(x, y, yerr=_values(errors, "array"), color=_color(color), linestyle="")


def _draw_bars(axes: Any, traces: Sequence[Mapping[str, Any]], mode: str) -> None:
    lying = any(trace.get("orientation") == "h" for trace in traces)
    names: list[Any] = list(dict.fromkeys(name for trace in traces for name in _values(trace, "y" if lying else "x")))
    ends = np.zeros(len(names))
    width = 0.75 if mode in ("stack", "relative", "overlay") else 0.75 / max(1, len(traces))
    for index, trace in enumerate(traces):
        places = np.array([names.index(name) for name in _values(trace, "y" if lying else "x")], dtype=float)
        sizes = np.nan_to_num(np.array(_values(trace, "x" if lying else "y"), dtype=float))
        at = places.astype(int)
        base = ends[at].copy() if mode in ("stack", "relative") else np.zeros(len(at))
        if mode == "group":
            places += width * (index - (len(traces) - 1) / 2)
        color = trace.get("marker", {}).get("color")
        colors = [_color(c) for c in color] if isinstance(color, list) else _color(color)
        if lying:
            axes.barh(places, sizes, height=width, left=base, color=colors, label=_label(trace))
        else:
            axes.bar(places, sizes, width=width, bottom=base, color=colors, label=_label(trace))
        ends[at] += sizes if mode in ("stack", "relative") else 0.0
    if names:
        (axes.set_yticks if lying else axes.set_xticks)(range(len(names)), [_text(name) for name in names])


def _draw_shape(axes: Any, shape: Mapping[str, Any]) -> None:
    """A line across the whole plot; other shapes are decoration."""
    look = {"color": "#555555", "linewidth": shape.get("line", {}).get("width", 1), "linestyle": "--"}
    if str(shape.get("yref", "")).endswith("domain"):
        axes.axvline(shape["x0"], **look)
    elif str(shape.get("xref", "")).endswith("domain"):
        axes.axhline(shape["y0"], **look)


def _set_axis(axes: Any, which: str, layout: Mapping[str, Any]) -> None:
    title = layout.get("title", {})
    getattr(axes, f"set_{which}label")(_text(title.get("text", "") if isinstance(title, Mapping) else title))
    if layout.get("type") == "log":
        getattr(axes, f"set_{which}scale")("log")
    if layout.get("tickvals") is not None:
        values = _values(layout, "tickvals")
        texts = layout.get("ticktext") or [f"{value:,}" for value in values]
        axis = getattr(axes, f"{which}axis")
        axis.set_ticks(values, [_text(text) for text in texts])
        axis.set_minor_locator(_no_ticks())
    elif layout.get("rangemode") == "tozero" and layout.get("type") != "log":
        getattr(axes, f"set_{which}lim")(**{"bottom" if which == "y" else "left": 0})
    if layout.get("autorange") == "reversed":
        getattr(axes, f"invert_{which}axis")()


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _values(holder: Mapping[str, Any], name: str) -> list[Any]:
    """A list, also where plotly wrote an array as base64."""
    value = holder.get(name)
    if isinstance(value, Mapping):
        return np.frombuffer(base64.b64decode(value["bdata"]), dtype=value["dtype"]).tolist()
    return [] if value is None else list(value)


def _label(trace: Mapping[str, Any]) -> str:
    return "_" if trace.get("showlegend") is False or not trace.get("name") else _text(trace["name"])


def _one(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None if isinstance(value, list) else value


def _color(value: Any) -> Any:
    """What matplotlib takes: names and hex as they are, rgb() and rgba() as numbers."""
    if isinstance(value, str) and value.startswith("rgb"):
        parts = [float(part) for part in re.findall(r"[\d.]+", value)]
        return (*(part / 255 for part in parts[:3]), *parts[3:])
    return value if isinstance(value, str) else None


def _text(value: Any) -> str:
    return _TAGS.sub(" ", str(value))
