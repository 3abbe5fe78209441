"""What a node daemon knows at one moment, frozen: the daemon makes it, the metrics render it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.events import FirstCauseEvent
from ddpprobe.records.site_memory import Outlier
from ddpprobe.records.step import Anomaly, StepRecord


@dataclass(frozen=True, slots=True)
class RankView:
    """One local rank. Times are Unix ns, durations seconds, counters cumulative since its start.

    `up` is None until the rank has been seen alive once; `loss`, `grad_norm` (L2 over its local
    gradients, before any reduction), `sites_expected` and `sites_observed` are of its last sampled
    step, `loss_scale` (a GradScaler's) of its last sampled or skipped one; `nonfinite` counts
    elements by Site kind; `anomalies` counts by level those that name this rank; `probe_seconds`
    is the time our code took inside the training process, `overhead_ratio` what it adds to a step
    by the step's own time, and `sample_interval` how far apart sampled steps are now.
    `end` is how it ended badly, as `End.how`; "" if it did not.
    `unrecorded_steps` are sampled steps that the rank took and whose records did not arrive.
    """

    rank: int
    local_rank: int
    pid: int
    device: str
    up: bool | None = None
    end: str = ""
    last_heartbeat_ns: int = 0
    step: int = -1
    steps: int = 0
    skipped_steps: int = 0
    phase_seconds: Mapping[str, float] = field(default_factory=dict)
    probe_seconds: float = 0.0
    overhead_ratio: float | None = None
    sample_interval: int | None = None
    unrecorded_steps: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    nonfinite: Mapping[str, int] = field(default_factory=dict)
    anomalies: Mapping[str, int] = field(default_factory=dict)
    sites_expected: int = 0
    sites_observed: int = 0
    resident_bytes: int | None = None
    cpu_seconds: float | None = None
    components: Mapping[str, bool] = field(default_factory=dict)  # False: its fuse has blown


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The rank known to be the cause, of this node or (head) of any; `signal` as `End.how`."""

    rank: int
    signal: str
    time_ns: int


@dataclass(frozen=True, slots=True)
class NodeView:
    """The whole node. `merged` is the newest sampled step over all ranks (head node only).

    `directory` is the run's, absolute, as a person types it on this node; `attempt` its newest.
    `detectors` are the names that an anomaly can have, in the order in which they are shown;
    `state` is one of `ends.end.STATES`; `stuck` are the ranks that the others wait for, and in
    which phase they are.
    """

    time_ns: int
    run_id: str
    directory: str
    attempt: int
    node: str
    world_size: int
    torch: str
    backend: str
    is_head: bool
    detectors: tuple[str, ...]
    ranks: tuple[RankView, ...] = ()
    paused: bool = False
    finished: bool = False
    state: str = "running"
    restarts: Mapping[str, int] = field(default_factory=dict)  # earlier attempts by their state
    restart_awaited: bool = False  # a launcher that may start the job again lives
    stuck: Mapping[int, str] = field(default_factory=dict)
    first_failure: FirstFailure | None = None
    first_cause: FirstCauseEvent | None = None  # head node only
    orders: Mapping[str, int] = field(default_factory=dict)  # head node only, by action
    merged: StepRecord | None = None
    outliers: tuple[Outlier, ...] = ()  # head node only, and so are:
    update_ratios: Mapping[str, float] = field(default_factory=dict)  # by the parameter's FQN
    # By FQN and kind, as `records.site_memory.Magnitudes.now`; {} unless it was asked for.
    magnitudes: Mapping[tuple[str, str], NDArray[np.int64]] = field(default_factory=dict)
    noise_scale: float | None = None  # as `records.derived.NoiseScale.now`
    nodes_expected: int | None = None
    node_blocks: Mapping[str, int] = field(default_factory=dict)  # when each other node was heard
    anomalies: Mapping[tuple[str, str], int] = field(default_factory=dict)  # (detector, level)
    exemplars: Mapping[tuple[str, str], Anomaly] = field(default_factory=dict)  # the latest of each
    records_dropped: Mapping[str, int] = field(default_factory=dict)  # by reason
    components: Mapping[str, bool] = field(default_factory=dict)  # the daemon's own; False: blown
    journal_lag_seconds: float = 0.0
    upload_lag_seconds: float | None = None  # None: the run has no URL to go to
    upload_failures: int | None = None
    host: Mapping[str, float] = field(default_factory=dict)
