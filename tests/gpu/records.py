"""Part `records`: the same training on a GPU gives the records that it gives on the CPU.

What a loop is told on the device (labels, targets, digests, what was computed again) takes other
ways there than on the CPU: nothing may wait for it. Each case trains the same model on the same
batches twice, once on each, and compares record by record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import ddpprobe
from ddpprobe.records.step import StepRecord
from tests.gpu.parts import Case, Context

STEPS, EVERY = 60, 2
COMPARED = 4  # records whose numbers are compared: by then other roundings have not yet grown
WORDS, WIDTH, CLASSES = 40, 32, 10
CLOSE = 2e-3  # of a number: float32 of another order of additions, over some steps
NEAR_ZERO = 1e-5  # of the largest number of a site
MOVED = 0.01  # of the elements, or one: those that other roundings put on the other side of 0
TIMED = "seconds"  # in the name of a scalar that no two runs have alike


def cases() -> dict[str, Case]:
    return {name: partial(compare, task) for name, task in TASKS.items()}


def compare(task: Task, context: Context) -> None:
    """Train on the CPU and on the device, and say what differs."""
    here, there = (
        trained(task, device, context.scratch / kind)
        for device, kind in (("cpu", "cpu"), (context.device, "device"))
    )
    found = list(differences(here[:COMPARED], there[:COMPARED]))
    sites, numbers = len(there[0].sites), len(there[-1].scalars[0])
    text = "; ".join(found[:5]) or f"{len(there)} records, {sites} sites, {numbers} scalars"
    context.findings.check("records as on the CPU", holds=not found, text=text)
    said, wanted = (verdicts(context.scratch / kind) for kind in ("device", "cpu"))
    text = ", ".join(sorted({name for name, *_ in said})) or "nothing was said"
    text = text if said == wanted else f"{said}, not {wanted}"
    context.findings.check("verdicts as on the CPU", holds=said == wanted, text=text)


def trained(task: Task, device: str, run: Path) -> list[StepRecord]:
    """Train; return the records."""
    torch.manual_seed(0)
    model = task.model()
    nn.init.normal_(next(model.parameters()), std=0.3)  # the same numbers on either device
    model.to(device)
    optimizer = task.optimizer(model.parameters())
    probe = ddpprobe.install(model, run_dir=run, every=EVERY, daemon="none")
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        for _ in range(task.micro):
            batch, answer = (t.to(device) for t in task.batch(draw))
            (task.loss(model(batch), answer) / task.micro).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if not task.keeps:
            optimizer.zero_grad()
    probe.close()
    return list(ddpprobe.open(run).records())


def verdicts(run: Path) -> set[tuple[str, str, int, str | None]]:
    """Return what the detectors say, but for the numbers."""
    return {(a.detector, a.level, a.step, a.module) for a in ddpprobe.open(run).anomalies()}


def differences(here: list[StepRecord], there: list[StepRecord]) -> Iterator[str]:
    """Say in which of the numbers, sites and steps two runs part."""
    if [r.step for r in here] != [r.step for r in there]:
        yield f"steps {[r.step for r in there]}, not {[r.step for r in here]}"
    for one, other in zip(here, there, strict=False):
        for said in (*_scalars(one, other), *_rows(one, other)):
            yield f"step {one.step}: {said}"


def _scalars(here: StepRecord, there: StepRecord) -> Iterator[str]:
    wanted, got = (
        {name: value for name, value in r.scalars.get(0, {}).items() if TIMED not in name}
        for r in (here, there)
    )
    for name in sorted(wanted.keys() ^ got.keys()):
        yield f"{name} only on the {'CPU' if name in wanted else 'device'}"
    for name in sorted(wanted.keys() & got.keys()):
        if not np.isclose(got[name], wanted[name], rtol=CLOSE, atol=1e-6, equal_nan=True):
            yield f"{name} is {got[name]:.6g}, not {wanted[name]:.6g}"


def _rows(here: StepRecord, there: StepRecord) -> Iterator[str]:
    if here.sites != there.sites:
        apart = set(map(str, here.sites)) ^ set(map(str, there.sites))
        yield f"other sites or another order: {sorted(apart)[:4]}"
        return
    for row, site in enumerate(here.sites):
        moved = np.abs(here.counts[row] - there.counts[row])
        if (moved > np.maximum(1, MOVED * here.counts[row])).any():
            yield f"{site} counts {there.counts[row]}, not {here.counts[row]}"
        bound = NEAR_ZERO * max(1.0, float(np.abs(here.values[row]).max()))
        if not np.allclose(there.values[row], here.values[row], rtol=5 * CLOSE, atol=bound):
            yield f"{site} has {there.values[row]}, not {here.values[row]}"


def adamw(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, **options)


@dataclass(frozen=True)
class Task:
    """What is trained: a model, what it is given, and the loss.

    Attributes:
        model: makes it, on the CPU.
        batch: draws inputs and what the loss compares with, on the CPU.
        loss: of the model's output and that.
        optimizer: makes it of the parameters.
        micro: batches of a step.
        keeps: whether the loop forgets `zero_grad`.
    """

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer] = adamw
    micro: int = 1
    keeps: bool = False


class Language(nn.Module):
    """A transformer of one layer whose block may be checkpointed and compute something else again.

    Args:
        remat: whether it is checkpointed.
        apart: whether what is computed again differs.
    """

    def __init__(self, *, remat: bool = False, apart: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        # With biases the keys' gradient is zero but for rounding, and no two devices round alike.
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 64, 0.0, batch_first=True, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.remat, self.apart, self.calls = remat, apart, 0

    def forward(self, words: Tensor) -> Tensor:
        x = self.block(self.embed(words))
        if self.remat:
            x = checkpoint(self.inner, x, use_reentrant=False)
        head: Tensor = self.head(x)
        return head

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        odd = self.apart and self.calls % 2 == 0
        return x + self.down(self.up(x * 1.5 if odd else x).relu())


class Experts(nn.Module):
    """A residual layer of experts, of which a router gives each row to one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        weight, chosen = self.router(x).softmax(-1).max(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mixed = mixed + expert(x) * (weight * (chosen == number)).unsqueeze(-1)
        head: Tensor = self.head(x + mixed)
        return head


def vision() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, CLASSES),
    )  # fmt: skip


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def words(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, WORDS, (8, 17), generator=draw)
    return drawn[:, :-1], drawn[:, 1:]


def copied(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw words, of which the loss wants the very ones."""
    drawn = torch.randint(0, WORDS, (8, 16), generator=draw)
    return drawn, drawn


def pictures(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw pictures, most of one class and some without a label."""
    label = torch.randint(0, CLASSES, (32,), generator=draw)
    label = torch.where(torch.rand(32, generator=draw) < 0.6, 3, label)
    label[:4] = -100
    return torch.randn(32, 3, 8, 8, generator=draw), label


def rows(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, WIDTH, generator=draw)
    return x, x[:, :3] * 2 + 1


def labelled(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, WIDTH, generator=draw)
    return x, torch.randint(0, CLASSES, (64,), generator=draw)


def over_words(output: Tensor, answer: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), answer.flatten())


def weighted(output: Tensor, answer: Tensor) -> Tensor:
    weight = torch.linspace(1, 2, CLASSES, device=output.device)
    return functional.cross_entropy(output, answer, weight=weight)


TASKS = {
    "language": Task(Language, words, over_words),
    "language, fused AdamW, 2 micro-batches": Task(
        Language, words, over_words, partial(adamw, fused=True), micro=2
    ),
    "language that copies": Task(Language, copied, over_words),
    "language, checkpointed": Task(partial(Language, remat=True), words, over_words),
    "language, computed again otherwise": Task(
        partial(Language, remat=True, apart=True), words, over_words
    ),
    "vision": Task(vision, pictures, functional.cross_entropy),
    "vision, weighted, SGD": Task(
        vision, pictures, weighted, partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    ),
    "regression": Task(perceptron, rows, functional.mse_loss),
    "regression, without zero_grad": Task(perceptron, rows, functional.mse_loss, keeps=True),
    "experts": Task(Experts, labelled, functional.cross_entropy),
}
