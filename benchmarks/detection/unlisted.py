"""The first ten faults that no list had, and with them all that stand in no list.

They were written before any of them was run, and 16 and 14 of 30 were found then. What they and
those of `learned` had in common has become rules, so that they say of other faults no more than the
listed ones; those of `fresh` and of the twelve sets do. What is expected names every detector that
speaks of the cause or of what follows from it at once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.detection import nets
from benchmarks.detection.faults import Expected, Fault
from benchmarks.detection.fresh import FRESH
from benchmarks.detection.learned import SECOND
from benchmarks.detection.nets import Batch
from benchmarks.detection.set_a import SET_A
from benchmarks.detection.set_b import SET_B
from benchmarks.detection.set_c import SET_C
from benchmarks.detection.set_d import SET_D
from benchmarks.detection.set_e import SET_E
from benchmarks.detection.set_f import SET_F
from benchmarks.detection.set_g import SET_G
from benchmarks.detection.set_h import SET_H
from benchmarks.detection.set_i import SET_I
from benchmarks.detection.set_j import SET_J
from benchmarks.detection.set_k import SET_K
from benchmarks.detection.set_l import SET_L


class U01(Fault):
    says = "the inputs of one rank are drawn at random, the labels stay"
    net, world, expected = "gpt", 2, Expected(("rank_outlier",), 10, rank=True)

    def batch(self) -> Batch:
        x, y = super().batch()
        if self.lasts and self.mine:
            x = torch.randint(0, nets.VOCABULARY, x.shape, generator=self.data.own)
        return x, y


class U02(Fault):
    says = "images are not divided by 100 any more"
    net = "cnn"
    expected = Expected(
        ("input_shift", "output_jump", "grad_spike", "loss_spike", "update_ratio", "loss_runaway"),
        2,
    )

    def batch(self) -> Batch:
        x, y = super().batch()
        return (x * 100 * self.strength, y) if self.lasts else (x, y)


class U03(Fault):
    says = "the output of an attention is detached"
    net = "gpt"
    expected = Expected(("grad_none_or_zero", "frozen_param", "coverage"), 25, module=True)
    modules = ("blocks.0.attn", "blocks.1.attn")

    def prepare(self) -> None:
        self.module().register_forward_hook(self._cut)

    def _cut(self, _: nn.Module, __: object, out: Tensor) -> Tensor:
        return out.detach() if self.lasts else out


class U04(Fault):
    says = "the gain of one layer norm is set to 0"
    net = "gpt"
    expected = Expected(
        ("output_drop", "dead_units", "weight_jump", "output_jump", "grad_spike", "loss_spike",
         "grad_none_or_zero", "update_ratio"), 5, module=True,
    )  # fmt: skip
    modules = ("blocks.0.norm2|blocks.0.up", "blocks.1.norm2|blocks.1.up")

    def before_step(self) -> None:
        if self.due:
            self.module().weight.data.zero_()


class U05(Fault):
    says = "the gradients of one rank are 8 times too large before the reduction"
    world, expected = 3, Expected(("rank_outlier", "grad_spike"), 10, rank=True)

    def prepare(self) -> None:
        for parameter in self.model.parameters():
            parameter.register_hook(self._enlarge)

    def _enlarge(self, grad: Tensor) -> Tensor:
        return grad * 8 * self.strength if self.lasts and self.mine else grad


class U06(Fault):
    says = "one rank is given the same batch again and again"
    net, world, expected = "cnn", 2, Expected(("stuck_data",), 25, rank=True)
    kept: Batch | None = None

    def batch(self) -> Batch:
        if not (self.lasts and self.mine):
            return super().batch()
        self.kept = self.kept or super().batch()
        return self.kept


class U07(Fault):
    says = "the weight decay is 1000 times too high"
    net = "gpt"
    expected = Expected(("weight_jump", "loss_runaway", "loss_spike", "update_ratio"), 40)

    def before_step(self) -> None:
        if self.due:
            for group in self.optimizer.param_groups:
                group["weight_decay"] *= 1000 * self.strength


class U08(Fault):
    says = "nobody sets training mode again after an evaluation"
    net, expected = "cnn", Expected(("mode_flip",), 25)

    def make_model(self) -> nn.Module:
        return nets.Residual()

    def before_step(self) -> None:
        if self.due:
            self.model.eval()


class U09(Fault):
    says = "the sign of the gradients is wrong: the loss is maximized"
    net, world = "gpt", 2
    expected = Expected(
        ("loss_runaway", "loss_spike", "grad_spike", "output_jump", "weight_jump", "update_ratio"),
        60,
    )

    def before_update(self) -> None:
        if self.lasts:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.neg_()


class U10(Fault):
    says = "gradients are summed over the ranks instead of averaged"
    world, expected = 3, Expected(("reduction", "grad_spike", "update_ratio"), 10)

    def before_step(self) -> None:
        if self.step == 0:
            self.reduce_by(self._reduce)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        by = 1 if self.lasts else self.world
        return done.then(lambda future: future.value()[0] / by)


FIRST: dict[str, type[Fault]] = {
    one.__name__: one for one in (U01, U02, U03, U04, U05, U06, U07, U08, U09, U10)
}
LEARNED = FIRST | SECOND
SETS = SET_A | SET_B | SET_C | SET_D | SET_E | SET_F | SET_G | SET_H | SET_I | SET_J | SET_K | SET_L
UNLISTED = LEARNED | FRESH | SETS
