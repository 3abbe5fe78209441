"""A second set of healthy runs by somebody who had not read what the detectors look for.

"Seen" is without the probe: the loss as a mean over the first and over the last ten steps.
"""

from __future__ import annotations

import copy
import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

from benchmarks.detection import nets
from benchmarks.detection.habits_blind import fit
from benchmarks.detection.healthy import Healthy
from benchmarks.detection.nets import Batch


def _normed(into: int, out: int, stride: int = 1) -> nn.Module:
    conv = nn.Conv2d(into, out, 3, padding=1, stride=stride, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out), nn.ReLU())


class _SimSiam(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            _normed(1, 8), _normed(8, 16, stride=2), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
            nn.Linear(64, width, bias=False), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, width, bias=False), nn.BatchNorm1d(width, affine=False),
        )  # fmt: skip
        self.predictor = nn.Sequential(
            nn.Linear(width, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, width)
        )

    def forward(self, one: Tensor, two: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        z1, z2 = self.encoder(one), self.encoder(two)
        return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()


class W25(Healthy):
    trap, world = "SimSiam: two views, no negatives, one side has no gradient", 2
    # Seen: loss -0.12 -> -0.97 (seed 0), -0.09 -> -0.96 (seed 1).

    def make_model(self) -> nn.Module:
        return _SimSiam()

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        return optimizer

    def batch(self) -> Batch:
        return self.data.images(size=64, noise=0.5)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        one, two = (x + 0.5 * torch.randn(x.shape, generator=self.data.own) for _ in range(2))
        p1, p2, z1, z2 = self.wrapped(one, two)
        near = nn.functional.cosine_similarity
        return -(near(p1, z2).mean() + near(p2, z1).mean()) / 2

    def after_step(self) -> None:
        self.schedule.step()


class W26(Healthy):
    trap, net, world = "a reward model: pairs, one number for each text, labels that err", "gpt", 2
    # Seen: loss 0.68 -> 0.54 (seed 0), 0.70 -> 0.60 (seed 1).

    def prepare(self) -> None:
        fit(self.model, nets.Data(self.seed, 7).text, 150)
        self.model.head = nn.Linear(32, 1)
        nn.init.normal_(self.model.head.weight, std=1 / math.sqrt(33))
        nn.init.zeros_(self.model.head.bias)

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / 10, 1 - step / self.steps)
        )
        return optimizer

    def batch(self) -> Batch:
        """Return the texts that are liked more, then the others, in which some is wrong."""
        x, _ = self.data.text(size=16)
        wrong = torch.rand(x.shape, generator=self.data.own) < 0.5
        wrong[:, : nets.LENGTH // 2] = False
        other = torch.randint(0, nets.VOCABULARY, x.shape, generator=self.data.own)
        worse = torch.where(wrong, other, x)
        errs = torch.rand(16, 1, generator=self.data.own) < 0.1
        return torch.where(errs, worse, x), torch.where(errs, x, worse)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        more, less = self.wrapped(torch.cat((x, y)))[:, -1, 0].chunk(2)
        return -nn.functional.logsigmoid(more - less).mean()

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def after_step(self) -> None:
        self.schedule.step()


class W27(Healthy):
    trap, net = "GRPO with a KL term: the loss begins at zero and only rises", "gpt"
    # Seen: loss 0.00 -> 0.03 (seed 0), 0.00 -> 0.02 (seed 1): of the KL; the reward goes to 1.
    prompts, group, asked, told = 4, 8, 8, 6

    def prepare(self) -> None:
        fit(self.model, nets.Data(self.seed, 7).text, 150)
        self.reference = copy.deepcopy(self.model).eval().requires_grad_(requires_grad=False)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=3e-4, weight_decay=0.0)

    @torch.no_grad()
    def batch(self) -> Batch:
        """Return answers that the policy gives, and which of them are more than others'."""
        x, _ = self.data.text(size=self.prompts, length=self.asked)
        x = x.repeat_interleave(self.group, 0)
        for _ in range(self.told):
            chance = self.model(x)[:, -1].softmax(-1)
            x = torch.cat((x, torch.multinomial(chance, 1, generator=self.data.own)), 1)
        even = (x[:, self.asked :] % 2 == 0).sum(1)
        reward = (even > self.told // 2).float().view(self.prompts, self.group)
        gain = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        return x, gain.flatten()

    def logs(self, model: nn.Module, x: Tensor) -> Tensor:
        logs = model(x[:, :-1]).log_softmax(-1).gather(2, x[:, 1:, None])[..., 0]
        return logs[:, self.asked - 1 :]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.logs(self.reference, x)
        now = self.logs(self.wrapped, x)
        ratio = (now - now.detach()).exp()
        gain = torch.minimum(ratio * y[:, None], ratio.clamp(0.8, 1.2) * y[:, None])
        far = (before - now).exp() - (before - now) - 1
        return -(gain - 0.04 * far).mean()

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class W28(Healthy):
    trap, world = "twenty labels, each on one sample in fifty", 3
    # Seen: loss 0.11 -> 0.0067 (seed 0), 0.11 -> 0.0052 (seed 1).
    labels, share = 20, 0.02

    def make_model(self) -> nn.Module:
        head = nn.Linear(64, self.labels)
        nn.init.constant_(head.bias, math.log(self.share / (1 - self.share)))
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), head)

    def prepare(self) -> None:
        task = torch.Generator().manual_seed(self.seed)
        self.signs = torch.randn(self.labels, 32, generator=task)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=2e-3)

    def batch(self) -> Batch:
        y = (torch.rand(32, self.labels, generator=self.data.own) < self.share).float()
        return y @ self.signs + 0.7 * torch.randn(32, 32, generator=self.data.own), y

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(self.wrapped(x), y)


class _Unet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = _normed(1, 8), _normed(8, 16, stride=2)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge, self.head = _normed(16, 8), nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.down1(x)
        return self.head(self.merge(torch.cat((fine, self.up(self.down2(fine))), 1)))


class W29(Healthy):
    trap, world = "segmentation: nearly all is background, half of the images have nothing else", 2
    # Seen: loss 1.81 -> 0.69 (seed 0), 1.56 -> 0.24 (seed 1).

    def make_model(self) -> nn.Module:
        return _Unet()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=2e-3)

    def batch(self) -> Batch:
        y = torch.zeros(8, 1, 16, 16)
        for one in y[:4, 0]:
            top, left = torch.randint(0, 13, (2,), generator=self.data.own).tolist()
            high, wide = torch.randint(3, 5, (2,), generator=self.data.own).tolist()
            one[top : top + high, left : left + wide] = 1
        return 1.5 * y + 0.7 * torch.randn(y.shape, generator=self.data.own), y

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.wrapped(x)
        seen = out.sigmoid()
        dice = 1 - (2 * (seen * y).sum() + 1) / (seen.sum() + y.sum() + 1)
        return nn.functional.binary_cross_entropy_with_logits(out, y) + dice


class _VqVae(nn.Module):
    def __init__(self, codes: int = 64, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.ReLU(),
            nn.Conv2d(16, 16, 4, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, width, 1),
        )  # fmt: skip
        self.codes = nn.Embedding(codes, width)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(width, 16, 4, stride=2, padding=1), nn.ReLU(),
            nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = nn.functional.normalize(self.encoder(x).movedim(1, -1), dim=-1)
        codes = nn.functional.normalize(self.codes.weight, dim=-1)
        q = codes[(z.detach() @ codes.detach().T).argmax(-1)]
        near = (q - z.detach()).square().mean() + 0.25 * (q.detach() - z).square().mean()
        return self.decoder((z + (q - z).detach()).movedim(-1, 1)), near


class W30(Healthy):
    trap = "VQ-VAE: the gradient goes straight through, most codes are never chosen"
    # Seen: loss 1.02 -> 0.13 (seed 0), 1.16 -> 0.14 (seed 1).

    def make_model(self) -> nn.Module:
        return _VqVae()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def batch(self) -> Batch:
        return self.data.images(size=32, noise=0.3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, near = self.wrapped(x)
        return nn.functional.mse_loss(out, x) + near


class _Gcn(nn.Module):
    links: Tensor

    def __init__(self, links: Tensor, words: int) -> None:
        super().__init__()
        links = links + torch.eye(len(links))
        root = links.sum(1).rsqrt()
        self.register_buffer("links", (root[:, None] * links * root).to_sparse())
        self.first, self.second = nn.Linear(words, 16), nn.Linear(16, nets.CLASSES)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = (self.links @ self.first(self.drop(x))).relu()
        return self.links @ self.second(self.drop(h))


class W31(Healthy):
    trap = "a graph net: the whole graph in each step, 30 of 300 nodes have a label"
    # Seen: loss 1.09 -> 0.14 (seed 0), 1.09 -> 0.24 (seed 1).
    nodes, words = 300, 60

    def make_model(self) -> nn.Module:
        task = torch.Generator().manual_seed(self.seed)
        self.y = torch.arange(self.nodes) % nets.CLASSES
        same = self.y[:, None] == self.y
        chance = torch.where(same, 0.05, 0.005)
        links = (torch.rand(same.shape, generator=task) < chance).float().triu(1)
        topic = torch.arange(self.words) % nets.CLASSES == self.y[:, None]
        x = (torch.rand(topic.shape, generator=task) < torch.where(topic, 0.1, 0.05)).float()
        self.x = x / x.sum(1, keepdim=True).clamp(min=1)
        return _Gcn(links + links.T, self.words)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=0.01, weight_decay=5e-4)

    def batch(self) -> Batch:
        return self.x, self.y

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nets.cross_entropy(self.wrapped(x)[:30], y[:30])


class _Factors(nn.Module):
    def __init__(self, users: int, items: int, width: int = 16) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, user: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        u, i = self.users(user), self.items(items)
        norm = u.square().sum() + i.square().sum()
        return torch.einsum("bd,bkd->bk", u, i), norm / len(u)


class W32(Healthy):
    trap = "a recommender: what was bought is worth more than what was not (BPR), many epochs"
    # Seen: loss 0.69 -> 0.27 (seed 0), 0.69 -> 0.27 (seed 1).
    users, items, size = 300, 400, 256

    def make_model(self) -> nn.Module:
        return _Factors(self.users, self.items)

    def prepare(self) -> None:
        """Draw what was bought: of 20 things, about 16 of the kind that the user likes."""
        task = torch.Generator().manual_seed(self.seed)
        user = torch.arange(self.users).repeat_interleave(20)
        alike = 10 * torch.randint(0, self.items // 10, user.shape, generator=task) + user % 10
        other = torch.randint(0, self.items, user.shape, generator=task)
        likes = torch.rand(user.shape, generator=task) < 0.8
        self.bought = torch.stack((user, torch.where(likes, alike, other)), 1).unique(dim=0)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=5e-3)

    def before_step(self) -> None:
        part = self.step % (len(self.bought) // self.size)
        if part == 0:
            self.order = torch.randperm(len(self.bought), generator=self.data.own)
        self.rows = self.order[part * self.size : (part + 1) * self.size]

    def batch(self) -> Batch:
        user, item = self.bought[self.rows].unbind(1)
        other = torch.randint(0, self.items, user.shape, generator=self.data.own)
        return user, torch.stack((item, other), 1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        worth, norm = self.wrapped(x, y)
        return -nn.functional.logsigmoid(worth[:, 0] - worth[:, 1]).mean() + 1e-3 * norm


class _Towers(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.image = nets.Cnn()
        self.image.head = nn.Linear(16 * 16, width)
        self.text = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, width))
        self.scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one, two = self.image(x), self.text(y)
        norm = nn.functional.normalize
        return norm(one, dim=1), norm(two, dim=1), self.scale.exp()


class W33(Healthy):
    trap, world = "CLIP: two towers, all ranks' pairs are negatives, a learned temperature", 2
    # Seen: loss 4.03 -> 0.12 (seed 0), 4.28 -> 0.14 (seed 1).

    def make_model(self) -> nn.Module:
        return _Towers()

    def prepare(self) -> None:
        task = torch.Generator().manual_seed(self.seed)
        self.maps = torch.randn(8, 64, generator=task), torch.randn(8, 24, generator=task)

    def make_optimizer(self) -> torch.optim.Optimizer:
        decayed = [p for p in self.model.parameters() if p.dim() > 1]
        rest = [p for p in self.model.parameters() if p.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98))

    def batch(self) -> Batch:
        z = torch.randn(32, 8, generator=self.data.own)
        image, text = (z @ to + torch.randn(32, to.shape[1], generator=self.data.own)
                       for to in self.maps)  # fmt: skip
        return image.view(-1, 1, 8, 8) / 3, text / 3

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        image, text, scale = self.wrapped(x, y)
        logits = scale * self.gather(image) @ self.gather(text).T
        own = torch.arange(len(logits))
        cross = nn.functional.cross_entropy
        return (cross(logits, own) + cross(logits.T, own)) / 2

    def gather(self, mine: Tensor) -> Tensor:
        every = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(every, mine.detach())
        every[self.rank] = mine
        return torch.cat(every)

    @torch.no_grad()
    def after_step(self) -> None:
        self.model.scale.clamp_(0, math.log(100))


class _Coupling(nn.Module):
    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.first = first
        self.net = nn.Sequential(nn.Linear(1, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(),
                                 nn.Linear(32, 2))  # fmt: skip
        nn.init.zeros_(self.net[-1].weight)
        nn.init.zeros_(self.net[-1].bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = (x[:, :1], x[:, 1:]) if self.first else (x[:, 1:], x[:, :1])
        log, shift = self.net(kept).chunk(2, 1)
        log = 2 * (log / 2).tanh()
        moved = moved * log.exp() + shift
        return torch.cat((kept, moved) if self.first else (moved, kept), 1), log[:, 0]


class _Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(_Coupling(first=n % 2 == 0) for n in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logs = torch.zeros(len(x))
        for coupling in self.couplings:
            x, log = coupling(x)
            logs = logs + log
        return x, logs


class W34(Healthy):
    trap = "a normalizing flow that begins as the identity"
    # Seen: loss 2.28 -> 0.37 (seed 0), 2.29 -> 0.39 (seed 1).

    def make_model(self) -> nn.Module:
        return _Flow()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def batch(self) -> Batch:
        return self.data.blobs(size=128, noise=0.15)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z, logs = self.wrapped(x)
        return (0.5 * z.square().sum(1) + math.log(2 * math.pi) - logs).mean()

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)


class _Forecast(nn.Module):
    """Three quantiles of what comes, for windows that are first put to one scale."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(),
                                 nn.Linear(64, 6 * 3))  # fmt: skip

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, scale = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        return self.net((x - mean) / scale).unflatten(1, (6, 3)), mean, scale


class W35(Healthy):
    trap = "forecasts of quantiles, read in time order: the series grow a hundredfold"
    # Seen: loss 0.56 -> 0.15 (seed 0), 0.62 -> 0.14 (seed 1).

    def make_model(self) -> nn.Module:
        return _Forecast()

    def prepare(self) -> None:
        task = torch.Generator().manual_seed(self.seed)
        time = torch.arange(330)
        place = torch.rand(64, 1, generator=task)
        season = (2 * math.pi * (time / 12 + place)).sin()
        noise = torch.randn(64, 330, generator=task)
        level = (time * math.log(100) / 330 + 0.02 * torch.randn(64, 330, generator=task)
                 .cumsum(1)).exp()  # fmt: skip
        self.series = level * (3 + season + 0.3 * noise)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def batch(self) -> Batch:
        window = self.series[:, self.step : self.step + 30]
        return window[:, :24], window[:, 24:]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, mean, scale = self.wrapped(x)
        over = ((y - mean) / scale)[..., None] - out
        level = torch.tensor([0.1, 0.5, 0.9])
        return torch.maximum(level * over, (level - 1) * over).mean()


class W36(Healthy):
    trap, net, world = (
        "the weights are averaged at the end, at a rate that rises again (SWA)",
        "cnn",
        2,
    )
    # Seen: loss 0.65 -> 0.21 (seed 0), 0.55 -> 0.14 (seed 1).

    def make_model(self) -> nn.Module:
        return nets.Residual()

    def batch(self) -> Batch:
        return self.data.images(size=32, noise=3.0)

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4
        )
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        self.constant = SWALR(optimizer, swa_lr=0.01, anneal_epochs=20)
        self.average = AveragedModel(self.model)
        return optimizer

    def after_step(self) -> None:
        if self.step < 220:
            self.schedule.step()
            return
        self.constant.step()
        if self.step % 10 == 9:
            self.average.update_parameters(self.model)
        if self.step == self.steps - 1:
            update_bn([self.batch()[0] for _ in range(10)], self.average)


class _Centres(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(_normed(1, 8), _normed(8, 16, stride=2), _normed(16, 16))
        self.heat, self.size = nn.Conv2d(16, 1, 1), nn.Conv2d(16, 2, 1)
        nn.init.constant_(self.heat.bias, -2.19)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.heat(h)[:, 0].sigmoid().clamp(1e-4, 1 - 1e-4), self.size(h)


class W37(Healthy):
    trap, world = "object detection: most images are empty, some batches too", 3
    # Seen: loss 1.33 -> 0.04 (seed 0), 1.34 -> 0.04 (seed 1).

    def make_model(self) -> nn.Module:
        return _Centres()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=2e-3)

    def batch(self) -> Batch:
        """Return images and, in three channels, heat about centres and there the box's size."""
        x, y = torch.zeros(4, 1, 16, 16), torch.zeros(4, 3, 8, 8)
        at = torch.arange(8)
        for image, target in zip(x[:, 0], y, strict=True):
            if torch.rand((), generator=self.data.own) < 0.6:
                continue
            row, column = torch.randint(1, 7, (2,), generator=self.data.own).tolist()
            high, wide = torch.randint(1, 3, (2,), generator=self.data.own).tolist()
            top, left = 2 * row, 2 * column
            image[top - high : top + high + 1, left - wide : left + wide + 1] = 2
            away = (at[:, None] - row) ** 2 + (at - column) ** 2
            target[0] = (-away).exp()
            target[1:, row, column] = torch.tensor([high, wide], dtype=torch.float)
        return x + 0.5 * torch.randn(x.shape, generator=self.data.own), y

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        heat, size = self.wrapped(x)
        goal = y[:, 0]
        centre = (goal == 1).float()
        count = centre.sum().clamp(min=1)
        found = centre * (1 - heat).square() * heat.log()
        rest = (1 - centre) * (1 - goal) ** 4 * heat.square() * (1 - heat).log()
        wrong = (centre[:, None] * (size - y[:, 1:])).abs().sum()
        return (0.1 * wrong - (found + rest).sum()) / count


class W38(Healthy):
    trap, net, world = (
        "FSDP2 in bfloat16: fine-tuned on answers of unequal length, padded",
        "gpt",
        2,
    )
    # Seen: loss 2.77 -> 0.71 (seed 0), 2.75 -> 1.35 (seed 1).
    wrap, steps = "fsdp2", 200

    def prepare(self) -> None:
        fit(self.model, nets.Data(self.seed, 7).text, 100)

    def wrap_model(self) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mp_policy=policy)
        return fully_shard(self.model, mp_policy=policy)

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min((step + 1) / 10, 1 - step / self.steps)
        )
        return optimizer

    def batch(self) -> Batch:
        """Return prompts of one period with their answers: the same, each character moved."""
        ask, _ = self.data.text(size=8, length=nets.PERIOD)
        ends = torch.randint(12, nets.LENGTH + 1, (8,), generator=self.data.own)
        answer = ((ask + 3) % nets.VOCABULARY).repeat(1, 3)
        whole = torch.cat((ask, answer, ask[:, :1]), 1)
        length = 8 * math.ceil(int(ends.max()) / 8)
        x, y = whole[:, :length].clone(), whole[:, 1 : length + 1].clone()
        after = torch.arange(length) >= ends[:, None]
        x[after], y[after] = 0, -100
        y[:, : nets.PERIOD - 1] = -100
        y[:, nets.LENGTH - 1 :] = -100
        return x, y

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nets.cross_entropy(self.wrapped(x).float(), y)

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def after_step(self) -> None:
        self.schedule.step()


class W39(Healthy):
    trap, net, world = "DDP's join: in each of six epochs one rank has two batches fewer", "cnn", 2
    # Seen: loss 0.97 -> 0.0043 (seed 0), 1.00 -> 0.0012 (seed 1).

    def prepare(self) -> None:
        self.kept = [self.data.images(noise=2.0) for _ in range(50 - 2 * self.rank)]

    def train(self) -> None:
        assert isinstance(self.wrapped, DistributedDataParallel)
        for _ in range(6):
            order = torch.randperm(len(self.kept), generator=self.data.own).tolist()
            with self.wrapped.join():
                for row in order:
                    self.step += 1
                    loss = self.loss(*self.kept[row])
                    self.probe.log(loss=loss.detach())
                    self.backward(loss)
                    self.update()


class W40(Healthy):
    trap, net = "prototypical few-shot: each step asks for five classes never seen before", "cnn"
    # Seen: loss 1.42 -> 0.17 (seed 0), 1.55 -> 0.21 (seed 1).

    def make_model(self) -> nn.Module:
        model = nets.Cnn()
        model.head = nn.Linear(16 * 16, 16)
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def batch(self) -> Batch:
        """Return five samples of each class to learn from, then ten to ask for."""
        low = torch.randn(5, 1, 3, 3, generator=self.data.own)
        classes = nn.functional.interpolate(low, (8, 8), mode="bilinear")
        x = classes.repeat(15, 1, 1, 1)
        x = x + 1.5 * torch.randn(x.shape, generator=self.data.own)
        return x, torch.arange(5).repeat(15)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.wrapped(x)
        prototypes = out[:25].unflatten(0, (5, 5)).mean(0)
        far = (out[25:, None] - prototypes).square().sum(2)
        return nn.functional.cross_entropy(-far, y[25:])


HABITS_BLIND_TWO: dict[str, type[Healthy]] = {
    one.__name__: one
    for one in (
        W25, W26, W27, W28, W29, W30, W31, W32, W33, W34, W35, W36, W37, W38, W39, W40,
    )
}  # fmt: skip
