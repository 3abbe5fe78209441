"""Gradients that are thrown away before any optimizer steps are counted; an optimizer that was made
for other tensors takes the steps of the run all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.records.step import DROPPED, LENT

STEPS = 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def backward(model: nn.Module, micro: int = 0) -> None:
    data = torch.randn(3, 4, generator=torch.Generator().manual_seed(micro))
    (model(data).mean() - 1).square().backward()


def zero_before_each_micro_batch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for micro in range(4):
        optimizer.zero_grad()
        backward(model, micro)
    optimizer.step()


def zero_between_forward_and_backward(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(4):
        loss = model(torch.ones(3, 4)).mean()
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()


def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    for micro in range(4):
        backward(model, micro)
    optimizer.step()


def sharpness_aware(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Weights are moved by a first gradient, and moved back after a second one."""
    backward(model)
    moved = [(p, 0.05 * p.grad) for p in model.parameters()]
    with torch.no_grad():
        for parameter, change in moved:
            parameter.add_(change)
    optimizer.zero_grad()
    backward(model)
    with torch.no_grad():
        for parameter, change in moved:
            parameter.sub_(change)
    optimizer.step()
    optimizer.zero_grad()


def summed_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Each gradient is taken away, added up in float32, and given back for the step."""
    parameters = [*model.parameters()]
    sums = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]
    for micro in range(4):
        backward(model, micro)
        for parameter, total in zip(parameters, sums, strict=True):
            total.add_(parameter.grad.float())
            parameter.grad = None
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = total.to(parameter.dtype)
    optimizer.step()
    optimizer.zero_grad()


def clipped_for_each_sample(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """As differentially private training does by hand."""
    parameters = [*model.parameters()]
    sums = [torch.zeros_like(p) for p in parameters]
    for sample in range(4):
        model.zero_grad()
        backward(model, sample)
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for parameter, total in zip(parameters, sums, strict=True):
            total.add_(parameter.grad)
    for parameter, total in zip(parameters, sums, strict=True):
        parameter.grad = total / 4
    optimizer.step()


def of_masters(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer has float32 copies."""
    masters = optimizer.masters
    for micro in range(4):
        backward(model, micro)
        for parameter, master in zip(model.parameters(), masters, strict=True):
            grad = parameter.grad.float()
            master.grad = grad if master.grad is None else master.grad + grad
            parameter.grad = None
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.copy_(master)


def attack(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Projected gradient descent on the input, between whose steps the gradients are cleared."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    worse = torch.zeros_like(x, requires_grad=True)
    for _ in range(4):
        model.zero_grad()
        (model(x + worse).mean() - 1).square().backward()
        with torch.no_grad():
            worse += 0.1 * worse.grad.sign()
        worse.grad = None
    model.zero_grad()
    (model(x + worse.detach()).mean() - 1).square().backward()
    optimizer.step()


def another_learns_through_it(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Four steps of a model in front, each of which leaves gradients here."""
    front = nn.Linear(4, 4)
    others = torch.optim.SGD(front.parameters(), lr=0.1)
    for _ in range(4):
        model(front(torch.ones(3, 4))).mean().backward()
        others.step()
        optimizer.zero_grad()
    backward(model)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    ("loop", "dropped"),
    [
        (zero_before_each_micro_batch, 3),
        (zero_between_forward_and_backward, 3),
        (accumulate, None),
        (sharpness_aware, 1),
        (another_learns_through_it, None),
        (summed_by_hand, None),
        (clipped_for_each_sample, None),
        (of_masters, None),
        (attack, 4),  # nobody can tell that the gradient of the input was what it is about
    ],
)
def test_gradients_that_nobody_takes_are_counted_where_no_other_optimizer_stepped(
    loop: Callable[[nn.Module, torch.optim.Optimizer], None], dropped: int | None,
    set_to_none: bool, tmp_path: Path, records_of,
) -> None:  # fmt: skip
    model = net()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    owned = masters if loop is of_masters else model.parameters()
    optimizer = torch.optim.SGD(owned, lr=0.01)
    optimizer.masters = masters
    if not set_to_none:
        optimizer.zero_grad = lambda: torch.optim.Optimizer.zero_grad(optimizer, set_to_none=False)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(STEPS):
            loop(model, optimizer)
    records = [r for r in records_of(tmp_path / "r") if not r.partial]
    if loop is not of_masters:
        assert [r.step for r in records] == list(range(STEPS))
    said = [r.scalars[0].get(DROPPED) for r in records]
    if set_to_none or dropped is None:
        assert set(said) == {dropped}
    else:  # zeros are gradients, too: what was in them cannot be told from what is
        assert len(set(said)) == 1
        assert said[0] in (dropped, None)
    if said[0] == 3:
        assert records[-1].scalars[0][LENT] == 3


def trained(optimizer_of: Callable[[nn.Module], torch.optim.Optimizer], path: Path) -> nn.Module:
    model = net()
    optimizer = optimizer_of(model)
    with ddpprobe.install(model, run_dir=path, every=1, daemon="none"):
        for _ in range(STEPS):
            backward(model)
            optimizer.step()
            model.zero_grad()
    return model


def test_an_optimizer_of_tensors_that_the_model_has_exchanged_takes_its_steps(
    tmp_path: Path, records_of
) -> None:
    def of_a_copy(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(copy.deepcopy(model).parameters(), lr=0.1)

    model = trained(of_a_copy, tmp_path / "r")
    assert all(map(torch.equal, model.parameters(), net().parameters()))
    records = records_of(tmp_path / "r")
    assert [(r.step, r.partial) for r in records] == [(s, False) for s in range(STEPS)]
    assert all(r.scalars[0]["lr"] == 0.1 for r in records)
    changes = [
        r.counts[i, 4] == r.counts[i, 0]
        for r in records for i, site in enumerate(r.sites) if site.kind == "update"
    ]  # fmt: skip
    assert len(changes) == STEPS * 4
    assert all(changes)  # all of them zeros


@pytest.mark.parametrize("other", ["of other shapes", "with gradients of its own"])
def test_an_optimizer_of_another_model_takes_no_step_of_this_one(
    other: str, tmp_path: Path, records_of
) -> None:
    def of_another(model: nn.Module) -> torch.optim.Optimizer:
        made = nn.Linear(4, 1) if other == "of other shapes" else copy.deepcopy(model)
        if other == "with gradients of its own":
            backward(made)
        made.zero_grad = lambda: None
        return torch.optim.Adam(made.parameters(), lr=0.1)

    trained(of_another, tmp_path / "r")
    assert all("lr" not in r.scalars[0] for r in records_of(tmp_path / "r"))


def test_an_optimizer_that_has_this_model_is_believed_from_then_on(
    tmp_path: Path, records_of
) -> None:
    model = net()
    stale = torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(STEPS):
            backward(model)
            optimizer.step()
            stale.step()
            model.zero_grad()
    records = records_of(tmp_path / "r")
    assert [r.step for r in records] == list(range(STEPS))
    assert {r.scalars[0]["lr"] for r in records} == {0.1}
