"""Set C: ten of twenty more faults written by somebody who had not read the detectors' rules.

Drawn from issue trackers and papers, the source beside each, and written before any of them was run
with the probe. A lot split the twenty into this set and `set_d`. Each was run without the probe, at
seeds 0 and 1, beside the same job without its fault. "Seen" says what it did: the loss of training,
or that of what was learned ("held out": on clean data of its own, at the end), and in brackets what
it was without the fault. What is expected names every detector that speaks of the cause or of what
follows from it at once.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.detection import nets
from benchmarks.detection.faults import Expected, Fault
from benchmarks.detection.learned import LOUD
from benchmarks.detection.nets import Batch


class U51(Fault):
    # pytorch issue 33752: the documents of MultiplicativeLR show LambdaLR.
    # Seen: the loss of the last 20 steps 2.87 and 415 (1.25 and 1.24 without).
    says = "the factor of a schedule is multiplied into the rate of the step before: it grows"
    net = "gpt"
    expected = Expected((*LOUD, "attn_logit", "dead_units", "nonfinite", "output_drop"), 90)

    def before_step(self) -> None:
        if self.lasts:
            self.set_rate(1 + 0.05 * self.strength)


class U52(Fault):
    # keras issue 19051: AdamW became Adam with an L2 penalty.
    # Seen: the loss of the last 20 steps 2.77 at both seeds (1.25): that of a guess.
    says = (
        "weight decay is part of the gradient that Adam divides: weights shrink, nothing is learned"
    )
    net, from_the_start = "gpt", True
    expected = Expected(
        (*LOUD, "vanishing", "collapse", "output_drop", "dead_units", "grad_none_or_zero"), 100
    )

    def make_optimizer(self) -> torch.optim.Optimizer:
        decay = 0.1 * self.strength
        return torch.optim.Adam(self.model.parameters(), lr=3e-3, weight_decay=decay)


class U53(Fault):
    # Open-Rig3R issue 35: autocast to float16, and no GradScaler.
    # Seen: held out 1.13 and 0.40 (0.17).
    says = (
        "float16 without a GradScaler, a loss that is divided by the number of samples: underflow"
    )
    from_the_start = True
    expected = Expected(
        ("grad_zeros", "grad_none_or_zero", "vanishing", "never_updated", "frozen_param",
         "update_ratio", "loss_scale"), 50,
    )  # fmt: skip

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            out = self.wrapped(x)
        return nets.cross_entropy(out.float(), y) / 400_000


class U54(Fault):
    # pytorch pull request 137348: weights that stay gathered do not see the optimizer's update.
    # Seen: the loss of the last 20 steps 1.43 and 1.41 (1.22), held out 3.79 and 3.53 (1.19).
    says = "FSDP2 does not reshard after the backward: the forward goes on with old weights"
    net, world, wrap, from_the_start = "gpt", 2, "fsdp2", True
    expected = Expected(
        (*LOUD, "never_updated", "frozen_param", "reduction", "desync", "coverage",
         "grad_altered", "stale_weights"), 50,
    )  # fmt: skip

    def wrap_model(self) -> nn.Module:
        wrapped = super().wrap_model()
        wrapped.set_reshard_after_backward(False)  # type: ignore[operator]
        return wrapped


class U55(Fault):
    # DeepSpeed issue 2343: parameters get their gradients in another order on another rank.
    # Seen: the loss of the last 20 steps 1.38 and 1.33 (1.22), held out 1.34 and 1.29 (1.19).
    says = "one rank puts its gradients into the bucket in another order"
    net, world, from_the_start = "gpt", 2, True
    expected = Expected(("reduction", "grad_altered", "rank_outlier", "desync", *LOUD), 20)

    def before_step(self) -> None:
        if self.step == 0:
            self.reduce_by(self._reduce)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        mine = bucket.buffer()
        if self.mine:
            mine = torch.cat([grad.flatten() for grad in reversed(bucket.gradients())])
        done = dist.all_reduce(mine, async_op=True).get_future()
        return done.then(lambda future: future.value()[0] / self.world)


class U56(Fault):
    # fashion-mnist pull request 5: the files are sorted by label, and not everybody shuffles.
    # Seen: the loss of training falls; held out 0.44 and 0.43 (0.17 and 0.16).
    says = "nobody shuffles any more: one class after the other, 25 batches of each"
    world = 2
    expected = Expected(
        (*LOUD, "collapse", "vanishing", "output_drop", "dead_units", "grad_zeros",
         "sample_outlier", "stuck_data", "cross_entropy"), 60,
    )  # fmt: skip

    def batch(self) -> Batch:
        if not self.lasts:
            return super().batch()
        x, y = self.data.blobs(size=192)
        rows = (y == (self.step - self.start) // 25 % nets.CLASSES).nonzero()[:32, 0]
        return x[rows], y[rows]


class U57(Fault):
    # tflearn issue 854: an augmentation changes the images that it is given.
    # Seen: the loss of the last 20 steps 0.52 and 1.27 (0.00), held out 0.23 and 1.00 (0.01).
    says = "images are augmented in place, in the cache: each time they are read they are noisier"
    net = "cnn"
    expected = Expected(("input_shift", *LOUD, "dead_units", "sample_outlier"), 60)

    def prepare(self) -> None:
        self.cache = self.data.images(size=48)

    def batch(self) -> Batch:
        own, rows = self.data.own, torch.randint(0, 48, (16,), generator=self.data.own)
        x, y = self.cache[0][rows], self.cache[1][rows]
        x = x * (1 + 0.2 * torch.randn(16, 1, 1, 1, generator=own))
        x = x + self.strength * torch.randn(x.shape, generator=own)
        if self.lasts:
            self.cache[0][rows] = x
        return x, y


class _Masked(nets.Attention):
    """Attention that looks at no padding.

    Attributes:
        hidden: bool, batch x length; what is padding.
    """

    hidden: Tensor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        hide = later | self.hidden[:, None, None, :]
        score = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hide, -torch.inf)
        return self.out((score.softmax(-1) @ v).transpose(1, 2).flatten(2))


class _Padded(nn.Module):
    """The `Gpt`, for texts of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = nets.Gpt()
        for block in self.gpt.blocks:
            block.attn = _Masked(32)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        for block in self.gpt.blocks:
            block.attn.hidden = hidden
        out: Tensor = self.gpt(x)
        return out


class U58(Fault):
    # pytorch issue 41508: the softmax over keys that are all masked.
    # Seen: the loss is NaN within five steps, and at the end what both ranks have learned.
    says = "one text of one rank is empty: attention has nothing to look at"
    net, world, expected = "gpt", 2, Expected(("nonfinite",), 1, rank=True, module=True)
    modules = ("gpt.blocks.0.attn",)

    def make_model(self) -> nn.Module:
        return _Padded()

    def batch(self) -> Batch:
        x, y = super().batch()
        ends = torch.randint(8, x.shape[1] + 1, (len(x), 1), generator=self.data.own)
        if self.due and self.mine:
            ends[0] = 0
        self.padding = torch.arange(x.shape[1]) >= ends
        return x, y.masked_fill(self.padding, -100)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nets.cross_entropy(self.wrapped(x, self.padding), y)


class _Recomputed(nets.Gpt):
    """The `Gpt`, whose blocks are computed once more in the backward."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place.weight[: x.shape[1]]
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=True)
        return self.head(self.norm(h))


class U59(Fault):
    # transformers issue 21381: reentrant checkpoints need an input that requires a gradient.
    # Seen: the loss of the last 20 steps 2.78 and 2.77 (1.28 and 1.26): that of a guess.
    says = "embeddings are frozen, blocks are checkpointed: the blocks get no gradient"
    net, from_the_start = "gpt", True
    expected = Expected(
        ("grad_none_or_zero", "never_updated", "frozen_param", "coverage", "grad_zeros",
         "vanishing"), 50, module=True,
    )  # fmt: skip
    modules = ("blocks",)

    def make_model(self) -> nn.Module:
        model = _Recomputed()
        model.embed.requires_grad_(requires_grad=False)
        model.place.requires_grad_(requires_grad=False)
        return model


class _Sorting(nets.Moe):
    """Top-1 experts, by sorting: each gets its rows in one piece.

    Attributes:
        wrong: whether rows are put back by the order itself in place of its inverse.
    """

    wrong = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).relu()
        weight, chosen = self.gate(h).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        shares = h[order].split(chosen.bincount(minlength=nets.EXPERTS).tolist())
        out = torch.cat([expert(rows) for expert, rows in zip(self.experts, shares, strict=True)])
        return self.head(out[order if self.wrong else order.argsort()] * weight[:, None])


class U60(Fault):
    # mlxcel issue 1600: a permutation in the place of its inverse.
    # Seen: the loss of the last 20 steps 0.84 and 0.93 (0.29 and 0.26).
    says = "what experts compute goes back to the wrong rows"
    expected = Expected(
        (*LOUD, "output_drop", "collapse", "dead_units", "grad_zeros", "vanishing"), 20
    )

    def make_model(self) -> nn.Module:
        return _Sorting()

    def before_step(self) -> None:
        if self.due:
            self.model.wrong = True


SET_C: dict[str, type[Fault]] = {
    one.__name__: one for one in (U51, U52, U53, U54, U55, U56, U57, U58, U59, U60)
}
