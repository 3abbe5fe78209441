"""Healthy runs in other habits: how batches are made, taken again, and what is learned of them."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from benchmarks.detection import nets
from benchmarks.detection.healthy import Healthy
from benchmarks.detection.nets import Batch


class V01(Healthy):
    trap, net, world = "eight steps on each batch", "cnn", 2

    def batch(self) -> Batch:
        if self.step % 8 == 0:
            self.kept = self.data.images()
        return self.kept


class _ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.actor(h), self.critic(h)[:, 0]


class V02(Healthy):
    trap, world = "PPO: four epochs in minibatches on each rollout of a pole that falls", 2
    walkers, moments, epochs, parts = 16, 16, 4, 4

    def make_model(self) -> nn.Module:
        return _ActorCritic()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def prepare(self) -> None:
        self.place = 0.05 * torch.randn(self.walkers, 4, generator=self.data.own)

    def before_step(self) -> None:
        if self.step % (self.epochs * self.parts) == 0:
            self.roll()
        if self.step % self.parts == 0:
            self.order = torch.randperm(self.walkers * self.moments, generator=self.data.own)

    @torch.no_grad()
    def roll(self) -> None:
        """Play some moments with the policy as it is."""
        seen, done, logs, gains = [], [], [], []
        for _ in range(self.moments):
            logits, value = self.model(self.place)
            chosen = torch.multinomial(logits.softmax(-1), 1, generator=self.data.own)[:, 0]
            seen.append(self.place)
            done.append(chosen)
            logs.append(logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0])
            at, speed, angle, turn = self.place.unbind(1)
            push = 2.0 * chosen - 1
            turn = turn + 0.05 * (3 * angle + push)
            self.place = torch.stack((at + 0.05 * speed, speed + 0.05 * push, angle + 0.05 * turn,
                                      turn), 1)  # fmt: skip
            fell = self.place[:, 2].abs() > 0.3
            gains.append(1.0 - fell.float() - value)
            fresh = 0.05 * torch.randn(self.place.shape, generator=self.data.own)
            self.place = torch.where(fell[:, None], fresh, self.place)
        self.rollout = [torch.cat(each) for each in (seen, done, logs, gains)]

    def batch(self) -> Batch:
        size = self.walkers * self.moments // self.parts
        part = self.step % self.parts
        self.rows = self.order[part * size : (part + 1) * size]
        return self.rollout[0][self.rows], self.rollout[1][self.rows]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits, value = self.wrapped(x)
        logs = logits.log_softmax(-1)
        ratio = (logs.gather(1, y[:, None])[:, 0] - self.rollout[2][self.rows]).exp()
        gain = self.rollout[3][self.rows]
        gain = (gain - gain.mean()) / (gain.std() + 1e-8)
        policy = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        entropy = -(logs.exp() * logs).sum(-1).mean()
        return policy + 0.5 * (value - 1).square().mean() - 0.01 * entropy


class V03(Healthy):
    trap = "Q-learning from a buffer, a target net that follows every 20 steps"

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def prepare(self) -> None:
        self.target = copy.deepcopy(self.model)
        self.buffer = torch.randn(64, 2, generator=self.data.own)

    def before_step(self) -> None:
        new = torch.randn(4, 2, generator=self.data.own)
        self.buffer = torch.cat((self.buffer, new))[-512:]
        if self.step % 20 == 0:
            self.target.load_state_dict(self.model.state_dict())

    def batch(self) -> Batch:
        rows = torch.randint(0, len(self.buffer), (32,), generator=self.data.own)
        return self.buffer[rows], torch.randint(0, nets.CLASSES, (32,), generator=self.data.own)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        after = 0.9 * x + 0.1 * (y[:, None] % 3 - 1)
        with torch.no_grad():
            worth = -after.square().sum(1) + 0.9 * self.target(after).amax(1)
        known = self.wrapped(x).gather(1, y[:, None])[:, 0]
        return nn.functional.smooth_l1_loss(known, worth)


class V04(Healthy):
    trap, net = "one batch, on purpose: does it learn at all?", "cnn"

    def batch(self) -> Batch:
        if self.step == 0:
            self.kept = self.data.images()
        return self.kept


class V05(Healthy):
    trap, net, world = "epochs of twelve batches that nobody shuffles", "cnn", 2

    def prepare(self) -> None:
        self.kept = [self.data.images(noise=2.0) for _ in range(12)]

    def batch(self) -> Batch:
        return self.kept[self.step % 12]


class V06(Healthy):
    trap, net = "contrastive: two views of each image", "cnn"

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        views = torch.cat((x, x + 0.3 * torch.randn(x.shape, generator=self.data.own)))
        features = nn.functional.normalize(self.wrapped(views), dim=1)
        first, second = features.chunk(2)
        return nn.functional.cross_entropy(first @ second.T / 0.2, torch.arange(len(x)))


class _Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 64))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + (log / 2).exp() * noise), mean, log


class V07(Healthy):
    trap = "a VAE whose KL term is warmed up"

    def make_model(self) -> nn.Module:
        return _Vae()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def batch(self) -> Batch:
        x, y = self.data.images(size=32, noise=0.3)
        return x.flatten(1), y

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, mean, log = self.wrapped(x, torch.randn(len(x), 4, generator=self.data.own))
        kl = -0.5 * (1 + log - mean.square() - log.exp()).sum(1).mean()
        return (out - x).square().sum(1).mean() + min(1.0, self.step / 100) * kl


class V08(Healthy):
    trap, net, world = "each batch has texts of one length, of 8 to 32", "gpt", 2

    def batch(self) -> Batch:
        length = 4 * int(torch.randint(2, 9, (), generator=self.data.own))
        return self.data.text(size=8, length=min(length, nets.LENGTH))


class V09(Healthy):
    trap, net = "images of 0 to 255, the first layer is a batch norm", "cnn"

    def make_model(self) -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(1), nets.Cnn())

    def batch(self) -> Batch:
        x, y = self.data.images()
        return (128 + 40 * x).clamp(0, 255).round(), y


class _InTurn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(2, 32), nn.Linear(32, 3), nn.Linear(32, 2)

    def forward(self, x: Tensor, first: bool) -> Tensor:  # noqa: FBT001  (as a script has it)
        return (self.a if first else self.b)(self.body(x).relu())


class V10(Healthy):
    trap = "two tasks in turn, a head each, inputs of another size"

    def make_model(self) -> nn.Module:
        return _InTurn()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def batch(self) -> Batch:
        x, y = self.data.blobs()
        return (x, y) if self.step % 2 == 0 else (20 * x, y % 2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nets.cross_entropy(self.wrapped(x, self.step % 2 == 0), y)


HABITS: dict[str, type[Healthy]] = {
    one.__name__: one for one in (V01, V02, V03, V04, V05, V06, V07, V08, V09, V10)
}
