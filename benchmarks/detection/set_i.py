"""Set I: the other ten of the twenty; see `set_h`."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from benchmarks.detection import nets
from benchmarks.detection.faults import Expected, Fault
from benchmarks.detection.learned import LOUD
from benchmarks.detection.nets import Batch


class _Denoiser(nn.Module):
    """Points with noise, and how much of it, to what is to be predicted."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.fc1, self.act1 = nn.Linear(3, width), nn.ReLU()
        self.fc2, self.act2 = nn.Linear(width, width), nn.ReLU()
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        h = self.act1(self.fc1(torch.cat((x, t), 1)))
        return self.head(self.act2(self.fc2(h)))


class U105(Fault):
    # dppo issue 14, 3D-Diffusion-Policy issue 34: what is predicted is not what the sampler takes.
    # Seen: the loss 0.87 and 0.88 at once (0.29 before it), held out, of the noise, 0.69 and 0.65
    # (0.28 and 0.29).
    says = "a config is read anew: a diffusion model that predicts the noise is to predict v"
    world, expected = 2, Expected((*LOUD, "targets"), 20)

    def make_model(self) -> nn.Module:
        return _Denoiser()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=5e-3)

    def batch(self) -> Batch:
        return self.data.blobs(size=64, noise=0.1)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        t = torch.rand(len(x), 1, generator=self.data.own)
        noise = torch.randn(x.shape, generator=self.data.own)
        keep, add = (t * math.pi / 2).cos(), (t * math.pi / 2).sin()
        target = keep * noise - add * x if self.lasts else noise
        return (self.wrapped(keep * x + add * noise, t) - target).square().mean()


class _Rotary(nets.Attention):
    """Attention with rotary positions.

    Attributes:
        halves: whether what is turned together stands half a head apart; otherwise side by side.
    """

    halves = True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = self._turn(q), self._turn(k)
        h = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h.transpose(1, 2).flatten(2))

    def _turn(self, x: Tensor) -> Tensor:
        length, width = x.shape[-2:]
        rates = 100 ** (-torch.arange(0, width, 2) / width)
        angle = torch.arange(length)[:, None] * rates
        a, b = x.chunk(2, -1) if self.halves else (x[..., ::2], x[..., 1::2])
        turned = (a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos())
        return torch.cat(turned, -1) if self.halves else torch.stack(turned, -1).flatten(-2)


class _Turned(nets.Gpt):
    """The `Gpt`, with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        del self.place
        for block in self.blocks:
            block.attn = _Rotary(32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class U106(Fault):
    # candle issue 3948, pollard-weights pull request 70: a checkpoint has the other of two layouts.
    # Seen: the loss 3.07 and 3.04 at once (1.41 and 1.39 before it), 1.52 and 1.54 over
    # steps 20 to 40 after it.
    says = "another implementation of rotary positions turns neighbours together, not halves"
    net, world = "gpt", 2
    expected = Expected((*LOUD, "attn_logit", "output_drop"), 20)

    def make_model(self) -> nn.Module:
        return _Turned()

    def before_step(self) -> None:
        if self.due:
            for block in self.model.blocks:
                block.attn.halves = False


class U107(Fault):
    # AeroDuo issue 13, DALLE-pytorch pull request 194: what cannot be read is the next one.
    # Seen: the loss of training is the same, 0.19 at both seeds (0.25 and 0.22), held out 1.65 and
    # 1.19 (0.21 and 0.22), 39 and 35 % are wrong (8 and 9 %).
    says = "the folder of a class is gone: in place of what cannot be read the next image is taken"
    net, world = "cnn", 3
    expected = Expected(
        (*LOUD, "stuck_data", "same_data", "sample_outlier", "targets", "collapse", "grad_zeros",
         "grad_none_or_zero", "dead_units", "cross_entropy"), 50,
    )  # fmt: skip

    def prepare(self) -> None:
        self.gone = self.draw.randrange(nets.CLASSES)

    def batch(self) -> Batch:
        x, y = self.data.images(noise=3.0)
        if not self.lasts:
            return x, y
        left = (y != self.gone).nonzero()[:, 0]
        rows = left[torch.searchsorted(left, torch.arange(len(y))) % len(left)]
        return x[rows], y[rows]


class U110(Fault):
    # fairscale issue 780, pytorch issue 37790, ms-swift pull request 9060: nobody waits for the
    # stream that reduces.
    # Seen: its weights are 5 and 3 % off those of the others in the end (none), held out on that
    # rank 1.22 and 1.25 (1.20 and 1.23 on the others).
    says = "now and then one rank steps by its own gradients: the reduced ones are not there yet"
    net, world = "gpt", 3
    expected = Expected(("desync", "reduction", "rank_outlier", "grad_altered"), 20, rank=True)

    def before_step(self) -> None:
        if self.step == 0:
            self.reduce_by(self._reduce)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        own = bucket.buffer().clone()
        early = self.lasts and self.mine and self.draw.random() < 0.15
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return done.then(lambda future: own if early else future.value()[0] / self.world)


class U113(Fault):
    # horovod issue 672, pytorch-benchmarks (sparticlesteve) pull request 1.
    # Seen: the loss of the last 20 steps 1.42 and 1.38 (1.19 and 1.20), held out 1.41 and 1.40
    # (1.20 and 1.23); the weights of one rank are as far from those of another as they are large.
    says = "each rank begins with weights of its own: nobody sends those of rank 0 around"
    net, world, from_the_start = "gpt", 3, True
    expected = Expected(("desync", "rank_outlier", "reduction"), 10)
    sync = False  # it should be True

    def make_model(self) -> nn.Module:
        torch.manual_seed(1000 * self.seed + self.rank)
        return super().make_model()

    def wrap_model(self) -> nn.Module:
        return DistributedDataParallel(self.model, init_sync=self.sync)


class _Dropping(nets.Gpt):
    """The `Gpt` with dropout, whose blocks are computed once more in the backward."""

    def __init__(self, rate: float = 0.3, *, kept: bool) -> None:
        super().__init__()
        self.kept = kept
        for block in self.blocks:
            block.act = nn.Sequential(block.act, nn.Dropout(rate))
            block.attn.out = nn.Sequential(block.attn.out, nn.Dropout(rate))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False, preserve_rng_state=self.kept)
        return self.head(self.norm(h))


class U114(Fault):
    # OLMo-core pull request 828, guided-diffusion issue 167, PIDM pull request 66.
    # Seen: the loss of the last 20 steps 1.36 and 1.30 (1.30 and 1.26), held out, without dropout,
    # 1.29 and 1.30 (1.24 and 1.26).
    says = "what is computed once more in the backward has another dropout than the forward had"
    net, world, from_the_start = "gpt", 2, True
    expected = Expected(
        ("grad_altered", "vanishing", "update_ratio", "grad_spike", "level_shift", "recompute"), 100
    )
    kept = False  # it should be True

    def make_model(self) -> nn.Module:
        return _Dropping(kept=self.kept)


class _Siamese(nn.Module):
    """Two views of an image, each brought to features, and a guess of those of the other."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(),
            nn.Linear(width, 16),
        )  # fmt: skip
        self.guess = nn.Sequential(
            nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 16)
        )  # fmt: skip

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        u, v = self.encode(a), self.encode(b)
        return u, v, self.guess(u), self.guess(v)


class U115(Fault):
    # lightly issue 559, SimSiam (PatrickHua) issues 39 and 50: what is not detached.
    # Seen: the loss -1.00 in the end at both seeds (-0.90 and -0.86); features of a length of 1
    # deviate by 0.09 and 0.12 (0.83, 1 is a sphere), 23 and 21 % are nearer to those of another
    # class (2 and 3 %).
    says = "a siamese net without its stop-gradient: all images get the same features"
    net, world, from_the_start = "cnn", 2, True
    expected = Expected(
        ("collapse", "vanishing", "grad_zeros", "grad_none_or_zero", "dead_units", "saturated",
         "output_drop", "update_ratio", "level_shift"), 100,
    )  # fmt: skip
    stops = False  # it should be True

    def make_model(self) -> nn.Module:
        return _Siamese()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)

    def batch(self) -> Batch:
        return self.data.images(size=32, noise=2.0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = (x + torch.randn(x.shape, generator=self.data.own) for _ in range(2))
        u, v, p, q = self.wrapped(a, b)
        if self.stops:
            u, v = u.detach(), v.detach()
        alike = nn.functional.cosine_similarity
        return -(alike(p, v).mean() + alike(q, u).mean()) / 2


class _Vae(nn.Module):
    """Images of 8 x 8, by way of a code of four numbers."""

    def __init__(self, width: int = 64, code: int = 4) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 2 * code)
        )  # fmt: skip
        self.decode = nn.Sequential(nn.Linear(code, width), nn.ReLU(), nn.Linear(width, 64))

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log = self.encode(x).chunk(2, 1)
        return self.decode(mean + (log / 2).exp() * noise).view_as(x), mean, log


class U116(Fault):
    # MMVAE pull request 19, WorldModels (AppliedDataSciencePartners) issue 12.
    # Seen: the KL term of an image is 0.00 at both seeds (3.2 and 3.5): nothing is encoded, the
    # error held out is 0.89 and 0.95 (0.25).
    says = "a VAE takes the sum of its KL terms, and the mean of its errors"
    net, world, from_the_start = "cnn", 2, True
    expected = Expected(
        (*LOUD, "collapse", "vanishing", "grad_zeros", "grad_none_or_zero", "dead_units",
         "output_drop", "frozen_param"), 100,
    )  # fmt: skip
    over = 1  # what the sum is divided by; it should be the number of all pixels of a batch

    def make_model(self) -> nn.Module:
        return _Vae()

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=3e-3)

    def batch(self) -> Batch:
        return self.data.images(size=32, noise=0.5)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        out, mean, log = self.wrapped(x, torch.randn(len(x), 4, generator=self.data.own))
        terms = (mean.square() + log.exp() - 1 - log) / 2
        return nn.functional.mse_loss(out, x) + terms.sum() / self.over


class U119(Fault):
    # delta (blackportal-ai) issue 248, CrossViVit issue 5: targets as they are in the file.
    # Seen: the loss 4.5e10 at first, and 1.9e10 and 1.8e10 of the last 20 steps; the error held out
    # is 4.8 and 4.3 times the variance of the targets (0.001 and 0.002 times).
    says = "the targets are prices as they are in the file: 200 000, give or take 50 000"
    world, from_the_start = 2, True
    expected = Expected(
        (*LOUD, "targets", "vanishing", "dead_units", "frozen_param", "nonfinite", "init_scale",
         "collapse"), 50,
    )  # fmt: skip
    middle, spread = 2e5, 5e4  # they should be 0 and 1

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        price = self.middle + self.spread * (x[:, 0] * x[:, 1] + x.sum(1))
        return (self.wrapped(x)[:, 0] - price).square().mean()


class U120(Fault):
    # GaNDLF issue 209: the weights of the classes are the shares that they have.
    # Seen: the loss of training is lower; held out, with as many of each class, 1.59 and 1.65 (0.33
    # at both), none of the rarest is found (83 and 91 %).
    says = "the weights of the classes are their shares, not the inverse: rare ones count for less"
    world, from_the_start = 2, True
    expected = Expected(
        ("targets", "sample_outlier", "grad_zeros", "grad_none_or_zero", "dead_units",
         "vanishing", "collapse", "cross_entropy"), 100,
    )  # fmt: skip
    power = 1  # it should be -1
    shares = torch.tensor([0.8, 0.15, 0.05])

    def batch(self) -> Batch:
        x, y = self.data.blobs(size=256, noise=0.6)
        keep = torch.rand(len(y), generator=self.data.own) < self.shares[y]
        return x[keep], y[keep]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.wrapped(x), y, weight=self.shares**self.power)


SET_I: dict[str, type[Fault]] = {
    one.__name__: one for one in (U105, U106, U107, U110, U113, U114, U115, U116, U119, U120)
}
