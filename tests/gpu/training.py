"""A small training in every setting that meets a GPU's own machinery, with the probe or without.

All settings train the same model on the same data. Its operators are deterministic on a GPU as it
is: two trainings that differ in a bit differ in something else than the order of additions.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import ddpprobe
from ddpprobe.testing import inject, state_hash

EVERY = 3  # sampled steps of a training that is compared
STEPS = 10
GRAPHED = "blocks.1"


@dataclass(frozen=True)
class Setting:
    """What a training is done with.

    Attributes:
        wrap: "", "ddp" or "fsdp2".
        precision: "" (float32), "bf16" (autocast), "fp16" (autocast and a GradScaler) or "fp64".
        remat: whether the blocks are checkpointed.
        mode: of `torch.compile`; "" does not compile.
        graphed: "part" replaces a block by CUDA graphs before `install`, "whole" the model after.
        streams: whether every block does half of its work on a stream of its own.
    """

    wrap: str = ""
    precision: str = ""
    remat: bool = False
    mode: str = ""
    graphed: str = ""
    streams: bool = False

    @property
    def only_cuda(self) -> str:
        """Why there is no dry run of it, "" if there is."""
        if self.graphed or self.mode == "reduce-overhead":
            return "CUDA graphs"
        return ""


SETTINGS = {
    "plain": Setting(),
    "plain fp64": Setting(precision="fp64"),
    "ddp": Setting("ddp"),
    "fsdp2": Setting("fsdp2"),
    "autocast bf16": Setting(precision="bf16"),
    "GradScaler fp16": Setting(precision="fp16"),
    "checkpointing": Setting(remat=True),
    "several streams": Setting(streams=True),
    "graphed callable, then install": Setting(graphed="part"),
    "install, then graphed callable": Setting(graphed="whole"),
    "compile": Setting(mode="default"),
    "compile reduce-overhead": Setting(mode="reduce-overhead"),
    "ddp bf16 checkpointing": Setting("ddp", "bf16", remat=True),
}


class Block(nn.Module):
    """A residual block; with a side stream, its two halves are computed at the same time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU()
        self.down, self.drop = nn.Linear(2 * width, width), nn.Dropout(0.1)
        self.gate = nn.Linear(width, width)
        self.side: torch.cuda.Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        with self.aside():
            gate = self.gate(x)
        y = self.drop(self.down(self.act(self.up(self.norm(x)))))
        if self.side is not None:
            torch.cuda.current_stream().wait_stream(self.side)
            gate.record_stream(torch.cuda.current_stream())
        return x + y * gate.sigmoid()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        if self.side is None:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield


class Model(nn.Module):
    def __init__(self, setting: Setting, width: int, device: str) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, width)
        self.remat = setting.remat
        if setting.streams and device == "cuda":
            for block in self.blocks:
                block.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.remat else block(x)
        return self.head(x).square().mean()


@dataclass
class Trained:
    """What a training came to: the hash of all its state, and the loss of each step."""

    hash: str
    losses: list[float] = field(default_factory=list)


class Training:
    """One training under way.

    Args:
        setting: with what.
        device: "cuda" or "cpu".
        run_dir: of the probe; None trains without.
        every: steps from a sampled one to the next.
        fault: `ddpprobe.testing.inject`'s text, "" for none.
        options: further arguments of `install`.
    """

    def __init__(
        self, setting: Setting, device: str, run_dir: Path | None = None, every: int = EVERY,
        fault: str = "", **options: Any,
    ) -> None:  # fmt: skip
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        self.setting, self.device = setting, device
        self.width, self.rows = (256, 512) if device == "cuda" else (16, 8)
        self.model = Model(setting, self.width, device).to(device, self.dtype)
        self.called = self._wrapped()
        self.optimizer = torch.optim.AdamW(self.called.parameters(), lr=0.01)
        self.scaler = None
        if setting.precision == "fp16":
            self.scaler = torch.amp.GradScaler(device, init_scale=2.0**10)
        self.probe = None
        if run_dir is not None:
            self.probe = ddpprobe.install(
                self.called, run_dir=run_dir, every=every, daemon="none", **options
            )
        self.fault = inject(self.called, fault) if fault else None
        if setting.graphed == "whole":
            # Which refuses modules with hooks.
            what = "make_graphed_callables"
            with self.probe.pause(what) if self.probe else contextlib.nullcontext():
                self.called = torch.cuda.make_graphed_callables(self.called, (self.batch(0),))
        self._step = 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.setting.precision == "fp64" else torch.float32

    def _wrapped(self) -> nn.Module:
        model, setting = self.model, self.setting
        if setting.graphed == "part":
            sample = torch.randn(self.rows, self.width, device=self.device, requires_grad=True)
            torch.cuda.make_graphed_callables(model.get_submodule(GRAPHED), (sample,))
        if setting.wrap == "ddp":
            return DistributedDataParallel(model)
        if setting.wrap == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            for part in (*model.blocks, model):
                fully_shard(part)
        if setting.mode and self.device == "cuda":
            return torch.compile(model, mode=setting.mode)
        return torch.compile(model, backend="aot_eager") if setting.mode else model

    def batch(self, step: int) -> Tensor:
        """Return the input of a step: a pure function of its number."""
        drawn = torch.randn(self.rows, self.width, generator=torch.Generator().manual_seed(step))
        return drawn.to(self.device, self.dtype)

    def step(self, batch: Tensor) -> Tensor:
        """Train on a batch; return the loss. Nothing in here waits but a GradScaler."""
        if self.setting.mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.setting.precision)
        with torch.autocast(self.device, low) if low else contextlib.nullcontext():
            loss: Tensor = self.called(batch)
        if self.scaler is None:
            loss.backward()
            nn.utils.clip_grad_norm_(self.called.parameters(), 1.0)
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self._step += 1
        return loss.detach()

    def steps(self, count: int) -> list[float]:
        """Train for some steps; return the losses."""
        return [self.step(self.batch(self._step)).item() for _ in range(count)]

    def close(self) -> None:
        if self.fault is not None:
            self.fault.remove()
        if self.probe is not None:
            self.probe.close()


def start_anew(setting: Setting) -> None:
    """Let the compiler forget what earlier trainings have made it do."""
    if setting.mode:
        torch.compiler.reset()


def trained(setting: Setting, device: str, run_dir: Path | None = None, **more: Any) -> Trained:
    """Train from the beginning to the end."""
    start_anew(setting)
    training = Training(setting, device, run_dir, **more)
    losses = training.steps(STEPS)
    training.close()
    return Trained(state_hash(training.called, training.optimizer), losses)


@contextlib.contextmanager
def one_rank(device: str) -> Iterator[None]:
    """Be the only rank of a process group: NCCL on a GPU."""
    if device == "cuda":
        torch.cuda.set_device(0)
    group = {"device_id": torch.device("cuda", 0)} if device == "cuda" else {}
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **group)
    try:
        yield
    finally:
        dist.destroy_process_group()


def group_for(setting: Setting, device: str) -> contextlib.AbstractContextManager[None]:
    """Return a process group if the setting needs one."""
    return one_rank(device) if setting.wrap else contextlib.nullcontext()
