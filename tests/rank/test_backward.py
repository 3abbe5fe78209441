"""Backwards in whatever order: the micro-batch of a bad gradient, and what `.grad` holds after."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ddpprobe
from ddpprobe.rank.backward import Backward
from ddpprobe.rank.passes import OF_THE_PROCESS
from ddpprobe.records.step import PASS_OF_BAD, USED_NORM, StepRecord

from .. import far

STEPS, BAD, EVERY, FORWARDS = 6, 4, 3, 3
ORDERS = [("each", 1), ("each", 2), ("012", 0), ("012", 1), ("210", 1), ("201", 2), ("sum", 2)]


class Spoils(nn.Module):
    """Makes the gradient that comes back through it bad while it is `on`."""

    on = False

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x = x * 1
            x.register_hook(lambda gradient: gradient * torch.nan if self.on else gradient)
        return x


class Model(nn.Module):
    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(4, 4), again
        self.block = nn.Sequential(nn.Linear(4, 4), Spoils(), nn.Tanh())
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(self.block, x, use_reentrant=True) if self.again else self.block(x)
        return self.last(x)


def train(path: Path, order: str, bad: tuple[int, int], *, again: bool = False) -> tuple[int, ...]:
    """Train with several forwards in a step; return the step and micro-batch of the page.

    `order`: of their backwards, "each" after its own forward, or one of their "sum".
    """
    torch.manual_seed(0)
    model = Model(again=again)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def backward(loss: Tensor, *at: int) -> None:
        model.block[1].on = at == bad
        loss.backward()

    with ddpprobe.install(model, run_dir=path, every=EVERY, daemon="none"):
        for step in range(STEPS):
            losses = []
            for micro in range(FORWARDS):
                losses.append(model(torch.randn(3, 4)).square().mean())
                if order == "each":
                    backward(losses[-1], step, micro)
            for micro in order if order.isdigit() else "":
                backward(losses[int(micro)], step, int(micro))
            if order == "sum":
                backward(torch.stack(losses).sum(), step, FORWARDS - 1)
            optimizer.step()
            optimizer.zero_grad()
    page = next(a for a in ddpprobe.open(path).anomalies() if a.level == "page")
    assert page.phase == "backward"
    return page.step, page.micro


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("step", [EVERY, BAD], ids=["sampled", "between"])
@pytest.mark.parametrize("is_far", [False, True], ids=["near", "far"])
@pytest.mark.parametrize(("order", "micro"), ORDERS)
def test_a_bad_gradient_has_the_micro_batch_of_its_forward(
    order: str, micro: int, is_far: bool, step: int, again: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if is_far:
        far.pretend(monkeypatch)
    assert train(tmp_path, order, (step, micro), again=again) == (step, micro)


def test_the_pass_of_a_bad_backward_is_known_among_those_of_several_models(tmp_path: Path) -> None:
    with ddpprobe.install(nn.Linear(4, 4), run_dir=tmp_path / "other", daemon="none"):
        start = OF_THE_PROCESS.number
        train(tmp_path / "run", "012", (EVERY, 1))
    (record,) = (r for r in ddpprobe.open(tmp_path / "run").records() if r.step == EVERY)
    before = EVERY * 2 * FORWARDS
    assert record.scalars[0][PASS_OF_BAD] - start == before + FORWARDS + 2


def test_an_output_in_a_graph_has_no_micro_batch_of_its_own() -> None:
    backward = Backward()
    backward.comes_to(None)
    assert (backward.micro, backward.micro_or(3)) == (None, 3)
    backward.comes_to(1)
    backward.comes_to(0)
    assert (backward.micro, backward.micro_or(3)) == (1, 1)
    backward.forget()
    assert (backward.micro, backward.entered) == (None, [])


def mlp(*sizes: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Linear(a, b), nn.LeakyReLU())]
    return nn.Sequential(*layers[:-1])


def slope_penalty(model: nn.Sequential, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """R1: its forward's own backward fills no `.grad`; that of the penalty meets no output."""
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    penalty = slope.square().sum(1).mean()
    optimizer.zero_grad()
    penalty.backward()


def weight_penalty(model: nn.Sequential, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """What is added to the gradients of the loss comes by no output either."""
    optimizer.zero_grad()
    model(x).mean().backward()
    sum(p.abs().sum() for p in model.parameters()).backward()


@pytest.mark.parametrize("penalty", [slope_penalty, weight_penalty])
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_reduced_gradients_are_those_of_a_backward_that_came_by_no_output(
    penalty: Callable[[nn.Sequential, Tensor, torch.optim.Optimizer], None], fraction: float,
    tmp_path: Path, records_of: Callable[[Path], list[StepRecord]],
) -> None:  # fmt: skip
    model = mlp(2, 6, 1)
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.Generator().manual_seed(0)
    expected = []
    with ddpprobe.install(model, run_dir=tmp_path, every=1, daemon="none"):
        for at in range(6):
            x = torch.randn(8, 2, generator=data)
            if at % 2:
                penalty(model, x, optimizer)
            else:
                optimizer.zero_grad()
                model(x).mean().backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            expected.append(math.sqrt(sum(float(g.square().sum()) for g in grads)))
            if fraction < 1 and not at % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), fraction * expected[-1])
            optimizer.step()
    told = [r.scalars[0] for r in records_of(tmp_path)]
    assert [said["grad_norm"] for said in told] == pytest.approx(expected, rel=1e-5)
    used = [x * (1 if at % 2 else fraction) for at, x in enumerate(expected)]
    assert [said[USED_NORM] for said in told] == pytest.approx(used, rel=1e-4)
