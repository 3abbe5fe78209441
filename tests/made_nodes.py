"""A run of several nodes made without training: on one disk, or each node on a disk of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ddpprobe.rundir import framing, paths
from ddpprobe.rundir.heartbeat import STATES, HeartbeatWriter
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import RunDir, node_name
from ddpprobe.store.writer import StoreWriter

from . import made_packs
from .made_runs import ANOMALY, DEAD_PID, head_merge, record

STEPS, CAPTURED = 12, (3, 9)
# A sharded parameter, an FSDP1 one (flat), parts of a batch that fit no grid, and replicas: each
# alone on a node's disk makes other arrays than with the other nodes' parts.
SITES = ("a.weight:param", "b.weight:param", "c:output", "d.weight:param")


def make(
    where: Sequence[Path],
    per_node: int = 2,
    *,
    seal: bool = True,
    captured: Sequence[int] = CAPTURED,
    told: int = STEPS,
) -> list[RunDir]:
    """Write the run; node `n` writes to `where[n]`, which may all be one directory.

    The head's daemon merges the first `told` steps, and is killed if these are not all.
    """
    runs = [RunDir(paths.make_dir(path)) for path in where]
    world = per_node * len(runs)
    for run in runs:
        paths.write_json(run.run_json, _identity(world, len(runs)))
    for step in captured:
        for node, run in enumerate(runs):
            mine = range(node * per_node, (node + 1) * per_node)
            made_packs.write(
                run, _tensors(world, step), step=step, only=lambda r, mine=mine: r in mine,
                per_node=per_node,
            )  # fmt: skip
    for node, run in enumerate(runs):
        _write_node(run, node, per_node, world, captured, told)
    for node, run in enumerate(runs) if seal else ():
        writer = StoreWriter(run, node_name(node), block=8, durable=False)
        writer.seal()
        writer.close()
    return runs


def whole(site: str, world: int, step: int) -> np.ndarray:
    """Return what a captured site is over all ranks."""
    shapes = {SITES[0]: [16, 8], SITES[1]: [7, 11], SITES[2]: [5 * world + 3, 4], SITES[3]: [6, 3]}
    return made_packs.whole(shapes[site], "float32", seed=step + SITES.index(site))


def _tensors(world: int, step: int) -> list[tuple[tuple[str, str, str, str], made_packs.Parts]]:
    values = [whole(site, world, step) for site in SITES]
    lengths = [5] * (world - 1) + [8]
    replicas = {r: (values[3], {"kind": "replicated"}) for r in range(world)}
    return [
        (("a", "a.weight", "param", ""), made_packs.sharded(values[0], [world], [0])),
        (("b", "b.weight", "param", ""), made_packs.flat(values[1], world, 3, 2)),
        (("c", "c", "output", ""), made_packs.batch(values[2], lengths)),
        (("d", "d.weight", "param", ""), replicas),
    ]


def _identity(world: int, nodes: int) -> dict[str, Any]:
    return {
        "format_version": 1, "run_id": "id", "name": "made", "world_size": world, "nodes": nodes,
        "created_ns": 1, "every": 1, "wrapper": "ddp", "torch": "2", "backend": "gloo",
        "hostname": "host0",
    }  # fmt: skip


def _write_node(
    run: RunDir, node: int, per_node: int, world: int, captured: Sequence[int], told: int
) -> None:
    name = node_name(node)
    meta = {
        **_identity(world, 2), "node": name, "node_index": node, "head": node == 0, "attempt": 0,
        "hostname": f"host{node}", "local_world_size": per_node, "device": "cpu",
        "pid": DEAD_PID, "pid_start": 0.0,
    }  # fmt: skip
    for local in range(per_node):
        rank = node * per_node + local
        own = {**meta, "rank": rank, "local_rank": local}
        journal = JournalWriter(run.rank_journal(0, name, rank), own, 8)
        for step in range(STEPS):
            journal.append_record(record(rank, step))
        for step in captured:
            journal.append_json(framing.LIFE, {"event": "captured", "step": step})
        journal.append_json(framing.LIFE, {"event": "closed", "status": "ok"})
        journal.close()
        _beat(run.heartbeat(0, name, rank))
    daemon = JournalWriter(run.daemon_journal(0, name), {**meta, "role": "daemon"}, 8)
    daemon.append_json(framing.SAMPLE, {"time_ns": 5 + node, "host": {"cpu": 0.5}, "ranks": {}})
    if node == 0:
        for step in range(told):
            daemon.append_record(head_merge([record(r, step) for r in range(world)]))
        daemon.append(framing.ANOMALY, framing.encode_anomaly(ANOMALY))
    if told == STEPS:
        for event in ("finished", "sealed") if node == 0 else ("sealed",):
            daemon.append_json(framing.LIFE, {"event": event})
    daemon.close()


def _beat(path: Path) -> None:
    paths.make_dir(path.parent)
    beating = HeartbeatWriter(path)
    beating.beat(
        step=STEPS, micro=0, state=STATES.index("closed"), steps=STEPS, skipped=0, sampled=STEPS,
        phase_seconds=(0.0, 1.0, 1.0, 1.0), probe_seconds=0.1,
    )  # fmt: skip
    beating.close()
