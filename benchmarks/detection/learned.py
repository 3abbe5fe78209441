"""The second ten faults that no list had; two rules were made from what U18 and U19 showed.

They were written before any of them was run: 18 of 30 were found at every=1 then, and 17 at
every=10. What is expected names every detector that speaks of the cause or of what follows from it
at once.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from benchmarks.detection import nets
from benchmarks.detection.faults import Expected, Fault
from benchmarks.detection.nets import Batch

LOUD = (
    "loss_spike", "loss_runaway", "level_shift", "output_jump", "grad_spike", "update_ratio",
    "weight_jump",
)  # fmt: skip


class U11(Fault):
    says = "the images of one rank are not normalized"
    net, world, expected = "cnn", 2, Expected(("input_shift", "rank_outlier", *LOUD), 10, rank=True)

    def batch(self) -> Batch:
        x, y = super().batch()
        return (x * 20 * self.strength + 10, y) if self.lasts and self.mine else (x, y)


class U12(Fault):
    says = "Adam loses its second moments, and keeps the rest"
    net, expected = "gpt", Expected(LOUD, 5)

    def before_step(self) -> None:
        if self.due:
            for state in self.optimizer.state.values():
                state["exp_avg_sq"].zero_()


class U13(Fault):
    says = "one sample of each batch is 1000 times too large"
    expected = Expected(("input_shift", *LOUD, "dead_units"), 2)

    def batch(self) -> Batch:
        x, y = super().batch()
        if self.lasts:
            x[self.draw.randrange(len(x))] *= 1000 * self.strength
        return x, y


class U14(Fault):
    says = "a dropout of 0.95 after one activation"
    net = "gpt"
    expected = Expected((*LOUD, "dead_units", "output_drop"), 20)
    modules = ("blocks.0.act", "blocks.1.act")

    def prepare(self) -> None:
        self.module().register_forward_hook(self._drop)

    def _drop(self, _: nn.Module, __: object, out: Tensor) -> Tensor:
        return nn.functional.dropout(out, 0.95) if self.lasts else out


class U15(Fault):
    says = "the tokenizer is another one: all characters are exchanged"
    net, world, expected = "gpt", 2, Expected(LOUD, 20)

    def batch(self) -> Batch:
        x, y = super().batch()
        table = torch.randperm(nets.VOCABULARY, generator=torch.Generator().manual_seed(self.seed))
        return (table[x], y) if self.lasts else (x, y)


class U16(Fault):
    says = "one block is not given to the optimizer"
    net, from_the_start = "gpt", True
    expected = Expected(("never_updated", "frozen_param"), 50, module=True)
    modules = ("blocks.0", "blocks.1")

    def make_optimizer(self) -> torch.optim.Optimizer:
        given = [p for n, p in self.model.named_parameters() if not n.startswith(self.where)]
        return torch.optim.AdamW(given, lr=3e-3)


class U17(Fault):
    says = "one rank alone stays in evaluation mode"
    world, expected = 2, Expected(("mode_flip", "rank_outlier"), 25, rank=True)

    def make_model(self) -> nn.Module:
        return nets.Residual()

    def batch(self) -> Batch:
        return self.data.images()

    def before_step(self) -> None:
        if self.due and self.mine:
            self.model.eval()


class U18(Fault):
    says = "the gradient of one layer is lost on one rank"
    net, world = "gpt", 3
    expected = Expected(("grad_none_or_zero", "rank_outlier", "reduction"), 25, rank=True)
    modules = ("blocks.0.attn.v", "blocks.0.up", "blocks.1.down", "head")

    def prepare(self) -> None:
        for parameter in self.module().parameters():
            parameter.register_hook(self._lose)

    def _lose(self, grad: Tensor) -> Tensor:
        return grad * 0 if self.lasts and self.mine else grad


class U19(Fault):
    says = "gradients are rounded to multiples of 0.02 before the optimizer"
    expected = Expected(
        ("grad_none_or_zero", "grad_altered", "frozen_param", "update_ratio", "vanishing"), 25
    )

    def before_update(self) -> None:
        if self.lasts:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(0.02).round_().mul_(0.02)


class U20(Fault):
    says = "every rank is given its own batch again and again"
    net, world, expected = "gpt", 2, Expected(("stuck_data",), 25)
    kept: Batch | None = None

    def batch(self) -> Batch:
        if not self.lasts:
            return super().batch()
        self.kept = self.kept or super().batch()
        return self.kept


SECOND: dict[str, type[Fault]] = {
    one.__name__: one for one in (U11, U12, U13, U14, U15, U16, U17, U18, U19, U20)
}
