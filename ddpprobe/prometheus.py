"""Every metric in one table, and the collector that renders a `NodeView` into an exposition.

The view is immutable and the families are built anew each time: no stale label sets, no races. What
is not known is absent. Site names come from strangers, so every label value is made safe here.
"""
# ruff: noqa: E501  (a row of the table is one line: name, unit, help, labels)

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from prometheus_client import exposition
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics import exposition as openmetrics_exposition
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from ddpprobe.labels import ROOT, exemplar_labels, label_value
from ddpprobe.records import KINDS, Anomaly, StepRecord
from ddpprobe.site_numbers import Layout, Layouts, global_grad_norm
from ddpprobe.view import NodeView, RankView

SERIES_LIMIT = 5_000  # at which rendering both formats costs about 10 ms of one core
TEXT_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS_CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# Counters of these start at 0: increase() never sees a counter that first appears at 512.
DETECTORS = ("nonfinite", "desync", "loss_scale", "grad_spike", "coverage", "rank_lost")
LEVELS = ("page", "warn", "info")
STEP_PHASES = ("data", "forward", "backward", "optimizer")
_BASE_UNITS = ("seconds", "bytes", "ratio")


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        name: the whole name as it is scraped; counters end in `_total`.
        kind: "counter" or "gauge".
        labels: names of its labels, in order.
        unit: base unit, or what is counted; "" if the number has the tensor's own unit.
        tier: "A" per rank and per node, "B" per site (head node only), "C" top-k outliers.
        help: what it is, and what to do about it.
    """

    name: str
    kind: str
    labels: tuple[str, ...]
    unit: str
    tier: str
    help: str

    def family(self) -> CounterMetricFamily | GaugeMetricFamily:
        """Return an empty family of this metric."""
        unit = self.unit if self.unit in _BASE_UNITS else ""
        if self.kind == "counter":
            base = self.name.removesuffix("_total")
            return CounterMetricFamily(base, self.help, labels=self.labels, unit=unit)
        return GaugeMetricFamily(self.name, self.help, labels=self.labels, unit=unit)


def _row(name: str, unit: str, text: str, *labels: str, tier: str = "A") -> Metric:
    kind = "counter" if name.endswith("_total") else "gauge"
    return Metric(f"ddpprobe_{name}", kind, labels, unit, tier, text)


METRICS: tuple[Metric, ...] = (
    # Identity
    _row("build_info", "", "Version of ddpprobe; always 1. Mixed versions in one job are a deployment error.", "version"),
    _row("job_info", "", "The run this node serves; always 1. Join it: * on (job, instance) group_left (run).", "run", "world_size", "torch", "backend"),
    _row("job_finished", "0 or 1", "1 after a normal end of all local ranks; silences the liveness alerts."),
    _row("paused", "0 or 1", "1 inside probe.pause(): evaluation or checkpoint, no step is expected."),
    _row("rank_info", "", "Where a rank runs; always 1. Use pid and device to find the process.", "rank", "local_rank", "pid", "device"),
    # Liveness
    _row("rank_up", "0 or 1", "1 while the rank's process lives, 0 after a bad end, absent after a good one; on 0 read first_failure and the rank's own log.", "rank"),
    _row("rank_last_heartbeat_timestamp_seconds", "seconds", "Unix time of the rank's last sign of life; if it stands still while rank_up is 1, the rank hangs.", "rank"),
    _row("steps_total", "steps", "Optimizer steps finished since the rank started; the slowest rank holds up all.", "rank"),
    _row("skipped_steps_total", "steps", "Steps a GradScaler skipped because of inf; many in a row mean that the loss scale cannot recover.", "rank"),
    _row("first_failure_timestamp_seconds", "seconds", "Unix time at which the first rank of this node died; start the search there, later deaths are torchrun's.", "rank", "signal"),
    # Time
    _row("step_phase_seconds_total", "seconds", "Host time in each phase of the step; the straggler has the most own work and the shortest backward.", "rank", "phase"),
    # Numerics
    _row("loss", "", "Loss of the rank's last sampled step; NaN here is late, look at nonfinite_elements_total.", "rank"),
    _row("grad_norm", "", "L2 norm of the rank's local gradients before any reduction; the rank that leaves the others is the guilty one.", "rank"),
    _row("loss_scale", "", "Loss scale of the rank's GradScaler; absent without one. If it falls and falls, no step is taken any more.", "rank"),
    _row("global_grad_norm", "", "L2 norm of the reduced gradients of the newest sampled step, over all ranks; compare with the clipping threshold. Absent where a part of it is not known (placement partial or unknown, a missing rank)."),
    _row("nonfinite_elements_total", "elements", "NaN and infinite elements seen on the rank; on the first increase run: ddpprobe anomalies RUN.", "rank", "kind"),
    _row("anomalies_total", "anomalies", "Verdicts of the detectors (head node); the exemplar names step, fqn, kind and rank.", "detector", "level"),
    _row("rank_anomalies_total", "anomalies", "Verdicts that blame this rank (head node); many on one rank point to its data or its hardware.", "rank", "level"),
    # Sites
    _row("site_abs_max", "", "Largest finite absolute value at a site, newest sampled step, over all ranks; near the dtype's maximum overflow follows.", "fqn", "kind", tier="B"),
    _row("site_rms", "", "Root mean square of the finite values at a site, newest sampled step, over all ranks; compare it along the depth.", "fqn", "kind", tier="B"),
    # Self
    _row("component_up", "0 or 1", "0 when a component switched itself off (minimum over the local ranks); its first error is in the log.", "component"),
    _row("sites_observed", "sites", "Sites that delivered data at the rank's last sampled step; below sites_expected something went unseen; a lasting drop is a loss.", "rank"),
    _row("sites_expected", "sites", "Sites that the rank has ever reported, and selected modules that were never called; ddpprobe info RUN names those.", "rank"),
    _row("records_dropped_total", "records", "Records lost before they were stored; on an increase look at disk space and the daemon's log.", "reason"),
    _row("series_dropped_total", "series", f"Series refused by the cap of {SERIES_LIMIT} per target; narrow include=, or read the store for the rest."),
    _row("probe_seconds_total", "seconds", "Time that ddpprobe itself took inside the training process.", "rank"),
    _row("overhead_ratio", "ratio", "What ddpprobe adds to a step on average, by the step's own time, measured over the last steps; if it is too much, give budget= or raise every=.", "rank"),
    _row("sample_interval_steps", "steps", "Steps from one sampled step to the next; above every= the budget has widened it, and ddpprobe_overhead_ratio says why.", "rank"),
    _row("journal_lag_seconds", "seconds", "Age of the oldest journal frame not read yet; if it grows, the daemon is short of CPU."),
    _row("last_collect_timestamp_seconds", "seconds", "Unix time of the data shown here; it is rendered once per interval, not per scrape."),
    # Process and host
    _row("rank_resident_memory_bytes", "bytes", "Resident memory of the rank's process; steady growth is a leak.", "rank"),
    _row("rank_cpu_seconds_total", "seconds", "CPU time of the rank's process, user and system.", "rank"),
    _row("host_cpu_ratio", "ratio", "Busy share of the node's CPUs; near 1 the data loader starves the ranks."),
    _row("host_load1", "processes", "Load average of one minute; compare it with the number of cores."),
    _row("host_memory_available_bytes", "bytes", "Memory of the node that can still be had; near 0 the kernel kills a rank (SIGKILL)."),
    _row("host_memory_total_bytes", "bytes", "Memory of the node; the ranks share it."),
    _row("host_disk_free_bytes", "bytes", "Free space where the run directory lies; at 0 records are dropped, training goes on."),
)  # fmt: skip
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
    yield _one("paused", view.paused)
    yield _one("last_collect_timestamp_seconds", view.time_ns / 1e9)
    yield _one("journal_lag_seconds", view.journal_lag_seconds)
    if view.first_failure is not None:
        first = view.first_failure
        name = "first_failure_timestamp_seconds"
        yield _one(name, first.time_ns / 1e9, first.rank, first.signal)
    if view.is_head:
        yield from _anomalies(view)
    if view.merged is not None:
        yield _one("global_grad_norm", global_grad_norm(view.merged))
    yield from _components(view)
    for reason, count in sorted(view.records_dropped.items()):
        yield _one("records_dropped_total", count, reason)
    for metric in METRICS:
        key = metric.name.removeprefix("ddpprobe_host_")
        if key != metric.name:
            yield metric.name, (), view.host.get(key), None
    for rank in sorted(view.ranks, key=lambda r: r.rank):
        yield from _rank(rank, head=view.is_head)


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
    yield _one("rank_resident_memory_bytes", rank.resident_bytes, n)
    yield _one("rank_cpu_seconds_total", rank.cpu_seconds, n)


@functools.cache
def version() -> str:
    """Return the installed version of ddpprobe; "unknown" when it runs from a bare source tree."""
    try:
        return importlib.metadata.version("ddpprobe")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"
