"""A training job with two faults of one MLP, each on one rank: a flipped bit, a log of a negative.

torchrun ... replayed_job.py RUN [--wrap ddp|fsdp2]
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpprobe

FLIP_STEP, FLIP_RANK, FLIP_BIT = 1, 0, 27
LOG_STEP, LOG_RANK = 3, 1


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 12), nn.Linear(12, 6), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, *, floor: float) -> torch.Tensor:
        h = self.up(x).square() + floor
        h = torch.log(h)  # the floor keeps it positive, as long as it is one
        return self.drop(self.down(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mlp, self.head = nn.Linear(4, 6), Mlp(), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor, floor: float) -> torch.Tensor:
        h = self.embed(x)
        return self.head(h + self.mlp(h, floor=floor)).mean()


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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--wrap", default="ddp")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    inner = model = build()
    if args.wrap == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model.mlp)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    flip = Flip()
    inner.mlp.register_forward_hook(flip)
    probe = ddpprobe.install(model, run_dir=args.out, every=1, capture="mlp*")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for step in range(LOG_STEP + 2):
        flip.armed = (step, rank) == (FLIP_STEP, FLIP_RANK)
        floor = -0.5 if (step, rank) == (LOG_STEP, LOG_RANK) else 1.0
        model(batch(step, rank), floor).backward()
        optimizer.step()
        optimizer.zero_grad()
    probe.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch with gloo aborts now and then when it exits right behind a DDP run


if __name__ == "__main__":
    main()
