"""What the overhead is measured on: one training step of a GPT, a ResNet, and two small models."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "launch"))  # scripts, and no package
from train_gpt import GPT, wrap


class _Residual(nn.Module):
    """The basic block of ResNet-18 with in-place ReLUs, as torchvision writes it."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1, self.relu = nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:  # [batch, inputs, height, width]
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """ResNet-18 for small images: a 3x3 stem and no pooling before the stages."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        plan = [
            (1, 1, 1),
            (1, 1, 1),
            (1, 2, 2),
            (2, 2, 1),
            (2, 4, 2),
            (4, 4, 1),
            (4, 8, 2),
            (8, 8, 1),
        ]
        self.stages = nn.Sequential(*(_Residual(i * width, o * width, s) for i, o, s in plan))
        self.head = nn.Linear(8 * width, 10)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.stages(self.stem(images)).mean((2, 3)))
        return logits, nn.functional.cross_entropy(logits, labels)


class MLP(nn.Module):
    """Four layers: about the smallest step that is still training."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        layers = [part for _ in range(3) for part in (nn.Linear(dim, dim), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(dim, 10))

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.layers(x)
        return logits, nn.functional.cross_entropy(logits, labels)


@dataclass(frozen=True)
class Workload:
    """A model, its data, and how many steps make a block that a clock can tell apart.

    Attributes:
        title: what it is, for the table.
        build: makes the model.
        batch: makes one batch, the arguments of its forward.
        wrapper: "ddp" or "fsdp2".
        steps: in a block.
        goals: largest ratio of a sampled and of an unsampled step; None: none is set.
        autocast: of the forward; None: as the model is.
    """

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    wrapper: str
    steps: int
    goals: tuple[float | None, float | None]
    autocast: torch.dtype | None = None


def _text(batch: int, length: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(256, (batch, length + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))


WORKLOADS = {
    f"gpt-{wrapper}": Workload(
        f"GPT of 10.9 M parameters (6 layers of 384), batch 4 x 256, {wrapper.upper()}",
        lambda: GPT(6, 384, 6, 256), lambda: _text(4, 256), wrapper, 1, (1.02, 1.002),
    )
    for wrapper in ("ddp", "fsdp2")
} | {
    "resnet": Workload(
        "ResNet-18 of 11.2 M parameters, in-place ReLU, batch 16 x 3 x 32 x 32, DDP",
        ResNet, lambda: _images(16), "ddp", 1, (1.05, 1.002),
    ),
    "small-gpt": Workload(
        "small step: GPT of 2 layers of 32, batch 2 x 16, DDP",
        lambda: GPT(2, 32, 2, 16), lambda: _text(2, 16), "ddp", 100, (None, 1.02),
    ),
    "small-mlp": Workload(
        "small step: MLP of 4 layers of 128, batch 64, DDP",
        lambda: MLP(128), lambda: (torch.randn(64, 128), torch.randint(10, (64,))),
        "ddp", 100, (None, 1.02),
    ),
}  # fmt: skip


# Steps as a GPU sees them: enough work for one to be busy with.
ON_GPU = {
    name: Workload(
        f"GPT of {count} parameters ({layers} layers of {dim}), {batch} x {length}, bf16, DDP",
        partial(GPT, layers, dim, heads, length), partial(_text, batch, length), "ddp", steps,
        (1.02, 1.002), torch.bfloat16,
    )
    for name, count, layers, dim, heads, batch, length, steps in (
        ("gpt-10m", "10.9 M", 6, 384, 6, 32, 256, 20),
        ("gpt-125m", "128 M", 18, 768, 12, 8, 1024, 10),
        ("gpt-1b", "1.0 B", 20, 2048, 16, 8, 1024, 4),
    )
}  # fmt: skip


class Training:
    """A workload under way on this rank: `step()` is what a loop does between two batches."""

    def __init__(self, workload: Workload, rank: int, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        with self.device:
            model = workload.build()
        self.model = wrap(model, workload.wrapper, self.device)
        # A model that learnt its one batch by heart would end among subnormal numbers, which are
        # many times slower: at lr=0 every step does the same work on the same numbers.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        torch.manual_seed(1 + rank)
        self._batch = [tensor.to(self.device) for tensor in workload.batch()]
        self._low = workload.autocast

    def step(self) -> Tensor:
        """Train on the batch; return the loss."""
        loss = self.forward()
        loss.backward()
        self.update()
        return loss

    def forward(self) -> Tensor:
        """Return the loss of the batch."""
        low = self._low
        with torch.autocast(self.device.type, low) if low else contextlib.nullcontext():
            loss: Tensor = self.model(*self._batch)[1]
        return loss

    def update(self) -> None:
        """Let the optimizer use the gradients, and forget them."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def wait(self) -> None:
        """Wait until the device has done what it was told."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
