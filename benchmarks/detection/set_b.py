"""Set B: the other ten of the twenty; see `set_a`. Rules were made from U41 and U42.

They were written with those of set A, by somebody who had not read the detectors' rules and had not
run any of them with the probe.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.detection import nets
from benchmarks.detection.faults import LINEARS, Expected, Fault
from benchmarks.detection.learned import LOUD
from benchmarks.detection.nets import Batch


class U41(Fault):
    # EveryDream2trainer pull request 175: clipped after the GradScaler, before it unscales.
    says = "gradients are clipped while they are scaled: next to nothing is left of them"
    net, from_the_start = "cnn", True
    expected = Expected(
        ("update_ratio", "frozen_param", "never_updated", "vanishing", "grad_altered",
         "grad_none_or_zero", "grad_zeros", "level_shift"), 50,
    )  # fmt: skip

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.strength)

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class U42(Fault):
    # Humbatova et al., ICSE 2020: wrong initialization of weights; AUTOTRAINER: dying ReLU.
    says = "one layer before a ReLU begins with zeros"
    world, from_the_start = 2, True
    expected = Expected(
        ("init_scale", "dead_units", "grad_none_or_zero", "grad_zeros", "never_updated",
         "frozen_param", "vanishing"), 50, module=True,
    )  # fmt: skip
    modules = ("fc1|act1", "fc2|act2")

    def prepare(self) -> None:
        for parameter in self.module().parameters():
            nn.init.zeros_(parameter)


class U43(Fault):
    # vllm speculators pull request 765: weights in bfloat16 without a copy in float32.
    says = "weights in bfloat16: the gains of the norms are too coarse for their updates"
    net, from_the_start = "gpt", True
    expected = Expected(("never_updated", "frozen_param", "update_ratio"), 50, module=True)
    modules = ("blocks.0.norm1|blocks.0.norm2|blocks.1.norm1|blocks.1.norm2|norm",)

    def prepare(self) -> None:
        self.model.to(torch.bfloat16)

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=5e-4 * self.strength)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nets.cross_entropy(self.wrapped(x).float(), y)


class U44(Fault):
    # arXiv 2604.00726: corruption of gradients by hardware in the training of LLaMA.
    says = "a bit of one weight's gradient is flipped on one rank before the reduction"
    net, world = "gpt", 3
    expected = Expected(("nonfinite", "rank_outlier", *LOUD), 10, rank=True, module=True)
    modules = LINEARS

    def prepare(self) -> None:
        self.module().weight.register_hook(self._flip)

    def _flip(self, grad: Tensor) -> Tensor:
        if self.due and self.mine:
            grad = grad.clone()
            grad.view(torch.int32)[0, 0] ^= 1 << 30
        return grad


class U45(Fault):
    # ROCm Megatron-LM pull request 63: parts of a distributed checkpoint in the wrong places.
    says = "every rank loads the shard of its neighbour"
    net, world, wrap = "gpt", 4, "fsdp2"
    expected = Expected((*LOUD, "output_drop"), 10)

    def before_step(self) -> None:
        if self.due:
            for parameter in self.model.parameters():
                mine = parameter.data.to_local()
                all_of_them = [torch.empty_like(mine) for _ in range(self.world)]
                dist.all_gather(all_of_them, mine.contiguous())
                mine.copy_(all_of_them[(self.rank + 1) % self.world])


class U46(Fault):
    # InternLM pull request 277: a gradient is taken before its reduction has ended.
    says = "one of DDP's buckets is not reduced, one step"
    net, world, expected = "cnn", 2, Expected(("desync", "reduction"), 10)

    def wrap_model(self) -> nn.Module:
        return DistributedDataParallel(self.model, bucket_cap_mb=0.002)

    def before_step(self) -> None:
        if self.step == 0:
            self.skipped = self.draw.randrange(2)
            self.reduce_by(self._reduce)

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        if self.due and bucket.index() == self.skipped:
            kept: torch.futures.Future[Tensor] = torch.futures.Future()
            kept.set_result(bucket.buffer())
            return kept
        done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return done.then(lambda future: future.value()[0] / self.world)


class U47(Fault):
    # Lin et al., arXiv 2505.05713: what makes stragglers in the training of large models.
    says = "the batches of one rank come 30 ms late"
    world, expected = 4, Expected(("straggler",), 30, rank=True)

    def batch(self) -> Batch:
        if self.lasts and self.mine:
            time.sleep(0.03 * self.strength)
        return super().batch()


class U48(Fault):
    # AtacWorks issue 207: every sample of a batch is the same one.
    says = "on one rank, all samples of a batch are copies of its first"
    net, world = "gpt", 3
    expected = Expected(
        ("rank_outlier", "same_data", "stuck_data", "collapse", *LOUD), 30, rank=True
    )

    def batch(self) -> Batch:
        x, y = super().batch()
        return (x[:1].expand_as(x), y[:1].expand_as(y)) if self.lasts and self.mine else (x, y)


class U49(Fault):
    # OpenJarvis pull request 521: the labels of padding are not masked.
    says = "padding counts in the loss"
    net = "gpt"
    expected = Expected(("input_shift", *LOUD, "output_drop", "cross_entropy"), 30)

    def batch(self) -> Batch:
        x, y = super().batch()
        ends = torch.randint(8, 25, (len(x), 1), generator=self.data.own)
        padding = torch.arange(x.shape[1]) >= ends
        return x.masked_fill(padding, 0), y.masked_fill(padding, 0 if self.lasts else -100)


class _Placed(nn.Module):
    """The `Gpt`, told where its characters stand."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt, self.lost = nets.Gpt(), False

    def forward(self, x: Tensor) -> Tensor:
        gpt, places = self.gpt, torch.arange(x.shape[1])
        h = gpt.embed(x) + gpt.place(places * 0 if self.lost else places)
        for block in gpt.blocks:
            h = block(h)
        return gpt.head(gpt.norm(h))


class U50(Fault):
    # nnsight pull request 673, TransformerLens issue 1609: wrong positions, and no error.
    says = "all characters are told to stand at the first place"
    net, world = "gpt", 2
    expected = Expected(
        (*LOUD, "output_drop", "grad_zeros", "grad_none_or_zero", "frozen_param"), 20
    )

    def make_model(self) -> nn.Module:
        return _Placed()

    def before_step(self) -> None:
        if self.due:
            self.model.lost = True


SET_B: dict[str, type[Fault]] = {
    one.__name__: one for one in (U41, U42, U43, U44, U45, U46, U47, U48, U49, U50)
}
