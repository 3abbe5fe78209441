"""A bad gradient is told with the micro-batch of its backward, in whatever order these come."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ddpprobe
from ddpprobe.rank.hooks.backwards import Backwards
from ddpprobe.rundir.fuse import Fuse

from ... import far

STEPS, BAD, EVERY, FORWARDS = 6, 4, 3, 3


def train(path: Path, order: str, bad: int) -> tuple[int, int, str]:
    """Several forwards a step, then their backwards in an order; return where the page is."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with ddpprobe.install(model, run_dir=path, every=EVERY, daemon="none"):
        for step in range(STEPS):
            losses = []
            for micro in range(FORWARDS):
                out = model(torch.randn(3, 4))
                if (step, micro) == (BAD, bad):
                    out.register_hook(lambda gradient: gradient * torch.nan)
                losses.append(out.square().mean())
                if order == "each":
                    losses[-1].backward()
            for micro in order if order.isdigit() else "":
                losses[int(micro)].backward()
            optimizer.step()
            optimizer.zero_grad()
    page = next(a for a in ddpprobe.open(path).anomalies() if a.level == "page")
    return page.step, page.micro, page.phase


@pytest.mark.parametrize("is_far", [False, True], ids=["near", "far"])
@pytest.mark.parametrize(
    ("order", "bad"), [("each", 1), ("each", 2), ("012", 0), ("012", 1), ("210", 1), ("201", 2)]
)
def test_a_step_that_was_not_sampled_names_the_micro_batch_of_the_bad_backward(
    order: str, bad: int, is_far: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_far:
        far.pretend(monkeypatch)
    assert train(tmp_path, order, bad) == (BAD, bad, "backward")


def outputs(count: int) -> list[Tensor]:
    return [torch.ones((), requires_grad=True) * 1 for _ in range(count)]


def test_nothing_is_hung_on_what_a_forward_returns_unless_another_one_waits() -> None:
    backwards = Backwards(Fuse("hooks"))
    first, second, third = outputs(3)
    backwards.follow(0, [first])
    assert backwards.micro(0) == 0
    backwards.ended(0)
    backwards.follow(1, [second])
    backwards.follow(1, [second])  # another part of the model
    assert not first._backward_hooks
    assert not second._backward_hooks
    backwards.follow(2, [third])
    assert third._backward_hooks
    third.backward()
    assert backwards.micro(2) == 2
    backwards.ended(2)
    assert backwards.micro(2) == 1


def test_one_backward_of_several_forwards_counts_to_the_last_of_them() -> None:
    backwards = Backwards(Fuse("hooks"))
    losses = outputs(3)
    for micro, loss in enumerate(losses):
        backwards.follow(micro, [loss])
    torch.stack(losses).sum().backward()
    assert backwards.micro(2) == 2


def test_forwards_without_a_backward_are_forgotten_with_their_step() -> None:
    backwards = Backwards(Fuse("hooks"))
    for micro, loss in enumerate(outputs(3)):
        backwards.follow(micro, [loss])
    backwards.end_step()
    (alone,) = outputs(1)
    backwards.follow(0, [alone])
    assert not alone._backward_hooks
    assert backwards.micro(0) == 0
