"""Models that would make a wrong guess at a layout a wrong number; two tensor-parallel ranks.

torchrun ... layouts_job.py OUT
"""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)  # fmt: skip
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ddpprobe


class SameWidth(nn.Module):
    """Each rank's half of `up` is as wide as the input: the shape looks like a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.down = WideHalf(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.inner(x))


class WideHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(8, 16), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return functional.gelu(self.up(x)) * self.gate


class Scatter(nn.Module):
    """Cuts the sequence for its rank in plain code, as some do by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x.chunk(2, 1)[dist.get_rank()]


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * (dist.get_rank() + 1)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient * (dist.get_rank() + 1)


class Foreign(nn.Module):
    """An autograd function of somebody's own, which does something else on each rank."""

    def forward(self, x: Tensor) -> Tensor:
        return Sum.apply(x)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.block, self.head = nn.LayerNorm(8), SameWidth(), nn.Linear(8, 3)
        self.scatter, self.foreign = Scatter(), Foreign()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        if self.kind == "checkpoint":
            h = checkpoint(self.block, h, use_reentrant=True)
        else:
            h = self.block(h)
        if self.kind == "scatter":
            h = self.scatter(h)
        if self.kind == "foreign":
            h = self.foreign(h)
        return self.head(h).square().mean()


def build(kind: str) -> Model:
    torch.manual_seed(0)
    model = Model(kind)
    plan = {"block.inner.up": ColwiseParallel(), "block.down": RowwiseParallel()}
    if kind == "split-input":  # the user feeds each rank its part of the sequence, and says so late
        plan["block"] = PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        )
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    return model


def main() -> None:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for kind in ("plain", "scatter", "foreign", "split-input", "checkpoint"):
        model = build(kind)
        probe = ddpprobe.install(model, run_dir=Path(sys.argv[1]) / kind, every=1, daemon="none")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seed = 7 + (dist.get_rank() if kind == "split-input" else 0)
        x = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(seed))
        for _ in range(2):  # micro-batches
            model(x.requires_grad_(kind == "checkpoint")).backward()
        optimizer.step()
        probe.close()
    dist.destroy_process_group()
    time.sleep(0.5)  # torch with gloo aborts now and then when it exits right after a run


if __name__ == "__main__":
    main()
