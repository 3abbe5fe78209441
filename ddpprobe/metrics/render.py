"""The collector that renders a `NodeView` into an exposition of the metrics in `metrics.table`.

The view is immutable and the families are built anew each time: no stale label sets, no races. What
is not known is absent. Site names come from strangers, so every label value is made safe here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from ddpprobe.metrics.labels import (
    LABEL_BYTES,
    PATH_BYTES,
    ROOT,
    exemplar_labels,
    label_value,
)
from ddpprobe.metrics.table import LE, METRICS, SERIES_LIMIT, Family, Metric
from ddpprobe.records.node_view import NodeView
from ddpprobe.records.site_stats import TensorRows, TensorRowsCache
from ddpprobe.records.step import Anomaly, StepRecord

TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_OF_SITES = [m for m in METRICS if m.stat]
_STATS = [m.stat for m in _OF_SITES]
_OF_MODULES = ("input", "output", "grad_output", "grad_input")
_DROPPED = "ddpprobe_series_dropped_total"
_EOF = b"# EOF\n"


class Exposition:
    """Renders views, one after the other.

    Attributes:
        refused: series of the last view that have no place below the cap, or no name of their own.
        dropped: the most that were refused of one view. So a series that is refused again and again
            is counted once, and the counter rises when there are more of them than ever.
    """

    def __init__(self, limit: int = SERIES_LIMIT) -> None:
        self._limit = limit
        self.refused = self.dropped = 0
        self._last: NodeView | None = None
        self._sites = _Sites()
        self._collector: _ViewCollector

    def render(self, view: NodeView, openmetrics: bool) -> bytes:  # noqa: FBT001
        """Return the exposition of `view`: OpenMetrics 1.0 with exemplars, or text 0.0.4."""
        if view is not self._last:  # both formats refuse the same series: they are counted once
            self._last, self._collector = view, _ViewCollector(view, self._limit)
            refused = self._sites.take(view.merged, self._limit - self._collector.series)
            self.refused = self._collector.refused + refused
            self.dropped = max(self.dropped, self.refused)
            self._collector.dropped = self.dropped
        body = _generate(self._collector, openmetrics=openmetrics)
        end = len(body) - len(_EOF) if openmetrics else len(body)
        return body[:end] + self._sites.lines(openmetrics=openmetrics).encode() + body[end:]


def render(view: NodeView, openmetrics: bool) -> bytes:  # noqa: FBT001
    """Render one view by itself; a daemon keeps an `Exposition`."""
    return Exposition().render(view, openmetrics)


class _ViewCollector(Collector):
    """The families of one view but the sites'.

    `series` are shown, the refusal counter included; `refused`: lost to the cap or as duplicates.
    """

    def __init__(self, view: NodeView, limit: int) -> None:
        self.dropped = self.refused = 0
        self._families: dict[str, Family] = {}
        view = replace(view, ranks=tuple(sorted(view.ranks, key=lambda r: r.rank)))
        room = limit - 1  # one place is the refusal counter's own
        for metric in METRICS:
            room -= self._take(metric, view, room)
        self.series = limit - room

    def _take(self, metric: Metric, view: NodeView, room: int) -> int:
        """Add the family of one metric; return how many series it has."""
        family, fits = metric.family(), True
        seen: set[tuple[str, ...]] = set()
        most = [PATH_BYTES if name == "directory" else LABEL_BYTES for name in metric.labels]
        for labels, value, anomaly in metric.read(view):
            if value is None:
                continue
            shown = tuple(map(label_value, labels, most))
            if metric.kind == "histogram" and shown[-1] == LE[0]:  # all buckets of one, or none
                fits = len(seen) + len(LE) <= room
            elif metric.kind != "histogram":
                fits = len(seen) < room
            if shown in seen or not fits:
                self.refused += 1
                continue
            seen.add(shown)
            if isinstance(family, CounterMetricFamily):
                exemplar = None if anomaly is None else exemplar_of(anomaly)
                family.add_metric(shown, float(value), exemplar=exemplar)
            elif isinstance(family, GaugeMetricFamily):
                family.add_metric(shown, float(value))
            else:
                family.add_sample(metric.name, dict(zip(metric.labels, shown, strict=True)), value)
        if seen or metric.name == _DROPPED:
            self._families[metric.name] = family
        return len(seen)

    def collect(self) -> Iterator[Family]:
        for name, family in self._families.items():
            if name == _DROPPED:
                family.samples.clear()
                family.add_sample(_DROPPED, {}, self.dropped)
            yield family


class _Sites(Collector):
    """The series of the sites (tier B): what matters more first, and that in execution order.

    They are most of an exposition, and from step to step only their values change. So the library
    writes names and labels once for all sites of a layout, and the values are put in here.
    """

    def __init__(self) -> None:
        self._layouts = TensorRowsCache()
        self._layout = TensorRows((), np.zeros(0, np.intp), np.zeros(0, np.intp))
        self._labels: list[tuple[str, str]] = []
        self._first: list[int] = []  # of those that have the same labels the first one is shown
        self._begins: dict[bool, list[tuple[list[str], list[str]]]] = {}
        self._shown: list[list[tuple[int, float]]] = []

    def take(self, merged: StepRecord | None, room: int) -> int:
        """Take the newest merged step; return how many series find no room or have no own name."""
        self._shown = []
        if merged is None:
            return 0
        layout = self._layouts.of(merged)
        if layout is not self._layout:
            self._layout, self._begins = layout, {}
            labels = [(label_value(fqn or ROOT), label_value(kind)) for fqn, kind in layout.names]
            first = {label: place for place, label in reversed(list(enumerate(labels)))}
            matters = priorities(layout.names)
            self._labels = labels
            self._first = sorted(first.values(), key=lambda place: (matters[place], place))
        numbers = layout.numbers(merged, _STATS)
        columns = [column.tolist() for column in numbers]
        # NaN: nothing finite at this site; the counters tell.
        blank = {int(i) for column in numbers for i in np.flatnonzero(np.isnan(column))}
        known = [i for i in self._first if i not in blank]
        fits = min(len(columns) * len(known), max(0, room))
        # Of the site at which the room ends, the first families have their series.
        self._shown = [
            [(i, column[i]) for i in known[: -((place - fits) // len(columns))]]
            for place, column in enumerate(columns)
        ]
        twice = len(layout.names) - len(self._first)
        return len(columns) * (len(known) + twice) - fits

    def lines(self, *, openmetrics: bool) -> str:
        """Return the lines of all their families."""
        if not any(self._shown):
            return ""
        if openmetrics not in self._begins:
            text = _generate(self, openmetrics=openmetrics).decode().removesuffix(_EOF.decode())
            # Not splitlines(): a name may hold what else ends a line in Unicode.
            lines = text.removesuffix("\n").split("\n")
            self._begins[openmetrics] = list(_split_families(lines, len(self._labels)))
        out: list[str] = []
        for (about, begins), shown in zip(self._begins[openmetrics], self._shown, strict=True):
            out += about if shown else []
            out += [f"{begins[i]}{floatToGoString(value)}" for i, value in shown]  # type: ignore[no-untyped-call]
        return "".join(f"{line}\n" for line in out)

    def collect(self) -> Iterator[Family]:
        for metric in _OF_SITES:
            family = metric.family()
            for labels in self._labels:
                family.add_sample(metric.name, dict(zip(metric.labels, labels, strict=True)), 0.0)
            yield family


def priorities(names: Sequence[tuple[str, str]]) -> list[int]:
    """Return for each site, by FQN and kind, what is given room first: 0 is first.

    Modules that hold others say of a fault in which block it lies, and a model has few of them.
    Then gradients: in execution order alone they are behind all outputs, so all of them would go.
    Which sites have room does not depend on their numbers: series would come and go with these.
    """
    modules = {fqn for fqn, kind in names if kind in _OF_MODULES}
    holders = {fqn[:at] for fqn in modules for at, letter in enumerate(fqn) if letter == "."}
    return [
        0 if fqn in holders or not fqn else 1 if kind.startswith("grad") else 2
        for fqn, kind in names
    ]


def _split_families(lines: list[str], series: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield of each family its comments (HELP, TYPE, UNIT where it has one) and its series.

    A series ends with the blank before its value.
    """
    at = 0
    while at < len(lines):
        begin = next(i for i in range(at, len(lines)) if not lines[i].startswith("# "))
        comments, at = lines[at:begin], begin + series
        yield comments, [line[: line.rindex(" ") + 1] for line in lines[begin:at]]


def _generate(collector: Collector, *, openmetrics: bool) -> bytes:
    if openmetrics:
        body: bytes = openmetrics_exposition.generate_latest(collector)  # type: ignore[no-untyped-call]
        return body
    return exposition.generate_latest(collector)


def exemplar_of(anomaly: Anomaly) -> Exemplar:
    """Return the exemplar that leads from a dot on a graph to the tensor in the store."""
    when = anomaly.wall_time_ns / 1e9 if anomaly.wall_time_ns > 0 else None
    return Exemplar(exemplar_labels(anomaly), 1.0, when)
