"""The run at a glance: verdicts, loss, gradient norms, times and which ranks delivered."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ddpprobe.records.step import Anomaly
from ddpprobe.report.curves import (
    COLOURS,
    Panel,
    Places,
    Trace,
    at,
    band,
    line,
    log_axis,
    marks,
    stacked,
    tint,
    upright,
    where,
)
from ddpprobe.report.encode import name, ranks_named
from ddpprobe.report.numbers import ScalarTable, quiet
from ddpprobe.report.ranks import standing_out
from ddpprobe.report.rows import Floats
from ddpprobe.report.story import Story

MOST_MARKS = 400
FEW_RANKS = 8  # so many are drawn one by one
PHASES = ("data", "forward", "backward", "optimizer")
_LEVELS = {
    "page": ("--bad", "triangle-up"), "warn": ("--warn", "diamond"), "info": ("--c2", "circle"),
}  # fmt: skip


def timeline(story: Story) -> dict[str, Any] | None:
    """Return the figure; None if no step was recorded."""
    if not story.lines:
        return None
    x, index = where(story.lines)
    found = [_verdicts(story.anomalies), _loss(story, x, index), _norms(story, x, index)]
    found += [_noise(story, x, index), _growth(story, x, index), _experts(story, x, index)]
    found += [_times(story, x, index), _scale(story, x, index), _delivered(story, x, index)]
    panels = [panel for panel in found if panel]
    lines = [upright(float(cause.step)) for cause in story.causes[:20]]
    height = 70 + int(130 * sum(panel.share for panel in panels))
    xaxis = {"title": {"text": "step"}, "rangemode": "nonnegative"}
    return stacked("timeline", panels, height=height, xaxis=xaxis, lines=lines)


def _verdicts(anomalies: Sequence[Anomaly]) -> Panel | None:
    traces = []
    for level, (colour, symbol) in _LEVELS.items():
        here = [a for a in anomalies if a.level == level][:MOST_MARKS]
        text = [f"step {a.step}: {name(a.detector)}, {name(a.message)}" for a in here]
        if here:
            traces.append(marks([a.step for a in here], [0] * len(here), text, colour, symbol))
    axis = {"visible": False, "range": [-1, 1]}
    return Panel("anomalies (▲ page, ◆ warning, ● info)", traces, axis, 0.3) if traces else None


def _loss(story: Story, x: Floats, index: Places) -> Panel | None:
    table = story.numbers("loss")
    if not table.known and not table.bad.any():
        return None
    mean, low, high = quiet(np.nanmean, table.mean), _low(table), _high(table)
    traces = [
        band(x, at(low, index), at(high, index), "--c1-soft", "all ranks"),
        line(x, at(mean, index), "mean loss", "--c1"),
        *_not_finite(x, at(mean, index), at(table.bad, index), story),
    ]
    return Panel("loss: mean and range over ranks", traces, {}, 1.4)


def _norms(story: Story, x: Floats, index: Places) -> Panel | None:
    table = story.numbers("grad_norm_local")
    if not table.known and not table.bad.any():
        return None
    ranks, values = list(story.labels.ranks), at(table.mean, index)
    middle = quiet(np.nanmedian, values)
    low, high = at(_low(table), index), at(_high(table), index)
    traces = [band(x, low, high, "--calm", "all ranks")]
    if len(ranks) > FEW_RANKS:
        lower, upper = (quiet(partial(np.nanquantile, q=q), values) for q in (0.25, 0.75))
        traces.append(band(x, lower, upper, "--c1-soft", "middle half of the ranks"))
    else:
        traces += [
            line(x, values[:, i], f"rank {rank}", "--faint", width=1)
            for i, rank in enumerate(ranks)
        ]
    traces.append(line(x, middle, "median over ranks", "--c1"))
    words = [tint("median", "--c1")]
    for colour, rank in zip(("--c4", "--c2", "--c5", "--c3"), standing_out(story), strict=False):
        words.append(tint(f"rank {rank}", colour))
        own = values[:, story.labels.ranks[rank]]
        traces.append(line(x, own, f"rank {rank}", colour, width=2.2))
    traces += _not_finite(x, middle, at(table.bad, index), story)
    title = f"gradient norm before the reduction:\n{', '.join(words)} (log scale)"
    return Panel(title, traces, log_axis(low, high), 1.6)


def _noise(story: Story, x: Floats, index: Places) -> Panel | None:
    table = story.whole("grad_noise_scale")
    if not table.known:
        return None
    curve = at(table.mean[:, 0], index)
    title = "gradient noise scale, in batches of one rank (log scale)"
    return Panel(title, [line(x, curve, "noise scale", "--c3")], log_axis(curve), 0.8)


def _growth(story: Story, x: Floats, index: Places) -> Panel | None:
    names = {"output_growth": "outputs", "grad_output_growth": "their gradients"}
    return _wholes(story, x, index, names, "growth from block to block, ln(rms ratio)")


def _experts(story: Story, x: Floats, index: Places) -> Panel | None:
    names = {
        "expert_violation": "busiest over mean - 1", "expert_concentration": "concentration",
        "expert_idle": "idle share",
    }  # fmt: skip
    return _wholes(story, x, index, names, "load of the experts, worst layer")


def _wholes(
    story: Story, x: Floats, index: Places, names: dict[str, str], title: str
) -> Panel | None:
    """Return numbers of whole steps in one panel; None where none of them is known."""
    tables = {text: story.whole(each) for each, text in names.items()}
    known = {text: table for text, table in tables.items() if table.known}
    traces = [
        line(x, at(table.mean[:, 0], index), text, colour)
        for colour, (text, table) in zip(COLOURS, known.items(), strict=False)
    ]
    words = ", ".join(tint(t["name"], t["line"]["color"]) for t in traces)
    return Panel(f"{title}:\n{words}", traces, {}, 0.8) if traces else None


def _times(story: Story, x: Floats, index: Places) -> Panel | None:
    traces = []
    for colour, phase in zip(COLOURS, PHASES, strict=False):
        table = story.numbers(f"{phase}_seconds")
        if table.known:
            median = quiet(np.nanmedian, table.mean)
            traces.append(line(x, at(median, index), phase, colour, width=1.5))
    words = ", ".join(tint(t["name"], t["line"]["color"]) for t in traces)
    axis = {"ticksuffix": " s", "rangemode": "tozero"}
    title = f"time in each phase, median over ranks:\n{words}"
    return Panel(title, traces, axis) if traces else None


def _scale(story: Story, x: Floats, index: Places) -> Panel | None:
    table = story.numbers("loss_scale")
    if not table.known:
        return None
    trace = line(x, at(quiet(np.nanmedian, table.mean), index), "loss scale", "--c3")
    return Panel("loss scale (GradScaler)", [trace], {"type": "log"}, 0.7)


def _delivered(story: Story, x: Floats, index: Places) -> Panel | None:
    ranks = len(story.labels.ranks)
    counts = np.array(
        [c.content.delivered.sum() / c.steps if c.steps else np.nan for c in story.lines],
        np.float64,
    )
    trace = line(x, at(counts, index), "ranks that delivered", "--c3", width=1.5)
    trace = {**trace, "fill": "tozeroy", "fillcolor": "--c3-soft"}
    trace["line"] = {**trace["line"], "shape": "hvh"}
    axis = {"range": [0, ranks * 1.1 or 1], "nticks": 3}
    return Panel("ranks in the merged record", [trace], axis, 0.5)


def _not_finite(x: Floats, near: Floats, bad: Floats, story: Story) -> list[Trace]:
    """Mark where values were NaN or infinite, at the height of the last finite one."""
    rows = np.flatnonzero(np.nansum(bad, axis=1) > 0)
    if not len(rows):
        return []
    known = np.flatnonzero(np.isfinite(near))
    before = np.searchsorted(known, rows, side="right") - 1
    heights = near[known[np.maximum(before, 0)]] if len(known) else np.ones(len(rows))
    ranks = list(story.labels.ranks)
    who = ([ranks[i] for i in np.flatnonzero(bad[row] > 0)] for row in rows)
    text = [f"not finite on {ranks_named(each, len(ranks))}" for each in who]
    return [{**marks(x[rows], heights, text, "--bad", "x"), "cliponaxis": False}]


def _low(table: ScalarTable) -> Floats:
    return quiet(np.nanmin, table.low)


def _high(table: ScalarTable) -> Floats:
    return quiet(np.nanmax, table.high)
