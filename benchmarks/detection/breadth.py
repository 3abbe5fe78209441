"""Healthy runs in other ways to train: sharded, in low precision, compiled, accumulated."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.detection import nets
from benchmarks.detection.healthy import Healthy
from benchmarks.detection.nets import Batch


class Y01(Healthy):
    trap, net, world, wrap = "FSDP2: a GPT, AdamW", "gpt", 2, "fsdp2"


class Y02(Healthy):
    trap, net, world, wrap = "FSDP2: a CNN with batch norm, three ranks", "cnn", 3, "fsdp2"

    def make_model(self) -> nn.Module:
        return nets.Residual()


class Y03(Healthy):
    trap, net, world, micros = "FSDP2: four micro-batches, one reduction, clipped", "gpt", 2, 4
    wrap = "fsdp2"

    def batch(self) -> Batch:
        return self.data.text(size=4)

    def backward(self, loss: Tensor) -> None:
        self.wrapped.set_requires_gradient_sync(self.micro == self.micros - 1)
        loss.backward()

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class Y04(Healthy):
    trap, net, world, wrap = "FSDP2: computes in bfloat16, reduces in float32", "gpt", 2, "fsdp2"

    def wrap_model(self) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            fully_shard(block, mp_policy=policy)
        return fully_shard(self.model, mp_policy=policy)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nets.cross_entropy(self.wrapped(x).float(), y)


class _Autocast(Healthy):
    kind = torch.bfloat16

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", self.kind):
            out = self.wrapped(x)
        return nets.cross_entropy(out.float(), y)


class Y05(_Autocast):
    trap, net = "autocast to bfloat16: a GPT", "gpt"


class Y06(_Autocast):
    trap, net, world = "autocast to bfloat16: a CNN under DDP", "cnn", 2


class Y07(_Autocast):
    trap, net, world = "float16 and a GradScaler, a CNN under DDP, gradients clipped", "cnn", 2
    kind = torch.float16

    def prepare(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu", growth_interval=50)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Y08(Healthy):
    trap, net = "torch.compile: a GPT", "gpt"

    def wrap_model(self) -> nn.Module:
        self.model.compile()
        return self.model


class Y09(Healthy):
    trap, net, world = "torch.compile of the blocks: a GPT under DDP", "gpt", 2

    def wrap_model(self) -> nn.Module:
        for block in self.model.blocks:
            block.compile()
        return super().wrap_model()


class Y10(Healthy):
    trap, net, micros = "eight micro-batches in one process, clipped", "gpt", 8

    def batch(self) -> Batch:
        return self.data.text(size=2)

    def before_update(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


BREADTH: dict[str, type[Healthy]] = {
    one.__name__: one for one in (Y01, Y02, Y03, Y04, Y05, Y06, Y07, Y08, Y09, Y10)
}
