"""A third set of healthy runs by somebody who had not read what the detectors look for.

"Seen" is without the probe: the loss as a mean over the first and over the last ten steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from benchmarks.detection import nets
from benchmarks.detection.habits_blind import fit
from benchmarks.detection.healthy import Healthy
from benchmarks.detection.nets import Batch


def _waves(t: Tensor) -> Tensor:
    angle = t[:, None] * torch.logspace(0, 2, 8)
    return torch.cat((angle.sin(), angle.cos()), 1)


class _Velocity(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.label = nn.Embedding(nets.CLASSES + 1, width)  # the last one is no class
        self.into, self.act = nn.Linear(64, width), nn.SiLU()
        self.mids = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, 64)
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        h = self.into(x) + self.time(_waves(t)) + self.label(y)
        for mid in self.mids:
            h = h + mid(self.act(h))
        return self.out(self.norm(h))


class W41(Healthy):
    trap, world = "flow matching: an output that begins at zero, a tenth of the classes dropped", 2
    # Seen: loss 1.42 -> 0.16 (seed 0), 1.47 -> 0.13 (seed 1).

    def make_model(self) -> nn.Module:
        return _Velocity()

    def prepare(self) -> None:
        self.average = copy.deepcopy(self.model).requires_grad_(requires_grad=False)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            self.model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0
        )

    def batch(self) -> Batch:
        x, y = self.data.images(size=64, noise=0.1)
        dropped = torch.rand(64, generator=self.data.own) < 0.1
        return x.flatten(1), torch.where(dropped, nets.CLASSES, y)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        t = torch.randn(len(x), generator=self.data.own).sigmoid()
        noise = torch.randn(x.shape, generator=self.data.own)
        between = noise + t[:, None] * (x - noise)
        return nn.functional.mse_loss(self.wrapped(between, t, y), x - noise)

    @torch.no_grad()
    def after_step(self) -> None:
        for mean, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(p, 0.01)


class _Masked(nn.Module):
    """A masked autoencoder of 16 patches: the encoder sees four."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.into, self.across = nn.Linear(4, width), nn.Linear(width, width)
        self.places = nn.ParameterList(0.02 * torch.randn(16, width) for _ in range(2))
        self.token = nn.Parameter(0.02 * torch.randn(width))
        self.encoder, self.decoder = (
            nn.ModuleList(nets.Block(width) for _ in range(depth)) for depth in (2, 1)
        )
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.out = nn.Linear(width, 4)
        for block in (*self.encoder, *self.decoder):
            block.attn.causal = False

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        rows = torch.arange(len(x))[:, None]
        h = (self.into(x) + self.places[0])[rows, kept]
        for block in self.encoder:
            h = block(h)
        h = self.across(self.norm1(h))
        whole = self.token.expand(len(x), 16, -1).clone()
        whole[rows, kept] = h
        whole = whole + self.places[1]
        for block in self.decoder:
            whole = block(whole)
        return self.out(self.norm2(whole))


class W42(Healthy):
    trap, world = "a masked autoencoder: three quarters of the patches are hidden", 2
    # Seen: loss 1.07 -> 0.10 (seed 0), 1.26 -> 0.11 (seed 1).

    def make_model(self) -> nn.Module:
        return _Masked()

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.05
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min((step + 1) / 30, (1 + math.cos(math.pi * step / self.steps)) / 2),
        )
        return optimizer

    def batch(self) -> Batch:
        x, _ = self.data.images(size=32, noise=0.3)
        patches = nn.functional.unfold(x, 2, stride=2).transpose(1, 2)
        return patches, torch.rand(32, 16, generator=self.data.own).argsort(1)[:, :4]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        wrong = (self.wrapped(x, y) - x).square().mean(-1)
        hidden = torch.ones(x.shape[:2]).scatter(1, y, 0.0)
        return (wrong * hidden).sum() / hidden.sum()

    def after_step(self) -> None:
        self.schedule.step()


class _Dino(nn.Module):
    centre: Tensor

    def __init__(self, prototypes: int = 32) -> None:
        super().__init__()
        self.student = self.net(prototypes)
        self.teacher = self.net(prototypes)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(requires_grad=False)
        self.register_buffer("centre", torch.zeros(prototypes))

    @staticmethod
    def net(prototypes: int) -> nn.Module:
        body = nets.Cnn()
        body.head = nn.Linear(16 * 16, 32)
        last = parametrizations.weight_norm(nn.Linear(32, prototypes, bias=False))
        last.parametrizations.weight.original0.data.fill_(1)
        last.parametrizations.weight.original0.requires_grad_(requires_grad=False)
        return nn.Sequential(body, _Unit(), last)

    def forward(self, views: list[Tensor], sharp: float) -> Tensor:
        """Return the cross-entropy of each student's view with the teacher's of other views."""
        out = (self.student(torch.cat(views)) / 0.1).log_softmax(-1).chunk(len(views))
        with torch.no_grad():
            told = self.teacher(torch.cat(views[:2]))
            goals = ((told - self.centre) / sharp).softmax(-1).chunk(2)
            mean = told.mean(0)
            dist.all_reduce(mean)
            self.centre.lerp_(mean / dist.get_world_size(), 0.1)
        pairs = [(g, s) for i, g in enumerate(goals) for j, s in enumerate(out) if i != j]
        return -torch.stack([(g * s).sum(-1).mean() for g, s in pairs]).mean()


class _Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.normalize(x, dim=-1)


class W43(Healthy):
    trap, world = "DINO: a teacher of averages, centred and sharpened; the last layer waits", 2
    # Seen: loss 2.47 -> 1.23 (seed 0), 2.20 -> 1.45 (seed 1); nearest neighbours are of one class.

    def make_model(self) -> nn.Module:
        return _Dino()

    def make_optimizer(self) -> torch.optim.Optimizer:
        learned = [p for p in self.model.student.parameters() if p.requires_grad]
        return torch.optim.AdamW(learned, lr=2e-3)

    def before_step(self) -> None:
        done = self.step / self.steps
        wave = (1 + math.cos(math.pi * done)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = 2e-3 * min((self.step + 1) / 30, wave)
            group["weight_decay"] = 0.4 - 0.36 * wave

    def batch(self) -> Batch:
        return self.data.images(size=32, noise=0.5)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        views = [x + 0.5 * torch.randn(x.shape, generator=self.data.own) for _ in range(2)]
        for _ in range(2):
            kept = torch.rand(len(x), 1, 8, 8, generator=self.data.own) < 0.6
            views.append(x * kept)
        return self.wrapped(views, 0.04 + 0.03 * min(1.0, self.step / 90))

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.student.parameters(), 3.0)
        if self.step < 30:
            for p in self.model.student[2].parameters():
                p.grad = None

    @torch.no_grad()
    def after_step(self) -> None:
        kept = 1 - 0.02 * (1 + math.cos(math.pi * self.step / self.steps)) / 2
        both = (self.model.teacher.parameters(), self.model.student.parameters())
        for slow, p in zip(*both, strict=True):
            slow.lerp_(p, 1 - kept)


class _Equilibrium(nn.Module):
    """What a layer comes to when it is called again and again; only the last call is learned."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.into = nn.Linear(2, width)
        self.again = parametrizations.spectral_norm(nn.Linear(width, width, bias=False))
        self.head = nn.Linear(width, nets.CLASSES)

    def layer(self, z: Tensor, given: Tensor) -> Tensor:
        return (0.9 * self.again(z) + given).relu()

    def forward(self, x: Tensor) -> Tensor:
        given = self.into(x)
        with parametrize.cached():
            with torch.no_grad():
                z = torch.zeros_like(given)
                for _ in range(30):
                    before, z = z, self.layer(z, given)
                    if (z - before).norm() < 1e-3 * z.norm():
                        break
            z = self.layer(z, given)
        return self.head(z)


class W44(Healthy):
    trap = "a deep equilibrium model: a layer is called until nothing changes, 30 times at most"
    # Seen: loss 1.02 -> 0.09 (seed 0), 0.90 -> 0.09 (seed 1).

    def make_model(self) -> nn.Module:
        return _Equilibrium()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def batch(self) -> Batch:
        return self.data.blobs(size=64, noise=0.4)


class W45(Healthy):
    trap = "MAML: the gradient of a gradient step, eight tasks in each step"
    # Seen: loss 0.90 -> 0.19 (seed 0), 0.79 -> 0.21 (seed 1).
    shots, tasks, inner = 10, 8, 0.02

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def batch(self) -> Batch:
        """Return samples of sines of other heights and phases: a task a row."""
        draw = torch.rand(2, self.tasks, 1, 1, generator=self.data.own)
        x = 10 * torch.rand(self.tasks, 2 * self.shots, 1, generator=self.data.own) - 5
        return x, (0.5 + 1.5 * draw[0]) * (x - math.pi * draw[1]).sin()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weights = dict(self.wrapped.named_parameters())
        far = nn.functional.mse_loss
        losses = []
        for given, goal in zip(x, y, strict=True):
            (near, ask), (known, sought) = given.chunk(2), goal.chunk(2)
            fast = weights
            for _ in range(2):
                wrong = far(torch.func.functional_call(self.wrapped, fast, (near,)), known)
                slopes = torch.autograd.grad(wrong, list(fast.values()), create_graph=True)
                fast = {
                    name: p - self.inner * slope
                    for (name, p), slope in zip(fast.items(), slopes, strict=True)
                }
            losses.append(far(torch.func.functional_call(self.wrapped, fast, (ask,)), sought))
        return torch.stack(losses).mean()


class W46(Healthy):
    trap = "an energy-based model: its negatives are samples of its own, by Langevin's steps"
    # Seen: loss -0.05 -> 0.01 (seed 0), -0.05 -> -0.01 (seed 1): its samples come to be the data's.

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        )

    def prepare(self) -> None:
        self.buffer = 4 * torch.rand(1024, 2, generator=self.data.own) - 2

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=2e-3, betas=(0.0, 0.999))

    def batch(self) -> Batch:
        """Return points, and others at which the model's energy is low."""
        x, _ = self.data.blobs(size=128, noise=0.2)
        rows = torch.randperm(len(self.buffer), generator=self.data.own)[:128]
        fresh = torch.rand(128, 1, generator=self.data.own) < 0.05
        new = 4 * torch.rand(128, 2, generator=self.data.own) - 2
        z = torch.where(fresh, new, self.buffer[rows])
        self.model.eval().requires_grad_(requires_grad=False)
        for _ in range(20):
            z.requires_grad_()
            (slope,) = torch.autograd.grad(self.wrapped(z).sum(), z)
            noise = torch.randn(z.shape, generator=self.data.own)
            z = (z - 0.05 * slope + 0.1 * noise).detach()
        self.model.train().requires_grad_(requires_grad=True)
        self.buffer[rows] = z
        return x, z

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        real, made = self.wrapped(torch.cat((x, y)))[:, 0].chunk(2)
        return real.mean() - made.mean() + 0.01 * (real.square() + made.square()).mean()


class _Sine(nn.Module):
    def __init__(self, into: int, out: int, *, first: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(into, out)
        edge = 1 / into if first else math.sqrt(6 / into) / 30
        nn.init.uniform_(self.linear.weight, -edge, edge)

    def forward(self, x: Tensor) -> Tensor:
        return (30 * self.linear(x)).sin()


class W47(Healthy):
    trap = "SIREN: sines of thirty times what a layer returns, one image, all pixels in each step"
    # Seen: loss 0.19 -> 1e-14 (seed 0), 0.14 -> 1e-11 (seed 1): the image is known by heart.

    def make_model(self) -> nn.Module:
        head = nn.Linear(64, 1)
        edge = math.sqrt(6 / 64) / 30
        nn.init.uniform_(head.weight, -edge, edge)
        return nn.Sequential(_Sine(2, 64, first=True), _Sine(64, 64), _Sine(64, 64), head)

    def prepare(self) -> None:
        task = torch.Generator().manual_seed(self.seed)
        coarse = torch.rand(1, 1, 10, 10, generator=task)
        image = nn.functional.interpolate(coarse, (32, 32), mode="bicubic").clamp(0, 1)
        line = torch.linspace(-1, 1, 32)
        self.places = torch.cartesian_prod(line, line)
        self.pixels = 2 * image.flatten()[:, None] - 1

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=5e-4)

    def batch(self) -> Batch:
        return self.places, self.pixels

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.wrapped(x), y)


class _Experts(nn.Module):
    """Two of four experts for each token; keeps what its router is to be told."""

    def __init__(self, width: int, experts: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = x.flatten(0, 1)
        logits = self.gate(h)
        chance = logits.softmax(-1)
        weight, chosen = chance.topk(2, -1)
        weight = weight / weight.sum(-1, keepdim=True)
        out = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero().unbind(1)
            out = out.index_add(0, rows, expert(h[rows]) * weight[rows, place, None])
        load = nn.functional.one_hot(chosen, len(self.experts)).float().sum(1).mean(0) / 2
        balance = len(self.experts) * (load * chance.mean(0)).sum()
        return out.view_as(x), 1e-2 * balance + 1e-3 * logits.logsumexp(-1).square().mean()


class _SparseBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), nets.Attention(width)
        self.norm2, self.moe = nn.LayerNorm(width), _Experts(width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attn(self.norm1(x))
        out, extra = self.moe(self.norm2(x))
        return x + out, extra


class _SparseGpt(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(nets.VOCABULARY, width)
        self.place = nn.Embedding(nets.LENGTH, width)
        self.blocks = nn.ModuleList(_SparseBlock(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, nets.VOCABULARY)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.embed(x) + self.place.weight[: x.shape[1]]
        extras = []
        for block in self.blocks:
            h, extra = block(h)
            extras.append(extra)
        return self.head(self.norm(h)), torch.stack(extras).sum()


class W48(Healthy):
    trap, net, world = (
        "two of four experts, with a loss for balance and one for the logits",
        "gpt",
        2,
    )
    # Seen: loss 2.91 -> 1.25 (seed 0), 2.91 -> 1.25 (seed 1).

    def make_model(self) -> nn.Module:
        return _SparseGpt()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, extra = self.wrapped(x)
        return nets.cross_entropy(out, y) + extra

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class W49(Healthy):
    trap = "DP-SGD: each sample's gradient is clipped, then noise is added; batches by chance"
    # Seen: loss 0.77 -> 0.05 (seed 0), 0.76 -> 0.05 (seed 1).
    expected, clip, noise = 64, 1.0, 0.8

    def prepare(self) -> None:
        self.x, self.y = self.data.blobs(size=2000, noise=0.4)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.5)

    def batch(self) -> Batch:
        taken = torch.rand(len(self.x), generator=self.data.own) < self.expected / len(self.x)
        return self.x[taken], self.y[taken]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        weights = {name: p.detach() for name, p in self.wrapped.named_parameters()}

        def one(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            out = torch.func.functional_call(self.wrapped, weights, (x[None],))
            return nn.functional.cross_entropy(out, y[None])

        each = torch.func.vmap(torch.func.grad_and_value(one), (None, 0, 0))
        self.each, losses = each(weights, x, y)
        return losses.mean()

    def backward(self, loss: Tensor) -> None:
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in self.each.values()]).norm(dim=0)
        share = (self.clip / (norms + 1e-6)).clamp(max=1)
        for name, p in self.model.named_parameters():
            whole = torch.einsum("b,b...->...", share, self.each[name])
            noise = torch.randn(p.shape, generator=self.data.own)
            p.grad = (whole + self.noise * self.clip * noise) / self.expected


class _LazyGan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(8, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
            nn.Linear(64, 2),
        )  # fmt: skip
        self.critic = nn.Sequential(
            nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
            nn.Linear(64, 1),
        )  # fmt: skip

    def forward(self, noise: Tensor, real: Tensor | None, penalty: float = 0.0) -> Tensor:
        fake = self.generator(noise)
        if real is None:
            return nn.functional.softplus(-self.critic(fake)).mean()
        real = real.detach().requires_grad_(requires_grad=penalty > 0)
        known = self.critic(real)
        loss = nn.functional.softplus(self.critic(fake.detach())).mean()
        loss = loss + nn.functional.softplus(-known).mean()
        if penalty:
            (slope,) = torch.autograd.grad(known.sum(), real, create_graph=True)
            loss = loss + penalty * slope.square().sum(1).mean()
        return loss


class W50(Healthy):
    trap = "a GAN whose R1 penalty comes in every 16th step, 16 times as strong"
    # Seen: critic's loss 1.35 -> 1.36 (seed 0), 1.33 -> 1.36 (seed 1): an equilibrium.

    def make_model(self) -> nn.Module:
        return _LazyGan()

    def prepare(self) -> None:
        self.average = copy.deepcopy(self.model.generator).requires_grad_(requires_grad=False)

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.other = torch.optim.Adam(self.model.generator.parameters(), lr=2e-3, betas=(0.0, 0.99))
        return torch.optim.Adam(self.model.critic.parameters(), lr=2e-3, betas=(0.0, 0.99))

    def batch(self) -> Batch:
        return self.data.blobs(size=64, noise=0.2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(len(y), 8, generator=self.data.own)
        return self.wrapped(noise, x, 16 * 0.1 / 2 if self.step % 16 == 0 else 0.0)

    @torch.no_grad()
    def follow(self) -> None:
        both = (self.average.parameters(), self.model.generator.parameters())
        for mean, p in zip(*both, strict=True):
            mean.lerp_(p, 0.02)

    def after_step(self) -> None:
        self.wrapped(torch.randn(64, 8, generator=self.data.own), None).backward()
        self.other.step()
        self.model.zero_grad()
        self.follow()


class _Lion(torch.optim.Optimizer):
    def __init__(self, parameters: Any, lr: float, decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(p.grad, mean, first).sign(), alpha=-group["lr"])
                mean.lerp_(p.grad, 1 - second)


class W51(Healthy):
    trap, net = "Lion in bfloat16: warm-up, constant, then down to zero", "gpt"
    # Seen: loss 2.93 -> 1.50 (seed 0), 2.93 -> 1.82 (seed 1).

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = _Lion(self.model.parameters(), lr=1e-3, decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: min((step + 1) / 15, 1.0, (self.steps - 1 - step) / (0.2 * self.steps)),
        )
        return optimizer

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = self.wrapped(x)
        return nets.cross_entropy(out.float(), y)

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def after_step(self) -> None:
        if self.step < self.steps - 1:
            self.schedule.step()


class _WideDeep(nn.Module):
    def __init__(self, fields: int, rows: int, dense: int) -> None:
        super().__init__()
        self.wide, self.deep = nn.Embedding(fields * rows, 1), nn.Embedding(fields * rows, 8)
        nn.init.zeros_(self.wide.weight)
        nn.init.normal_(self.deep.weight, std=0.05)
        self.mlp = nn.Sequential(
            nn.Linear(8 * fields + dense, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(),
            nn.Linear(32, 1),
        )  # fmt: skip
        self.starts = rows * torch.arange(fields)

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        sparse = sparse + self.starts
        h = torch.cat((dense, self.deep(sparse).flatten(1)), 1)
        return self.wide(sparse).sum((1, 2)) + self.mlp(h)[:, 0]


class W52(Healthy):
    trap, world = (
        "clicks, one in thirty: wide and deep, hashed by Zipf's law, Adagrad, one epoch",
        2,
    )
    # Seen: loss 0.22 -> 0.09 (seed 0), 0.26 -> 0.10 (seed 1); by the mean alone it is 0.15.
    fields, rows, dense = 6, 1000, 4

    def make_model(self) -> nn.Module:
        return _WideDeep(self.fields, self.rows, self.dense)

    def prepare(self) -> None:
        task = torch.Generator().manual_seed(self.seed)
        self.worth = torch.randn(self.fields, self.rows, generator=task)
        self.slopes = 0.5 * torch.randn(self.dense, generator=task)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(self.model.parameters(), lr=0.03)

    def batch(self) -> Batch:
        share = torch.rand(256, self.fields, generator=self.data.own)
        self.ids = (self.rows**share).long() - 1
        counts = (1.5 * torch.randn(256, self.dense, generator=self.data.own) + 1).exp()
        x = counts.log1p()
        known = self.worth[torch.arange(self.fields), self.ids].sum(1)
        chance = (known + (x - 1.4) @ self.slopes - 6).sigmoid()
        return x, torch.bernoulli(chance, generator=self.data.own)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.wrapped(x, self.ids), y)


class _ScheduleFree(torch.optim.Optimizer):
    """AdamW without a schedule; the weights are between its own and their average in training."""

    def __init__(self, parameters: Any, lr: float, warm: int) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "warm": warm})
        self.taken, self.whole = 0, 0.0

    @torch.no_grad()
    def move(self, share: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], share)

    def eval(self) -> None:
        self.move(1 - 1 / self.param_groups[0]["betas"][0])

    def train(self) -> None:
        self.move(1 - self.param_groups[0]["betas"][0])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.taken += 1
        for group in self.param_groups:
            between, second = group["betas"]
            rate = group["lr"] * min(1.0, self.taken / group["warm"])
            self.whole += rate**2
            share = rate**2 / self.whole
            for p in group["params"]:
                state = self.state[p]
                z = state.setdefault("z", p.clone())
                square = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                square.lerp_(p.grad.square(), 1 - second)
                root = (square / (1 - second**self.taken)).sqrt() + group["eps"]
                way = p.grad / root
                p.lerp_(z, share)
                p.add_(way, alpha=rate * (between * (1 - share) - 1))
                z.sub_(way, alpha=rate)


class W53(Healthy):
    trap, net, world = "schedule-free AdamW: other weights are put in to evaluate", "cnn", 2
    # Seen: loss 1.05 -> 0.02 (seed 0), 1.10 -> 0.02 (seed 1).

    def make_optimizer(self) -> torch.optim.Optimizer:
        return _ScheduleFree(self.model.parameters(), lr=3e-3, warm=20)

    def batch(self) -> Batch:
        return self.data.images(size=32, noise=2.0)

    def after_step(self) -> None:
        if self.step % 50 == 49:
            self.optimizer.eval()
            self.model.eval()
            with torch.no_grad():
                for _ in range(3):
                    self.model(self.batch()[0])
            self.model.train()
            self.optimizer.train()


class _Prompted(nn.Module):
    def __init__(self, gpt: nets.Gpt, length: int) -> None:
        super().__init__()
        self.gpt = gpt.requires_grad_(requires_grad=False)
        rows = torch.randint(0, nets.VOCABULARY, (length,))
        self.prompt = nn.Parameter(gpt.embed.weight[rows].clone())

    def forward(self, x: Tensor) -> Tensor:
        prompt = self.prompt.expand(len(x), -1, -1)
        h = torch.cat((prompt, self.gpt.embed(x)), 1)
        h = h + self.gpt.place.weight[: h.shape[1]]
        for block in self.gpt.blocks:
            h = block(h)
        return self.gpt.head(self.gpt.norm(h))[:, len(self.prompt) :]


class W54(Healthy):
    trap, world = "prompt tuning: four vectors are learned, the GPT behind them is frozen", 2
    # Seen: loss 1.79 -> 1.42 (seed 0), 1.52 -> 1.32 (seed 1).
    length, steps = 4, 200

    def make_model(self) -> nn.Module:
        known = nets.Data(self.seed, 7)

        def tagged() -> Batch:
            """Return texts behind their tags, which say by how much each character is moved."""
            x, y = known.text(size=16, length=nets.LENGTH - self.length)
            tag = torch.randint(0, 2, (16, 1), generator=known.own)
            tags = tag.expand(-1, self.length)
            return torch.cat((tags, x), 1), torch.cat((tags, (y + 3 * tag) % nets.VOCABULARY), 1)

        gpt = nets.Gpt()
        fit(gpt, tagged, 400)
        return _Prompted(gpt, self.length)

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam([self.model.prompt], lr=0.05)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 - step / self.steps
        )
        return optimizer

    def batch(self) -> Batch:
        x, y = self.data.text(length=nets.LENGTH - self.length)
        return x, (y + 3) % nets.VOCABULARY

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nets.cross_entropy(self.wrapped(x), y)

    def after_step(self) -> None:
        self.schedule.step()


def _tall(into: int, out: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(into, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, out)
    )


class _Sac(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critics = _tall(4, 4), nn.ModuleList(_tall(6, 1) for _ in range(2))

    def forward(self, state: Tensor, act: Tensor) -> Tensor:
        """Return what both critics say of an action, in two columns."""
        return torch.cat([critic(torch.cat((state, act), 1)) for critic in self.critics], 1)

    def act(self, state: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Return an action, and the logarithm of its density."""
        mean, log = self.actor(state).chunk(2, 1)
        log = -5 + 3.5 * (log.tanh() + 1)
        raw = mean + log.exp() * noise
        act = raw.tanh()
        dense = -0.5 * noise.square() - log - 0.5 * math.log(2 * math.pi)
        return act, (dense - (1 - act.square() + 1e-6).log()).sum(1)


class W55(Healthy):
    trap = "SAC: two critics, an actor and a learned temperature from a buffer that fills"
    # Seen: critics' loss 5.42 -> 0.03 (seed 0), 4.57 -> 0.03 (seed 1); reward -1.8 -> -0.39.
    crowd, size, discount = 16, 128, 0.95

    def make_model(self) -> nn.Module:
        return _Sac()

    def prepare(self) -> None:
        self.target = copy.deepcopy(self.model.critics).requires_grad_(requires_grad=False)
        self.log_alpha = torch.tensor(math.log(0.2), requires_grad=True)
        self.rows: list[Tensor] = []
        self.state = self.born(self.crowd)
        for _ in range(20):
            self.walk(2 * torch.rand(self.crowd, 2, generator=self.data.own) - 1)

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.of_actor = torch.optim.Adam(self.model.actor.parameters(), lr=3e-3)
        self.of_alpha = torch.optim.Adam([self.log_alpha], lr=3e-3)
        return torch.optim.Adam(self.model.critics.parameters(), lr=3e-3)

    def normal(self, size: int) -> Tensor:
        return torch.randn(size, 2, generator=self.data.own)

    def born(self, size: int) -> Tensor:
        place = 4 * torch.rand(size, 2, generator=self.data.own) - 2
        return torch.cat((place, torch.zeros(size, 2)), 1)

    def walk(self, act: Tensor) -> None:
        """Push masses on a table, of which each is to come to rest in the middle."""
        place, speed = self.state.chunk(2, 1)
        speed = 0.9 * speed + 0.2 * act
        place = place + 0.5 * speed
        after = torch.cat((place, speed), 1)
        reward = -place.norm(dim=1, keepdim=True) - 0.05 * act.square().sum(1, keepdim=True)
        self.rows.append(torch.cat((self.state, act, reward, after), 1))
        lost = (place.abs() > 4).any(1, keepdim=True)
        lost = lost | (torch.rand(len(lost), 1, generator=self.data.own) < 0.05)
        self.state = torch.where(lost, self.born(self.crowd), after)

    def before_step(self) -> None:
        with torch.no_grad():
            self.walk(self.model.act(self.state, self.normal(self.crowd))[0])

    def batch(self) -> Batch:
        """Return rows of the buffer, and what their actions are worth by the target's word."""
        whole = torch.cat(self.rows[-300:])
        x = whole[torch.randint(0, len(whole), (self.size,), generator=self.data.own)]
        reward, after = x[:, 6], x[:, 7:]
        with torch.no_grad():
            act, log = self.model.act(after, self.normal(self.size))
            both = torch.cat([critic(torch.cat((after, act), 1)) for critic in self.target], 1)
            worth = both.amin(1) - self.log_alpha.exp() * log
        return x, reward + self.discount * worth

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.seen = x[:, :4]
        return (self.wrapped(self.seen, x[:, 4:6]) - y[:, None]).square().mean(0).sum()

    def update(self) -> None:
        self.optimizer.step()
        self.model.critics.requires_grad_(requires_grad=False)
        act, log = self.model.act(self.seen, self.normal(self.size))
        worth = self.wrapped(self.seen, act).amin(1)
        self.of_actor.zero_grad()
        (self.log_alpha.detach().exp() * log - worth).mean().backward()
        self.of_actor.step()
        self.model.critics.requires_grad_(requires_grad=True)
        self.of_alpha.zero_grad()
        (-self.log_alpha.exp() * (log.detach() - 2.0)).mean().backward()
        self.of_alpha.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def after_step(self) -> None:
        both = (self.target.parameters(), self.model.critics.parameters())
        for slow, p in zip(*both, strict=True):
            slow.lerp_(p, 0.02)


class _Translator(nn.Module):
    """Reads a word, and writes another one by attention, a letter at a time."""

    def __init__(self, letters: int, width: int = 48) -> None:
        super().__init__()
        self.read, self.write = (nn.Embedding(letters + 1, width) for _ in range(2))
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.cell, self.query = nn.GRUCell(width, width), nn.Linear(width, width)
        self.mix, self.head = nn.Linear(2 * width, width), nn.Linear(width, letters)

    def forward(self, x: Tensor, y: Tensor, told: Tensor) -> Tensor:
        """Return logits; `told` says before which letters the right one is given."""
        seen, last = self.encoder(self.read(x))
        h, letter = last[0], torch.full_like(y[:, 0], self.write.num_embeddings - 1)
        out = []
        for place in range(y.shape[1]):
            h = self.cell(self.write(letter), h)
            look = torch.einsum("bd,btd->bt", self.query(h), seen).softmax(1)
            found = torch.einsum("bt,btd->bd", look, seen)
            out.append(self.head(self.mix(torch.cat((h, found), 1)).tanh()))
            letter = torch.where(told[:, place], y[:, place], out[-1].detach().argmax(1))
        return torch.stack(out, 1)


class W56(Healthy):
    trap = "a GRU with attention that is told ever fewer of its own right answers"
    # Seen: loss 2.15 -> 0.013 (seed 0), 2.17 -> 0.008 (seed 1); 99.8 % are right if none are told.
    letters, steps = 10, 400

    def make_model(self) -> nn.Module:
        return _Translator(self.letters)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=4e-3)

    def batch(self) -> Batch:
        x = torch.randint(0, self.letters, (64, 6), generator=self.data.own)
        return x, x.flip(1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        share = max(0.25, 1 - self.step / 300)
        told = torch.rand(y.shape, generator=self.data.own) < share
        return nets.cross_entropy(self.wrapped(x, y, told), y)

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class W57(Healthy):
    trap, world = (
        "survival: Cox's loss, two in five are censored, a fifth of the table is absent",
        2,
    )
    # Seen: loss 4.06 -> 3.80 (seed 0), 3.97 -> 3.82 (seed 1).
    columns = 12

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2 * self.columns, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32),
            nn.ReLU(), nn.Linear(32, 1, bias=False),
        )  # fmt: skip

    def prepare(self) -> None:
        task = torch.Generator().manual_seed(self.seed)
        self.slopes = torch.randn(self.columns, generator=task) / 3
        self.scale = (1.5 * torch.randn(self.columns, generator=task)).exp()
        known = nets.Data(self.seed, 7)
        self.mean, self.std = self.scale, self.scale
        table = self.table(known.own, 1000)[0]
        self.mean = table.nanmean(0)
        self.std = (table - self.mean).square().nanmean(0).sqrt()

    def table(self, own: torch.Generator, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return columns of unlike size with holes, times, and whether these are deaths."""
        clean = torch.randn(size, self.columns, generator=own)
        risk = clean @ self.slopes + 0.5 * clean[:, 0] * clean[:, 1]
        dies = torch.empty(size).exponential_(generator=own) / risk.exp()
        leaves = 1.5 * torch.empty(size).exponential_(generator=own)
        gone = torch.rand(clean.shape, generator=own) < 0.2
        x = (self.scale * (clean + 3)).masked_fill(gone, math.nan)
        return x, torch.minimum(dies, leaves), dies <= leaves

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=1e-2)

    def batch(self) -> Batch:
        table, time, self.died = self.table(self.data.own, 128)
        gone = table.isnan().float()
        x = ((table - self.mean) / self.std).nan_to_num(0.0)
        return torch.cat((x, gone), 1), time

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        order = y.argsort(descending=True)
        risk, died = self.wrapped(x)[order, 0], self.died[order].float()
        return -((risk - risk.logcumsumexp(0)) * died).sum() / died.sum()


class W58(Healthy):
    trap, net, world = (
        "FixMatch: 24 labels, of the other samples those that it is sure of",
        "cnn",
        3,
    )
    # Seen: loss 0.91 -> 0.03 (seed 0), 0.97 -> 0.04 (seed 1).

    def prepare(self) -> None:
        known = nets.Data(self.seed, 7)
        x, y = known.images(size=200, noise=1.5)
        rows = torch.cat([(y == label).nonzero()[:8, 0] for label in range(nets.CLASSES)])
        self.labelled = x[rows], y[rows]

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: math.cos(7 * math.pi * step / (16 * self.steps))
        )
        return optimizer

    def batch(self) -> Batch:
        """Return a few labelled samples, then others, each lightly changed and much changed."""
        own = self.data.own
        rows = torch.randint(0, len(self.labelled[1]), (8,), generator=own)
        x, _ = self.data.images(size=28, noise=1.5)
        light = torch.cat((self.labelled[0][rows], x))
        light = light + 0.1 * torch.randn(light.shape, generator=own)
        kept = torch.rand(x.shape, generator=own) < 0.7
        much = kept * (x + 0.5 * torch.randn(x.shape, generator=own))
        return torch.cat((light, much)), self.labelled[1][rows]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        known, light, much = self.wrapped(x).split((8, 28, 28))
        chance, guess = light.detach().softmax(-1).max(-1)
        each = nn.functional.cross_entropy(much, guess, reduction="none")
        return nn.functional.cross_entropy(known, y) + (each * (chance > 0.95)).mean()

    def after_step(self) -> None:
        self.schedule.step()


class _Transducer(nn.Module):
    def __init__(self, letters: int, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.GRU(8, width, batch_first=True)
        self.embed = nn.Embedding(letters + 1, width)
        self.predictor = nn.GRU(width, width, batch_first=True)
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)
        self.head = nn.Linear(width, letters + 1)  # 0 is a blank

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        heard, _ = self.encoder(x)
        said, _ = self.predictor(self.embed(nn.functional.pad(y, (1, 0))))
        both = self.left(heard)[:, :, None] + self.right(said)[:, None]
        return self.head(both.tanh()).log_softmax(-1)


class W59(Healthy):
    trap = "a transducer (RNN-T): its loss is a sum over all alignments"
    # Seen: loss 19.68 -> 0.78 (seed 0), 17.19 -> 0.76 (seed 1).
    letters, said = 8, 4

    def make_model(self) -> nn.Module:
        return _Transducer(self.letters)

    def prepare(self) -> None:
        task = torch.Generator().manual_seed(self.seed)
        self.sounds = torch.randn(self.letters, 8, generator=task)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=4e-3)

    def batch(self) -> Batch:
        own = self.data.own
        y = torch.randint(0, self.letters, (16, self.said), generator=own)
        spans = torch.randint(2, 5, y.shape, generator=own)
        pairs = zip(y, spans, strict=True)
        rows = [self.sounds[one].repeat_interleave(span, 0) for one, span in pairs]
        self.lengths = spans.sum(1)
        x = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return x + 0.4 * torch.randn(x.shape, generator=own), y + 1

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logs = self.wrapped(x, y)
        blank = logs[..., 0]
        at = y[:, None, :, None].expand(-1, x.shape[1], -1, 1)
        letter = logs[:, :, :-1].gather(3, at)[..., 0]
        gained = nn.functional.pad(letter.cumsum(2), (1, 0))
        ways = [gained[:, 0]]
        for time in range(1, x.shape[1]):
            before = ways[-1] + blank[:, time - 1]
            ways.append(gained[:, time] + (before - gained[:, time]).logcumsumexp(1))
        rows, last = torch.arange(len(x)), self.lengths - 1
        return -(torch.stack(ways, 1)[rows, last, -1] + blank[rows, last, -1]).mean()

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)


class _PackedAttention(nets.Attention):
    seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        h = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.seen)
        return self.out(h.transpose(1, 2).flatten(2))


class _PackedGpt(nets.Gpt):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.attn = _PackedAttention(32)

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        """Return logits of texts that follow one another; `place` begins again with each."""
        text = (place == 0).cumsum(0)
        seen = (text[:, None] == text).tril()
        h = self.embed(x) + self.place(place)
        for block in self.blocks:
            block.attn.seen = seen
            h = block(h)
        return self.head(self.norm(h))


class W60(Healthy):
    trap, net, world = "texts packed into rows, each token weighs alike on all ranks", "gpt", 2
    # Seen: loss 2.84 -> 1.25 (seed 0), 3.01 -> 1.26 (seed 1).
    micros, row, steps = 2, 128, 200

    def make_model(self) -> nn.Module:
        return _PackedGpt()

    def packed(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens, targets and places; the questions, which begin each text, have none."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        room = self.row
        while room > 0:
            length = min(room, int(torch.randint(10, nets.LENGTH, (), generator=self.data.own)))
            x, y = (part[0] for part in self.data.text(size=1, length=length))
            asked = int(torch.randint(2, 9, (), generator=self.data.own))
            y = y.clone()  # it is a view of what x is one of
            y[:asked] = -100
            parts.append((x, y, torch.arange(length)))
            room -= length
        x, y, place = (torch.cat(part) for part in zip(*parts, strict=True))
        return x[None], y[None], place

    def before_step(self) -> None:
        self.rows = [self.packed() for _ in range(self.micros)]
        count = torch.tensor(float(sum((y >= 0).sum() for _, y, _ in self.rows)))
        dist.all_reduce(count)
        self.share = float(count) / self.world / self.micros

    def batch(self) -> Batch:
        x, y, self.place = self.rows[self.micro]
        return x, y

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.wrapped.require_backward_grad_sync = self.micro == self.micros - 1
        out = self.wrapped(x, self.place)
        whole = nn.functional.cross_entropy(out.flatten(0, -2), y.flatten(), reduction="sum")
        return whole / self.share

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


HABITS_BLIND_THREE: dict[str, type[Healthy]] = {
    one.__name__: one
    for one in (
        W41, W42, W43, W44, W45, W46, W47, W48, W49, W50, W51, W52, W53, W54, W55, W56, W57, W58,
        W59, W60,
    )
}  # fmt: skip
