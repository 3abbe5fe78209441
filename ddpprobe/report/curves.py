"""Curves over steps or time: lines with gaps, bands, marks; and several of them in one plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddpprobe.report.columns import StepColumn
from ddpprobe.report.encode import figure, typed
from ddpprobe.report.rows import Floats

Trace = dict[str, Any]
Places = NDArray[np.intp]
COLOURS = ("--c1", "--c2", "--c3", "--c4", "--c5", "--c6")  # colour-blind safe: page.css
_GAP, _TITLE = 0.075, 36  # between panels, as a share of the whole; height of a title, px


@final
@dataclass(slots=True)
class Panel:
    """One of several plots above each other that share their x axis.

    Attributes:
        title: shown above it.
        traces: without their axes.
        axis: what is particular of its y axis.
        share: of the height.
    """

    title: str
    traces: list[Trace]
    axis: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0


def stacked(
    title: str,
    panels: Sequence[Panel],
    *,
    height: int,
    xaxis: dict[str, Any],
    lines: Iterable[Trace] = (),
) -> dict[str, Any]:
    """Return a figure of panels above each other; `lines` are shapes across all of them."""
    total = sum(panel.share for panel in panels)
    gap = _GAP if len(panels) > 1 else 0.0
    free, top = 1 - gap * (len(panels) - 1), 1.0
    data: list[Trace] = []
    layout: dict[str, Any] = {"annotations": [], "shapes": list(lines), "showlegend": False}
    for number, panel in enumerate(panels, 1):
        bottom = max(0.0, top - free * panel.share / total)
        key = "y" if number == 1 else f"y{number}"
        layout[f"yaxis{number if number > 1 else ''}"] = {
            "domain": [bottom, top], "zeroline": False, "automargin": True, "nticks": 5,
            "fixedrange": True, **panel.axis,
        }  # fmt: skip
        layout["annotations"].append(
            {"text": f"<b>{panel.title}</b>", "xref": "paper", "yref": "paper", "x": 0, "y": top,
             "xanchor": "left", "yanchor": "bottom", "showarrow": False, "align": "left",
             "font": {"size": 12.5}}
        )  # fmt: skip
        data += [{**trace, "xaxis": "x", "yaxis": key} for trace in panel.traces]
        top = bottom - gap
    layout["xaxis"] = {"anchor": key, "zeroline": False, "automargin": True, **xaxis}
    layout["margin"] = {"t": _TITLE + 4, "r": 12, "b": 44, "l": 12}
    return figure(title, data, layout, height)


def tint(word: str, colour: str) -> str:
    """Return a word of a title in the colour of its curve, which makes it the legend."""
    return f'<span style="color:{colour}">{word}</span>'


def log_axis(*curves: Floats) -> dict[str, Any]:
    """Return a logarithmic axis for these values with few ticks, at round numbers."""
    every = np.concatenate([np.ravel(curve) for curve in curves] or [np.zeros(0)])
    seen = every[np.isfinite(every) & (every > 0)]
    if not seen.size:
        return {"type": "log"}
    low, high = np.log10(seen.min()), np.log10(seen.max())
    pad = max(0.06 * (high - low), 0.02)
    low, high = float(low - pad), float(high + pad)
    return {"type": "log", "range": [low, high], "tickvals": _round(low, high)}


def _round(low: float, high: float) -> list[float]:
    """Return round numbers between two powers of ten: decades, 1-2-5, or evenly apart."""
    if high - low > 2.5:
        apart = max(1, round((high - low) / 5))
        return [10.0**n for n in range(math.ceil(low), math.floor(high) + 1, apart)]
    if high - low > 0.9:
        decades = range(math.floor(low), math.ceil(high) + 1)
        numbers = [m * 10.0**n for n in decades for m in (1, 2, 5)]
    else:
        rough = (10**high - 10**low) / 4
        unit = 10.0 ** math.floor(math.log10(rough))
        step = unit * min((1, 2, 5, 10), key=lambda m: abs(m * unit - rough))
        first, last = math.floor(10**low / step), math.ceil(10**high / step)
        numbers = [step * n for n in range(first, last + 1)]
    return [n for n in numbers if 10**low <= n <= 10**high]


def line(
    x: ArrayLike,
    y: ArrayLike,
    label: str,
    colour: str,
    *,
    width: float = 1.8,
    **more: Any,  # noqa: ANN401
) -> Trace:
    """Return a line; where y is NaN there is none."""
    return {
        "type": "scatter", "mode": "lines", "x": typed(x), "y": typed(y), "name": label,
        "line": {"color": colour, "width": width}, "connectgaps": False,
        "hovertemplate": f"{label} %{{y:.5g}}<extra></extra>", **more,
    }  # fmt: skip


def marks(x: ArrayLike, y: ArrayLike, text: Sequence[str], colour: str, symbol: str) -> Trace:
    """Return markers, each with its text."""
    return {
        "type": "scatter", "mode": "markers", "x": typed(x), "y": typed(y), "text": list(text),
        "marker": {"color": colour, "symbol": symbol, "size": 9,
                   "line": {"width": 1, "color": "--card"}},
        "hovertemplate": "%{text}<extra></extra>",
    }  # fmt: skip


def band(x: Floats, low: Floats, high: Floats, colour: str, label: str) -> Trace:
    """Return the area between two curves; in pieces where one of them has gaps."""
    xs: list[float] = []
    ys: list[float] = []
    good = np.isfinite(low) & np.isfinite(high)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], good.astype(np.int8), [0]))))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        piece = slice(start, stop)
        xs += [*x[piece], *x[piece][::-1], np.nan]
        ys += [*low[piece], *high[piece][::-1], np.nan]
    return {
        "type": "scatter", "mode": "lines", "x": typed(xs), "y": typed(ys), "fill": "toself",
        "fillcolor": colour, "line": {"width": 0, "color": colour}, "hoverinfo": "skip",
        "name": label,
    }  # fmt: skip


def upright(x: float) -> Trace:
    """Return a vertical line through all panels."""
    return {
        "type": "line", "xref": "x", "yref": "paper", "x0": x, "x1": x, "y0": 0, "y1": 1,
        "line": {"color": "--bad", "width": 1.5, "dash": "dot"},
    }  # fmt: skip


def where(columns: Sequence[StepColumn[Any]]) -> tuple[Floats, Places]:
    """Return x [m] and the index of the column there [m], -1 where a new attempt begins a line."""
    x: list[float] = []
    index: list[int] = []
    for i, column in enumerate(columns):
        if i and columns[i - 1].attempt != column.attempt:
            x.append(float(column.first))
            index.append(-1)
        x.append((column.first + column.last) / 2)
        index.append(i)
    return np.array(x), np.array(index, np.intp)


def at(values: Floats, index: Places) -> Floats:
    """Return values [columns, ...] as `where` says; NaN where a line is to break."""
    if not len(values):
        return values
    found = np.take(values, index, axis=0)
    found[index < 0] = np.nan
    return found
