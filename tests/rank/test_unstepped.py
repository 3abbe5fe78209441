"""A loop that leaves the optimizer's step out has steps all the same, and is told that nothing
moves; passes that are for something else make none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.rank.unstepped import PASSES, STEPS, THROWN, TIMES, UNHEARD, Unstepped
from ddpprobe.records.step import StepRecord

BEFORE, BEHIND = 60, 80  # steps with the optimizer, and without
Step = Callable[[nn.Module, torch.optim.Optimizer, bool], None]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def backward(model: nn.Module) -> None:
    torch.nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(3, (8,))).backward()


def zero_first(model: nn.Module, optimizer: torch.optim.Optimizer, steps: bool) -> None:
    optimizer.zero_grad()
    backward(model)
    if steps:
        optimizer.step()


def zero_behind_the_forward(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: bool
) -> None:
    loss = model(torch.randn(8, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if steps:
        optimizer.step()


def zero_at_the_end(model: nn.Module, optimizer: torch.optim.Optimizer, steps: bool) -> None:
    backward(model)
    if steps:
        optimizer.step()
    optimizer.zero_grad()


def zero_in_place(model: nn.Module, optimizer: torch.optim.Optimizer, steps: bool) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward(model)
    if steps:
        optimizer.step()


def both_left_out(model: nn.Module, optimizer: torch.optim.Optimizer, steps: bool) -> None:
    backward(model)
    if steps:
        optimizer.step()
        optimizer.zero_grad()


def four_micro_batches(model: nn.Module, optimizer: torch.optim.Optimizer, steps: bool) -> None:
    optimizer.zero_grad()
    for _ in range(4):
        backward(model)
    if steps:
        optimizer.step()


@pytest.mark.parametrize(
    "step",
    [zero_first, zero_behind_the_forward, zero_at_the_end, zero_in_place, both_left_out,
     four_micro_batches],
)  # fmt: skip
def test_a_step_that_is_left_out_is_told(step: Step, tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with ddpprobe.install(model, run_dir=tmp_path / "run", every=1, daemon="none"):
        for number in range(BEFORE + BEHIND):
            step(model, optimizer, number < BEFORE)
    found = ddpprobe.open(tmp_path / "run").anomalies()
    (frozen,) = (a for a in found if a.detector == "frozen_param")
    assert (frozen.level, frozen.step) == ("page", BEFORE + 19)
    assert "the optimizer's step is left out" in frozen.message


def test_an_optimizer_that_steps_again_takes_steps_again(tmp_path: Path, records_of) -> None:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with ddpprobe.install(model, run_dir=tmp_path, every=1, daemon="none"):
        for number in range(BEFORE + BEHIND + 20):
            zero_first(model, optimizer, not BEFORE <= number < BEFORE + BEHIND)
    records = records_of(tmp_path)
    assert [record.step for record in records] == list(range(len(records)))
    micros = [record.scalars[0]["micro_batches"] for record in records]
    # Until it is known that no step is to come, all passes are those of one.
    merged = BEHIND + BEFORE + 20 - len(records) + 1
    assert THROWN < merged < 2 * THROWN
    assert micros[:BEFORE] == [1.0] * BEFORE
    assert micros[-20:] == [1.0] * 20
    assert _changed(records[BEFORE - 1])
    assert _changed(records[-1])
    assert not _changed(records[BEFORE + 1])


def _changed(record: StepRecord) -> bool:
    rows = [i for i, site in enumerate(record.sites) if site.kind == "update"]
    return bool(rows) and any(record.values[rows].any(1))


def evaluation(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients of an evaluation, as of a saliency map: none of a step."""
    model.eval()
    for _ in range(2 * PASSES):
        backward(model)
        optimizer.zero_grad()
    model.train()


def a_measured_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(THROWN - 2):
        backward(model)
        optimizer.zero_grad()


def a_front_that_learns(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    front = nn.Linear(4, 4)
    others = torch.optim.SGD(front.parameters(), lr=0.1)
    for _ in range(2 * PASSES):
        model(front(torch.ones(3, 4))).mean().backward()
        others.step()
        optimizer.zero_grad()


def more_micro_batches(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(PASSES):
        backward(model)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("between", "more"),
    [(evaluation, 0), (a_measured_gradient, 0), (a_front_that_learns, 0), (more_micro_batches, 1)],
)
def test_passes_for_something_else_are_no_steps(
    between: Callable[[nn.Module, torch.optim.Optimizer], None], more: int, tmp_path: Path,
    records_of,
) -> None:  # fmt: skip
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with ddpprobe.install(model, run_dir=tmp_path, every=1, daemon="none"):
        for number in range(3 * STEPS):
            zero_at_the_end(model, optimizer, True)
            if number % STEPS == STEPS - 1:
                between(model, optimizer)
    assert len(records_of(tmp_path)) == (STEPS + more) * 3


def passes(loop: Unstepped, number: int, *, gone: bool) -> int:
    """Take some passes; return how many steps are over."""
    over = 0
    for _ in range(number):
        over += loop.goes_on and loop.end(gone=gone)
        loop.backward()
        if gone:
            loop.throw_away()
    return over


def test_what_a_step_usually_has_decides() -> None:
    for most in (1, 4):
        for gone in (False, True):
            loop = Unstepped()
            for _ in range(STEPS):
                passes(loop, most, gone=False)
                loop.step()
            enough = THROWN if gone else PASSES + TIMES * most
            assert passes(loop, enough, gone=gone) == 0
            assert passes(loop, 4 * most, gone=gone) == (4 * most if gone else 4)


def test_a_loop_that_is_not_known_has_all_passes_in_one_step() -> None:
    loop = Unstepped()
    for _ in range(STEPS - 1):
        passes(loop, 1, gone=False)
        loop.step()
    assert passes(loop, 1000, gone=True) == 0


def test_a_step_of_many_passes_makes_them_usual_within_bounds() -> None:
    loop = Unstepped()
    for _ in range(STEPS):
        passes(loop, 1, gone=False)
        loop.step()
    passes(loop, 60, gone=False)
    loop.step()
    assert passes(loop, PASSES + TIMES * 60, gone=False) == 0
    passes(loop, 10**5, gone=False)
    loop.step()
    bound = PASSES + TIMES * 4 * (PASSES + TIMES * 60)
    assert passes(loop, bound, gone=False) == 0
    assert passes(loop, 10**4, gone=False) > 0


def by_hand(model: nn.Module, probe: ddpprobe.Probe | None = None) -> None:
    for _ in range(3 * UNHEARD):
        backward(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad.zero_()
        if probe is not None:
            probe.step()


@pytest.mark.parametrize(("declared", "has_optimizer"), [(0, 0), (1, 0), (0, 1)])
def test_a_loop_by_hand_is_asked_once_for_its_steps(
    declared: bool, has_optimizer: bool, tmp_path: Path, caplog
) -> None:
    model = net()
    held = torch.optim.SGD(model.parameters(), lr=0.1) if has_optimizer else None  # may step yet
    with ddpprobe.install(model, run_dir=tmp_path / "r", daemon="none") as probe:
        by_hand(model, probe if declared else None)
    asked = [r for r in caplog.messages if "call probe.step() after each step" in r]
    assert len(asked) == (not declared and held is None)
