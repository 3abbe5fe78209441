"""Two ranks on two simulated nodes: one of them asks for a capture, then a NaN stops both.

torchrun ... orders_job.py DIRECTORY
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpprobe
from ddpprobe.rundir.orders import Order, OrderBoard, OrderReader
from ddpprobe.rundir.paths import RunDir, node_name
from ddpprobe.testing import inject, state_hash

OUT, BAD, MOST = Path(sys.argv[1]), 40, 5000
HASHED, SHORT, TOLD = 20, 10, 6


@dataclass
class Trained:
    """Hashes of the training state by step, and what a probe raised."""

    hashes: dict[int, str] = field(default_factory=dict)
    stop: ddpprobe.AnomalyStop | None = None


def train(
    rank: int, steps: int, between: Callable[[int, Any], None] | None = None, **options: Any
) -> Trained:
    """Train with a probe, if `options` are given, calling `between(step, probe)` after a step."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    fault = inject(model, f"nan:step={BAD},rank=1,module=2")
    trained = Trained()
    probe = ddpprobe.install(model, every=5, **options) if options else None
    try:
        for step in range(steps):
            loss = model(torch.full((4, 8), 0.1 * rank + 0.01 * step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % HASHED == HASHED - 1:
                trained.hashes[step] = state_hash(model, optimizer)
            if between is not None:
                between(step, probe)
                time.sleep(0.003)
    except ddpprobe.AnomalyStop as stop:
        trained.stop = stop
    finally:
        trained.hashes[step] = state_hash(model, optimizer)
        fault.remove()
        if probe is not None:
            probe.close()
    return trained


def board_of(name: str, rank: int) -> Path:
    return RunDir(OUT / name).orders(0, node_name(rank))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"] = str(rank), "0"

    def meddle(step: int, probe: ddpprobe.Probe) -> None:
        if step == 3:  # what is no order must hurt nobody
            with board_of("stopped", rank).open("ab") as board:
                board.write(b"dpp1" + os.urandom(200))
        if step == 5 and rank == 1:  # not on the head's node
            probe.trigger("have a look")
            deadline, board = time.monotonic() + 60, OrderReader(board_of("stopped", rank))
            while board.look() is None:  # the daemons may still be starting
                assert time.monotonic() < deadline
                time.sleep(0.02)

    stopped = train(rank, MOST, meddle, run_dir=OUT / "stopped", on_anomaly="stop")
    assert stopped.stop is not None
    bare = train(rank, stopped.stop.step + 1)

    told: list[tuple[int, str]] = []

    def post(step: int, _: ddpprobe.Probe) -> None:
        now[0] = step + 1
        if step == 1:  # in the place of the node's daemon
            order = Order(0, "tell", TOLD, TOLD + 1, (), "", stopped.stop.anomaly)
            OrderBoard(board_of("told", rank)).post(order)

    now = [0]
    train(
        rank, SHORT, post, run_dir=OUT / "told", daemon="none",
        on_anomaly=lambda anomaly: told.append((now[0], anomaly.detector)),
    )  # fmt: skip
    result = {
        "step": stopped.stop.step, "text": str(stopped.stop), "told": told,
        "same": bare.hashes == stopped.hashes, "hashed": len(bare.hashes),
    }  # fmt: skip
    (OUT / f"{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()
    time.sleep(0.5)
    raise stopped.stop


if __name__ == "__main__":
    main()
