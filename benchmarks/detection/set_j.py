"""Set J: ten faults written down on 2026-11-28, before any of them was run.

Half of them are what a change of a config or of a library does in the middle of a run, or one rank
alone; three are there from the start.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.detection import nets
from benchmarks.detection.faults import Expected, Fault
from benchmarks.detection.learned import LOUD
from benchmarks.detection.nets import Batch


class U121(Fault):
    says = "the loss is divided by the number of micro-batches twice: by the trainer, too"
    net, world, micros = "gpt", 2, 4
    expected = Expected((*LOUD, "grad_altered", "batch_size", "cross_entropy"), 30)

    def backward(self, loss: Tensor) -> None:
        super().backward(loss / self.micros if self.lasts else loss)


class U122(Fault):
    says = "the texts of one rank are cut in half, and the rest is filled with padding that counts"
    net, world, expected = "gpt", 3, Expected(("input_shift", "rank_outlier", *LOUD), 20, rank=True)

    def batch(self) -> Batch:
        x, y = super().batch()
        if self.lasts and self.mine:
            half = x.shape[1] // 2
            x, y = x.clone(), y.clone()
            x[:, half:], y[:, half:] = 0, 0
        return x, y


class U123(Fault):
    says = "a load gives the head a new tensor, and the optimizer has the old one"
    net, world = "gpt", 1
    expected = Expected(("frozen_param", "never_updated", "grad_dropped"), 50, module=True)
    modules = ("head",)

    def before_step(self) -> None:
        if self.due:
            self.model.head.weight = nn.Parameter(self.model.head.weight.detach().clone())

    def update(self) -> None:
        super().update()
        self.model.zero_grad()


class U124(Fault):
    says = "a config is read anew: the epsilon of Adam is 1, and not 1e-8"
    net, world = "gpt", 2
    expected = Expected((*LOUD, "frozen_param", "mode_flip"), 30)

    def before_step(self) -> None:
        if self.due:
            for group in self.optimizer.param_groups:
                group["eps"] = 1.0


class _Positive(nets.Cnn):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class U125(Fault):
    says = "there is a ReLU after the head: no logit is negative"
    net, world, from_the_start = "cnn", 2, True
    expected = Expected(
        ("dead_units", "grad_zeros", "grad_none_or_zero", "collapse", "cross_entropy", "targets"),
        50,
    )

    def make_model(self) -> nn.Module:
        return _Positive()


class U126(Fault):
    says = "a sigmoid before a loss that has its own: binary cross-entropy with logits"
    world, from_the_start = 2, True
    expected = Expected(
        ("saturated", "vanishing", "cross_entropy", "targets", "update_ratio", "init_scale"), 100
    )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        wanted = nn.functional.one_hot(y, nets.CLASSES).float()
        out = self.wrapped(x).sigmoid()
        return nn.functional.binary_cross_entropy_with_logits(out, wanted)


class U127(Fault):
    says = "gradients are clipped to a norm of 0.001, and not of 1"
    net, world, expected = "cnn", 2, Expected((*LOUD, "grad_altered", "frozen_param"), 30)

    def before_update(self) -> None:
        norm = 1e-3 * self.strength if self.lasts else 1.0
        nn.utils.clip_grad_norm_(self.model.parameters(), norm)


class U128(Fault):
    says = "the labels of one rank are those of the batch before"
    net, world, expected = "cnn", 3, Expected(("rank_outlier", *LOUD), 20, rank=True)
    before: Tensor | None = None

    def batch(self) -> Batch:
        x, y = super().batch()
        labels, self.before = self.before, y
        return (x, labels) if self.lasts and self.mine and labels is not None else (x, y)


class _TwoHeads(nets.Cnn):
    """Has a second head, for the mean of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(16 * 16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]  # two of them
        h = self.features(x)
        return self.head(h), self.second(h)


class U129(Fault):
    says = "on one rank the second of two losses is left out: its data lack what it needs"
    net, world = "cnn", 3
    expected = Expected(("grad_none_or_zero", "rank_outlier", "coverage", *LOUD), 30, rank=True)

    def make_model(self) -> nn.Module:
        return _TwoHeads()

    def wrap_model(self) -> nn.Module:
        return DistributedDataParallel(self.model, find_unused_parameters=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        classes, brightness = self.wrapped(x)
        first = nets.cross_entropy(classes, y)
        if self.lasts and self.mine:
            return first
        return first + 0.1 * (brightness[:, 0] - x.mean((1, 2, 3))).square().mean()


class U130(Fault):
    says = "a group of parameters is given no rate of its own, and the default is 0: a block"
    net, world, from_the_start = "gpt", 2, True
    expected = Expected(("never_updated", "frozen_param"), 50, module=True)
    modules = ("blocks.0", "blocks.1")

    def make_optimizer(self) -> torch.optim.Optimizer:
        block = set(self.module().parameters())
        rest = [p for p in self.model.parameters() if p not in block]
        groups = [{"params": rest, "lr": 3e-3}, {"params": [*block]}]
        return torch.optim.AdamW(groups, lr=0.0)


SET_J: dict[str, type[Fault]] = {
    one.__name__: one for one in (U121, U122, U123, U124, U125, U126, U127, U128, U129, U130)
}
