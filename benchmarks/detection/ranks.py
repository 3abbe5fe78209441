"""Carries a job out: ranks forked from a process that has imported torch, one run directory."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from benchmarks.detection.jobs import JOBS
from tests.faults.zygote import start_rank

WAIT_SECONDS = 60  # for a rank that is slow on a busy machine
STOPPED_SECONDS = 12  # for one that was stopped (D06)


def launch(name: str, seed: int, every: int, directory: str) -> None:
    """Run a job; the run is in `directory`/run. Called in a forked process.

    Raises:
        RuntimeError: a rank failed, and no fault has made it.
    """
    place, world = Path(directory), JOBS[name].world
    reading, writing = os.pipe()
    stops = name.startswith("D06")

    def body(rank: int) -> None:
        if world > 1:
            store = dist.TCPStore("127.0.0.1", int(os.read(reading, 5)), world, is_master=False)
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world,
                timeout=timedelta(seconds=STOPPED_SECONDS if stops else WAIT_SECONDS),
            )  # fmt: skip
        JOBS[name](seed, rank).run(place / "run", every)
        if world > 1:
            dist.destroy_process_group()

    errors = place / "ranks.txt"
    pids = [start_rank(lambda r=rank: body(r), errors) for rank in range(world)]
    if world > 1:  # after the forks: it has a thread
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        os.write(writing, f"{store.port:05}".encode() * world)
    if stops:
        _end_stopped(pids, victim=JOBS[name](seed, 0).victim)
        return
    failed = [pid for pid in pids if os.waitpid(pid, 0)[1]]
    if failed:
        raise RuntimeError(f"{name}: {len(failed)} ranks failed: {errors.read_text()[-2000:]}")


def _end_stopped(pids: list[int], victim: int) -> None:
    """Wait for the ranks that gave up; then end the stopped one, as a launcher does."""
    for rank, pid in enumerate(pids):
        if rank != victim:
            os.waitpid(pid, 0)
    time.sleep(0.2)
    os.kill(pids[victim], signal.SIGKILL)
    os.waitpid(pids[victim], 0)
