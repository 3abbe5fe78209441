"""A short synthetic run, for looking at the dashboard without a GPU: healthy, a NaN, a death.

    python -m grafana.sample [LISTEN]

serves it at LISTEN (default 127.0.0.1:13377), one view a second.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np

from ddpprobe.daemon.server import Server
from ddpprobe.ends.anomalies import TITLES, first_cause_of
from ddpprobe.ends.end import BAD
from ddpprobe.metrics.render import Exposition
from ddpprobe.records.histogram import BINS
from ddpprobe.records.node_view import FirstFailure, NodeView, RankView
from ddpprobe.records.site_memory import Magnitudes, Outliers
from ddpprobe.records.step import COUNTS, Anomaly, Site, StepRecord

RANKS = 2
STEPS_PER_VIEW = 4
MODULES = ("embed", *(f"blocks.{i}.{m}" for i in range(4) for m in ("attn", "mlp")), "head")
_PHASES = {"data": 0.02, "forward": 0.08, "backward": 0.12, "optimizer": 0.03}


def _merged(step: int, bad: bool) -> StepRecord:
    sites = tuple(Site(f, k) for k in ("output", "grad_output") for f in MODULES) + tuple(
        Site(f"{f}.weight", "grad", placement="replicated") for f in MODULES
    )
    n = len(sites)
    counts = np.zeros((n, len(COUNTS)), np.int64)
    counts[:, COUNTS.index("numel")] = 4096
    counts[:, COUNTS.index("observed")] = counts[:, COUNTS.index("tapped")] = 1
    if bad:
        counts[4:, COUNTS.index("nan")] = 512
        # Of the culprit and what follows from it in the forward pass nothing is finite.
        counts[MODULES.index("blocks.2.mlp") : len(MODULES), COUNTS.index("nan")] = 4096
    top = np.exp(0.1 * np.arange(n)) * (1 + 0.2 * math.sin(step / 9))
    rms = top / 4
    values = np.stack([-top, top, 0 * top, rms**2 * 4096], axis=1)
    norm = math.sqrt(sum(v[3] for s, v in zip(sites, values, strict=True) if s.kind == "grad"))
    norms = {"grad_norm": norm, "grad_norm_used": min(norm, 1.0)}  # clipped at 1
    bins = np.zeros((len(MODULES), BINS), np.int64)
    middle = 3 * BINS // 4 + step // 20  # magnitudes near 1 that grow slowly
    bins[:, middle - 6 : middle] = 2 ** np.arange(6) * 60
    return StepRecord(
        0, step, tuple(range(RANKS)), time.time_ns(), True, sites, counts, values,
        scalars=dict.fromkeys(range(RANKS), norms), binned=np.arange(len(MODULES)), bins=bins,
    )  # fmt: skip


def _rank(rank: int, tick: int, bad_at: int, dead_at: int) -> RankView:
    steps = STEPS_PER_VIEW * min(tick, dead_at if rank == 1 else tick)
    bad = tick >= bad_at
    dead = rank == 1 and tick >= dead_at
    slow = 1.0 + 0.5 * rank
    phases = {p: s * steps * (slow if p == "forward" else 1.0) for p, s in _PHASES.items()}
    phases["backward"] += 0.04 * steps * (1 - rank)
    loss = 4 * math.exp(-steps / 80) + 1.5 + 0.05 * math.sin(tick + rank)
    return RankView(
        rank=rank,
        local_rank=rank,
        pid=4000 + rank,
        device=f"cuda:{rank}",
        up=not dead,
        last_heartbeat_ns=time.time_ns() - (5 * 10**9 if dead else 0),
        step=steps,
        steps=steps,
        skipped_steps=min(tick // 4, 2),
        phase_seconds=phases,
        probe_seconds=0.004 * steps,
        overhead_ratio=0.008,
        sample_interval=10,
        unrecorded_steps=3 * max(0, tick - bad_at),
        loss=math.nan if bad else loss,
        grad_norm=math.nan if bad else loss * (0.5 + 0.1 * rank),
        loss_scale=65536.0 / 2 ** min(tick // 4, 2),
        nonfinite={"output": 512 if rank else 0, "grad": 4096} if bad else {},
        anomalies={"page": int(bad and rank == 1)},
        sites_expected=3 * len(MODULES),
        sites_observed=(3 - (rank == 1 and bad)) * len(MODULES),
        resident_bytes=2_000_000_000 + 1_000_000 * tick,
        cpu_seconds=0.9 * tick,
        components={"hooks": True, "journal": True},
    )


def views(bad_at: int = 8, dead_at: int = 12, until: int = 16) -> Iterator[NodeView]:
    """Yield the run, one view per second of it: a NaN on rank 1 at `bad_at`, its death later."""
    times: dict[int, int] = {}  # when each tick was: an event keeps its moment
    outliers, magnitudes = Outliers(), Magnitudes()
    for tick in range(until):
        times[tick] = time.time_ns()
        step = STEPS_PER_VIEW * tick
        bad = tick >= bad_at
        merged = _merged(step, bad)
        outliers.update(merged)
        magnitudes.update(merged)
        nan = Anomaly(
            "nonfinite", "page", STEPS_PER_VIEW * bad_at, 0, 1, "blocks.2.mlp", "output",
            "forward", True, "first NaN", {"nan": 512.0}, True, 0, times.get(bad_at, 0),
        )  # fmt: skip
        yield NodeView(
            time_ns=time.time_ns(),
            run_id="sample",
            directory="/runs/sample",
            attempt=0,
            restarts=dict.fromkeys(BAD, 0),
            node="node_0000",
            world_size=RANKS,
            torch="2.13.0",
            backend="gloo",
            is_head=True,
            detectors=tuple(TITLES),
            ranks=tuple(_rank(r, tick, bad_at, dead_at) for r in range(RANKS)),
            first_failure=(FirstFailure(1, "SIGKILL", times[dead_at]) if tick >= dead_at else None),
            first_cause=first_cause_of(nan) if bad else None,
            orders={"capture": 1} if bad else {},
            merged=merged,
            outliers=outliers.now,
            update_ratios={f"{fqn}.weight": 1e-3 * (1 + i) for i, fqn in enumerate(MODULES)},
            magnitudes=magnitudes.now,
            nodes_expected=2,
            node_blocks={"node_0001": time.time_ns()},
            anomalies={("nonfinite", "page"): 1} if bad else {},
            exemplars={("nonfinite", "page"): nan} if bad else {},
            records_dropped={"disk_full": 0},
            components={"gather": True, "store": True},
            journal_lag_seconds=0.1,
            upload_lag_seconds=0.0,
            upload_failures=0,
            host={
                "cpu_ratio": 0.6 + 0.1 * math.sin(tick),
                "load1": 3.5,
                "memory_available_bytes": 6e10,
                "memory_total_bytes": 1e11,
                "disk_free_bytes": 5e11 - 1e9 * tick,
            },
        )


def main() -> None:
    """Serve the run, then hold its end until interrupted."""
    server = Server(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:13377")
    print(f"http://{server.start()}/metrics", flush=True)
    exposition = Exposition()
    tick = threading.Event()
    for view in views(bad_at=60, dead_at=90, until=120):
        server.publish(exposition.render(view, False), exposition.render(view, True))
        tick.wait(1.0)
    tick.wait()


if __name__ == "__main__":
    main()
