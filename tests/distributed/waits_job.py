"""One rank comes late to each forward of a step; it reads where the others say that they are.

torchrun ... waits_job.py OUT CASE [CASE ...]     (OUT/CASE is the run directory of a case)

What is read stands in OUT/CASE.json: per micro-batch, rank -> [step, micro-batch, state]. At last
one comes late to a barrier, until every rank has said where it stands; OUT/barrier.json has that:
rank -> [line, whether it waits for others].
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ddpprobe
from ddpprobe.rank import standing
from ddpprobe.records.events import StandsEvent
from ddpprobe.rundir import framing, heartbeat
from ddpprobe.rundir.journal import JournalTail

LATE, STEP, MICROS = 0, 2, 2  # rank 0: it sends DDP's buffers
LONG = 0.2  # seconds for which the others are kept waiting, seen to wait
PATIENCE = 60.0  # seconds; what is waited for comes at once, or never


def net(*, buffers: bool = False) -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(8) if buffers else nn.Identity()
    return nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 1))


def sharded(model: nn.Module) -> nn.Module:
    fully_shard(model[0])
    return fully_shard(model)


def made(case: str, out: Path) -> tuple[nn.Module, ddpprobe.Probe]:
    """Return the model as it is called, and the probe on it; some are wrapped after `install`."""
    options = {"run_dir": out / case, "every": 2, "daemon": "none"}
    if case == "fsdp2-behind":
        inner = net()
        probe = ddpprobe.install(inner, **options)
        return sharded(inner), probe
    if case == "ddp-behind":
        inner = net(buffers=True)
        probe = ddpprobe.install(inner, **options)
        return DistributedDataParallel(inner), probe
    model = {
        "ddp": lambda: DistributedDataParallel(net(buffers=True)),
        "fsdp1": lambda: FullyShardedDataParallel(net(), device_id=torch.device("cpu")),
        "fsdp2": lambda: sharded(net()),
    }[case]()
    return model, ddpprobe.install(model, **options)


def places(run: Path) -> dict[int, tuple[int, int, str]]:
    """Return where each rank says that it is."""
    found = {}
    for path in sorted(run.glob("heartbeat/*/*/rank_*")):
        beat = heartbeat.read(path)
        if beat is not None:
            found[int(path.name.removeprefix("rank_"))] = (beat.step, beat.micro, beat.state)
    return found


def wait_for_others(run: Path, micro: int) -> dict[int, tuple[int, int, str]]:
    wanted = dict.fromkeys(range(dist.get_world_size()), (STEP, micro, "forward"))
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        found = places(run)
        if found | {LATE: wanted[LATE]} == wanted:
            break
        time.sleep(0.01)
    return found


def evaluate(model: nn.Module) -> None:
    """Which is no step. After it wrappers skip once what they would wait for."""
    model.eval()
    with torch.no_grad():
        model(torch.randn(4, 4))
    model.train()


def train(case: str, out: Path) -> None:
    model, probe = made(case, out)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    seen = {}
    with probe:
        for step in range(STEP + 3):
            for micro in range(MICROS):
                if (step, dist.get_rank()) == (STEP, LATE):
                    seen[micro] = wait_for_others(out / case, micro)
                    time.sleep(LONG)
                model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                evaluate(model)
    if dist.get_rank() == LATE:
        (out / f"{case}.json").write_text(json.dumps(seen))


def said(run: Path) -> dict[int, tuple[str, bool]]:
    """Return where each rank has said that it stands."""
    found = {}
    for directory in run.glob("journal/*/*/rank_*"):
        tail = JournalTail(directory)
        for frame in tail.poll():
            event = frame.event() if frame.type == framing.LIFE else None
            if isinstance(event, StandsEvent):
                found[int(directory.name.removeprefix("rank_"))] = event.where, event.waits
        tail.close()
    return found


def wait_until_all_have_said(run: Path) -> dict[int, tuple[str, bool]]:
    until = time.monotonic() + PATIENCE
    while len(found := said(run)) < dist.get_world_size() and time.monotonic() < until:
        time.sleep(0.05)
    return found


def stand(out: Path) -> None:
    """Train a little, then keep all in a barrier, but for one."""
    standing.STILL_SECONDS, standing.STILL_STEPS = 0.3, 0
    model = DistributedDataParallel(net())
    with ddpprobe.install(model, run_dir=out / "barrier", every=2, daemon="none"):
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(STEP):
            model(torch.randn(4, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if dist.get_rank() == LATE:
            found = wait_until_all_have_said(out / "barrier")
            (out / "barrier.json").write_text(json.dumps(found))
        dist.barrier()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for each in sys.argv[2:]:
        train(each, Path(sys.argv[1]))
    stand(Path(sys.argv[1]))
    dist.destroy_process_group()
