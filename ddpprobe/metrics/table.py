"""Every metric is one row here: name, unit, what it is and what to do about it, labels, getter."""
# ruff: noqa: E501  (what a row says is one line, however long)

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from ddpprobe.metrics.labels import ROOT, label_value, ranks_label
from ddpprobe.records.derived import DERIVED, NOISE_SCALE, Derived
from ddpprobe.records.events import ACTIONS
from ddpprobe.records.histogram import BORDERS
from ddpprobe.records.node_view import NodeView, RankView
from ddpprobe.records.site_memory import SLOTS
from ddpprobe.records.site_stats import global_grad_norm
from ddpprobe.records.step import COUNTED_KINDS, KINDS, LEVELS, STEP_PHASES, Anomaly

SERIES_LIMIT = 5_000  # at which rendering both formats costs about 10 ms of one core
POSITIONS = 500  # modules and parameters whose place in execution order is told
MAGNITUDES = 32  # sites whose histogram is told
LE = (*(repr(border) for border in BORDERS), "+Inf")  # labels of the buckets
RATIOS = 500  # parameters whose update ratio is told: both come before the sites under the cap
# Above so many ranks a node has one series for all its ranks of what names no culprit: of each rank
# about 13 are left, so that one Prometheus can hold a job of ten thousand.
JOINED_ABOVE = 1_024
_BASE_UNITS = ("seconds", "bytes", "ratio")


Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class Reading(NamedTuple):
    """One sample: the values of the metric's labels, in their order, and the number.

    Attributes:
        labels: of any type; they are made safe to show by `labels.label_value`.
        value: None where it is not known: the sample is absent then.
        anomaly: the latest of those counted; becomes the exemplar.
    """

    labels: tuple[object, ...]
    value: float | None
    anomaly: Anomaly | None = None


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table.

    Attributes:
        name: the whole name as it is scraped; counters end in `_total`.
        unit: base unit, or what is counted; "" if the number has the tensor's own unit.
        help: what it is, and what to do about it.
        labels: names of its labels, in order.
        read: returns its samples in a view, whose ranks are in ascending order.
        stat: of a metric that each site has (tier B), the statistic of `records.STATS`; "" of one
            per rank or per node (tier A).
        joined: how the ranks of a node are joined above `JOINED_ABOVE` ranks: "sum", "mean", "min"
            or "max"; "" if each has a series in jobs of any size.
    """

    name: str
    unit: str
    help: str
    labels: tuple[str, ...]
    read: Callable[[NodeView], Iterable[Reading]]
    stat: str = ""
    joined: str = ""

    @property
    def kind(self) -> str:
        """Return "counter", "histogram" (its buckets, whose last label is `le`) or "gauge"."""
        if self.name.endswith("_bucket"):
            return "histogram"
        return "counter" if self.name.endswith("_total") else "gauge"

    @property
    def tier(self) -> str:
        """Return "A" if it is per rank or per node, "B" if it is per site (head node only)."""
        return "B" if self.stat else "A"

    def family(self) -> Family:
        """Return an empty family of this metric."""
        if self.kind == "histogram":
            base = self.name.removesuffix("_bucket")
            return HistogramMetricFamily(base, self.help, labels=self.labels[:-1])
        unit = self.unit if self.unit in _BASE_UNITS else ""
        if self.kind == "counter":
            base = self.name.removesuffix("_total")
            return CounterMetricFamily(base, self.help, labels=self.labels, unit=unit)
        return GaugeMetricFamily(self.name, self.help, labels=self.labels, unit=unit)


def _row(
    name: str,
    unit: str,
    text: str,
    labels: tuple[str, ...],
    read: Callable[[NodeView], Iterable[Reading]],
    joined: str = "",
) -> Metric:
    """Return the row of a metric whose samples have labels of their own."""
    return Metric(f"ddpprobe_{name}", unit, text, labels, read, joined=joined)


def _node(name: str, unit: str, text: str, get: Callable[[NodeView], float | None]) -> Metric:
    """Return the row of a metric with one number for the node."""
    return _row(name, unit, text, (), lambda view: [Reading((), get(view))])


def _rank(
    name: str, unit: str, text: str, get: Callable[[RankView], float | None], joined: str = ""
) -> Metric:
    """Return the row of a metric with one number for each rank of the node, or for all of them."""

    def read(view: NodeView) -> list[Reading]:
        if joined and view.world_size > JOINED_ABOVE:
            return _joined(view, joined, get)
        return [Reading((rank.rank,), get(rank)) for rank in view.ranks]

    return Metric(f"ddpprobe_{name}", unit, text, ("rank",), read, joined=joined)


def _joined(view: NodeView, how: str, get: Callable[[RankView], float | None]) -> list[Reading]:
    """Return one reading for all ranks of the node; it is not known if it is of none of them.

    A mean is of all ranks: over those that are left a counter would begin anew.
    """
    if not view.ranks:
        return []
    known = [x for rank in view.ranks if (x := get(rank)) is not None]
    whole = len(known) == len(view.ranks) if how == "mean" else bool(known)
    return [Reading((_node_ranks(view),), _JOIN[how](known) if whole else None)]


def _node_ranks(view: NodeView) -> str:
    return ranks_label(rank.rank for rank in view.ranks)


_JOIN: Mapping[str, Callable[[list[float]], float]] = MappingProxyType(
    {"mean": statistics.fmean, "min": min, "max": max}
)


def _site(name: str, unit: str, text: str, stat: str) -> Metric:
    """Return the row of a metric with one number for each site: a statistic of `records.STATS`."""
    return Metric(f"ddpprobe_{name}", unit, text, ("fqn", "kind"), _by_the_renderer, stat)


def _derived(number: Derived) -> Metric:
    """Return the row of a number that follows from the newest merged step (head node only)."""
    text = f"{number.text[:1].upper()}{number.text[1:]}. Newest sampled step; {number.source}."
    return _node(
        number.name, number.unit, text, lambda v: None if v.merged is None else number.of(v.merged)
    )


def _by_the_renderer(_: NodeView) -> tuple[Reading, ...]:
    """Return nothing: sites are too many to be read anew, and the refused only it can count."""
    return ()


def _first_failure(view: NodeView) -> Iterator[Reading]:
    first = view.first_failure
    if first is not None:
        yield Reading((first.rank, first.signal), first.time_ns / 1e9)


def _first_cause(view: NodeView) -> Iterator[Reading]:
    """Yield the first cause; what is not known of it is empty, as a label cannot be absent."""
    cause = view.first_cause
    if cause is not None:
        module = None if cause.module is None else cause.module or ROOT
        place = (cause.rank, module, cause.kind, cause.phase)
        yield Reading((cause.detector, cause.step, *("" if x is None else x for x in place)), 1)


def _anomalies(view: NodeView) -> Iterator[Reading]:
    """Yield a sample for whatever can be found, from the start, at 0.

    `increase()` never sees the first count of a counter that appears with it.
    """
    if not view.is_head:
        return
    every = itertools.product(view.detectors, LEVELS)
    for key in dict.fromkeys([*every, *view.anomalies]):
        yield Reading(key, view.anomalies.get(key, 0), view.exemplars.get(key))


def _components(view: NodeView) -> Iterator[Reading]:
    """Yield each component's minimum over the daemon and its ranks."""
    up: dict[str, bool] = {}
    for components in (view.components, *(rank.components for rank in view.ranks)):
        for name, ok in components.items():
            up[name] = up.get(name, True) and ok
    for name in sorted(up):
        yield Reading((name,), up[name])


def _positions(view: NodeView) -> Iterator[Reading]:
    """Yield the place of each module in execution order, of the first ones.

    More rows than that no heat map can show, and they would take the place of the sites' series.
    """
    sites = () if view.merged is None else view.merged.sites
    fqns = dict.fromkeys(label_value(site.fqn or ROOT) for site in sites)
    for place, fqn in enumerate(itertools.islice(fqns, POSITIONS)):
        yield Reading((fqn,), place)


def _nonfinite(view: NodeView) -> Iterator[Reading]:
    """Yield of each rank its count by kind; above `JOINED_ABOVE` ranks of all ranks of the node."""
    for kind in COUNTED_KINDS:
        counts = [rank.nonfinite.get(kind, 0) for rank in view.ranks]
        if view.ranks and view.world_size > JOINED_ABOVE:
            yield Reading((_node_ranks(view), kind), sum(counts))
        else:
            ranks = (rank.rank for rank in view.ranks)
            yield from (Reading((r, kind), n) for r, n in zip(ranks, counts, strict=True))


def _magnitudes(view: NodeView) -> Iterator[Reading]:
    """Yield the buckets of the first sites, each site's as a whole.

    What modules give comes before gradients: a broad pattern names more weights than have room.
    """
    sites = sorted(view.magnitudes.items(), key=lambda site: KINDS.index(site[0][1]))
    for (fqn, kind), counts in itertools.islice(sites, MAGNITUDES):
        for le, count in zip(LE, counts.tolist(), strict=True):
            yield Reading((fqn or ROOT, kind, le), count)


@functools.cache
def version() -> str:
    """Return the installed version of ddpprobe; "unknown" when it runs from a bare source tree."""
    try:
        return importlib.metadata.version("ddpprobe")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


METRICS: tuple[Metric, ...] = (
    # Identity
    _row("build_info", "", "Version of ddpprobe; always 1. Mixed versions in one job are a deployment error.",
         ("version",), lambda _: [Reading((version(),), 1)]),
    _row("job_info", "", "The run this node serves; always 1. Type ddpprobe anomalies and the directory; join it: * on (job, instance) group_left (directory).",
         ("run_id", "directory", "world_size", "torch", "backend"), lambda v: [Reading((v.run_id, v.directory, v.world_size, v.torch, v.backend), 1)]),
    _node("attempt", "", "Number of the run's attempt, 0 for the first; it rises each time the job is started again.",
          lambda v: v.attempt),
    _node("job_finished", "0 or 1", "1 after a normal end of all local ranks; job_state has a word for every other end.",
          lambda v: v.finished),
    _row("job_state", "", "1 for the state of the job as this node sees it: running, ended, stopped (from outside), crashed, hung, vanished or unknown; ddpprobe anomalies RUN says more.",
         ("state",), lambda v: [Reading((v.state,), 1)]),
    _row("restarts_total", "attempts", "Attempts that another one followed, by how they had ended (as job_state; stopped: it was meant to be). If it rises, ddpprobe anomalies RUN says who failed.",
         ("state",), lambda v: [Reading((state,), count) for state, count in v.restarts.items()]),
    _node("restart_awaited", "0 or 1", "1 after a bad end while the torchrun of this node's ranks lives and may start them again (--max-restarts), for ten minutes at most; DdpprobeRunLost waits for it.",
          lambda v: v.restart_awaited),
    _node("paused", "0 or 1", "1 inside probe.pause(): evaluation or checkpoint, no step is expected.",
          lambda v: v.paused),
    _row("rank_info", "", "Where a rank runs; always 1. Use pid and device to find the process.",
         ("rank", "local_rank", "pid", "device"), lambda v: [Reading((r.rank, r.local_rank, r.pid, r.device), 1) for r in v.ranks]),
    # Liveness
    _rank("rank_up", "0 or 1", "1 while the rank's process lives, 0 after a bad end, absent after a good one; on 0 read first_failure and the rank's own log.",
          lambda r: r.up),
    _row("rank_end_info", "", "How a rank ended, if it ended badly; always 1. Which of them was first: first_failure; absent, it is not decided, and ddpprobe anomalies RUN names the candidates.",
         ("rank", "signal"), lambda v: [Reading((r.rank, r.end), 1) for r in v.ranks if r.end]),
    _rank("rank_last_heartbeat_timestamp_seconds", "seconds", "Unix time of the rank's last sign of life; if it stands still while rank_up is 1, the rank hangs.",
          lambda r: r.last_heartbeat_ns / 1e9 if r.last_heartbeat_ns > 0 else None),
    _row("rank_stuck", "", "1 for a rank that the others wait for, or that is suspended, and the phase it is in; absent while ranks move. Look at its stack (py-spy dump) before it is killed.",
         ("rank", "phase"), lambda v: [Reading(item, 1) for item in sorted(v.stuck.items())]),
    _rank("steps_total", "steps", "Optimizer steps finished since the rank started; the slowest rank holds up all.",
          lambda r: r.steps),
    _rank("skipped_steps_total", "steps", "Steps a GradScaler skipped because of inf; many in a row mean that the loss scale cannot recover.",
          lambda r: r.skipped_steps, "max"),
    _row("first_failure_timestamp_seconds", "seconds", "Unix time of the end of the rank that is known to be the cause, of this node or (head node) of any; start the search there. Absent where that is not decided: job_state and ddpprobe anomalies RUN name the candidates.",
         ("rank", "signal"), _first_failure),
    # Time
    _row("step_phase_seconds_total", "seconds", "Host time in each phase of the step; the straggler has the most own work and the shortest backward.",
         ("rank", "phase"), lambda v: [Reading((r.rank, p), r.phase_seconds.get(p, 0.0)) for r in v.ranks for p in STEP_PHASES]),
    # Numerics
    _rank("loss", "", "Loss of the rank's last sampled step; NaN here is late, look at nonfinite_elements_total.",
          lambda r: r.loss),
    _rank("grad_norm", "", "L2 norm of the rank's local gradients before any reduction; the rank that leaves the others is the guilty one.",
          lambda r: r.grad_norm),
    _rank("loss_scale", "", "Loss scale of the rank's GradScaler; absent without one. If it falls and falls, no step is taken any more.",
          lambda r: r.loss_scale, "min"),
    _node("global_grad_norm", "", "L2 norm of the reduced gradients of the newest sampled step, over all ranks; compare with the clipping threshold. Absent where a part of it is not known (placement partial or unknown, a missing rank).",
          lambda v: None if v.merged is None else global_grad_norm(v.merged)),
    *(_derived(each) for each in DERIVED),
    _node(NOISE_SCALE.name, NOISE_SCALE.unit, f"{NOISE_SCALE.text[:1].upper()}{NOISE_SCALE.text[1:]}. {NOISE_SCALE.source}.",
          lambda v: v.noise_scale),
    _node("missing_ranks", "ranks", "Ranks that are not in the newest merged step (head node): above 0, site_abs_max and site_rms lack them; look at rank_up and at the other nodes.",
          lambda v: None if v.merged is None else len(v.merged.missing)),
    _node("nodes_expected", "nodes", "Nodes of the job (head node).",
          lambda v: v.nodes_expected),
    _row("node_last_block_timestamp_seconds", "seconds", "Unix time at which another node pushed last, every second or so (head node); of one that never did, since when it is waited for; absent once it has said that its ranks ended. If it stands still, the node or the way to it is lost: look at its daemon's log.",
         ("node",), lambda v: [Reading((node,), ns / 1e9) for node, ns in sorted(v.node_blocks.items())]),
    _row("nonfinite_elements_total", "elements", "NaN and infinite elements seen on the rank; on the first increase run: ddpprobe anomalies RUN.",
         ("rank", "kind"), _nonfinite, joined="sum"),
    _row("anomalies_total", "anomalies", "Verdicts of the detectors (head node), and rank_lost; the exemplar names step, fqn, kind and rank.",
         ("detector", "level"), _anomalies),
    _row("first_cause_info", "", "1 for the first cause of the newest episode (head node), once all ranks have gone by its step, or 5 s later; after a hang that is over it is the one before that, or none; what is not known of it is empty, as fqn is of a NaN in the forward of a step that is not sampled (every=1 samples all). ddpprobe anomalies DIRECTORY says what followed.",
         ("detector", "step", "rank", "fqn", "kind", "phase"), _first_cause),
    _row("orders_total", "orders", "What the head ordered all ranks to do at chosen steps: capture (full tensors), stop, or tell (on_anomaly= is a function); ddpprobe info RUN lists them with their steps and reasons.",
         ("action",), lambda v: [Reading((action,), v.orders.get(action, 0)) for action in ACTIONS] if v.is_head else []),
    _node("first_cause_timestamp_seconds", "seconds", "Unix time at which that first cause was seen.",
          lambda v: v.first_cause.time_ns / 1e9 if v.first_cause is not None and v.first_cause.time_ns > 0 else None),
    _row("rank_anomalies_total", "anomalies", "Verdicts that blame this rank (head node); many on one rank point to its data or its hardware.",
         ("rank", "level"), lambda v: [Reading((r.rank, x), r.anomalies.get(x, 0)) for r in v.ranks for x in LEVELS] if v.is_head else []),
    # Sites
    _row("site_position", "", f"Place in execution order, from 0, of the module or parameter, for the first {POSITIONS} (head node); it sorts what shows the depth of the model.",
         ("fqn",), _positions),
    _site("site_abs_max", "", "Largest finite absolute value at a site, newest sampled step, over all ranks; near the dtype's maximum overflow follows.",
          "abs_max"),
    _site("site_rms", "", "Root mean square of the finite values at a site, newest sampled step, over all ranks; compare it along the depth.",
          "rms"),
    _site("site_zero_ratio", "ratio", "Share of zeros at a site, newest sampled step, over all ranks; near 1 at an output its units are dead, at a gradient nothing is learned there.",
          "zero_ratio"),
    _row("site_update_ratio", "ratio", f"Root mean square of what an optimizer step changed of a parameter over that of the parameter, at its last turn, for the first {RATIOS} (head node): about 0.001 is usual; 0 does not learn, 0.1 and more is thrown about.",
         ("fqn", "kind"), lambda v: [Reading((fqn or ROOT, "update"), ratio) for fqn, ratio in itertools.islice(v.update_ratios.items(), RATIOS)]),
    _row("site_magnitude_bucket", "elements", f"Elements of all sampled steps whose magnitude is below `le`, zeros among them; +Inf: all elements, NaN among them; over all ranks, for the first {MAGNITUDES} sites that install(histograms=...) names, outputs before gradients (head node). Only if asked for: DDPPROBE_HISTOGRAMS=1. histogram_quantile over its rate() shows where values lie.",
         ("fqn", "kind", "le"), _magnitudes),
    _row("outlier_score", "", f"How far the rms of a site is from its usual level, in powers of ten, newest sampled step (head node), for the {SLOTS} that are furthest; who it is says outlier_info of the same slot. Slots are there also for sites that the cap of series leaves out.",
         ("slot",), lambda v: [Reading((slot,), x.score) for slot, x in enumerate(v.outliers)]),
    _row("outlier_info", "", "The site that a slot of outlier_score is about now; always 1.",
         ("slot", "fqn", "kind"), lambda v: [Reading((slot, x.fqn or ROOT, x.kind), 1) for slot, x in enumerate(v.outliers)]),
    # Self
    _row("component_up", "0 or 1", "0 when a component switched itself off (minimum over the local ranks); its first error is in the log.",
         ("component",), _components),
    _rank("sites_observed", "sites", "Sites that delivered data at the rank's last sampled step; below sites_expected something went unseen; a lasting drop is a loss.",
          lambda r: r.sites_observed if r.sites_expected > 0 else None, "min"),
    _rank("sites_expected", "sites", "Sites that the rank has ever reported, and selected modules that were never called; ddpprobe info RUN names those.",
          lambda r: r.sites_expected if r.sites_expected > 0 else None, "max"),
    _row("records_dropped_total", "records", "Records lost before they were stored, refused_* on the head: pushed by a node that may not say so; on an increase look at disk space and the daemon's log.",
         ("reason",), lambda v: [Reading((reason,), count) for reason, count in sorted(v.records_dropped.items())]),
    _rank("unrecorded_steps", "steps", "Sampled steps that the rank took and whose records are not in its journal; one or two may be on their way, but if it grows, the disk refuses them: look at host_disk_free_bytes and the rank's log.",
          lambda r: r.unrecorded_steps, "max"),
    _row("series_dropped_total", "series", f"Series refused by the cap of {SERIES_LIMIT} per target, each counted once: the most that one exposition lacked; narrow include=, or read the store for the rest.",
         (), _by_the_renderer),
    _rank("probe_seconds_total", "seconds", "Time that passed in ddpprobe inside the training process: in the training at every call of it, and of a core in its disk thread.",
          lambda r: r.probe_seconds, "max"),
    _rank("overhead_ratio", "ratio", "What ddpprobe adds to a step on average, by the step's own time, measured over the last steps; a floor where every step is sampled, as none is left to compare with; if it is too much, give budget= or raise every=.",
          lambda r: r.overhead_ratio, "max"),
    _rank("sample_interval_steps", "steps", "Steps from one sampled step to the next; above every= the budget has widened it, and ddpprobe_overhead_ratio says why.",
          lambda r: r.sample_interval, "max"),
    _node("journal_lag_seconds", "seconds", "Age of the oldest journal frame not read yet; if it grows, the daemon is short of CPU.",
          lambda v: v.journal_lag_seconds),
    _node("upload_lag_seconds", "seconds", "For how long something stored has been missing at the run's URL, 0 if nothing is, absent without a URL; if it grows, read the daemon's log: the object store refuses or does not answer.",
          lambda v: v.upload_lag_seconds),
    _node("upload_failures_total", "requests", "Requests that the object store refused or did not answer; tried again, training does not wait.",
          lambda v: v.upload_failures),
    _node("last_collect_timestamp_seconds", "seconds", "Unix time of the data shown here; it is rendered once per interval, not per scrape.",
          lambda v: v.time_ns / 1e9),
    # Process and host
    _rank("rank_resident_memory_bytes", "bytes", "Resident memory of the rank's process; steady growth is a leak.",
          lambda r: r.resident_bytes, "max"),
    _rank("rank_cpu_seconds_total", "seconds", "CPU time of the rank's process, user and system.",
          lambda r: r.cpu_seconds, "mean"),
    _node("host_cpu_ratio", "ratio", "Busy share of the node's CPUs; near 1 the data loader starves the ranks.",
          lambda v: v.host.get("cpu_ratio")),
    _node("host_load1", "processes", "Load average of one minute; compare it with the number of cores.",
          lambda v: v.host.get("load1")),
    _node("host_memory_available_bytes", "bytes", "Memory of the node that can still be had, or of a rank's control group (a container, a Slurm step) where less is left of its limit; near 0 the kernel kills a rank (SIGKILL).",
          lambda v: v.host.get("memory_available_bytes")),
    _node("host_memory_total_bytes", "bytes", "Memory of the node, or the limit of the control group of which less is left; the ranks share it.",
          lambda v: v.host.get("memory_total_bytes")),
    _node("host_disk_free_bytes", "bytes", "Free space where the run directory lies; at 0 records are dropped, training goes on.",
          lambda v: v.host.get("disk_free_bytes")),
)  # fmt: skip
