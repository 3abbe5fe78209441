"""Every metric in one table: its name, unit, labels, and what to do about it."""
# ruff: noqa: E501  (a row of the table is one line: name, unit, help, labels)

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

SERIES_LIMIT = 5_000  # at which rendering both formats costs about 10 ms of one core
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
    _row("job_finished", "0 or 1", "1 after a normal end of all local ranks; job_state has a word for every other end."),
    _row("job_state", "", "1 for the state of the job as this node sees it: running, ended, stopped (from outside), crashed, hung, vanished or unknown; ddpprobe anomalies RUN says more.", "state"),
    _row("paused", "0 or 1", "1 inside probe.pause(): evaluation or checkpoint, no step is expected."),
    _row("rank_info", "", "Where a rank runs; always 1. Use pid and device to find the process.", "rank", "local_rank", "pid", "device"),
    # Liveness
    _row("rank_up", "0 or 1", "1 while the rank's process lives, 0 after a bad end, absent after a good one; on 0 read first_failure and the rank's own log.", "rank"),
    _row("rank_last_heartbeat_timestamp_seconds", "seconds", "Unix time of the rank's last sign of life; if it stands still while rank_up is 1, the rank hangs.", "rank"),
    _row("rank_stuck", "", "1 for a rank that the others wait for, or that is suspended, and the phase it is in; absent while ranks move. Look at its stack (py-spy dump) before it is killed.", "rank", "phase"),
    _row("steps_total", "steps", "Optimizer steps finished since the rank started; the slowest rank holds up all.", "rank"),
    _row("skipped_steps_total", "steps", "Steps a GradScaler skipped because of inf; many in a row mean that the loss scale cannot recover.", "rank"),
    _row("first_failure_timestamp_seconds", "seconds", "Unix time of the end of the rank of this node that is known to be the cause; start the search there. Absent where that is not decided: job_state and ddpprobe anomalies RUN name the candidates.", "rank", "signal"),
    # Time
    _row("step_phase_seconds_total", "seconds", "Host time in each phase of the step; the straggler has the most own work and the shortest backward.", "rank", "phase"),
    # Numerics
    _row("loss", "", "Loss of the rank's last sampled step; NaN here is late, look at nonfinite_elements_total.", "rank"),
    _row("grad_norm", "", "L2 norm of the rank's local gradients before any reduction; the rank that leaves the others is the guilty one.", "rank"),
    _row("loss_scale", "", "Loss scale of the rank's GradScaler; absent without one. If it falls and falls, no step is taken any more.", "rank"),
    _row("global_grad_norm", "", "L2 norm of the reduced gradients of the newest sampled step, over all ranks; compare with the clipping threshold. Absent where a part of it is not known (placement partial or unknown, a missing rank)."),
    _row("missing_ranks", "ranks", "Ranks that are not in the newest merged step (head node): above 0, site_abs_max and site_rms lack them; look at rank_up and at the other nodes."),
    _row("nonfinite_elements_total", "elements", "NaN and infinite elements seen on the rank; on the first increase run: ddpprobe anomalies RUN.", "rank", "kind"),
    _row("anomalies_total", "anomalies", "Verdicts of the detectors (head node), and rank_lost; the exemplar names step, fqn, kind and rank.", "detector", "level"),
    _row("rank_anomalies_total", "anomalies", "Verdicts that blame this rank (head node); many on one rank point to its data or its hardware.", "rank", "level"),
    # Sites
    _row("site_abs_max", "", "Largest finite absolute value at a site, newest sampled step, over all ranks; near the dtype's maximum overflow follows.", "fqn", "kind", tier="B"),
    _row("site_rms", "", "Root mean square of the finite values at a site, newest sampled step, over all ranks; compare it along the depth.", "fqn", "kind", tier="B"),
    # Self
    _row("component_up", "0 or 1", "0 when a component switched itself off (minimum over the local ranks); its first error is in the log.", "component"),
    _row("sites_observed", "sites", "Sites that delivered data at the rank's last sampled step; below sites_expected something went unseen; a lasting drop is a loss.", "rank"),
    _row("sites_expected", "sites", "Sites that the rank has ever reported, and selected modules that were never called; ddpprobe info RUN names those.", "rank"),
    _row("records_dropped_total", "records", "Records lost before they were stored, refused_* on the head: pushed by a node that may not say so; on an increase look at disk space and the daemon's log.", "reason"),
    _row("unrecorded_steps", "steps", "Sampled steps that the rank took and whose records are not in its journal; one or two may be on their way, but if it grows, the disk refuses them: look at host_disk_free_bytes and the rank's log.", "rank"),
    _row("series_dropped_total", "series", f"Series refused by the cap of {SERIES_LIMIT} per target; narrow include=, or read the store for the rest."),
    _row("probe_seconds_total", "seconds", "Time that ddpprobe itself took inside the training process.", "rank"),
    _row("overhead_ratio", "ratio", "What ddpprobe adds to a step on average, by the step's own time, measured over the last steps; if it is too much, give budget= or raise every=.", "rank"),
    _row("sample_interval_steps", "steps", "Steps from one sampled step to the next; above every= the budget has widened it, and ddpprobe_overhead_ratio says why.", "rank"),
    _row("journal_lag_seconds", "seconds", "Age of the oldest journal frame not read yet; if it grows, the daemon is short of CPU."),
    _row("upload_lag_seconds", "seconds", "For how long something stored has been missing at the run's URL, 0 if nothing is, absent without a URL; if it grows, read the daemon's log: the object store refuses or does not answer."),
    _row("upload_failures_total", "requests", "Requests that the object store refused or did not answer; tried again, training does not wait."),
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
