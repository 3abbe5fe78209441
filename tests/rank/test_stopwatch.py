"""What ddpprobe says of its own cost: every way into its code is timed, and timed once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import ddpprobe
from ddpprobe.rank import made_recorder
from ddpprobe.rank.disk_thread import DiskThread
from ddpprobe.rank.hooks import call_cost
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.interval import Pacer
from ddpprobe.rundir import framing as codec
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.heartbeat import HeartbeatWriter
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.rundir.orders import OrderReader
from ddpprobe.rundir.paths import RunDir
from ddpprobe.rundir.stopwatch import Caller, Stopwatch

PACKAGE = str(Path(ddpprobe.__file__).parent)
# What stands between torch and the stopwatch: it passes a call on, and does nothing else.
ON_THE_WAY = {
    "BackwardHook.__call__", "Fuse.guard.<locals>.guarded", "CopySafeObserver.__call__",
    "Probe.log", "Probe.step", "OrderHandler.act", "RootHooks.begin", "RootHooks.begin_root",
    "StepClock._behind_step",
    "Stopwatch.timed.<locals>.entered", "_After.__call__", "_Arrived.__call__",
    "GradientHook.__call__", "_Before.__call__", "_Gradient.__call__", "_Watched.__call__",
    "after_backward.<locals>.first", "after_backward.<locals>.last", "is_captured", "outside_modes",
    "_Watched._tell", "hands_back.<locals>.hook", "may_break_off",
    "run_beside_graphs.<locals>.called", "run_beside_graphs.<locals>.plain",
}  # fmt: skip
LAYERS = 3


class Time:
    """A clock that stands still until it is told to go on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def passes(self, seconds: float = 1.0) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    """The clock of every stopwatch that `install` makes; calls take nothing besides."""
    made = Time()
    monkeypatch.setattr(made_recorder, "Stopwatch", lambda: Stopwatch(now=made))
    monkeypatch.setattr("ddpprobe.rank.disk_thread.time.thread_time", lambda: 0.0)
    monkeypatch.setattr(call_cost, "measure", lambda: [0.0] * len(Caller))
    return made


class Job:
    """A small training under the probe."""

    def __init__(self, directory: Path, **options: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(LAYERS)])
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.run = directory / "run"
        self.probe = ddpprobe.install(self.model, run_dir=self.run, daemon="none", **options)
        self.recorder = self.probe._recorder
        self.stopwatch: Stopwatch = self.recorder._stopwatch

    def step(self) -> None:
        self._optimizer.zero_grad()
        loss = self.model(torch.randn(2, 4)).square().mean()
        self.probe.log(loss=loss)
        loss.backward()
        self._optimizer.step()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    jobs: list[Job] = []

    def make(**options: object) -> Job:
        jobs.append(Job(tmp_path, **options))
        return jobs[-1]

    yield make
    for each in jobs:
        each.probe.close()


def test_a_call_within_a_call_is_counted_once() -> None:
    time = Time()
    watch = Stopwatch(now=time)
    inner = watch.timed(time.passes)

    def outer() -> None:
        time.passes()
        inner(2.0)
        assert watch.seconds == 3.0, "the call under way is included"

    watch.timed(outer, Caller.MODULE)()
    inner(5.0)
    time.passes(100.0)  # the user's
    assert (watch.seconds, watch.calls) == (8.0, [1, 1, 0])


def test_a_call_that_raises_is_over() -> None:
    time = Time()
    watch = Stopwatch(now=time)

    def fails() -> None:
        time.passes()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        watch.timed(fails)()
    time.passes()
    assert (watch.seconds, sum(watch.calls)) == (1.0, 1)


def test_two_threads_that_are_inside_at_once_share_the_time() -> None:
    """A backward on a device has a thread of its own."""
    time = Time()
    watch = Stopwatch(now=time)
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        inside.set()
        leave.wait()

    thread = threading.Thread(target=watch.timed(first))
    thread.start()
    inside.wait()

    def second() -> None:
        time.passes()
        leave.set()
        thread.join()
        time.passes()

    watch.timed(second)()
    time.passes()
    assert watch.seconds == 1.0
    watch.timed(time.passes)()
    assert watch.seconds == 2.0


def test_what_a_call_takes_besides_is_added_for_every_call() -> None:
    watch = Stopwatch(now=Time())
    tensor, module = (watch.timed(lambda: None, c) for c in (Caller.TENSOR, Caller.MODULE))
    for call in (tensor, module, tensor):
        call()
    watch.way = [100.0, 10.0, 1.0]
    assert watch.seconds == 12.0


@pytest.mark.parametrize("options", [{}, {"capture": "*"}, {"backward": "full"}])
def test_nothing_of_ours_runs_in_training_without_the_stopwatch(job, options) -> None:
    """Sampled and unsampled steps: the first frames of ours below torch's or the user's."""
    training = job(every=2, **options)
    watch, missed = training.stopwatch, set()

    def look(frame, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and watch._since is None and code.co_filename.startswith(PACKAGE):
            missed.add(code.co_qualname)

    sys.setprofile(look)
    try:
        for _ in range(5):
            training.step()
            training.model.eval()
            with torch.no_grad():
                training.model(torch.randn(2, 4))
            training.model.train()
    finally:
        sys.setprofile(None)
    assert missed <= ON_THE_WAY, missed - ON_THE_WAY
    assert "Stopwatch.timed.<locals>.entered" in missed, "it looked at the hooks of another model"


PLACES = [
    (HeartbeatWriter, "beat"), (StepRows, "add"), (Pacer, "end_step"), (OrderReader, "look"),
    (StepRows, "fetch"),
]  # fmt: skip


@pytest.mark.parametrize(("owner", "name"), PLACES)
def test_time_in_heartbeat_pacer_responder_and_rows_is_counted_once(
    job, clock, monkeypatch, owner, name
) -> None:
    training = job(every=3)
    original, calls = getattr(owner, name), []

    def slow(self, *args, **kwargs):
        clock.passes()
        calls.append(name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, slow)
    for _ in range(7):
        training.step()
    assert calls
    assert training.stopwatch.seconds == len(calls)
    assert training.recorder._clock.probe_seconds == len(calls)


def test_the_calls_that_are_counted_are_those_that_torch_makes(job) -> None:
    training = job(every=5)
    watch = training.stopwatch
    counts = []
    for _ in range(10):
        before = list(watch.calls)
        training.step()
        counts.append([now - then for now, then in zip(watch.calls, before, strict=True)])
    # The log; two at the end of the backward, two around the optimizer; the root's two hooks; and
    # the gradient of its output, which a sampled step asks whether older gradients are there.
    unsampled = [5, 2, 1]
    assert counts[6:] == [unsampled] * 4
    parameters, outputs = 2 * LAYERS, LAYERS + 1
    assert counts[5] == [5, 2 + outputs, 2 + outputs + parameters]


def test_the_first_step_learns_what_calls_take(job, monkeypatch) -> None:
    measured = [3e-9, 2e-9, 1e-9]
    monkeypatch.setattr(call_cost, "measure", lambda: measured)
    training = job(every=2)
    assert training.stopwatch.way == [0.0] * len(Caller)
    training.step()
    assert training.stopwatch.way == measured


def test_measuring_what_calls_take_touches_nothing_of_the_users() -> None:
    seen: list[object] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2, requires_grad=True)
    (x * 2).sum().backward()
    state, default = torch.get_rng_state(), torch.get_default_dtype()
    hook = nn.modules.module.register_module_forward_hook(lambda *_: seen.append("hook"))
    try:
        with torch.no_grad(), Functions(), Operators():
            costs = call_cost.measure()
        with torch.inference_mode():
            call_cost.measure()
            assert torch.is_inference_mode_enabled()
        assert torch.is_grad_enabled()
    finally:
        hook.remove()
    assert seen == []
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_default_dtype() == default
    assert torch.equal(x.grad, torch.full((2,), 2.0))
    assert len(costs) == len(Caller)
    assert all(0 <= cost < 1 for cost in costs)


def test_it_is_not_measured_inside_a_backward() -> None:
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    said = []
    y.register_hook(lambda _: said.append(call_cost.can_be_measured()))
    y.backward()
    assert said == [False]
    assert call_cost.can_be_measured()


def test_the_disk_threads_own_time_is_known_and_outlives_the_thread() -> None:
    disk_thread = DiskThread()
    disk_thread.start()
    disk_thread.do(partial(sum, range(200_000)))
    assert disk_thread.wait(60)
    assert disk_thread.wait(60), "the task before has been accounted for"
    first = disk_thread.cpu_seconds
    assert first > 0
    disk_thread.rest()
    disk_thread.do(partial(sum, range(200_000)))
    assert disk_thread.wait(60)
    assert disk_thread.wait(60)
    assert disk_thread.cpu_seconds > first
    disk_thread.close()


def test_a_record_tells_its_own_step_and_what_writing_the_last_one_took(
    job, clock, monkeypatch
) -> None:
    """Ten seconds after each record, one in each heartbeat; the disk thread took 100 more."""
    training = job(every=4)
    disk_thread = training.probe._joined.record_files.disk_thread
    disk_thread.tell_cpu = lambda _: None  # but what is told below
    beat, look = HeartbeatWriter.beat, OrderReader.look
    beats: list[int] = []

    def slow_beat(self, **said):
        clock.passes()
        beats.append(said["step"])
        beat(self, **said)

    def slow_look(self):
        clock.passes(10.0)
        return look(self)

    monkeypatch.setattr(HeartbeatWriter, "beat", slow_beat)
    monkeypatch.setattr(OrderReader, "look", slow_look)
    for step in range(9):
        if step == 2:
            training.stopwatch.beside += 100.0
        training.step()
    training.probe.close()
    tail = JournalTail(RunDir(training.run).rank_journal(0, "node_0000", 0))
    records = [
        codec.decode_record(frame.payload, tail.tables)
        for frame in tail.poll() if frame.type == codec.RECORD
    ]  # fmt: skip
    tail.close()
    told = {r.step: r.scalars[0]["probe_seconds"] for r in records if r.sampled}
    own = beats.count(4)  # all of them come before the record
    assert told == {0: own, 4: own + 10 + 100, 8: own + 10}


def test_what_does_not_get_as_far_as_the_stopwatch_is_contained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("DDPPROBE_STRICT", raising=False)

    class Broken:
        def __call__(self) -> float:
            raise RecursionError

    fuse = Fuse("x", stopwatch=Stopwatch(now=Broken()))
    assert fuse.guard(lambda: 1)() is None
    assert fuse.blown
