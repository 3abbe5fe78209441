"""Gradients of the step before that a backward adds to are told; those set to zero are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.records.step import KEPT

STEPS = 4
Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def loss(model: nn.Module) -> torch.Tensor:
    return (model(torch.randn(3, 4)) - 1).square().mean()


def never_zeroed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss(model).backward()
    optimizer.step()


def clipped_and_never_zeroed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def accumulated_and_never_zeroed(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss(model).backward()
    loss(model).backward()
    optimizer.step()


def zeroed_at_the_end(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()


def zeroed_behind_the_forward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    this = loss(model)
    optimizer.zero_grad()
    this.backward()
    optimizer.step()


def zeroed_in_place(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)
    loss(model).backward()
    optimizer.step()


def zeroed_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss(model).backward()
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad.data.zero_()


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss(model).backward()
    loss(model).backward()
    optimizer.step()


def given_another_tensor(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    parameters = [*model.parameters()]
    for parameter, gradient in zip(
        parameters, torch.autograd.grad(loss(model), parameters), strict=True
    ):
        parameter.grad = gradient
    optimizer.step()


def as_a_discriminator(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Another model's step leaves gradients here beside those of the step before."""
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()
    front = nn.Linear(4, 4)
    others = torch.optim.SGD(front.parameters(), lr=0.1)
    model(front(torch.ones(3, 4))).mean().backward()
    others.step()


def told(step: Step, path: Path, records_of: Callable[..., list]) -> list[float | None]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpprobe.install(model, run_dir=path, every=1, daemon="none"):
        for _ in range(STEPS):
            step(model, optimizer)
    return [r.scalars[0].get(KEPT) for r in records_of(path) if not r.partial]


class OwnLoss(nn.Module):
    """Returns its loss alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.net(x) - 1).square().mean()


def test_a_model_that_returns_its_loss_alone_is_heard_too(tmp_path: Path, records_of) -> None:
    model = OwnLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpprobe.install(model, run_dir=tmp_path, every=1, daemon="none"):
        for _ in range(STEPS):
            model(torch.randn(3, 4)).backward()
            optimizer.step()
    assert [KEPT in r.scalars[0] for r in records_of(tmp_path)] == [False, *[True] * (STEPS - 1)]


@pytest.mark.parametrize(
    "step", [never_zeroed, clipped_and_never_zeroed, accumulated_and_never_zeroed]
)
def test_what_a_backward_adds_to_is_told_from_the_second_step_on(
    step: Step, tmp_path: Path, records_of
) -> None:
    first, *others = told(step, tmp_path, records_of)
    assert first is None
    assert len(others) == STEPS - 1
    assert all(norm > 0 for norm in others)
    if step is clipped_and_never_zeroed:
        assert others == [pytest.approx(0.1, rel=1e-3)] * (STEPS - 1)


@pytest.mark.parametrize(
    ("step", "usual"),
    [
        (zeroed_at_the_end, None),
        (zeroed_behind_the_forward, None),
        (zeroed_in_place, 0.0),
        (zeroed_by_hand, 0.0),
        (accumulated, None),
        (given_another_tensor, None),
        (as_a_discriminator, None),
    ],
)
def test_what_is_set_to_zero_or_replaced_is_not(
    step: Step, usual: float | None, tmp_path: Path, records_of
) -> None:
    found = told(step, tmp_path, records_of)
    assert found == [None, *[usual] * (STEPS - 1)]
