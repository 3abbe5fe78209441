"""A user's training script, in pieces that a fault or an oddity can change."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import ddpprobe
from benchmarks.detection import nets
from benchmarks.detection.nets import Batch, Data

STEPS = 300
EARLIEST, LATEST = 120, 200  # where a fault begins


class Training:
    """One job as one rank runs it; what a subclass changes is what is odd about it.

    What is drawn by the seed is the same on all ranks: where the fault begins (`start`), on which
    rank (`victim`), how strong it is (`strength`, a factor of 1/2 to 2).

    Attributes:
        net: "mlp", "cnn" or "gpt", unless `make_model` says otherwise.
        world: ranks; from two on wrapped as `wrap` says.
        wrap: "ddp" or "fsdp2".
        daemon: as `install()` takes it; only a rank's end needs one.
    """

    net: ClassVar[str] = "mlp"
    world: ClassVar[int] = 1
    wrap: ClassVar[str] = "ddp"
    steps: ClassVar[int] = STEPS
    micros: ClassVar[int] = 1
    daemon: ClassVar[str] = "none"

    def __init__(self, seed: int, rank: int) -> None:
        self.seed, self.rank, self.step = seed, rank, -1
        self.draw = random.Random(zlib.crc32(f"{type(self).__name__} {seed}".encode()))
        self.start = self.draw.randint(EARLIEST, LATEST)
        self.victim = self.draw.randrange(self.world)
        self.strength = 2 ** self.draw.uniform(-1, 1)
        self.data = Data(seed, self.data_seed())

    # What a subclass may change, in the order in which it is asked.

    def data_seed(self) -> int:
        return 1000 * self.seed + self.rank + 1

    def make_model(self) -> nn.Module:
        return {"mlp": nets.Mlp, "cnn": nets.Cnn, "gpt": nets.Gpt}[self.net]()

    def prepare(self) -> None:
        """Before the model is wrapped, on all ranks alike."""

    def wrap_model(self) -> nn.Module:
        """Return what is called in a forward: the model, for several ranks, wrapped."""
        if self.world == 1:
            return self.model
        if self.wrap == "ddp":
            return DistributedDataParallel(self.model)
        for block in getattr(self.model, "blocks", ()):
            fully_shard(block)
        return fully_shard(self.model)

    def make_optimizer(self) -> torch.optim.Optimizer:
        parameters = self.model.parameters()
        if self.net == "gpt":
            return torch.optim.AdamW(parameters, lr=3e-3)
        rate, momentum = (0.1, 0.0) if self.net == "mlp" else (0.02, 0.9)
        return torch.optim.SGD(parameters, lr=rate, momentum=momentum)

    def before_step(self) -> None:
        """Before the forward of a step."""

    def batch(self) -> Batch:
        if self.net == "gpt":
            return self.data.text()
        return self.data.images() if self.net == "cnn" else self.data.blobs()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nets.cross_entropy(self.wrapped(x), y)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def before_update(self) -> None:
        """After the backward."""

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def after_step(self) -> None:
        """After the optimizer."""

    # What they ask.

    @property
    def due(self) -> bool:
        """Whether the fault is to happen in this step, on whatever rank."""
        return self.step == self.start

    @property
    def lasts(self) -> bool:
        """Whether the fault has begun."""
        return self.step >= self.start

    @property
    def mine(self) -> bool:
        """Whether this rank is the one with the fault."""
        return self.rank == self.victim

    def set_rate(self, factor: float) -> None:
        """Multiply the learning rate."""
        for group in self.optimizer.param_groups:
            group["lr"] *= factor

    def reduce_by(self, reduce: Callable[[dist.GradBucket], torch.futures.Future[Tensor]]) -> None:
        """Have DDP reduce each bucket of gradients by a function of it."""
        # DDP reads a hook's annotations, which are strings here; a lambda has none.
        self.wrapped.register_comm_hook(None, lambda _, bucket: reduce(bucket))

    @final
    def run(self, directory: Path, every: int) -> None:
        """Train; the run is in `directory`."""
        torch.manual_seed(self.seed)
        self.model = self.make_model()
        self.prepare()
        self.wrapped: nn.Module = self.wrap_model()
        self.optimizer = self.make_optimizer()
        options = {"run_dir": directory, "every": every, "daemon": self.daemon}
        with ddpprobe.install(self.wrapped, **options) as self.probe:
            self.train()

    def train(self) -> None:
        """Take all steps."""
        for step in range(self.steps):
            self.step = step
            self.before_step()
            for micro in range(self.micros):
                self.micro = micro
                loss = self.loss(*self.batch()) / self.micros
                self.probe.log(loss=loss.detach() * self.micros)
                self.backward(loss)
            self.before_update()
            self.update()
            self.after_step()
