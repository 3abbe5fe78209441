"""A job whose modules go wrong on one rank: a bit that flips, logarithms of negative numbers.

torchrun ... replayed_job.py OUT

It trains several times in a row, into OUT/captured, OUT/fsdp2, ...: one launch is what takes long.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import ddpprobe

FLIP_STEP, FLIP_RANK, FLIP_BIT = 1, 0, 27
LOG_STEP, LOG_RANK = 3, 1
HEAD_STEP, HEAD_RANK = 1, 1
LOSS_STEP, LOSS_RANK = 3, 0


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 12), nn.Linear(12, 6), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, *, floor: float) -> torch.Tensor:
        h = self.up(x).square() + floor
        h = torch.log(h)  # the floor keeps it positive, as long as it is one
        return self.drop(self.down(h))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out, self.gain = nn.Linear(6, 1), nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, floor: float) -> torch.Tensor:
        return torch.log(self.out(x).square() * self.gain + floor)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Linear(4, 6), Mlp(), Head()

    def forward(self, x: torch.Tensor, mlp: float, head: float, loss: float) -> torch.Tensor:
        h = self.embed(x)
        y = self.head(h + self.mlp(h, floor=mlp), head)
        return torch.log(y.square().mean() + loss)


def build() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * step + rank))


class Flip:
    """Flips one bit of one element of a module's output, once, behind autograd's back."""

    def __init__(self) -> None:
        self.armed = False

    def __call__(self, _module: nn.Module, _args: object, output: torch.Tensor) -> torch.Tensor:
        if not self.armed:
            return output
        self.armed = False
        struck = output.clone()
        struck.detach().view(torch.int32)[1, 2] ^= 1 << FLIP_BIT
        return struck


def wrapped(model: Model, wrap: str) -> nn.Module:
    if wrap == "fsdp2":
        for part in (model.mlp, model.head, model):
            fully_shard(part)
        return model
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy({Mlp, Head}), device_id=torch.device("cpu"),
        use_orig_params=wrap == "fsdp1-orig",
    )  # fmt: skip


def captured(out: Path) -> None:
    """A bit of the MLP flips, later it takes a logarithm of what is negative."""
    rank, model = dist.get_rank(), build()
    outer, flip = wrapped(model, "fsdp2"), Flip()
    model.mlp.register_forward_hook(flip)
    probe = ddpprobe.install(outer, run_dir=out, every=1, capture="mlp*")
    optimizer = torch.optim.SGD(outer.parameters(), 1e-3)
    for step in range(LOG_STEP + 2):
        flip.armed = (step, rank) == (FLIP_STEP, FLIP_RANK)
        floor = -0.5 if (step, rank) == (LOG_STEP, LOG_RANK) else 1.0
        outer(batch(step, rank), floor, 1.0, 1.0).backward()
        optimizer.step()
        optimizer.zero_grad()
    probe.close()


def origins(out: Path, wrap: str, capture: tuple[str, ...] = (), *, frozen: bool = False) -> None:
    """The head, and later the loss, take a logarithm of what is negative."""
    rank, model = dist.get_rank(), build()
    for part in (model.embed, model.mlp):
        part.requires_grad_(not frozen)
    outer = wrapped(model, wrap)
    probe = ddpprobe.install(outer, run_dir=out, every=1, capture=capture, daemon="none")
    optimizer = torch.optim.SGD(outer.parameters(), 1e-3)
    for step in range(LOSS_STEP + 1):
        head = -1e3 if (step, rank) == (HEAD_STEP, HEAD_RANK) else 1.0
        loss = -1e9 if (step, rank) == (LOSS_STEP, LOSS_RANK) else 1.0
        outer(batch(step, rank), 1.0, head, loss).backward()
        for parameter in outer.parameters():
            if parameter.grad is not None:
                parameter.grad.zero_()  # what went bad is to stay in its step
        optimizer.step()
        optimizer.zero_grad()
    probe.close()


def main() -> None:
    out = Path(sys.argv[1])
    dist.init_process_group("gloo")
    captured(out / "captured")
    for wrap in ("fsdp2", "fsdp1", "fsdp1-orig"):
        origins(out / wrap, wrap)
    origins(out / "whole", "fsdp2", capture=("",))
    origins(out / "frozen", "fsdp2", frozen=True)
    dist.destroy_process_group()
    time.sleep(0.5)  # torch with gloo aborts now and then when it exits right after a run


if __name__ == "__main__":
    main()
