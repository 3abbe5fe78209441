"""The collector that renders a `NodeView` into an exposition of the metrics in `metrics`.

The view is immutable and the families are built anew each time: no stale label sets, no races. What
is not known is absent. Site names come from strangers, so every label value is made safe here.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import math
from collections.abc import Iterator

import numpy as np
from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from ddpprobe.labels import ROOT, exemplar_labels, label_value
from ddpprobe.metrics import DETECTORS, LEVELS, METRICS, SERIES_LIMIT, STEP_PHASES
from ddpprobe.records import KINDS, Anomaly, StepRecord
from ddpprobe.site_numbers import Layout, Layouts, global_grad_norm
from ddpprobe.view import NodeView, RankView

TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_TABLE = {m.name: m for m in METRICS}
_DROPPED = "ddpprobe_series_dropped_total"
_EOF = b"# EOF\n"
Sample = tuple[str, tuple[object, ...], float | None, Exemplar | None]


class Exposition:
    """Renders views; counts what the cap refuses over its life, so that the counter only rises."""

    def __init__(self, limit: int = SERIES_LIMIT) -> None:
        self._limit = limit
        self.dropped = 0
        self._last: NodeView | None = None
        self._sites = _Sites()
        self._collector: _ViewCollector

    def render(self, view: NodeView, openmetrics: bool) -> bytes:  # noqa: FBT001
        """Return the exposition of `view`: OpenMetrics 1.0 with exemplars, or text 0.0.4."""
        if view is not self._last:  # both formats refuse the same series: they are counted once
            self._last, self._collector = view, _ViewCollector(view, self._limit)
            refused = self._sites.take(view.merged, self._limit - self._collector.series)
            self.dropped += self._collector.refused + refused
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
        self._families = {m.name: m.family() for m in METRICS if m.tier == "A"}
        seen: set[tuple[str, tuple[str, ...]]] = set()
        for name, values, value, exemplar in _tier_a(view):
            if value is None:
                continue
            key = (name, tuple(label_value(v) for v in values))
            if key in seen or len(seen) >= limit - 1:  # one place is the refusal counter's own
                self.refused += 1
                continue
            seen.add(key)
            family = self._families[name]
            if isinstance(family, CounterMetricFamily):
                family.add_metric(key[1], float(value), exemplar=exemplar)
            else:
                family.add_metric(key[1], float(value))
        self.series = len(seen) + 1

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        for name, family in self._families.items():
            if name == _DROPPED:
                fresh = _TABLE[name].family()
                fresh.add_metric((), self.dropped)
                yield fresh
            elif family.samples:
                yield family


class _Sites(Collector):
    """Two series a site, in execution order (tier B).

    They are most of an exposition, and from step to step only their values change. So the library
    writes names and labels once for all sites of a layout, and the values are put in here.
    """

    def __init__(self) -> None:
        self._layouts = Layouts()
        self._layout = Layout((), np.zeros(0, np.intp), np.zeros(0, np.intp))
        self._labels: list[tuple[str, str]] = []
        self._first: list[int] = []  # of those that have the same labels the first one is shown
        self._begins: dict[bool, list[list[str]]] = {}
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
            self._labels, self._first = labels, sorted(first.values())
        columns = [column.tolist() for column in layout.numbers(merged)]
        # NaN: nothing finite at this site; the counters tell.
        known = [i for i in self._first if not math.isnan(columns[0][i] + columns[1][i])]
        fits = min(2 * len(known), max(0, room))
        self._shown = [
            [(i, column[i]) for i in known[: (fits + 1 - place) // 2]]
            for place, column in enumerate(columns)
        ]
        twice = len(layout.names) - len(self._first)
        return 2 * (len(known) + twice) - fits

    def lines(self, *, openmetrics: bool) -> str:
        """Return the lines of both families."""
        if not any(self._shown):
            return ""
        if openmetrics not in self._begins:
            lines = _generate(self, openmetrics=openmetrics).decode().split("\n")
            size = 2 + len(self._labels)  # HELP and TYPE
            self._begins[openmetrics] = [
                [
                    *lines[at : at + 2],
                    *(line[: line.rindex(" ") + 1] for line in lines[at + 2 : at + size]),
                ]
                for at in range(0, 2 * size, size)
            ]
        out: list[str] = []
        for (about, kind, *begins), shown in zip(
            self._begins[openmetrics], self._shown, strict=True
        ):
            out += [about, kind] if shown else []
            out += [f"{begins[i]}{floatToGoString(value)}" for i, value in shown]  # type: ignore[no-untyped-call]
        return "".join(f"{line}\n" for line in out)

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        for metric in METRICS:
            if metric.tier == "B":
                family = metric.family()
                for labels in self._labels:
                    family.add_metric(labels, 0.0)
                yield family


def _generate(collector: Collector, *, openmetrics: bool) -> bytes:
    if openmetrics:
        body: bytes = openmetrics_exposition.generate_latest(collector)  # type: ignore[no-untyped-call]
        return body
    return exposition.generate_latest(collector)


def exemplar_of(anomaly: Anomaly) -> Exemplar:
    """Return the exemplar that leads from a dot on a graph to the tensor in the store."""
    when = anomaly.wall_time_ns / 1e9 if anomaly.wall_time_ns > 0 else None
    return Exemplar(exemplar_labels(anomaly), 1.0, when)


def _one(name: str, value: float | None, *labels: object) -> Sample:
    return f"ddpprobe_{name}", labels, value, None


def _tier_a(view: NodeView) -> Iterator[Sample]:
    yield _one("build_info", 1, version())
    yield _one("job_info", 1, view.run, view.world_size, view.torch, view.backend)
    yield _one("job_finished", view.finished)
    yield _one("job_state", 1, view.state)
    yield _one("paused", view.paused)
    for rank, phase in sorted(view.stuck.items()):
        yield _one("rank_stuck", 1, rank, phase)
    yield _one("last_collect_timestamp_seconds", view.time_ns / 1e9)
    yield _one("journal_lag_seconds", view.journal_lag_seconds)
    yield _one("upload_lag_seconds", view.upload_lag_seconds)
    yield _one("upload_failures_total", view.upload_failures)
    if view.first_failure is not None:
        first = view.first_failure
        name = "first_failure_timestamp_seconds"
        yield _one(name, first.time_ns / 1e9, first.rank, first.signal)
    if view.is_head:
        yield from _anomalies(view)
    if view.merged is not None:
        yield _one("global_grad_norm", global_grad_norm(view.merged))
        yield _one("missing_ranks", len(view.merged.missing))
    yield from _components(view)
    for reason, count in sorted(view.records_dropped.items()):
        yield _one("records_dropped_total", count, reason)
    for metric in METRICS:
        key = metric.name.removeprefix("ddpprobe_host_")
        if key != metric.name:
            yield metric.name, (), view.host.get(key), None
    for each in sorted(view.ranks, key=lambda r: r.rank):
        yield from _rank(each, head=view.is_head)


def _anomalies(view: NodeView) -> Iterator[Sample]:
    keys = dict.fromkeys(itertools.product(DETECTORS, LEVELS)) | dict.fromkeys(view.anomalies)
    for key in keys:
        latest = view.exemplars.get(key)
        exemplar = None if latest is None else exemplar_of(latest)
        yield "ddpprobe_anomalies_total", key, view.anomalies.get(key, 0), exemplar


def _components(view: NodeView) -> Iterator[Sample]:
    up: dict[str, bool] = {}
    for components in (view.components, *(rank.components for rank in view.ranks)):
        for name, ok in components.items():
            up[name] = up.get(name, True) and ok
    for name in sorted(up):
        yield _one("component_up", up[name], name)


def _rank(rank: RankView, *, head: bool) -> Iterator[Sample]:
    n = rank.rank
    yield _one("rank_info", 1, n, rank.local_rank, rank.pid, rank.device)
    yield _one("rank_up", rank.up, n)
    beat = rank.last_heartbeat_ns / 1e9 if rank.last_heartbeat_ns > 0 else None
    yield _one("rank_last_heartbeat_timestamp_seconds", beat, n)
    yield _one("steps_total", rank.steps, n)
    yield _one("skipped_steps_total", rank.skipped_steps, n)
    for phase in STEP_PHASES:
        yield _one("step_phase_seconds_total", rank.phase_seconds.get(phase, 0.0), n, phase)
    yield _one("loss", rank.loss, n)
    yield _one("grad_norm", rank.grad_norm, n)
    yield _one("loss_scale", rank.loss_scale, n)
    for kind in KINDS:
        yield _one("nonfinite_elements_total", rank.nonfinite.get(kind, 0), n, kind)
    if head:
        for level in LEVELS:
            yield _one("rank_anomalies_total", rank.anomalies.get(level, 0), n, level)
    known = rank.sites_expected > 0
    yield _one("sites_observed", rank.sites_observed if known else None, n)
    yield _one("sites_expected", rank.sites_expected if known else None, n)
    yield _one("probe_seconds_total", rank.probe_seconds, n)
    yield _one("overhead_ratio", rank.overhead_ratio, n)
    yield _one("sample_interval_steps", rank.sample_interval, n)
    yield _one("unrecorded_steps", rank.unrecorded_steps, n)
    yield _one("rank_resident_memory_bytes", rank.resident_bytes, n)
    yield _one("rank_cpu_seconds_total", rank.cpu_seconds, n)


@functools.cache
def version() -> str:
    """Return the installed version of ddpprobe; "unknown" when it runs from a bare source tree."""
    try:
        return importlib.metadata.version("ddpprobe")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
