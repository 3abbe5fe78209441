"""The 28 public faults: what is planted, and what must be said of it, by when."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from benchmarks.detection import nets
from benchmarks.detection.nets import Batch
from benchmarks.detection.training import Training


@dataclass(frozen=True, slots=True)
class Expected:
    """What must be said: any of `detectors`, at most `within` steps after the fault.

    At an interval of k the limit is the next sampled step, or that many steps if they are more.
    `rank` and `module`: whether the one of the fault must be named.
    """

    detectors: tuple[str, ...]
    within: int
    rank: bool = False
    module: bool = False


class Fault(Training):
    """A training with a fault in it.

    Attributes:
        says: what the fault is.
        expected: what must be said of it.
        from_the_start: it begins at step 0.
        modules: where it may be, one of them is drawn; "a|b": seen in both.
        early: so many steps before it a verdict may lie.
    """

    says: ClassVar[str]
    expected: ClassVar[Expected]
    from_the_start: ClassVar[bool] = False
    modules: ClassVar[tuple[str, ...]] = ()
    early: ClassVar[int] = 0

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__(seed, rank)
        self.where = self.draw.choice(self.modules) if self.modules else ""
        if self.from_the_start:
            self.start = 0

    def module(self) -> nn.Module:
        """Return the module of the fault."""
        return self.model.get_submodule(self.where.partition("|")[0])


LINEARS = ("blocks.0.up", "blocks.0.down", "blocks.1.attn.v", "blocks.1.up", "blocks.1.down")


class N01(Fault):
    says = "one input element is NaN, one step"
    world, expected = 3, Expected(("nonfinite",), 0, rank=True, module=True)
    modules = ("fc1",)

    def batch(self) -> Batch:
        x, y = super().batch()
        if self.due and self.mine:
            x[self.draw.randrange(len(x)), 0] = torch.nan
        return x, y


class N02(Fault):
    says = "one element of one weight gradient is NaN before the reduction"
    net, world, expected = "gpt", 2, Expected(("nonfinite",), 0, rank=True, module=True)
    modules = LINEARS

    def prepare(self) -> None:
        self.module().weight.register_hook(self._spoil)

    def _spoil(self, grad: Tensor) -> Tensor:
        if self.due and self.mine:
            grad = grad.clone()
            grad[0, 0] = torch.nan
        return grad


class N03(Fault):
    says = "a finite forward whose backward is NaN"
    net, expected = "gpt", Expected(("nonfinite",), 0, rank=True, module=True)
    modules = LINEARS

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        more = (0 * self.module().weight).sum().sqrt() if self.due else 0.0
        return super().loss(x, y) + more


class N04(Fault):
    says = "the loss is infinite, one step"
    net, world, expected = "cnn", 2, Expected(("nonfinite",), 0, rank=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        return loss - torch.zeros(()).log() if self.due and self.mine else loss


class N05(N01):
    says = "as N01, at a step that is not sampled if the interval is 10"

    def __init__(self, seed: int, rank: int) -> None:
        super().__init__(seed, rank)
        self.start += self.start % 10 == 0


class N06(Fault):
    says = "infinite gradients under a GradScaler, at every step"
    expected = Expected(("loss_scale",), 20)

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        if self.lasts:
            self.model.fc1.weight.grad[0, 0] = torch.inf
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class N07(Fault):
    says = "bit 30 of one weight is flipped on one rank"
    net, world = "gpt", 3
    expected = Expected(("desync", "nonfinite", "output_jump"), 1, rank=True, module=True)
    modules = LINEARS

    def before_step(self) -> None:
        if self.due and self.mine:
            bits = self.module().weight.data.view(torch.int32)
            bits[0, 0] ^= 1 << 30


class E01(Fault):
    says = "the learning rate is 100 times too high"
    net, expected = "gpt", Expected(("grad_spike", "loss_spike", "output_jump", "update_ratio"), 2)

    def before_step(self) -> None:
        if self.due:
            self.set_rate(100 * self.strength)


class E02(Fault):
    says = "gradients are 100 times too large, one step"
    net, world, expected = "gpt", 2, Expected(("grad_spike", "unsampled_spike"), 0)

    def backward(self, loss: Tensor) -> None:
        super().backward(100 * self.strength * loss if self.due else loss)


class E03(Fault):
    says = "the loss is summed instead of averaged"
    net = "cnn"
    expected = Expected(
        (
            "grad_spike",
            "loss_spike",
            "loss_runaway",
            "output_jump",
            "update_ratio",
            "cross_entropy",
        ),
        5,
    )

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        return loss * 50 * self.strength if self.lasts else loss


class E04(Fault):
    says = "one layer begins 30 times too large"
    from_the_start = True
    expected = Expected(
        ("init_scale", "grad_spike", "output_jump", "vanishing", "dead_units"), 50, module=True
    )
    modules = ("fc1", "fc2")

    def prepare(self) -> None:
        self.module().weight.data.mul_(30 * self.strength)


class E05(Fault):
    says = "zero_grad is left out"
    net = "gpt"
    expected = Expected(("grad_spike", "loss_spike", "output_jump", "update_ratio"), 12)

    def update(self) -> None:
        self.optimizer.step()
        if not self.lasts:
            self.optimizer.zero_grad()


class E06(Fault):
    says = "the weights of queries and keys are 10 times too large"
    net = "gpt"
    expected = Expected(("grad_spike", "output_jump", "attn_logit", "weight_jump"), 1, module=True)
    modules = ("blocks.0.attn", "blocks.1.attn")

    def before_step(self) -> None:
        if self.due:
            self.module().q.weight.data.mul_(10 * self.strength)
            self.module().k.weight.data.mul_(10 * self.strength)


class E07(Fault):
    says = "labels are permuted"
    net, world, expected = "cnn", 2, Expected(("loss_spike", "loss_runaway", "cross_entropy"), 20)

    def batch(self) -> Batch:
        x, y = super().batch()
        return (x, (y + 1) % nets.CLASSES) if self.lasts else (x, y)


class F01(Fault):
    says = "a bias of -100 before a ReLU"
    expected = Expected(("dead_units", "grad_none_or_zero"), 20, module=True)
    modules = ("fc1|act1", "fc2|act2")

    def before_step(self) -> None:
        if self.due:
            self.module().bias.data.fill_(-100 * self.strength)


class F02(Fault):
    says = "ten sigmoid layers: nothing reaches the first ones"
    from_the_start = True
    expected = Expected(("grad_none_or_zero", "vanishing"), 100, module=True)

    modules = ("layers",)

    def make_model(self) -> nn.Module:
        return nets.Sigmoid()


class F03(Fault):
    says = "the learning rate becomes 0"
    net, expected = "cnn", Expected(("frozen_param",), 20)

    def before_step(self) -> None:
        if self.due:
            self.set_rate(0)


class F04(Fault):
    says = "the optimizer's step is left out"
    net, expected = "gpt", Expected(("frozen_param", "hang"), 20)

    def update(self) -> None:
        if not self.lasts:
            self.optimizer.step()
        self.optimizer.zero_grad()


class F05(Fault):
    says = "the backbone is frozen in the middle of training"
    net = "gpt"
    expected = Expected(("frozen_param", "grad_none_or_zero", "coverage"), 20, module=True)

    modules = ("blocks|embed",)

    def before_step(self) -> None:
        if self.due:
            self.model.embed.requires_grad_(requires_grad=False)
            self.model.blocks.requires_grad_(requires_grad=False)


class F06(Fault):
    says = "the head is replaced behind the optimizer's back"
    net, from_the_start = "cnn", True
    expected = Expected(("never_updated",), 50, module=True)
    modules = ("head",)

    def make_optimizer(self) -> torch.optim.Optimizer:
        made = super().make_optimizer()
        self.model.head = nn.Linear(16 * 16, nets.CLASSES)
        return made


class F07(Fault):
    says = "every parameter loses a tenth in each step"
    net, expected = "cnn", Expected(("weight_jump", "collapse", "loss_spike"), 15)

    def after_step(self) -> None:
        if self.lasts:
            for parameter in self.model.parameters():
                parameter.data.mul_(0.9)


class S01(Fault):
    says = "batches of zeros on one rank"
    net, world = "cnn", 3
    expected = Expected(("input_shift", "rank_outlier", "collapse"), 5, rank=True)

    def batch(self) -> Batch:
        x, y = super().batch()
        return (torch.zeros_like(x), y) if self.lasts and self.mine else (x, y)


class D01(Fault):
    says = "one weight differs by 1e-4 on one rank"
    world, expected = 3, Expected(("desync",), 1, rank=True, module=True)
    modules = ("fc1", "fc2", "head")

    def before_step(self) -> None:
        if self.due and self.mine:
            self.module().weight.data[0, 0] += 1e-4 * self.strength


class D02(Fault):
    says = "gradients are not reduced any more: DDP lost its hooks"
    world, expected = 3, Expected(("reduction", "desync"), 3)

    def before_step(self) -> None:
        if self.due:
            self.model.to(torch.float64)
            self.model.to(torch.float32)


class D03(Fault):
    says = "one rank contributes nothing: its loss is multiplied by 0"
    world, expected = 3, Expected(("rank_outlier",), 5, rank=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        return loss * 0 if self.lasts and self.mine else loss


class D04(Fault):
    says = "all ranks read the same data"
    world, from_the_start, expected = 3, True, Expected(("same_data",), 3)

    def data_seed(self) -> int:
        return 1000 * self.seed + 1


class D05(Fault):
    says = "the forward of one rank takes 30 ms more"
    world, expected = 2, Expected(("straggler",), 20, rank=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.lasts and self.mine:
            time.sleep(0.03 * self.strength)
        return super().loss(x, y)


class D06(Fault):
    says = "one rank is stopped (SIGSTOP)"
    world, expected = 3, Expected(("rank_lost",), 30, rank=True)
    daemon, early = "auto", 1  # told is the last step that was whole

    def before_step(self) -> None:
        if self.due and self.mine:
            os.kill(os.getpid(), signal.SIGSTOP)


FAULTS: dict[str, type[Fault]] = {
    one.__name__: one
    for one in (
        N01, N02, N03, N04, N05, N06, N07, E01, E02, E03, E04, E05, E06, E07,
        F01, F02, F03, F04, F05, F06, F07, S01, D01, D02, D03, D04, D05, D06,
    )
}  # fmt: skip
