"""Ten more faults that no list had: written when the rules were there, before any of them was run.

13 of 30 were found then at every=1, and 13 of 30 at every=10. Since then U26 and U30 have become a
rule, `grad_zeros`, and U28 is planted in another way: a call of `probe.step()` in place of the
optimizer's had ended the count of steps of its rank. No threshold was chosen by the others. What is
expected names every detector that speaks of the cause or of what follows from it at once. Each is
of a kind that real programs have had: a target that is shifted, a mask that is left out, ...
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from benchmarks.detection import nets
from benchmarks.detection.faults import Expected, Fault
from benchmarks.detection.learned import LOUD
from benchmarks.detection.nets import Batch


class U21(Fault):
    says = "the targets are shifted by one more place"
    net, world, expected = "gpt", 2, Expected((*LOUD, "cross_entropy"), 20)

    def batch(self) -> Batch:
        x, y = super().batch()
        return (x, y.roll(-1, dims=1)) if self.lasts else (x, y)


class U22(Fault):
    says = "the losses of four micro-batches are summed instead of averaged"
    net, micros, expected = "cnn", 4, Expected((*LOUD, "cross_entropy"), 25)

    def backward(self, loss: Tensor) -> None:
        super().backward(loss * self.micros if self.lasts else loss)


class U23(Fault):
    says = "a softmax before a loss that has its own"
    world, expected = 2, Expected(LOUD, 20)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.lasts:
            return super().loss(x, y)
        return nets.cross_entropy(self.wrapped(x).softmax(-1), y)


class U24(Fault):
    says = "the causal mask is left out"
    net, expected = "gpt", Expected((*LOUD, "output_drop"), 20)

    def before_step(self) -> None:
        if self.due:
            for block in self.model.blocks:
                block.attn.causal = False


class U25(Fault):
    says = "two of three ranks read the same shard"
    world, from_the_start, expected = 3, True, Expected(("same_data",), 10)

    def data_seed(self) -> int:
        return 1000 * self.seed + max(self.rank, 1)


class U26(Fault):
    says = "half of the rows of the embedding get no gradient"
    net, world = "gpt", 2
    expected = Expected(("grad_zeros", "grad_none_or_zero", "frozen_param"), 25, module=True)
    modules = ("embed",)

    def prepare(self) -> None:
        self.module().weight.register_hook(self._mask)

    def _mask(self, grad: Tensor) -> Tensor:
        rows = torch.arange(len(grad)) % 2
        return grad * rows[:, None] if self.lasts else grad


class U27(Fault):
    says = "only the norms are in evaluation mode"
    net, expected = "cnn", Expected(("mode_flip",), 25)

    def make_model(self) -> nn.Module:
        return nets.Residual()

    def before_step(self) -> None:
        if self.due:
            for module in self.model.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.eval()


class U28(Fault):
    says = "one step of the optimizer changes nothing on one rank"
    net, world, expected = "cnn", 3, Expected(("desync",), 2, rank=True)

    def update(self) -> None:
        if not (self.due and self.mine):
            super().update()
            return
        kept = [group["lr"] for group in self.optimizer.param_groups]
        self.set_rate(0)
        super().update()
        for group, rate in zip(self.optimizer.param_groups, kept, strict=True):
            group["lr"] = rate


class U29(Fault):
    says = "the weights of the start are loaded"
    net, world, expected = "gpt", 2, Expected(LOUD, 10)

    def prepare(self) -> None:
        self.first = copy.deepcopy(self.model.state_dict())

    def before_step(self) -> None:
        if self.due:
            self.model.load_state_dict(self.first)


class U30(Fault):
    says = "gradients below 0.001 are flushed to zero"
    net, world = "gpt", 2
    expected = Expected(("grad_zeros", "grad_none_or_zero", "vanishing", "frozen_param"), 25)

    def prepare(self) -> None:
        for parameter in self.model.parameters():
            parameter.register_hook(self._flush)

    def _flush(self, grad: Tensor) -> Tensor:
        return grad * (grad.abs() >= 1e-3 * self.strength) if self.lasts else grad


FRESH: dict[str, type[Fault]] = {
    one.__name__: one for one in (U21, U22, U23, U24, U25, U26, U27, U28, U29, U30)
}
