"""The 18 healthy runs, each a trap, and more of them that nobody planned: nothing may be said."""

from __future__ import annotations

import contextlib
import math
import time
from typing import ClassVar

import torch
from torch import Tensor, nn

from benchmarks.detection import nets
from benchmarks.detection.nets import Batch
from benchmarks.detection.training import Training

HALF = 150


class Healthy(Training):
    """A training in which nothing is wrong.

    Attributes:
        trap: why somebody may think so.
    """

    trap: ClassVar[str]


class H01(Healthy):
    trap = "an MLP on blobs, SGD"


class H02(Healthy):
    trap, net = "warm-up and cosine", "gpt"

    def before_step(self) -> None:
        peak, t = 6e-3, self.step / self.steps
        rate = peak * min(t / 0.1, 0.5 * (1 + math.cos(math.pi * t)))
        for group in self.optimizer.param_groups:
            group["lr"] = max(rate, 1e-6)


class H03(Healthy):
    trap, net = "batch 4, gradients clipped", "gpt"

    def batch(self) -> Batch:
        return self.data.text(size=4)

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class H04(Healthy):
    trap, net = "the sequence length goes from 8 to 32", "gpt"

    def batch(self) -> Batch:
        return self.data.text(length=8 if self.step < HALF else 32)


class H05(Healthy):
    trap = "mixed precision, a GradScaler that starts too high and probes often"

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=60)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            out = self.wrapped(x)
        return nets.cross_entropy(out.float(), y)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class H06(Healthy):
    trap = "top-1 experts, a batch of 8: some have no token"

    def make_model(self) -> nn.Module:
        return nets.Moe()

    def batch(self) -> Batch:
        return self.data.blobs(size=8)


class H07(Healthy):
    trap = "a wide ReLU with a negative bias: most are zero"

    def make_model(self) -> nn.Module:
        model = nets.Mlp(width=256)
        model.fc1.bias.data.fill_(-0.8)
        return model


class H08(Healthy):
    trap = "rare words: most gradients are zero"

    def make_model(self) -> nn.Module:
        return nets.Rare()

    def batch(self) -> Batch:
        return self.data.words(5000)


class H09(Healthy):
    trap = "batch norm, and residual branches that begin at zero"

    def make_model(self) -> nn.Module:
        return nets.Residual()

    def batch(self) -> Batch:
        return self.data.images()


class _Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, noise: Tensor, real: Tensor | None) -> Tensor:
        fake = self.generator(noise)
        if real is None:
            return nn.functional.softplus(-self.critic(fake)).mean()
        both = (
            nn.functional.softplus(self.critic(fake.detach())),
            nn.functional.softplus(-self.critic(real)),
        )
        return both[0].mean() + both[1].mean()


class H10(Healthy):
    trap = "a GAN"

    def make_model(self) -> nn.Module:
        return _Gan()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=2e-3, betas=(0.5, 0.9))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(len(x), 8, generator=self.data.own)
        critic = self.step % 2 == 0
        self.model.critic.requires_grad_(requires_grad=critic)
        return self.wrapped(noise, x if critic else None)


class H11(Healthy):
    trap = "REINFORCE: the reward is 20 times as high now and then"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        policy = torch.distributions.Categorical(logits=self.wrapped(x))
        action = policy.sample()
        rare = torch.rand(len(y), generator=self.data.own) < 0.05
        reward = (action == y).float() * torch.where(rare, 20.0, 1.0)
        return -(policy.log_prob(action) * reward).mean()


class H12(Healthy):
    trap = "targets with heavy tails"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        normal = torch.randn(5, *y.shape, generator=self.data.own)
        tail = normal[0] / (normal[1:].square().mean(0) + 0.05).sqrt() ** 1.6  # about t(2.5)
        return nn.functional.mse_loss(self.wrapped(x)[:, 0], x.sum(1) + tail)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.01)


class H13(Healthy):
    trap, net = "cosine with warm restarts", "gpt"

    def before_step(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-5 + 4e-3 * (1 + math.cos(math.pi * (self.step % 75) / 75))


class H14(Healthy):
    trap, net = "a backbone that is frozen first", "gpt"

    def prepare(self) -> None:
        self.model.blocks.requires_grad_(requires_grad=False)

    def before_step(self) -> None:
        if self.step == HALF:
            self.model.blocks.requires_grad_(requires_grad=True)


class H15(Healthy):
    trap = "interpolation: the loss goes to 1e-6"

    def prepare(self) -> None:
        self.fixed = self.data.blobs(size=32, noise=0.1)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def batch(self) -> Batch:
        return self.fixed

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(
            self.wrapped(x), nn.functional.one_hot(y, nets.CLASSES).float()
        )


class H16(Healthy):
    trap, net, world, micros = "two micro-batches, the first without reduction", "gpt", 2, 2

    def batch(self) -> Batch:
        return self.data.text(size=4)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        last = self.micro == self.micros - 1
        self.sync = contextlib.nullcontext() if last else self.wrapped.no_sync()
        with self.sync:
            return super().loss(x, y)

    def backward(self, loss: Tensor) -> None:
        with contextlib.nullcontext() if self.micro else self.wrapped.no_sync():
            loss.backward()


class H17(Healthy):
    trap, net, world = "batch norm on two ranks, the last batch is shorter on one", "cnn", 2

    def make_model(self) -> nn.Module:
        return nets.Residual()

    def batch(self) -> Batch:
        short = self.step % 20 == 19 and self.rank
        return self.data.images(size=5 if short else 16)


class H18(Healthy):
    trap, world = "rank 0 evaluates for 40 s", 2

    def before_step(self) -> None:
        if self.step == HALF and self.rank == 0:
            with self.probe.pause("eval"):
                time.sleep(40)


# Beyond the list: what else is normal.


class X01(Healthy):
    trap, net = "LayerDrop", "gpt"

    def make_model(self) -> nn.Module:
        return nets.Gpt(layers=6, drop=0.2)


class X02(Healthy):
    trap, world = "top-1 experts on two ranks", 2

    def make_model(self) -> nn.Module:
        return nets.Moe()

    def batch(self) -> Batch:
        x, y = self.data.blobs(size=16)
        return x, y

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        every = sum(p.sum() for p in self.model.experts.parameters())
        return super().loss(x, y) + 0 * every


class X03(Healthy):
    trap, net, world = "fine-tuning: the learning rate is tiny, the head is new", "cnn", 2

    def prepare(self) -> None:
        mine, optimizer = self.data, torch.optim.SGD(self.model.parameters(), lr=0.05)
        for _ in range(150):
            x, y = nets.Data(self.seed, 7).images()
            nets.cross_entropy(self.model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.data = mine
        self.model.head.reset_parameters()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-4)


class X04(Healthy):
    trap, net = "an evaluation every 50 steps, in eval mode", "cnn"

    def make_model(self) -> nn.Module:
        return nets.Residual()

    def after_step(self) -> None:
        if self.step % 50 == 49:
            self.model.eval()
            with torch.no_grad():
                for _ in range(5):
                    self.wrapped(self.data.images(size=64)[0])
            self.model.train()


class X05(Healthy):
    trap = "a step decay of the learning rate: the loss falls at once"

    def before_step(self) -> None:
        if self.step in (150, 225):
            self.set_rate(0.1)


class X06(Healthy):
    trap = "batches of 2, a high learning rate"

    def batch(self) -> Batch:
        return self.data.blobs(size=2, noise=0.8)


class X07(Healthy):
    trap, world = "ranks with other data: blobs of other noise", 3

    def batch(self) -> Batch:
        return self.data.blobs(noise=0.3 + 0.3 * self.rank)


class X08(Healthy):
    trap, net = "a curriculum: noise grows", "cnn"

    def batch(self) -> Batch:
        return self.data.images(noise=0.5 + 2.0 * self.step / self.steps)


class X09(Healthy):
    trap, net, world = "an RMSprop GPT on four ranks, no warm-up", "gpt", 4
    steps = 200

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.model.parameters(), lr=1e-3)


class X10(Healthy):
    trap = "dropout of a half, weight decay"

    def make_model(self) -> nn.Module:
        model = nets.Mlp(64)
        model.act1 = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
        model.act2 = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.1, weight_decay=1e-2)


class X11(Healthy):
    trap = "a regression whose targets are large"

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.smooth_l1_loss(self.wrapped(x)[:, 0], 50 * x.sum(1))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-2)


class X12(Healthy):
    trap, net, world = "one rank has twice the batch", "cnn", 2

    def batch(self) -> Batch:
        return self.data.images(size=16 * (1 + self.rank))


HEALTHY: dict[str, type[Healthy]] = {
    one.__name__: one
    for one in (
        H01, H02, H03, H04, H05, H06, H07, H08, H09, H10, H11, H12, H13, H14, H15, H16, H17, H18,
        X01, X02, X03, X04, X05, X06, X07, X08, X09, X10, X11, X12,
    )
}  # fmt: skip
