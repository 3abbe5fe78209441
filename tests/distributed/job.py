"""A small training job for real ranks; the tests import its model and data for their reference.

torchrun ... job.py --wrap ddp --out RUN [--bad phase:step:micro:rank:module] [--hash FILE] ...

`--then` between two sets of options trains with one after the other, in one launch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpprobe
from ddpprobe.rundir.paths import RunDir, node_name
from ddpprobe.testing import inject, state_hash


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(10), nn.Linear(10, 14)
        self.act, self.down, self.drop = nn.ReLU(inplace=True), nn.Linear(14, 10), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(self.act(self.up(self.norm(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(11, 10), nn.Embedding(5, 10)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(10, 7)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.embed(x) + self.position.weight  # a module that is never called
        for block in self.blocks:
            h = block(h)
        y = self.head(h)
        return y, y.square().mean()


def build(dropout: float = 0.1) -> Model:
    torch.manual_seed(0)
    model = Model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
    return model


def batch(step: int, micro: int, rank: int, *, even: bool = False) -> torch.Tensor:
    g = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    return torch.randint(0, 11, (3 if even else 3 + rank, 5), generator=g)


def arguments_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wrap", default="ddp")
    parser.add_argument("--out")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--micros", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--before", action="store_true", help="install before wrapping")
    parser.add_argument("--backward", default="output")
    parser.add_argument("--daemon", default="none")
    parser.add_argument("--inject")
    parser.add_argument("--capture", action="append", help="modules kept in full, by glob")
    parser.add_argument("--histograms", default=(), help="modules with a histogram, by glob")
    parser.add_argument("--sleep", type=float, default=0.0)
    parser.add_argument("--hash")
    parser.add_argument("--steps-file", help="report finished steps and, beside them, the process")
    parser.add_argument("--behind-daemon", action="store_true", help="train once the daemon serves")
    parser.add_argument("--hold", type=int, help="at this step, wait for STEPS_FILE.go")
    return parser.parse_args(words)


def main() -> None:
    runs: list[list[str]] = [[]]
    for word in sys.argv[1:]:
        if word == "--then":
            runs.append([])
        else:
            runs[-1].append(word)
    every_run = [arguments_of(words) for words in runs]
    dist.init_process_group("gloo")
    for args in every_run:
        train(args, dist.get_rank())
    dist.destroy_process_group()
    time.sleep(0.5)  # torch with gloo aborts now and then when it exits right after a DDP run


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def train(args: argparse.Namespace, rank: int) -> None:
    if args.steps_file:
        Path(f"{args.steps_file}.pid.{rank}").write_text(str(os.getpid()))
    model = build(args.dropout)
    fault = inject(model, args.inject) if args.inject and args.before else None
    options = {"run_dir": args.out, "every": args.every, "daemon": args.daemon,
               "backward": args.backward, "histograms": args.histograms}  # fmt: skip
    options |= {"capture": tuple(args.capture)} if args.capture else {}
    probe = ddpprobe.install(model, **options) if args.out and args.before else None
    wrapped: nn.Module = model
    if args.wrap == "ddp":
        wrapped = DistributedDataParallel(model)
    elif args.wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard  # half a second, for nothing under DDP

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    if args.inject and not args.before:
        fault = inject(wrapped, args.inject)
    if args.out and not args.before:
        probe = ddpprobe.install(wrapped, **options)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=args.lr)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + rank)
    if args.behind_daemon:
        wait_for(RunDir(Path(args.out)).daemon_file(node_name(0), "json"))
    for step in range(args.steps):
        if step == args.hold:
            wait_for(Path(f"{args.steps_file}.go"))
        for micro in range(args.micros):
            last = micro == args.micros - 1
            quiet = contextlib.nullcontext()
            if args.wrap == "ddp" and not last:
                quiet = wrapped.no_sync()
            if args.wrap == "fsdp2":
                wrapped.set_requires_gradient_sync(last)
            with quiet:
                wrapped(batch(step, micro, rank))[1].backward()
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wrapped.eval()
        with torch.no_grad():
            wrapped(batch(step, 9, rank))
        wrapped.train()
        if args.steps_file:
            with Path(f"{args.steps_file}.{rank}").open("a") as file:
                file.write(f"{step}\n")
        time.sleep(args.sleep)
    if args.hash:
        Path(f"{args.hash}.{rank}").write_text(json.dumps(state_hash(wrapped, optimizer)))
    if fault is not None:
        fault.remove()
    if probe is not None:
        probe.close()


if __name__ == "__main__":
    main()
