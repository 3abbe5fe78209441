"""Gradients that `torch.autograd.grad` returns, and the loop puts into `.grad` itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ddpprobe

STEPS = 5
Backward = Callable[[nn.Module, Tensor], None]


def exchanged(model: nn.Module, loss: Tensor) -> None:
    all_ = [*model.parameters()]
    for p, g in zip(all_, torch.autograd.grad(loss, all_), strict=True):
        p.grad = g


def copied(model: nn.Module, loss: Tensor) -> None:
    """Into the gradients that there are, as a loop does that keeps their memory."""
    all_ = [*model.parameters()]
    for p, g in zip(all_, torch.autograd.grad(loss, all_), strict=True):
        p.grad = g.clone() if p.grad is None else p.grad.copy_(g)


def of_a_part(model: nn.Module, loss: Tensor) -> None:
    """The first layer stands still: it is asked for no gradient."""
    last = [*model[2].parameters()]
    for p, g in zip(last, torch.autograd.grad(loss, last), strict=True):
        p.grad = g


@pytest.mark.parametrize("backward", [exchanged, copied, of_a_part])
@pytest.mark.parametrize("every", [1, 2])
def test_rows_are_of_the_gradients_that_the_step_uses(
    backward: Backward, every: int, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    norms = []
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=every, daemon="none"):
        for step in range(STEPS):
            backward(model, model(torch.randn(6, 4)).square().mean() * (step + 1))
            norms.append(float(model[2].weight.grad.norm()))
            optimizer.step()
    run = ddpprobe.open(tmp_path / "r")
    told = run.series("2.weight:grad", "norm")
    assert told.steps.tolist() == list(range(0, STEPS, every))
    assert told.values.ravel().tolist() == pytest.approx(norms[::every], rel=1e-5)
    read, used = run.scalars("grad_norm").values, run.scalars("grad_norm_used").values
    assert read.ravel().tolist() == pytest.approx(used.ravel().tolist(), rel=1e-5)


def test_gradients_of_a_backward_are_those_before_clipping_though_others_are_asked_for_behind_it(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters())
    norms = []
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(6, 4)).square().mean()
            loss.backward(retain_graph=True)
            norms.append(float(model[2].weight.grad.norm()))
            torch.autograd.grad(loss, [*model.parameters()])
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
    told = ddpprobe.open(tmp_path / "r").series("2.weight:grad", "norm")
    assert told.values.ravel().tolist() == pytest.approx(norms, rel=1e-5)
