"""The ranks of the overhead's benchmark: blocks with a variant and without, in turn.

torchrun ... -m benchmarks.blocks WORKLOAD VARIANT PAIRS SCRATCH: rank 0 writes SCRATCH/times.json.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch.distributed as dist

from benchmarks.variants import VARIANTS, Variant
from benchmarks.workloads import WORKLOADS, Training

_WARM = 2  # blocks of either kind before the first that counts


def _block(training: Training, variant: Variant, steps: int) -> tuple[float, float]:
    """Return seconds a step: on the wall, and of this process on the CPU."""
    dist.barrier()
    training.wait()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(steps):
        variant.begin()
        loss = training.step()
        variant.end(loss)
    training.wait()
    return (time.perf_counter() - wall) / steps, (time.process_time() - cpu) / steps


def times_of(training: Training, variant: Variant, steps: int, pairs: int) -> dict[str, list]:
    """Return seconds a step, block by block: `off` and `on` as (wall, CPU), `own` as it says."""
    times: dict[str, list] = {"off": [], "on": [], "own": []}
    for pair in range(-_WARM, pairs):
        for kind in ("off", "on") if pair % 2 else ("on", "off"):
            if kind == "on":
                variant.on()
                before = variant.own_seconds()
            measured = _block(training, variant, steps)
            if kind == "on":
                own = (variant.own_seconds() - before) / steps
                variant.off()
                if pair >= 0:
                    times["own"].append(own)
            if pair >= 0:
                times[kind].append(measured)
    return times


def main(workload: str, name: str, pairs: int, scratch: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    training = Training(WORKLOADS[workload], rank)
    training.step()
    variant = VARIANTS[name][1](training, scratch)
    times = times_of(training, variant, WORKLOADS[workload].steps, pairs)
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, times)
    if rank == 0:
        (scratch / "times.json").write_text(json.dumps(everyone))
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # gloo's threads must be gone before the interpreter is


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
