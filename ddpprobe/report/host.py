"""What the machines did meanwhile: processor, memory, disk and GPUs of the nodes, and the ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ddpprobe.reader.readings import NodeReading
from ddpprobe.report.curves import COLOURS, Panel, Trace, line, stacked, tint, upright
from ddpprobe.report.encode import name
from ddpprobe.report.story import Story

MOST_POINTS = 400  # of a curve
MOST_CURVES = 12  # in a panel
MOST_PANELS = 9
_GIB = 2.0**30
_NS_PER_MS = 1e6
Curves = dict[str, list[tuple[float, float]]]


def host_panels(story: Story) -> dict[str, Any] | None:
    """Return the figure; None if no daemon read anything."""
    panels = _panels(story.readings)
    if not panels:
        return None
    times = [a.wall_time_ns / _NS_PER_MS for a in story.causes[:20] if a.wall_time_ns]
    first = min(r.time_ns for r in story.readings) / _NS_PER_MS
    last = max(r.time_ns for r in story.readings) / _NS_PER_MS
    lines = [upright(t) for t in times if first - 6e4 <= t <= last + 6e4]
    height = 70 + 120 * len(panels)
    xaxis = {"type": "date", "title": {"text": "time (UTC)"}}
    return stacked("host", panels, height=height, xaxis=xaxis, lines=lines)


def _panels(readings: Sequence[NodeReading]) -> list[Panel]:
    several = len({r.node for r in readings}) > 1
    nodes: dict[str, Curves] = defaultdict(lambda: defaultdict(list))
    resident: Curves = defaultdict(list)
    busy: Curves = defaultdict(list)
    before: dict[tuple[int, int], tuple[int, float]] = {}
    for reading in readings:
        at = reading.time_ns / _NS_PER_MS
        for what, value in _of_host(reading):
            nodes[what][reading.node if several else "node"].append((at, value))
        for rank, found in reading.ranks.items():
            if "resident_bytes" in found:
                resident[f"rank {rank}"].append((at, found["resident_bytes"] / _GIB))
            if "cpu_seconds" in found:
                share = _share(before, reading, rank, found["cpu_seconds"])
                busy[f"rank {rank}"] += [(at, share)] if share is not None else []
    panels = [_panel(_title(what), curves, what) for what, curves in nodes.items()]
    panels.append(_panel("memory of each rank's process (GiB)", resident, ""))
    panels.append(_panel("processors that each rank keeps busy", busy, ""))
    return [panel for panel in panels if panel.traces][:MOST_PANELS]


def _of_host(reading: NodeReading) -> Iterable[tuple[str, float]]:
    """Yield what is drawn of a host: memory as the share in use, all else as it is."""
    host = dict(reading.host)
    free, total = host.pop("memory_available_bytes", None), host.pop("memory_total_bytes", 0.0)
    yield from ((what, value) for what, value in host.items() if what != "disk_free_bytes")
    if free is not None and total:
        yield "memory_used_ratio", 1 - free / total
    if "disk_free_bytes" in host:
        yield "disk_free_bytes", host["disk_free_bytes"]


def _title(what: str) -> str:
    known = {
        "cpu_ratio": "processors of the node in use",
        "load1": "load of the node (1 minute)",
        "memory_used_ratio": "memory of the node in use",
        "disk_free_bytes": "free on the run's disk (GiB)",
    }
    return known.get(what) or name(what.replace("_", " "))


def _share(
    before: dict[tuple[int, int], tuple[int, float]],
    reading: NodeReading,
    rank: int,
    seconds: float,
) -> float | None:
    """Return how many processors a rank kept busy since the last reading; None at the first one."""
    key = reading.attempt, rank
    last = before.get(key)
    before[key] = reading.time_ns, seconds
    if last is None or reading.time_ns <= last[0] or seconds < last[1]:
        return None
    return (seconds - last[1]) / ((reading.time_ns - last[0]) / 1e9)


def _panel(title: str, curves: Curves, what: str) -> Panel:
    scale = 1 / _GIB if what.endswith("_bytes") else 1.0
    ratio = what.endswith("_ratio")
    traces = [
        _curve(points, label, COLOURS[i % len(COLOURS)], scale)
        for i, (label, points) in enumerate(_chosen({k: v for k, v in curves.items() if v}))
    ]
    axis: dict[str, Any] = {"rangemode": "tozero", "nticks": 4}
    axis |= {"tickformat": ".0%", "range": [0, 1.04]} if ratio else {}
    if 1 < len(traces) <= len(COLOURS):
        title += ":\n" + ", ".join(tint(t["name"], t["line"]["color"]) for t in traces)
    return Panel(title, traces, axis)


def _chosen(curves: Curves) -> list[tuple[str, list[tuple[float, float]]]]:
    """Return all curves, or of too many those furthest from the median."""
    if len(curves) <= MOST_CURVES:
        return list(curves.items())
    means = {label: float(np.mean([v for _, v in points])) for label, points in curves.items()}
    middle = float(np.median(list(means.values())))
    chosen = set(sorted(means, key=lambda label: -abs(means[label] - middle))[:MOST_CURVES])
    return [(label, points) for label, points in curves.items() if label in chosen]


def _curve(points: list[tuple[float, float]], label: str, colour: str, scale: float) -> Trace:
    """Draw a curve; of too many points the largest of so many neighbours."""
    found = np.array(points, np.float64)
    width = -(-len(found) // MOST_POINTS)
    if width > 1:
        pieces = [found[i : i + width] for i in range(0, len(found), width)]
        found = np.array([(p[-1, 0], np.nanmax(p[:, 1])) for p in pieces])
    return line(found[:, 0], found[:, 1] * scale, name(label, 30), colour, width=1.3)
