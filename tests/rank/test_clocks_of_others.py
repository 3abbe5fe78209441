"""Steps that an engine or another clock tells, and passes that count for no step of ours."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddpprobe.rank.host import Host
from ddpprobe.rank.lending import PATIENCE
from ddpprobe.rank.passes import OF_THE_PROCESS
from ddpprobe.rank.topology import describe as topology_of
from ddpprobe.rundir.fuse import Fuse

from .test_step_events import Loop, Make, X, made, net, sgd

__all__ = ["made"]  # the fixture


class Clock:
    """A clock of which only the identity matters."""

    next_step, trains = 3, True


def test_followers_hear_the_steps_of_the_model_they_follow_and_of_no_other() -> None:
    host, leader, students = Host(), Clock(), [Clock(), Clock()]
    heard: list[tuple[int, bool]] = []
    assert host.clock is None
    for number, student in enumerate(students):
        host.hear(student, lambda skipped, number=number: heard.append((number, skipped)))
    assert host.clock is None  # those follow, nobody leads
    host.hear(leader, None)
    assert host.clock is leader
    host.stepped(students[0], skipped=False)
    assert heard == []
    host.stepped(leader, skipped=True)
    assert sorted(heard) == [(0, True), (1, True)]


def test_who_leaves_hears_no_more_and_leaves_the_others_as_they_were() -> None:
    host, leader, student, other = Host(), Clock(), Clock(), Clock()
    heard: list[str] = []
    host.hear(leader, None)
    host.hear(student, lambda _: heard.append("student"))
    host.hear(other, lambda _: heard.append("other"))
    host.leave(student)
    host.leave(student)
    host.leave(Clock())  # it never came
    assert host.clock is leader
    host.stepped(leader, skipped=False)
    assert heard == ["other"]
    host.leave(leader)
    assert host.clock is None
    host.stepped(leader, skipped=False)
    assert heard == ["other"]


def test_a_host_keeps_no_clock_alive() -> None:
    host, leader, student, heard = Host(), Clock(), Clock(), []
    host.hear(leader, None)
    host.hear(student, heard.append)
    del student
    gc.collect()
    host.stepped(leader, skipped=False)
    assert heard == []
    del leader
    gc.collect()
    assert host.clock is None


class Engine:
    """What an engine is to a clock: its optimizer owns nothing of the model."""

    wrapper = "zero2"

    def __init__(self) -> None:
        self.optimizer = sgd(nn.Linear(1, 1))
        self.muted = 0
        self.ready: Callable[[], object] = lambda: None
        self.over: Callable[[bool], object] = lambda _: None
        self.act: Callable[[], object] = lambda: None

    def gradients(self) -> Any:
        return iter(())

    def listen(self, ready: Any, over: Any, act: Any) -> None:
        self.ready, self.over, self.act = ready, over, act

    def mute(self) -> None:
        self.muted += 1


class Driven(Loop):
    """A loop whose steps an engine takes."""

    def gradients_ready(self, optimizer: object, *, by_engine: bool = False) -> None:
        assert by_engine
        super().gradients_ready(optimizer)


@pytest.fixture
def driven(monkeypatch: pytest.MonkeyPatch) -> tuple[Driven, Engine]:
    engine = Engine()
    monkeypatch.setattr(
        "tests.rank.test_step_events.describe",
        lambda model: topology_of.describe(model, engine=engine),
    )
    loop = Driven(net())
    loop.clock.start()
    return loop, engine


def test_the_steps_of_an_engine_are_told_with_its_optimizer(driven: tuple[Driven, Engine]) -> None:
    loop, engine = driven
    ours = sgd(loop.model)
    for step in range(3):
        loop.model(X).sum().backward()
        engine.ready()
        assert loop.clock.place()["state"] == "optimizer"
        ours.step()  # the engine tells the steps, no optimizer of torch does
        loop.model.zero_grad()  # nor do gradients that vanish
        engine.over(step == 1)
        engine.act()
        assert (loop.clock.steps, loop.clock.skipped) == (step + 1, int(step >= 1))
    assert loop.ready == [engine.optimizer] * 3
    assert loop.ends() == [False, True, False]
    assert [event[-2] for event in loop.heard if event[0] == "step ended"] == [0, 1, 2]
    assert loop.acts > 0
    loop.clock.stop()
    assert engine.muted == 1


def test_what_an_engine_tells_outside_of_a_step_is_none(driven: tuple[Driven, Engine]) -> None:
    loop, engine = driven
    engine.ready()  # no forward was seen
    assert (loop.ready, loop.ends()) == ([], [])
    for steps in range(1, 4):
        engine.over(False)
        assert [event[0] for event in loop.heard].count("blind") == int(steps == 3)
    loop.model(X).sum().backward()
    engine.ready()
    engine.over(False)
    engine.ready()  # the step is over
    engine.over(False)
    assert (loop.ready, loop.ends()) == ([engine.optimizer], [False])
    loop.clock.stop()


def lent(loop: Loop) -> bool:
    return any(event[0] == "lent" for event in loop.heard)


def test_what_a_scaler_gave_up_is_a_skipped_step_and_no_pass_of_another_models(made: Make) -> None:
    loop = made(net())
    optimizer = sgd(loop.model)
    loop.clock.start()
    for skipped in (False, True, True, False):
        loop.model(X).sum().backward()
        loop.scaler_gave_up = skipped
        if not skipped:
            optimizer.step()
        loop.model.zero_grad()
    loop.model(X)
    assert loop.ends() == [False, True, True, False]
    assert not lent(loop)
    assert (loop.clock.step, loop.clock.micro, loop.clock.lent) == (4, 0, 0)


def test_what_one_of_two_optimizers_has_stepped_is_no_pass_of_another_models(made: Make) -> None:
    """Its gradients are thrown away between the backwards of a step."""
    loop = made(net())
    halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in loop.model]
    loop.clock.start()
    for _ in range(3):
        first, second = loop.model(X).sum(), loop.model(X).sum()
        first.backward()
        halves[0].step()
        loop.model.zero_grad()
        second.backward()
        halves[1].step()
        loop.model.zero_grad()
    assert loop.ends() == [False] * 3
    assert not lent(loop)


def test_a_gradient_that_goes_before_anybody_was_seen_to_step_is_lent_to_nobody(made: Make) -> None:
    """Who takes it may be an optimizer that is none of torch's."""
    loop = made(net())
    loop.clock.start()
    loop.model(X).sum().backward()
    out = loop.model(X).sum()
    loop.model.zero_grad()
    out.backward()
    assert not lent(loop)
    assert (loop.ends(), loop.clock.micro) == ([], 1)


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_a_first_pass_is_lent_where_an_optimizer_of_torch_has_yet_to_step(
    moves: bool, late: bool, made: Make
) -> None:
    """SAM, which moves the weights by that pass, and an attack on the inputs, which does not."""
    loop = made(net())
    optimizer = sgd(loop.model)
    loop.clock.start()
    for step in range(3):
        loop.model(X).sum().backward()
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.add_(0.1 * parameter.grad * moves)
        if late:
            out = loop.model(X)
        optimizer.zero_grad()
        (out if late else loop.model(X)).sum().backward()
        assert (loop.clock.step, loop.clock.micro, loop.clock.lent) == (step, 1, 1)
        optimizer.step()
        optimizer.zero_grad()
    assert loop.ends() == [False] * 3


def by_hand(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad
        parameter.grad = None


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None


@pytest.mark.parametrize("take", [by_hand, in_place])
def test_a_step_by_hand_ends_a_step_from_the_first_one_on(
    take: Callable[[nn.Module], None], made: Make
) -> None:
    """Also where optimizers of other models live, and no version of a weight tells of `.data`."""
    loop, other = made(net()), net()
    bystander = sgd(other)
    loop.clock.start()
    for _ in range(4):
        loop.model(X).sum().backward()
        take(loop.model)
    loop.model(X)
    assert loop.ends() == [False] * 4
    assert not lent(loop)
    assert bystander.param_groups


def test_an_optimizer_that_never_steps_is_not_waited_for_for_ever(made: Make) -> None:
    """A loop may keep one for its learning rates alone, and step by hand."""
    loop = made(net())
    schedule = sgd(loop.model)
    loop.clock.start()
    for _ in range(PATIENCE + 10):
        loop.model(X).sum().backward()
        by_hand(loop.model)
    loop.model(X)
    assert loop.ends() == [False] * 10
    assert (loop.clock.micro, loop.clock.lent) == (0, 0)
    assert schedule.param_groups


def test_a_step_in_the_middle_of_which_an_optimizer_raised_is_not_over_at_the_end(
    made: Make,
) -> None:
    loop = made(net())
    halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in loop.model]
    loop.clock.start()
    loop.model(X).sum().backward()
    halves[0].step()

    def closure() -> float:
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        halves[1].step(closure)
    loop.clock.settle()
    assert loop.ends() == []


def test_a_clock_that_stops_is_no_model_of_the_process_any_more(made: Make) -> None:
    before = OF_THE_PROCESS.models
    host, loop, other = Host(), made(net()), made(net())
    other.clock.stop()  # it has not begun
    assert OF_THE_PROCESS.models == before
    loop.clock._host = host
    loop.clock.start()
    assert (OF_THE_PROCESS.models, host.clock) == (before + 1, loop.clock)
    for _ in range(2):
        loop.clock.stop()
        assert (OF_THE_PROCESS.models, host.clock) == (before, None)


def test_the_nodes_at_which_a_backward_came_into_the_model_are_known(made: Make) -> None:
    loop, entered = made(net()), []
    loop.backward_computed = lambda: entered.extend(loop.clock.backward.entered)
    loop.clock.__init__(loop.topology, loop, Fuse("steps", stopwatch=loop.watch), loop, loop.watch)
    loop.clock.start()
    out = loop.model(X)
    (2 * out).sum().backward()
    assert len(entered) == 1
    assert entered[0] is not None
    assert loop.clock.backward.entered == []


def test_a_pass_that_leaves_no_gradients_says_nothing_of_those_of_the_step_before(
    made: Make,
) -> None:
    """A penalty's `autograd.grad`, before the loop throws the older ones away."""
    loop = made(net())
    optimizer = sgd(loop.model)
    loop.clock.start()
    for _ in range(3):
        x = X.clone().requires_grad_()
        torch.autograd.grad(loop.model(x).sum(), x, create_graph=True)
        optimizer.zero_grad()
        loop.model(X).sum().backward()
        optimizer.step()
    assert (loop.ends(), loop.vanished) == ([False] * 3, [])
    assert not lent(loop)


@pytest.mark.parametrize("before", [False, True])
def test_a_pass_through_a_frozen_model_is_lent_once_and_none_of_its_own_is(
    before: bool, made: Make
) -> None:
    loop, other = made(net()), nn.Linear(4, 4)
    ours, theirs = sgd(loop.model), sgd(other)
    loop.clock.start()
    for step in range(4):
        loop.model(X).sum().backward()
        ours.step()
        assert (loop.clock.step, loop.clock.micro) == (step, int(step > 0))
        if not before:
            ours.zero_grad()
        loop.model.requires_grad_(False)
        loop.model(other(X)).sum().backward()
        theirs.step()
        loop.model.requires_grad_(True)
        if before:
            ours.zero_grad()
    told = [event[1:] for event in loop.heard if event[0] == "lent"]
    assert told == [(1, step, 0) for step in (1, 2, 3, 4)]


def test_of_what_the_model_returns_it_is_told_what_can_be_trained(made: Make) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = self.layer(x)
            return out, out.detach() > 0

    loop = made(Two())
    loop.clock.start()
    loop.model(X)
    assert ("forward ended", 2, 1, 0, 0) in loop.heard


def test_a_step_that_one_of_two_optimizers_has_taken_is_lent_to_nobody(made: Make) -> None:
    loop = made(net())
    halves = [torch.optim.SGD(part.parameters(), lr=0.1) for part in loop.model]
    loop.clock.start()
    first, second = loop.model(X).sum(), loop.model(X).sum()
    first.backward()
    halves[0].step()
    loop.model.requires_grad_(False)
    second.backward()
    assert not lent(loop)


@pytest.mark.parametrize("keyword", [False, True])
def test_an_optimizer_gets_its_own_arguments_beside_the_closure(keyword: bool, made: Make) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Callable[[], float], *more: int, last: int = 0) -> object:  # type: ignore[override]
            return closure(), more, last

    loop = made(net())
    loop.clock.start()
    optimizer = Odd(loop.model.parameters(), lr=0.1)

    def closure() -> str:
        loop.model(X).sum().backward()
        return "loss"

    if keyword:
        assert optimizer.step(closure=closure, last=3) == ("loss", (), 3)
    else:
        assert optimizer.step(closure, 7, 8, last=3) == ("loss", (7, 8), 3)
    assert loop.ready == [optimizer]
    assert loop.ends() == [False]
