"""Freezes what the daemon knows into the view that `/metrics` renders."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ddpprobe.daemon.attempt import Attempt
from ddpprobe.daemon.uploader import Uploader
from ddpprobe.ends.anomalies import TITLES
from ddpprobe.ends.end import by_state
from ddpprobe.records.node_view import NodeView, RankView
from ddpprobe.records.step import STEP_PHASES
from ddpprobe.rundir.heartbeat import Heartbeat


@dataclass(slots=True)
class Readings:
    """The latest samples of the node and of its ranks' processes, see `host`."""

    host: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


def view_of(
    attempt: Attempt,
    readings: Readings,
    *,
    run_id: str,
    finished: bool,
    dropped: Mapping[str, int],
    restarts: Mapping[str, int],
    components: Mapping[str, bool],
    uploader: Uploader | None = None,
    histograms: bool = False,
) -> NodeView:
    """Return the view of one attempt now.

    Args:
        attempt: the newest one.
        readings: of host and processes.
        run_id: of the run.
        finished: every local rank has ended, none of them badly.
        dropped: losses of the daemon's own, added to the attempt's.
        restarts: attempts that another one followed, by the state in which they ended.
        components: the daemon's own; False where a fuse has blown.
        uploader: of a run that has a URL.
        histograms: show them.
    """
    daemon_journal, meta = attempt.daemon_journal, attempt.meta
    lag = time.monotonic() - attempt.unread_since if attempt.unread_since is not None else 0.0
    return NodeView(
        time_ns=time.time_ns(),
        run_id=run_id,
        directory=str(attempt.run.path),
        attempt=attempt.number,
        node=attempt.node,
        world_size=attempt.world_size,
        torch=str(meta.get("torch", "")),
        backend=str(meta.get("backend", "")),
        is_head=attempt.is_head,
        detectors=tuple(TITLES),
        ranks=tuple(_rank_view(attempt, n, readings) for n in sorted(attempt.ranks)),
        paused=any(rank.tail.facts.paused for rank in attempt.ranks.values()),
        finished=finished,
        state=attempt.state,
        restarts=by_state(restarts),
        restart_awaited=attempt.awaits_restart(time.monotonic()),
        stuck=attempt.ends.stuck if attempt.ends else {},
        first_failure=attempt.ends.first_failure if attempt.ends else None,
        first_cause=daemon_journal.first_cause if daemon_journal and attempt.is_head else None,
        orders=dict(daemon_journal.orders) if daemon_journal and attempt.is_head else {},
        merged=daemon_journal.merged if daemon_journal and attempt.is_head else None,
        outliers=daemon_journal.outliers.now if daemon_journal and attempt.is_head else (),
        update_ratios=(
            daemon_journal.update_ratios.now if daemon_journal and attempt.is_head else {}
        ),
        magnitudes=(
            daemon_journal.magnitudes.now
            if histograms and daemon_journal and attempt.is_head
            else {}
        ),
        noise_scale=(
            daemon_journal.noise_scale.now if daemon_journal and attempt.is_head else None
        ),
        nodes_expected=attempt.nodes_expected,
        node_blocks=attempt.node_blocks,
        anomalies=dict(daemon_journal.anomalies) if daemon_journal else {},
        exemplars=dict(daemon_journal.exemplars) if daemon_journal else {},
        records_dropped=dict(attempt.losses() + Counter(dropped)),
        components=dict(components),
        journal_lag_seconds=lag,
        upload_lag_seconds=uploader.lag_seconds() if uploader else None,
        upload_failures=uploader.failures if uploader else None,
        host=readings.host,
    )


def _rank_view(attempt: Attempt, number: int, readings: Readings) -> RankView:
    rank = attempt.ranks[number]
    facts, sample = rank.tail.facts, readings.ranks.get(number, {})
    meta = facts.meta or {}
    resident = sample.get("resident_bytes")
    # A rank that left as it should is neither up nor down, whatever the others still do; one whose
    # last words are still being read is not dead yet.
    failed = attempt.daemon_journal is not None and number in attempt.daemon_journal.deaths
    left = rank.judged and not failed
    up = None if left or not rank.seen_alive else rank.exit is None or not rank.judged
    view = RankView(
        rank=number,
        local_rank=int(meta.get("local_rank", -1)),
        pid=int(meta.get("pid", 0)),
        device=str(meta.get("device", "")),
        up=up,
        end=attempt.ends.how(number) if attempt.ends and rank.judged else "",
        loss=facts.loss,
        grad_norm=facts.grad_norm,
        loss_scale=facts.loss_scale,
        nonfinite=dict(facts.nonfinite),
        anomalies=dict(attempt.daemon_journal.blamed[number]) if attempt.daemon_journal else {},
        sites_expected=facts.sites_expected,
        sites_observed=facts.sites_observed,
        resident_bytes=None if resident is None else int(resident),
        cpu_seconds=sample.get("cpu_seconds"),
        components=dict(facts.components),
        unrecorded_steps=rank.unrecorded,
    )
    return view if rank.beat is None else _with_heartbeat(view, rank.beat, left=left)


def _with_heartbeat(view: RankView, beat: Heartbeat, *, left: bool) -> RankView:
    return replace(
        view,
        last_heartbeat_ns=0 if left else beat.time_ns,
        step=beat.step,
        steps=beat.steps,
        skipped_steps=beat.skipped,
        phase_seconds=dict(zip(STEP_PHASES, beat.phase_seconds, strict=True)),
        probe_seconds=beat.probe_seconds,
        overhead_ratio=None if math.isnan(beat.overhead_ratio) else beat.overhead_ratio,
        sample_interval=beat.every or None,
    )
