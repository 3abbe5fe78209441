"""Set A: ten of twenty faults written by somebody who had not read the detectors' rules.

Drawn from what goes wrong in training programs by papers and issue trackers, the source beside
each, before any of them was run with the probe. A lot split the twenty into this set and `set_b`,
separately among those that begin at the start, happen once, and last. From this one may be learned;
the other is for one measurement, after the last rule. What is expected names every detector that
speaks of the cause or of what follows from it at once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.detection.faults import LINEARS, Expected, Fault
from benchmarks.detection.learned import LOUD
from benchmarks.detection.nets import Batch


class U31(Fault):
    # FunASR pull request 3472: the condition of no_sync is off by one.
    says = "of four micro-batches the first is reduced, and not the last"
    net, world, micros, from_the_start = "cnn", 2, 4, True
    expected = Expected(("reduction", "desync"), 10)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.wrapped.require_backward_grad_sync = self.micro == 0  # what no_sync() sets
        return super().loss(x, y)


class U32(Fault):
    # verl-SpeCo pull request 29: a mean over all ranks is reduced by a mean over all ranks.
    says = "gradients are averaged over the ranks twice"
    net, world, from_the_start = "cnn", 4, True
    expected = Expected(
        ("reduction", "grad_altered", "update_ratio", "vanishing", "level_shift"), 20
    )

    def before_step(self) -> None:
        if self.step == 0:
            self.reduce_by(self._reduce)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return done.then(lambda future: future.value()[0] / self.world**2)


class _Adapted(nn.Module):
    """A linear layer with an adapter of low rank, which begins at zero."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.narrow = nn.Linear(base.in_features, rank, bias=False)
        self.wide = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.wide.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.wide(self.narrow(x))


class U33(Fault):
    # sd-scripts pull request 989, pytorch issue 12603: DDP does not know what came after it.
    says = "an adapter is put in after DDP: nobody reduces its gradients"
    net, world, from_the_start = "gpt", 3, True
    expected = Expected(("reduction", "desync"), 10, module=True)
    modules = ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down")

    def wrap_model(self) -> nn.Module:
        wrapped = DistributedDataParallel(self.model)
        around, _, name = self.where.rpartition(".")
        self.model.get_submodule(around).register_module(name, _Adapted(self.module()))
        return wrapped


class U34(Fault):
    # Humbatova et al., ICSE 2020: missing normalization of the training data.
    says = "images are not normalized: values as in a file, from 0 to 255"
    net, from_the_start = "cnn", True
    expected = Expected(
        (*LOUD, "dead_units", "grad_none_or_zero", "grad_zeros", "frozen_param", "vanishing",
         "init_scale", "nonfinite", "output_drop", "collapse"), 30,
    )  # fmt: skip

    def batch(self) -> Batch:
        x, y = super().batch()
        return (128 + 40 * self.strength * x).clamp(0, 255), y


class U35(Fault):
    # Dixit et al., arXiv 2102.11245: what comes back from a bad core or a file is zero.
    says = "a page of memory (4 KiB) of one weight is zero"
    net = "gpt"
    expected = Expected((*LOUD, "output_drop", "dead_units"), 50, module=True)
    modules = LINEARS

    def before_step(self) -> None:
        if self.due:
            pages = self.module().weight.data.view(-1, 1024)
            pages[self.draw.randrange(len(pages))] = 0


class U36(Fault):
    # stylegan2-ada-pytorch issue 108: the state of Adam is not in the checkpoint.
    says = "the optimizer's state is lost: a resume without it"
    net, world, expected = "gpt", 2, Expected(("optimizer_reset", *LOUD), 20)

    def before_step(self) -> None:
        if self.due:
            self.optimizer.state.clear()


class U37(Fault):
    # bnnr issue 394, super-gradients pull request 1202: an augmentation expects 0 to 1.
    says = "inputs that are normalized are clipped to between 0 and 1"
    world = 2
    expected = Expected(("input_shift", *LOUD, "output_drop", "dead_units", "grad_zeros"), 30)

    def batch(self) -> Batch:
        x, y = super().batch()
        return (x.clamp(0, 1), y) if self.lasts else (x, y)


class U38(Fault):
    # Humbatova et al., ICSE 2020: wrong learning rate, the most frequent of their hyperparameters.
    says = "the learning rate is 30 times too high from the start"
    net, world, from_the_start = "cnn", 2, True
    expected = Expected(
        (*LOUD, "dead_units", "grad_none_or_zero", "grad_zeros", "vanishing", "frozen_param",
         "nonfinite", "collapse"), 50,
    )  # fmt: skip

    def make_optimizer(self) -> torch.optim.Optimizer:
        rate = 0.02 * 30 * self.strength
        return torch.optim.SGD(self.model.parameters(), lr=rate, momentum=0.9)


class U39(Fault):
    # ivadomed pull request 55, pytorch/vision issue 1261: stepped per batch instead of per epoch.
    says = "the decay of the learning rate that was meant for an epoch comes in each step"
    expected = Expected(("frozen_param", "update_ratio", "level_shift"), 50)

    def after_step(self) -> None:
        if self.lasts:
            self.set_rate(0.5**self.strength)


class U40(Fault):
    # arXiv 2605.04213: faults of a GPU that stick hit the same lanes again and again.
    says = "one rank gets one unit of a layer 16 times too large: a lane of its multiplier sticks"
    world = 3
    expected = Expected(("rank_outlier", *LOUD), 30, rank=True, module=True)
    modules = ("fc1|act1", "fc2|act2")

    def prepare(self) -> None:
        self.lane = self.draw.randrange(self.module().out_features)
        self.module().register_forward_hook(self._enlarge)

    def _enlarge(self, _: nn.Module, __: object, out: Tensor) -> Tensor:
        if self.lasts and self.mine:
            out = out.clone()
            out[..., self.lane] *= 16 * self.strength
        return out


SET_A: dict[str, type[Fault]] = {
    one.__name__: one for one in (U31, U32, U33, U34, U35, U36, U37, U38, U39, U40)
}
