"""What the clock of the steps tells its owner, event by event, and what a heartbeat says of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddpprobe.rank import phase_times
from ddpprobe.rank.first_forward import FirstForward
from ddpprobe.rank.logged_numbers import LoggedNumbers
from ddpprobe.rank.phase_times import BACKWARD, DATA, FORWARD, OPTIMIZER
from ddpprobe.rank.step_clock import StepClock
from ddpprobe.rank.topology.describe import describe
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.heartbeat import STATES
from ddpprobe.rundir.stopwatch import Stopwatch

X = torch.ones(3, 4)


class Loop:
    """A model whose clock tells all to this object.

    Attributes:
        heard: the events, each with the step and the micro-batch it was told in.
        beats: what the heartbeats said.
        seconds: the time, which stands still.
        scaler_gave_up, look_again: what it answers.
        acts: how often it could act.
    """

    def __init__(self, model: nn.Module, first_step: int = 0) -> None:
        self.model, self.topology = model, describe(model)
        self.heard: list[tuple[Any, ...]] = []
        self.beats: list[dict[str, Any]] = []
        self.seconds = 1000.0
        self.scaler_gave_up = self.look_again = False
        self.ready: list[object] = []
        self.vanished: list[bool] = []
        self.acts = 0
        self.watch = Stopwatch(lambda: 0.0)
        self.clock: StepClock = StepClock(
            self.topology, self, Fuse("steps", stopwatch=self.watch), self, self.watch,
            first_step, self.act,
        )  # fmt: skip

    def act(self) -> None:
        self.acts += 1

    def beat(self, **said: Any) -> None:
        self.beats.append(said)

    def told(self, *what: Any) -> None:
        self.heard.append((*what, self.clock.step, self.clock.micro))

    def forward_begins(self) -> None:
        self.told("forward")

    def evaluation_begins(self) -> None:
        self.told("evaluation")

    def forward_ended(self, outputs: list[Tensor], trained: list[Tensor]) -> None:
        self.told("forward ended", len(outputs), len(trained))

    def forward_raised(self, error: BaseException) -> None:
        self.told("forward raised", type(error).__name__)

    def backward_computed(self) -> None:
        self.told("backward computed")

    def backward_ended(self) -> None:
        self.told("backward ended")

    def gradients_ready(self, optimizer: object) -> None:
        self.ready.append(optimizer)
        self.told("gradients ready")

    def given_up(self, *, vanished: bool) -> bool:
        self.vanished.append(vanished)
        return self.scaler_gave_up

    def lent(self, until: int) -> None:
        self.told("lent", until)

    def step_ended(self, *, skipped: bool) -> None:
        self.told("step ended", skipped)

    def forward_is_next(self) -> None:
        pass

    def blind(self) -> bool:
        self.told("blind")
        return self.look_again

    def ends(self) -> list[bool]:
        """Return of each step that is over whether it was skipped."""
        return [event[1] for event in self.heard if event[0] == "step ended"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch):
    loops: list[Loop] = []

    def make(model: nn.Module, **how: Any) -> Loop:
        monkeypatch.setattr(phase_times.time, "perf_counter", lambda: loops[-1].seconds)
        loops.append(loop := Loop.__new__(Loop))
        loop.seconds = 1000.0
        loop.__init__(model, **how)
        return loop

    yield make
    for loop in loops:
        loop.clock.stop()


Make = Callable[..., Loop]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_events_of_a_loop_come_in_their_order_with_their_step_and_micro_batch(
    made: Make,
) -> None:
    loop = made(net(), first_step=7)
    loop.clock.start()
    optimizer = sgd(loop.model)
    for _ in range(2):
        for _ in range(2):
            loop.model(X).sum().backward()
        with torch.no_grad():
            loop.model(X)
        optimizer.step()
        optimizer.zero_grad()
    of_a_micro_batch = (
        ("forward",), ("forward ended", 1, 1), ("backward computed",), ("backward ended",),
    )  # fmt: skip
    assert loop.heard == [
        (*event, step, micro)
        for step in (7, 8)
        for micro, events in (
            (0, of_a_micro_batch),
            (1, of_a_micro_batch),
            (1, (("evaluation",), ("gradients ready",), ("step ended", False))),
        )
        for event in events
    ]
    assert loop.ready == [optimizer] * 2


def test_phases_take_the_time_that_passes_in_them_and_heartbeats_say_it(made: Make) -> None:
    loop = made(net(), first_step=3)
    clock = loop.clock
    clock.sampled = 5
    clock.start()
    assert loop.beats[-1] == {
        "step": 3, "micro": 0, "state": STATES.index("data"), "steps": 0, "skipped": 0,
        "sampled": 5, "phase_seconds": (0.0,) * 4, "probe_seconds": 0.0,
    }  # fmt: skip
    optimizer = sgd(loop.model)
    inside = loop.model[0].register_forward_hook(lambda *_: pass_(20))
    own_step = optimizer.step

    def pass_(seconds: float) -> None:
        loop.seconds += seconds

    for step in range(2):
        for _ in range(2):
            pass_(1)
            output = loop.model(X)
            pass_(300)
            output.sum().backward()
        inside.remove()
        with torch.no_grad():
            loop.model(X)
        inside = loop.model[0].register_forward_hook(lambda *_: pass_(20))
        assert clock.place() == {
            "step": 3 + step, "steps": step, "micro": 1, "state": "backward",
        }  # fmt: skip
        hook = register_optimizer_step_pre_hook(lambda *_: pass_(4000))
        own_step()
        hook.remove()
        optimizer.zero_grad()
        assert loop.beats[-1]["state"] == STATES.index("data")
    # The second forward of a step begins in its backward phase: what is before it is that phase's.
    data, forward, backward, stepping = clock.phases.seconds
    assert (data, forward, backward, stepping) == (2.0, 80.0, 1202.0, 8000.0)
    assert loop.beats[-1]["phase_seconds"] == (data, forward, backward, stepping)
    assert (loop.beats[-1]["steps"], loop.beats[-1]["step"]) == (2, 4)
    pass_(7)
    loop.watch.beside = 0.5
    assert clock.reading() == (4, 9284.0 + 7, 0.0, 0.5)
    assert clock.probe_seconds == 0.5
    clock.beat(STATES.index("paused"))
    assert (loop.beats[-1]["state"], loop.beats[-1]["probe_seconds"]) == (
        STATES.index("paused"), 0.5,
    )  # fmt: skip
    clock.leave_out()
    assert clock.reading()[1] == 9284.0
    assert (DATA, FORWARD, BACKWARD, OPTIMIZER) == (0, 1, 2, 3)
    inside.remove()


def test_an_evaluation_ends_with_its_forward_and_its_time_is_no_phases(made: Make) -> None:
    loop = made(net())
    loop.clock.start()
    with torch.no_grad():
        loop.model[0].register_forward_hook(lambda *_: seen.append(loop.clock.evaluating))
        seen: list[bool] = []
        loop.seconds += 2
        loop.model[1].register_forward_hook(lambda *_: setattr(loop, "seconds", loop.seconds + 50))
        loop.model(X)
    assert (seen, loop.clock.evaluating) == ([True], False)
    assert loop.clock.reading()[1] == 2.0
    assert loop.heard == [("evaluation", 0, -1)]
    assert not loop.clock.is_inside_a_step


def test_the_first_training_forward_is_asked_for_once_before_anything_is_told(made: Make) -> None:
    loop, asked = made(net()), list[object]()

    def first(module: nn.Module) -> bool:
        asked.append((module, list(loop.heard)))
        return False

    loop.clock.start(first=first)
    with torch.no_grad():
        loop.model(X)
    loop.heard.clear()
    loop.model(X)
    loop.model(X)
    assert asked == [(loop.model, [])]
    assert [event[0] for event in loop.heard] == ["forward", "forward ended"] * 2


def test_a_forward_that_raises_is_told_and_the_next_is_another_micro_batch(made: Make) -> None:
    loop = made(net())
    loop.clock.start()
    with pytest.raises(RuntimeError):
        loop.model(torch.ones(3, 5))
    loop.model(X)
    assert [event[0] for event in loop.heard] == [
        "forward", "forward raised", "forward", "forward ended",
    ]  # fmt: skip
    assert loop.heard[1] == ("forward raised", "RuntimeError", 0, 0)
    assert loop.clock.micro == 1


def test_several_outputs_have_one_backward_and_the_next_one_is_another(made: Make) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    loop = made(Two())
    loop.clock.start()
    for count in (1, 2):
        a, b = loop.model(X)
        (a + b).sum().backward()
        assert [event[0] for event in loop.heard].count("backward ended") == count
        assert [event[0] for event in loop.heard].count("backward computed") == count
        assert loop.clock.backward.entered == []
    a, b = loop.model(X)  # and two backwards of one forward
    a.sum().backward()
    b.sum().backward()
    assert [event[0] for event in loop.heard].count("backward ended") == 4


def test_an_optimizer_is_ours_from_when_it_owns_parameters_of_the_model(made: Make) -> None:
    loop = made(net())
    clock = loop.clock
    clock.start()
    other = nn.Linear(4, 4)
    theirs, ours = sgd(other), torch.optim.SGD(loop.model[0].parameters(), lr=0.1)
    loop.model(X).sum().backward()
    theirs.step()
    assert clock.owners.optimizers() == []
    may_own = clock.owners.may_own
    assert (may_own(id(theirs)), may_own(id(ours))) == (False, True)  # not known yet
    ours.step()
    assert clock.owners.optimizers() == [ours]
    assert (may_own(id(theirs)), may_own(id(ours))) == (False, True)
    another = sgd(other)
    assert may_own(id(another))  # which may be that of the second layer
    assert loop.ends() == []  # the second layer has no optimizer yet
    theirs.add_param_group({"params": list(loop.model[1].parameters())})
    theirs.step()
    assert set(clock.owners.optimizers()) == {ours, theirs}
    assert may_own(id(theirs))
    assert not may_own(id(another))  # it would have nothing to train
    assert loop.ends() == [False]


def test_what_an_optimizer_owns_is_asked_for_once(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = made(net())
    loop.clock.start()
    ours, theirs = sgd(loop.model), sgd(nn.Linear(4, 4))
    asked: list[int] = []
    named = loop.topology.named_parameters
    monkeypatch.setattr(loop.topology, "named_parameters", lambda: asked.append(1) or named())
    for _ in range(2):
        theirs.step()
    before_one_is_known = len(asked)
    for _ in range(3):
        loop.model(X).sum().backward()
        ours.step()
        theirs.step()
    asked.clear()
    for _ in range(2):
        loop.model(X).sum().backward()
        ours.step()
        theirs.step()
    assert asked == []
    assert before_one_is_known == 2  # until an optimizer of the model's is known


@pytest.mark.parametrize(
    ("found", "skipped"),
    [
        (torch.tensor(1.0), True),
        (torch.tensor(0.0), False),
        (torch.tensor(1.0, device="meta"), False),  # on a device: the host would wait for it
        (1.0, False),
        (None, False),
    ],
    ids=str,
)
def test_a_fused_optimizer_that_was_told_of_an_inf_has_skipped_the_step(
    found: object, skipped: bool, made: Make
) -> None:
    class Fused(torch.optim.Optimizer):
        def step(self, closure: None = None) -> None:
            self.found_inf = found

    loop = made(net())
    loop.clock.start()
    loop.model(X).sum().backward()
    Fused(loop.model.parameters(), {}).step()
    assert loop.ends() == [skipped]
    assert (loop.clock.steps, loop.clock.skipped) == (1, int(skipped))


def test_a_step_that_the_user_declares_is_told_once_and_optimizers_count_no_more(
    made: Make,
) -> None:
    loop = made(net())
    loop.clock.start()
    loop.model(X).sum().backward()
    assert loop.clock.is_inside_a_step
    loop.clock.declare_step()
    loop.clock.declare_step()
    assert not loop.clock.is_inside_a_step
    optimizer = sgd(loop.model)
    for _ in range(2):
        loop.model(X).sum().backward()
        optimizer.step()
    assert (loop.ends(), loop.ready) == ([False], [])
    loop.clock.declare_step()
    assert loop.ends() == [False, False]
    assert loop.clock.step == 1


@pytest.mark.parametrize("again", [False, True])
def test_an_optimizer_that_steps_without_a_forward_is_told_of_after_three_steps(
    again: bool, made: Make
) -> None:
    loop = made(net())
    loop.look_again = again
    loop.clock.start()
    optimizer = sgd(loop.model)
    net()(X)
    for parameter in loop.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for steps in range(1, 8):
        optimizer.step()
        times = steps // 3 if again else steps >= 3
        assert [event[0] for event in loop.heard].count("blind") == times
    assert loop.ends() == []


def test_a_clock_that_starts_within_a_closure_ends_the_step_with_its_optimizer(
    made: Make,
) -> None:
    """As in Lightning where `install()` waits for the first forward."""
    loop = made(net())
    optimizer, others = sgd(loop.model), sgd(nn.Linear(2, 2))

    def closure() -> Tensor:
        if not loop.heard:
            loop.clock.start(inside=loop.model)
            assert loop.heard == [("forward", 0, 0)]
        loss = loop.model(X).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert loop.ends() == [False]
    others.step()
    loop.model(X).sum().backward()
    optimizer.step()
    assert loop.ends() == [False, False]
    assert loop.clock.step == 1


def test_an_optimizer_that_steps_after_a_late_start_is_not_taken_for_one_with_a_closure(
    made: Make,
) -> None:
    loop = made(net())
    optimizer = sgd(loop.model)
    loop.clock.start(inside=loop.model)
    loop.model(X).sum().backward()
    optimizer.step()
    assert len(loop.ready) == 1
    assert loop.ends() == [False]


def test_steps_of_a_part_of_the_parameters_end_with_the_next_forward_or_at_the_end(
    made: Make,
) -> None:
    loop = made(net())
    loop.clock.start()
    optimizer = torch.optim.SGD([loop.model[0].weight], lr=0.1)
    for _ in range(2):
        loop.model(X).sum().backward()
        optimizer.step()
        loop.model.zero_grad()
    assert loop.ends() == [False]
    loop.clock.settle()
    assert loop.ends() == [False, False]
    loop.clock.settle()
    assert (loop.ends(), loop.vanished) == ([False, False], [])


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("given_up", [False, True])
@pytest.mark.parametrize("at_the_end", [False, True])
def test_gradients_that_vanish_or_a_scaler_end_a_step_that_no_optimizer_took(
    gone: bool, given_up: bool, at_the_end: bool, made: Make
) -> None:
    loop = made(net())
    loop.scaler_gave_up = given_up
    loop.clock.start()
    loop.model(X).sum().backward()
    if gone:
        loop.model.zero_grad()
    if at_the_end:
        loop.clock.settle()
        assert loop.ends() == ([True] if given_up else [])
    else:
        loop.model(X)
        assert loop.ends() == ([given_up] if gone or given_up else [])
        assert loop.clock.micro == (0 if gone or given_up else 1)
    assert loop.vanished == [gone]


def test_the_optimizer_of_what_nobody_observes_is_no_sign_that_gradients_are_thrown_away(
    made: Make,
) -> None:
    """Who steps this model may be no optimizer of torch's, and use one of torch's elsewhere."""
    loop, elsewhere = made(net()), sgd(net())
    loop.clock.start()
    for _ in range(3):
        loop.model(X).sum().backward()
        elsewhere.step()
        loop.model.zero_grad()
    loop.model(X)
    assert loop.ends() == [False] * 3
    assert not any(event[0] == "lent" for event in loop.heard)


def test_of_a_closure_that_is_called_again_and_again_the_first_gradients_are_told(
    made: Make,
) -> None:
    loop = made(net())
    loop.clock.start()
    optimizer = torch.optim.LBFGS(loop.model.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loop.model(X).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert sum(event[0] == "forward" for event in loop.heard) > 1
    assert loop.ready == [optimizer]


def test_before_a_backward_no_gradient_can_vanish(made: Make) -> None:
    loop = made(net())
    loop.scaler_gave_up = True
    loop.clock.start()
    loop.model(X)
    loop.model(X)
    loop.clock.settle()
    assert (loop.vanished, loop.ends(), loop.clock.micro) == ([], [], 1)


def test_a_clock_that_has_stopped_leaves_no_hook_and_hears_nothing(made: Make) -> None:
    loop = made(net())
    loop.clock.start()
    assert loop.model._forward_pre_hooks
    loop.clock.unhang()  # in a pause, too
    assert not loop.model._forward_pre_hooks
    loop.clock.hang()
    assert loop.model._forward_pre_hooks
    optimizer = sgd(loop.model)
    loop.model(X).sum().backward()
    loop.clock.stop()
    assert not loop.model._forward_pre_hooks
    assert not loop.model._forward_hooks
    heard, acts = list(loop.heard), loop.acts
    loop.model(X).sum().backward()
    optimizer.step()
    assert (loop.heard, loop.acts) == (heard, acts)


def test_it_may_act_behind_every_event_at_which_a_step_may_be_over(made: Make) -> None:
    loop = made(net())
    loop.clock.start()
    optimizer = sgd(loop.model)
    for step in range(1, 4):
        loop.model(X).sum().backward()
        assert loop.acts == 2 * step - 1
        optimizer.step()
        assert loop.acts == 2 * step


def test_an_optimizer_within_anothers_step_takes_none_of_its_own(made: Make) -> None:
    loop = made(net())
    loop.clock.start()
    outer, inner_ = sgd(loop.model), sgd(loop.model)
    loop.model(X).sum().backward()

    def closure() -> Tensor:
        inner_.step()
        loss = loop.model(X).sum()
        loss.backward()
        return loss

    outer.step(closure)
    assert (loop.ends(), loop.ready) == ([False], [outer])
    assert loop.clock.step == 0


def test_the_first_forward_with_gradients_of_any_module_is_told_once_and_leaves_no_hook() -> None:
    model = net()
    told: list[nn.Module] = []
    waiting = FirstForward(describe(model), told.append)
    with torch.no_grad():
        model(X)
    assert told == []
    model[1](X)
    model(X)
    assert told == [model[1]]
    assert not any(m._forward_pre_hooks for m in model.modules())
    assert not waiting.cancel()
    waiting.hang()
    model(X)
    assert told == [model[1], model]
    waiting.hang()
    assert waiting.cancel()
    model(X)
    assert len(told) == 2


def test_of_a_compiled_model_the_first_forward_is_that_of_what_was_compiled() -> None:
    model = net()
    compiled = torch.compile(model, backend="eager")
    told: list[nn.Module] = []
    waiting = FirstForward(describe(compiled), told.append)
    compiled(X)
    assert told == [model]
    assert not waiting.cancel()


def test_a_loss_scale_that_was_logged_once_is_known_in_whatever_step(made: Make) -> None:
    loop = made(net())
    unkept: list[tuple[int, list[str]]] = []

    class Writer:
        def unkept(self, step: int, names: Iterable[str], _: str) -> None:
            unkept.append((step, list(names)))

    logged = LoggedNumbers(loop.clock, Writer())
    logged.take({"loss": 1.0}, None, sampling=False)
    assert (logged.told_scale, unkept) == (False, [(-1, ["loss"])])
    logged.take({"loss_scale": 2.0}, None, sampling=False)
    assert logged.told_scale
    logged.take({"loss": 1.0}, None, sampling=False)
    assert logged.told_scale


def test_where_the_loop_is_is_the_micro_batch_and_the_phase_under_way(made: Make) -> None:
    loop = made(net(), first_step=4)
    loop.clock.start()
    places = []
    loop.model[0].register_forward_hook(lambda *_: places.append(loop.clock.place()))
    assert loop.clock.place() == {"step": 4, "steps": 0, "micro": 0, "state": "data"}
    for _ in range(2):
        loop.model(X)
    assert places == [
        {"step": 4, "steps": 0, "micro": micro, "state": "forward"} for micro in (0, 1)
    ]
