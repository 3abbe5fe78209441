"""A job that trains until it is told to end, and goes wrong as and when it is told to.

torchrun ... job.py --out RUN --dir DIR --name NAME [--fault FAULT] [--rank R] [--sleep S]

Files in DIR are what it is told: `fault` to go wrong, at the next sampled step, and `end` to end
well. Rank 0 looks, the others hear it from rank 0, so that all of them do it at the same step.
There it says `at`: the step of the fault; and each rank `pid.RANK`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import ddpprobe
from ddpprobe.testing import inject

MODULE = "blocks.1.up"  # where a NaN and an explosion begin
PAUSE_SECONDS = 90.0  # of an evaluation: longer than any alert's patience in it
CHECKPOINT_SECONDS = 120.0
SLOWER_SECONDS = 1.0  # of the straggler's step
OVERFLOW_EVERY = 3  # steps; in between the scale grows again, so that it is the same for ever


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(8), nn.Linear(8, 16)
        self.act, self.down = nn.ReLU(), nn.Linear(16, 8)
        self.past_act = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        return x + self.down(h.relu() if self.past_act else self.act(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


class Fault:
    """What goes wrong from a step on, on one rank or on all."""

    def __init__(self, name: str, rank: int, model: nn.Module, probe: ddpprobe.Probe) -> None:
        self._name, self._rank, self._model, self._probe = name, rank, model, probe
        self._mine = dist.get_rank() == rank
        self._steps = 0

    def before_step(self) -> None:
        """Do what is wrong with a step from its beginning, or between two."""
        first, self._steps = self._steps == 0, self._steps + 1
        if self._name in ("nan", "explode") and first:
            more = ",factor=1e6" if self._name == "explode" else ""
            inject(self._model, f"{self._name}:step=0,rank={self._rank},module={MODULE}{more}")
        elif self._name == "lost" and first:
            self._model.module.blocks[1].past_act = True
        elif self._name == "desync" and first and self._mine:
            with torch.no_grad():
                self._model.module.head.weight.add_(0.01)
        elif self._name == "evaluation" and first:
            with self._probe.pause("eval"):
                time.sleep(PAUSE_SECONDS)
        elif self._name == "checkpoint" and first:
            time.sleep(CHECKPOINT_SECONDS)
        elif self._name == "straggler" and self._mine:
            time.sleep(SLOWER_SECONDS)

    def after_backward(self) -> None:
        """Do what is wrong with its gradients."""
        if self._name == "overflow" and self._steps % OVERFLOW_EVERY == 1:
            for parameter in self._model.parameters():
                parameter.grad.fill_(float("inf"))


def told(directory: Path) -> tuple[bool, bool]:
    """Return whether to go wrong, and whether to end: the same on all ranks."""
    words = torch.zeros(2)
    if dist.get_rank() == 0:
        words = torch.tensor([float((directory / name).exists()) for name in ("fault", "end")])
    dist.broadcast(words, 0)
    return bool(words[0]), bool(words[1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--dir", type=Path)
    parser.add_argument("--name")
    parser.add_argument("--fault", default="")
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--sleep", type=float, default=0.1)
    parser.add_argument("--every", type=int, default=10)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (args.dir / f"pid.{rank}").write_text(str(os.getpid()))
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    probe = ddpprobe.install(model, name=args.name, run_dir=args.out, every=args.every)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2, enabled=args.fault == "overflow")
    fault, step, wrong = Fault(args.fault, args.rank, model, probe), 0, False
    data = torch.Generator().manual_seed(rank)
    while True:
        begins, ended = told(args.dir)
        if ended:
            break
        if begins and not wrong and step % args.every == 0:
            wrong = True
            if rank == 0:
                (args.dir / "at").write_text(str(step))
        if wrong:
            fault.before_step()
        loss = model(torch.randn(4, 8, generator=data))
        scaler.scale(loss).backward()
        if wrong:
            fault.after_backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        probe.log(loss=loss.detach())
        step += 1
        time.sleep(args.sleep)
    probe.close()
    dist.barrier()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch with gloo aborts now and then when it exits right after a DDP run


if __name__ == "__main__":
    main()
