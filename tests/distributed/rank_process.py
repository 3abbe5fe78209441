"""One rank as the daemon sees it: a plain process that writes a journal and a heartbeat.

Run as a script with one JSON object. It prints every step that is in the journal, one per line.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import psutil

from ddpprobe.records.step import FirstBad, Site, StepRecord
from ddpprobe.rundir import framing
from ddpprobe.rundir.heartbeat import STATES, HeartbeatWriter
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import RunDir, node_name

SITES = (Site("blocks.0", "output", dtype="float32"), Site("blocks.1", "grad_output"))


def record(
    rank: int, step: int, attempt: int = 0, *, bad: bool = False, parted: bool = False
) -> StepRecord:
    """Return a record whose sums are exact and differ by rank and step."""
    counts = np.zeros((2, 7), np.int64)
    counts[:, 0], counts[:, 5:] = 100 + rank, 1
    values = np.array([[-1.0 - rank, step, step + rank, 4.0], [0.0, rank, step * 2, 9.0]])
    witness = None
    if bad:
        counts[1, 1] = 3
        witness = FirstBad(step, 0, "backward", 7, rank, "blocks.1", "grad_output", "", 3)
    return StepRecord(
        attempt, step, (rank,), time.time_ns(), sites=SITES, counts=counts, values=values,
        scalars={
            rank: {
                "loss": 2.0 - step / 1000, "grad_norm_local": 1.0 + rank, "loss_scale": 1024.0,
                "sites_expected": 3.0, "sites_observed": 2.0,
            }
        },
        first_bad=witness,
        digests={("w", ""): {step: 1 << rank}, ("v", ""): {-rank if parted else 0: 1 << rank}},
    )  # fmt: skip


def is_behind(end: Path, step: int) -> bool:
    """Whether a file says, by now, how many steps there are to be, and this is one too many."""
    return end.exists() and step >= int(end.read_text())


def main(spec: dict[str, object]) -> int:
    """Write `steps` records, `delay` seconds apart, then end as told."""
    run, rank, node = RunDir(Path(str(spec["run"]))), int(spec["rank"]), int(spec.get("node", 0))
    attempt, steps, delay = int(spec.get("attempt", 0)), int(spec["steps"]), float(spec["delay"])
    first, local_world = int(spec.get("first", 0)), int(spec["local_world_size"])
    meta = {
        "rank": rank, "local_rank": rank % local_world, "world_size": spec["world_size"],
        "local_world_size": local_world, "node": node_name(node), "node_index": node,
        "attempt": attempt, "pid": os.getpid(), "pid_start": psutil.Process().create_time(),
        "hostname": os.uname().nodename, "device": "cpu", "wrapper": "ddp", "backend": "gloo",
        "torch": "2.13.0", "run_id": "test-run", "name": "test", "every": 1,
        "started_ns": time.time_ns(), "head": node == 0, "resume_step": 0,
        "head_url": spec.get("head_url"),
    }  # fmt: skip
    journal = JournalWriter(run.rank_journal(attempt, node_name(node), rank), meta)
    beat = HeartbeatWriter(run.heartbeat(attempt, node_name(node), rank))
    journal.append_json(framing.LIFE, {"event": "sites", "expected": 2, "observed": 2, "step": 0})
    while spec.get("gate") and not Path(str(spec["gate"])).exists():  # all ranks begin together
        time.sleep(0.01)
    for step in range(first, first + steps):
        if spec.get("end") and is_behind(Path(str(spec["end"])), step):
            break
        if step == spec.get("limited"):  # no file may grow beyond this: the journal does
            resource.setrlimit(resource.RLIMIT_FSIZE, (512, resource.RLIM_INFINITY))
        beat.beat(
            step=step, micro=0, state=STATES.index("forward"), steps=step, skipped=0,
            sampled=step - first,
            phase_seconds=(0.0, 0.1 * step, 0.2 * step, 0.0), probe_seconds=0.01 * step,
        )  # fmt: skip
        parted = spec.get("parted") is not None and step >= int(spec["parted"])
        made = record(rank, step, attempt, bad=step == spec.get("bad"), parted=parted)
        if journal.append_record(made):
            print(step, flush=True)
        time.sleep(delay)
    behind = partial(
        beat.beat, step=first + steps, micro=0, steps=first + steps, skipped=0, sampled=steps,
        phase_seconds=(0.0, 0.0, 0.0, 0.0), probe_seconds=0.0,
    )  # fmt: skip
    behind(state=STATES.index("data"))
    if spec.get("hang"):
        time.sleep(600)
    while spec.get("go_on") and not Path(str(spec["go_on"])).exists():
        time.sleep(0.01)
    if spec.get("closed", True):
        status = str(spec.get("status", "ok"))
        words = {"status": status, **({"error": spec["error"]} if spec.get("error") else {})}
        journal.append_json(framing.LIFE, {"event": "closed", **words})
        behind(state=STATES.index("closed"))
    time.sleep(float(spec.get("teardown", 0.0)))
    if spec.get("signal"):
        os.kill(os.getpid(), int(spec["signal"]))
    return int(spec.get("exit", 0))


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
