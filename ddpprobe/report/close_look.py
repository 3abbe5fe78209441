"""The guilty module around the step: every statistic of each of its sites, drawn and in numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ddpprobe.reader.text import number
from ddpprobe.records.step import Site
from ddpprobe.report.curves import Panel, Trace, band, line, log_axis, stacked, tint, upright
from ddpprobe.report.encode import typed
from ddpprobe.report.heat import KIND_WORDS, without
from ddpprobe.report.history import History
from ddpprobe.report.rows import Floats

MOST_SITES = 8  # of one module
LISTED = 6  # steps on each side in the table
TABLE = (
    "nan", "pos_inf", "neg_inf", "zero_ratio", "min", "max", "mean", "std", "rms", "abs_max",
    "norm", "numel",
)  # fmt: skip
_BROKEN = (("nan", "NaN", "--bad"), ("pos_inf", "+Inf", "--c2"), ("neg_inf", "-Inf", "--c5"))


def close_looks(history: History) -> list[dict[str, Any]]:
    """Return a figure for each site of the module, the one that the verdict names first."""
    return [_figure(history, site) for site in history.ordered()[:MOST_SITES]]


def numbers_around(history: History) -> dict[str, Any] | None:
    """Return the table of the guilty site: `site`, `stats`, and `rows` of step and values."""
    sites = history.ordered()
    if not sites:
        return None
    steps = list(history.steps)
    before = [s for s in steps if s < history.cause.step][-LISTED:]
    after = [s for s in steps if s >= history.cause.step][: LISTED + 1]
    series = {stat: history.series(sites[0].key, stat) for stat in TABLE}
    places = [steps.index(step) for step in (*before, *after)]
    rows = [
        {
            "step": f"{steps[i]}{without(history.absent.get(steps[i], 0))}",
            "guilty": steps[i] == history.cause.step,
            "values": [number(float(series[stat][i])) for stat in TABLE],
        }
        for i in places
    ]
    return {"site": sites[0], "stats": TABLE, "rows": rows}


def _figure(history: History, site: Site) -> dict[str, Any]:
    x = np.array(history.steps, np.float64)
    found = {stat: history.series(site.key, stat) for stat in TABLE}
    panels = [
        _sizes(x, found), _spread(x, found), _broken(x, found), _zeros(x, found),
        _ranks(x, history, site),
    ]  # fmt: skip
    shown = [panel for panel in panels if panel]
    words = KIND_WORDS.get(site.kind, site.kind)
    leaf = f" [{site.leaf}]" if site.leaf else ""
    height = 70 + int(130 * sum(panel.share for panel in shown))
    title = f"{words}{leaf}{_lacking(history)}"
    return stacked(
        title, shown, height=height, xaxis={"title": {"text": "step"}},
        lines=[upright(float(history.cause.step))],
    )  # fmt: skip


def _lacking(history: History) -> str:
    if not history.absent:
        return ""
    most = max(history.absent.values())
    return f" ({len(history.absent)} of {len(history.steps)} steps{without(most)[1:]} or fewer)"


def _dots(x: Floats, y: Floats, label: str, colour: str, **more: Any) -> Trace:  # noqa: ANN401
    marker = {"color": colour, "size": 4.5}
    return line(x, y, label, colour, mode="lines+markers", marker=marker, **more)


def _sizes(x: Floats, found: dict[str, Floats]) -> Panel:
    traces = [
        _dots(x, _positive(found["abs_max"]), "largest magnitude", "--c2"),
        _dots(x, _positive(found["rms"]), "root mean square", "--c1"),
    ]
    words = tint("largest magnitude", "--c2"), tint("root mean square", "--c1")
    title = "{} and\n{} (log scale)".format(*words)
    return Panel(title, traces, log_axis(found["abs_max"], found["rms"]), 1.3)


def _spread(x: Floats, found: dict[str, Floats]) -> Panel:
    mean, std = found["mean"], found["std"]
    traces = [
        band(x, found["min"], found["max"], "--calm", "range"),
        band(x, mean - std, mean + std, "--c1-soft", "mean ± std"),
        _dots(x, mean, "mean", "--c1"),
    ]
    title = f"{tint('mean ± standard deviation', '--c1')} and range"
    return Panel(title, traces, {}, 1.3)


def _broken(x: Floats, found: dict[str, Floats]) -> Panel:
    """Draw bars on a log axis: one step's few, and the next one's many; none is no bar."""
    traces: list[Trace] = [
        {
            "type": "bar", "x": typed(x), "y": typed(_positive(found[stat])), "name": label,
            "marker": {"color": colour},
            "hovertemplate": f"%{{y:,.0f}} {label}<extra></extra>",
        }
        for stat, label, colour in _BROKEN
        if np.nansum(found[stat])
    ]  # fmt: skip
    if traces:
        most = max(float(np.nanmax(found[stat])) for stat, _, _ in _BROKEN)
        decades = max(1, math.ceil(math.log10(most)))
        ticks = [10.0**n for n in range(0, decades + 1, -(-decades // 4))]
        axis: dict[str, Any] = {"type": "log", "range": [-0.3, decades + 0.1], "tickvals": ticks}
        words = ", ".join(tint(t["name"], t["marker"]["color"]) for t in traces)
        return Panel(f"elements that are not finite:\n{words} (log scale)", traces, axis, 0.9)
    nonfinite = sum((found[stat] for stat, _, _ in _BROKEN), np.zeros(len(x)))
    trace = _dots(x, nonfinite, "not finite", "--c3")
    axis = {"range": [-0.1, 1], "nticks": 2}
    return Panel("elements that are not finite: none", [trace], axis, 0.5)


def _zeros(x: Floats, found: dict[str, Floats]) -> Panel:
    trace = _dots(x, found["zero_ratio"], "zeros", "--c3")
    return Panel("share of zeros", [trace], {"tickformat": ".3~%", "rangemode": "tozero"}, 0.8)


def _ranks(x: Floats, history: History, site: Site) -> Panel | None:
    """Compare the ranks' own rows, where they are there."""
    traces = []
    for rank in sorted(history.ranks, key=lambda r: (r == history.cause.rank, r)):
        found = _positive(history.series(site.key, "rms", rank))
        guilty = rank == history.cause.rank
        colour, width = ("--c4", 2.4) if guilty else ("--faint", 1.2)
        if np.isfinite(found).any():
            traces.append(_dots(x, found, f"rank {rank}", colour, width=width))
    blamed = history.cause.rank
    who = "" if blamed is None else f"({tint(f'rank {blamed}', '--c4')} in colour)"
    drawn = [_positive(history.series(site.key, "rms", r)) for r in history.ranks]
    title = f"root mean square on single ranks\n{who}, log scale"
    return Panel(title, traces, log_axis(*drawn), 1.2) if len(traces) > 1 else None


def _positive(values: Floats) -> Floats:
    """Return values for a logarithmic axis, which has no place for 0."""
    return np.where(values > 0, values, np.nan)
