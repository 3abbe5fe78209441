"""Healthy runs in more habits, written by somebody who had not read what the detectors look for.

"Seen" is without the probe: the loss as a mean over the first and over the last ten steps.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from benchmarks.detection import nets
from benchmarks.detection.healthy import Healthy
from benchmarks.detection.nets import Batch


def fit(model: nn.Module, batch: Callable[[], Batch], steps: int) -> None:
    """Train a model before the job: what others would download."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        x, y = batch()
        nets.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


class W01(Healthy):
    trap, net, world = "Nesterov momentum, a one-cycle learning rate", "cnn", 2
    # Seen: loss 1.07 -> 0.22 (seed 0), 1.12 -> 0.14 (seed 1).

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.04, total_steps=self.steps
        )
        return optimizer

    def batch(self) -> Batch:
        return self.data.images(size=32, noise=3.0)

    def after_step(self) -> None:
        self.schedule.step()


class W02(Healthy):
    trap, net = "an average of the weights is put in for each evaluation, then taken out", "gpt"
    # Seen: loss 2.89 -> 1.26 (seed 0), 2.90 -> 1.26 (seed 1).

    def prepare(self) -> None:
        self.average = [p.detach().clone() for p in self.model.parameters()]

    @torch.no_grad()
    def after_step(self) -> None:
        decay = min(0.99, (1 + self.step) / (10 + self.step))
        for mean, p in zip(self.average, self.model.parameters(), strict=True):
            mean.lerp_(p, 1 - decay)
        if self.step % 40 == 39:
            self.evaluate()

    def evaluate(self) -> None:
        kept = [p.clone() for p in self.model.parameters()]
        self.put(self.average)
        self.model.eval()
        for _ in range(4):
            self.model(self.data.text()[0])
        self.model.train()
        self.put(kept)

    def put(self, weights: list[Tensor]) -> None:
        for p, weight in zip(self.model.parameters(), weights, strict=True):
            p.copy_(weight)


class W03(Healthy):
    trap, net, world = "mixup and cutmix in turn, soft labels", "cnn", 2
    # Seen: loss 0.97 -> 0.53 (seed 0), 1.02 -> 0.57 (seed 1).

    def batch(self) -> Batch:
        x, y = self.data.images(size=32)
        target = nn.functional.one_hot(y, nets.CLASSES).float()
        share = float(torch.rand((), generator=self.data.own))
        if self.step % 2:
            mixed = share * x + (1 - share) * x.flip(0)
        else:
            side = round(8 * math.sqrt(1 - share))
            top, left = torch.randint(0, 9 - side, (2,), generator=self.data.own).tolist()
            mixed, share = x.clone(), 1 - side**2 / 64
            box = (..., slice(top, top + side), slice(left, left + side))
            mixed[box] = x.flip(0)[box]
        return mixed, share * target + (1 - share) * target.flip(0)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.05)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.wrapped(x), y, label_smoothing=0.1)


class W04(Healthy):
    trap, net = "SAM: a second forward and backward from worse weights in each step", "cnn"
    # Seen: loss 0.48 -> 0.10 (seed 0), 0.51 -> 0.03 (seed 1).

    def make_model(self) -> nn.Module:
        return nets.Residual()

    def batch(self) -> Batch:
        self.kept = self.data.images(noise=2.0)
        return self.kept

    def before_update(self) -> None:
        parameters = list(self.model.parameters())
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(grads) + 1e-12
        moves = [0.05 * grad / norm for grad in grads]
        self.move(moves, 1)
        self.optimizer.zero_grad()
        self.loss(*self.kept).backward()
        self.move(moves, -1)

    @torch.no_grad()
    def move(self, moves: list[Tensor], sign: int) -> None:
        for p, move in zip(self.model.parameters(), moves, strict=True):
            p.add_(move, alpha=sign)


class _Lora(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(x))


class W05(Healthy):
    trap, net, world = "LoRA on a frozen GPT that knows another language", "gpt", 2
    # Seen: loss 3.84 -> 1.44 (seed 0), 3.86 -> 1.51 (seed 1).

    def prepare(self) -> None:
        known = nets.Data(self.seed, 7)
        fit(self.model, known.text, 150)
        self.model.requires_grad_(requires_grad=False)
        for block in self.model.blocks:
            for part, names in ((block.attn, ("q", "k", "v", "out")), (block, ("up", "down"))):
                for name in names:
                    setattr(part, name, _Lora(getattr(part, name)))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((p for p in self.model.parameters() if p.requires_grad), lr=3e-3)

    def batch(self) -> Batch:
        x, y = self.data.text()
        return x, (y + 1) % nets.VOCABULARY


class W06(Healthy):
    trap = "distilled from a frozen teacher, at a temperature of 2"
    # Seen: loss 3.02 -> 0.23 (seed 0), 3.16 -> 0.15 (seed 1).

    def prepare(self) -> None:
        self.teacher = nets.Cnn()
        known = nets.Data(self.seed, 7)
        fit(self.teacher, lambda: known.images(noise=2.0), 200)
        self.teacher.eval().requires_grad_(requires_grad=False)

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def batch(self) -> Batch:
        return self.data.images(size=32, noise=2.0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            soft = (self.teacher(x) / 2).log_softmax(-1)
        out = self.wrapped(x)
        far = nn.functional.kl_div(
            (out / 2).log_softmax(-1), soft, log_target=True, reduction="batchmean"
        )
        return 0.1 * nn.functional.cross_entropy(out, y) + 0.9 * 4 * far


class W07(Healthy):
    trap, net = "triplets with a margin: soon most batches have a loss of exactly zero", "cnn"
    # Seen: loss 0.11 -> 0.0023 (seed 0), 0.10 -> 0.0021 (seed 1).

    def make_model(self) -> nn.Module:
        model = nets.Cnn()
        model.head = nn.Linear(16 * 16, 8)
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def batch(self) -> Batch:
        return self.data.images(size=32, noise=1.5)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = nn.functional.normalize(self.wrapped(x), dim=1)
        same = (y[:, None] == y).float()
        near = torch.multinomial(same - torch.eye(len(y)) + 1e-9, 1, generator=self.data.own)[:, 0]
        other = torch.multinomial(1.0 - same + 1e-9, 1, generator=self.data.own)[:, 0]
        return nn.functional.triplet_margin_loss(out, out[near], out[other], margin=0.2)


class W08(Healthy):
    trap, net = "pruned by magnitude in eight rounds, to a sixth of the weights", "cnn"
    # Seen: loss 0.97 -> 0.06 (seed 0), 0.98 -> 0.03 (seed 1).

    def batch(self) -> Batch:
        return self.data.images(size=32, noise=2.0)

    def before_step(self) -> None:
        if self.step in range(100, 260, 20):
            for layer in (self.model.conv1, self.model.conv2, self.model.head):
                prune.l1_unstructured(layer, "weight", amount=0.2)


class _Quantized(nn.Module):
    """A layer that rounds what it reads to 8 bits and its weights to 4, once it is on."""

    top: Tensor

    def __init__(self, layer: nn.Conv2d | nn.Linear) -> None:
        super().__init__()
        self.layer, self.on = layer, False
        self.register_buffer("top", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.top.lerp_(x.detach().abs().max(), 0.05)
        if not self.on:
            return self.layer(x)
        weight = self.layer.weight
        near = weight.detach().abs().max()
        w = torch.fake_quantize_per_tensor_affine(weight, float(near) / 7, 0, -8, 7)
        h = torch.fake_quantize_per_tensor_affine(x, float(self.top) / 127, 0, -128, 127)
        return torch.func.functional_call(self.layer, {"weight": w}, (h,))


class W09(Healthy):
    trap, net = "quantization-aware from the middle on: 4 bits, a tenth of the rate", "cnn"
    # Seen: loss 0.97 -> 0.04 (seed 0), 0.98 -> 0.01 (seed 1).

    def prepare(self) -> None:
        for name in ("conv1", "conv2", "head"):
            setattr(self.model, name, _Quantized(getattr(self.model, name)))

    def batch(self) -> Batch:
        return self.data.images(size=32, noise=2.0)

    def before_step(self) -> None:
        if self.step == 160:
            self.set_rate(0.1)
            for part in self.model.modules():
                if isinstance(part, _Quantized):
                    part.on = True


class _Wgan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)
        )
        self.critic = nn.Sequential(
            nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
            nn.Linear(64, 1),
        )  # fmt: skip

    def forward(self, noise: Tensor, real: Tensor | None) -> Tensor:
        fake = self.generator(noise)
        if real is None:
            return -self.critic(fake).mean()
        fake = fake.detach()
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * penalty


class W10(Healthy):
    trap = "WGAN with a gradient penalty: two steps of the critic for one of the generator"
    # Seen: critic's loss 3.87 -> -0.77 -> -0.25 (seed 0), 4.00 -> -0.69 -> -0.23 (seed 1).

    def make_model(self) -> nn.Module:
        return _Wgan()

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.other = torch.optim.Adam(self.model.generator.parameters(), lr=3e-4, betas=(0.0, 0.9))
        return torch.optim.Adam(self.model.critic.parameters(), lr=2e-3, betas=(0.0, 0.9))

    def batch(self) -> Batch:
        return self.data.blobs(size=64, noise=0.2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.wrapped(torch.randn(len(y), 8, generator=self.data.own), x)

    def after_step(self) -> None:
        if self.step % 2 == 1:
            self.wrapped(torch.randn(64, 8, generator=self.data.own), None).backward()
            self.other.step()
            self.model.zero_grad()


class _Denoiser(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.into, self.mid = nn.Linear(64, width), nn.Linear(width, width)
        self.out, self.act = nn.Linear(width, 64), nn.SiLU()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        angle = t[:, None] * torch.logspace(0, 2, 8)
        h = self.into(x) + self.time(torch.cat((angle.sin(), angle.cos()), 1))
        h = h + self.mid(self.act(h))
        return self.out(self.act(h))


class W11(Healthy):
    trap, world = "diffusion: a net predicts the noise, at times drawn anew", 3
    # Seen: loss 0.97 -> 0.21 (seed 0), 0.97 -> 0.19 (seed 1).

    def make_model(self) -> nn.Module:
        return _Denoiser()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def batch(self) -> Batch:
        x, _ = self.data.images(size=64, noise=0.1)
        return x.flatten(1), torch.rand(64, generator=self.data.own)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(x.shape, generator=self.data.own)
        signal, level = (y * math.pi / 2).cos()[:, None], (y * math.pi / 2).sin()[:, None]
        return nn.functional.mse_loss(self.wrapped(signal * x + level * noise, y), noise)


class _Bert(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(nets.VOCABULARY + 1, width)
        self.place = nn.Embedding(nets.LENGTH, width)
        self.blocks = nn.ModuleList(nets.Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, nets.VOCABULARY + 1)
        for block in self.blocks:
            block.attn.causal = False
        for table in (self.embed, self.place):
            nn.init.normal_(table.weight, std=0.1)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place.weight
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class W12(Healthy):
    trap, world = "a masked language model whose head is its embedding", 2
    # Seen: loss 2.94 -> 0.64 (seed 0), 2.86 -> 0.65 (seed 1).

    def make_model(self) -> nn.Module:
        return _Bert()

    def make_optimizer(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.98))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / 30, (self.steps - step) / (self.steps - 30))
        )
        return optimizer

    def batch(self) -> Batch:
        x, _ = self.data.text(size=16)
        draw = torch.rand(x.shape, generator=self.data.own)
        other = torch.randint(0, nets.VOCABULARY, x.shape, generator=self.data.own)
        y = torch.where(draw < 0.15, x, -100)
        x = torch.where(draw < 0.12, nets.VOCABULARY, x)
        return torch.where((draw >= 0.12) & (draw < 0.135), other, x), y

    def after_step(self) -> None:
        self.schedule.step()


class _Moco(nn.Module):
    queue: Tensor

    def __init__(self, size: int = 128) -> None:
        super().__init__()
        self.online = nets.Cnn()
        self.online.head = nn.Linear(16 * 16, 16)
        self.slow = copy.deepcopy(self.online).requires_grad_(requires_grad=False)
        queue = nn.functional.normalize(torch.randn(size, 16), dim=1)
        self.register_buffer("queue", queue)

    def forward(self, one: Tensor, two: Tensor) -> Tensor:
        query = nn.functional.normalize(self.online(one), dim=1)
        with torch.no_grad():
            for slow, p in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                slow.lerp_(p, 0.01)
            key = nn.functional.normalize(self.slow(two), dim=1)
        near = (query * key).sum(1, keepdim=True)
        far = query @ self.queue.clone().T
        with torch.no_grad():
            keys = [torch.empty_like(key) for _ in range(dist.get_world_size())]
            dist.all_gather(keys, key)
            self.queue.copy_(torch.cat((*keys, self.queue))[: len(self.queue)])
        return torch.cat((near, far), 1) / 0.2


class W13(Healthy):
    trap, world = "MoCo: a momentum encoder and a queue of keys", 2
    # Seen: step 0 1.06, soon 4.15, -> 1.47 (seed 0); 1.23, 3.54, -> 1.47 (seed 1): a new queue.

    def make_model(self) -> nn.Module:
        return _Moco()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            self.model.online.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4
        )

    def batch(self) -> Batch:
        return self.data.images()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one, two = (x + 0.3 * torch.randn(x.shape, generator=self.data.own) for _ in range(2))
        out = self.wrapped(one, two)
        return nn.functional.cross_entropy(out, torch.zeros(len(y), dtype=torch.long))


class _Tasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU())
        self.classes, self.near, self.far = nn.Linear(32, 3), nn.Linear(32, 1), nn.Linear(32, 1)
        self.logs = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        h = self.body(x)
        return self.classes(h), self.near(h)[:, 0], self.far(h)[:, 0], self.logs


class W14(Healthy):
    trap = "three tasks weighted by learned uncertainties: the loss goes below zero"
    # Seen: loss 1.12 -> -1.42 (seed 0), 1.15 -> -1.45 (seed 1).

    def make_model(self) -> nn.Module:
        return _Tasks()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=5e-3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, near, far, logs = self.wrapped(x)
        noise = torch.randn(2, len(y), generator=self.data.own)
        near = near - x.prod(1) - 0.1 * noise[0]
        far = far - 0.1 * x.square().sum(1) - 0.02 * noise[1]
        class_loss = nn.functional.cross_entropy(out, y)
        each = torch.stack((class_loss, near.square().mean() / 2, far.square().mean() / 2))
        return (each * (-logs).exp() + logs / 2).sum()


class W15(Healthy):
    trap, world = "focal loss: of three classes one is rare, one very rare", 3
    # Seen: loss 0.24 -> 0.02 (seed 0), 0.30 -> 0.02 (seed 1).

    def make_model(self) -> nn.Module:
        model = nets.Mlp()
        model.head.bias.data.copy_(torch.tensor([0.90, 0.08, 0.02]).log())
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def batch(self) -> Batch:
        x, y = self.data.blobs(size=512)
        share = torch.tensor([0.90, 0.08, 0.02])[y]
        rows = torch.multinomial(share, 32, generator=self.data.own)
        return x[rows], y[rows]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        log = self.wrapped(x).log_softmax(-1).gather(1, y[:, None])[:, 0]
        return -((1 - log.exp()).square() * log).mean()


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(nets.VOCABULARY, 32), nn.Dropout(0.2)
        self.lstm, self.head = nn.LSTM(32, 64, batch_first=True), nn.Linear(64, nets.VOCABULARY)

    def forward(
        self, x: Tensor, state: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, state = self.lstm(self.drop(self.embed(x)), state)
        return self.head(self.drop(h)), state


class W16(Healthy):
    trap = "an LSTM whose state is carried over, clipped to 0.25 at a rate of 10"
    # Seen: loss 2.53 -> 0.60 (seed 0), 2.54 -> 0.58 (seed 1).

    def make_model(self) -> nn.Module:
        return _Lstm()

    def prepare(self) -> None:
        self.whole = self.data.text(size=20, length=30 * 32)
        self.state: tuple[Tensor, Tensor] | None = None

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=10.0)

    def before_step(self) -> None:
        if self.step % 30 == 0:
            self.state = None
        if self.step in (240, 270):
            self.set_rate(0.25)

    def batch(self) -> Batch:
        part = slice(32 * (self.step % 30), 32 * (self.step % 30 + 1))
        return self.whole[0][:, part], self.whole[1][:, part]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, (h, c) = self.wrapped(x, self.state)
        self.state = h.detach(), c.detach()
        return nets.cross_entropy(out, y)

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)


class _Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0]).log_softmax(-1)


class W17(Healthy):
    trap = "CTC on a GRU, sounds of unequal length"
    # Seen: loss 4.19 -> 0.23 (seed 0), 4.35 -> 0.22 (seed 1).

    def make_model(self) -> nn.Module:
        return _Speech()

    def prepare(self) -> None:
        self.sounds = torch.randn(8, 8, generator=torch.Generator().manual_seed(self.seed))

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def batch(self) -> Batch:
        y = torch.randint(0, 8, (16, 6), generator=self.data.own)
        spans = torch.randint(2, 6, (16, 6), generator=self.data.own)
        pairs = zip(y, spans, strict=True)
        rows = [self.sounds[one].repeat_interleave(span, 0) for one, span in pairs]
        self.lengths = spans.sum(1)
        x = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return x + 0.5 * torch.randn(x.shape, generator=self.data.own), y + 1

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.wrapped(x).transpose(0, 1)
        each = torch.full((len(y),), y.shape[1])
        return nn.functional.ctc_loss(out, y, self.lengths, each, zero_infinity=True)

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)


class _Skipgram(nn.Module):
    def __init__(self, rows: int = 2000, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(rows, width, sparse=True)
        self.contexts = nn.Embedding(rows, width, sparse=True)
        nn.init.uniform_(self.words.weight, -0.5 / width, 0.5 / width)
        nn.init.zeros_(self.contexts.weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.einsum("bd,bkd->bk", self.words(x), self.contexts(y))


class W18(Healthy):
    trap = "word2vec: sparse gradients, SparseAdam, contexts that begin at zero"
    # Seen: loss 4.16 -> 1.76 (seed 0), 4.16 -> 1.74 (seed 1).

    def make_model(self) -> nn.Module:
        return _Skipgram()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(self.model.parameters()), lr=0.02)

    def zipf(self, *shape: int) -> Tensor:
        return (200 ** torch.rand(shape, generator=self.data.own)).long()

    def batch(self) -> Batch:
        topic = torch.randint(0, 10, (128, 1), generator=self.data.own)
        near = 10 * (self.zipf(128, 2) - 1) + topic
        other = 10 * (self.zipf(128, 5) - 1)
        other += torch.randint(0, 10, (128, 5), generator=self.data.own)
        return near[:, 0], torch.cat((near[:, 1:], other), 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.wrapped(x, y)
        known = nn.functional.softplus(-out[:, 0])
        return (known + nn.functional.softplus(out[:, 1:]).sum(1)).mean()


class _Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = self.layer(1, 8)
        self.mid, self.last = self.layer(8, 8), self.layer(8, 16)
        self.pool, self.head = nn.AdaptiveAvgPool2d(4), nn.Linear(16 * 16, nets.CLASSES)

    @staticmethod
    def layer(into: int, out: int) -> nn.Module:
        conv = nn.Conv2d(into, out, 3, padding=1, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.last(self.mid(self.stem(x)))).flatten(1))


class W19(Healthy):
    trap, world = "the images grow from 8 to 12 to 16, the batches get smaller", 3
    # Seen: loss 0.98 -> 0.18 (seed 0), 0.94 -> 0.17 (seed 1).

    def make_model(self) -> nn.Module:
        return _Pooled()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)

    def batch(self) -> Batch:
        phase = self.step // 100
        x, y = self.data.images(size=(32, 16, 8)[phase], noise=2.0)
        side = 8 + 4 * phase
        x = nn.functional.interpolate(x, (side, side), mode="bilinear")
        return x, y


class W20(Healthy):
    trap, net, world = "post-local SGD: from step 100 on only the weights are averaged", "cnn", 2
    # Seen: loss 0.97 -> 0.08 (seed 0), 1.00 -> 0.04 (seed 1).

    def prepare(self) -> None:
        self.averager = PeriodicModelAverager(period=4, warmup_steps=100)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return self.wrapped.no_sync() if self.step >= 100 else contextlib.nullcontext()

    def batch(self) -> Batch:
        return self.data.images(noise=2.0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with self.alone():
            return super().loss(x, y)

    def backward(self, loss: Tensor) -> None:
        with self.alone():
            loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.averager.average_parameters(self.model.parameters())
        self.optimizer.zero_grad()


class W21(Healthy):
    trap = "physics-informed: second derivatives in the loss"
    # Seen: loss 44.12 -> 0.0059 (seed 0), 48.76 -> 0.0025 (seed 1).

    def make_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
        )

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def batch(self) -> Batch:
        x = torch.rand(64, 1, generator=self.data.own)
        return x, -(math.pi**2) * (math.pi * x).sin()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        u = self.wrapped(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        edge = self.wrapped(torch.tensor([[0.0], [1.0]]))
        return (second - y).square().mean() + 10 * edge.square().mean()


class W22(Healthy):
    trap, net = "DPO: the loss begins at the logarithm of 2, the rate is small", "gpt"
    # Seen: loss 0.693 -> 0.51 (seed 0), 0.53 (seed 1).

    def prepare(self) -> None:
        known = nets.Data(self.seed, 7)
        fit(self.model, known.text, 150)
        self.reference = copy.deepcopy(self.model).eval().requires_grad_(requires_grad=False)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.0)

    def batch(self) -> Batch:
        """Return pairs with one beginning; in the answer that is liked less some are wrong."""
        x, y = self.data.text()
        both = torch.cat((x, y[:, -1:]), 1)
        wrong = torch.rand(both.shape, generator=self.data.own) < 0.3
        wrong[:, : nets.LENGTH // 2] = False
        other = torch.randint(0, nets.VOCABULARY, both.shape, generator=self.data.own)
        whole = torch.cat((both, torch.where(wrong, other, both)))
        return whole[:, :-1], whole[:, 1:]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.worth(self.reference, x, y)
        chosen, rejected = (self.worth(self.wrapped, x, y) - before).chunk(2)
        return -nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()

    def worth(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        logs = model(x).log_softmax(-1).gather(2, y[..., None])[..., 0]
        return logs[:, nets.LENGTH // 2 - 1 :].sum(1)


class _Checkpointed(nets.Gpt):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False)
        return self.head(self.norm(h))


class W23(Healthy):
    trap, world, wrap = "FSDP2: blocks are computed twice, the batch grows from 2 to 8", 2, "fsdp2"
    # Seen: loss 2.93 -> 1.25 (seed 0), 2.92 -> 1.21 (seed 1).
    net = "gpt"

    def make_model(self) -> nn.Module:
        return _Checkpointed()

    def batch(self) -> Batch:
        return self.data.text(size=(2, 4, 8)[min(2, self.step // 50)])

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class W24(Healthy):
    trap, net = "Muon for matrices and AdamW for the rest; the rate falls in the last fifth", "gpt"
    # Seen: loss 2.91 -> 1.24 (seed 0), 2.91 -> 1.20 (seed 1).

    def make_optimizer(self) -> torch.optim.Optimizer:
        inner = [p for p in self.model.blocks.parameters() if p.dim() == 2]
        known = {id(p) for p in inner}
        rest = [p for p in self.model.parameters() if id(p) not in known]
        self.other = torch.optim.Muon(inner, lr=0.02, momentum=0.95, weight_decay=0.01)
        optimizer = torch.optim.AdamW(rest, lr=3e-3, betas=(0.9, 0.95))
        self.schedules = [
            torch.optim.lr_scheduler.LambdaLR(
                each, lambda step: min((step + 1) / 10, 1.0, (self.steps - step) / 60)
            )
            for each in (self.other, optimizer)
        ]
        return optimizer

    def update(self) -> None:
        self.other.step()
        self.optimizer.step()
        self.model.zero_grad()
        for schedule in self.schedules:
            schedule.step()


HABITS_BLIND: dict[str, type[Healthy]] = {
    one.__name__: one
    for one in (
        W01, W02, W03, W04, W05, W06, W07, W08, W09, W10, W11, W12,
        W13, W14, W15, W16, W17, W18, W19, W20, W21, W22, W23, W24,
    )
}  # fmt: skip
