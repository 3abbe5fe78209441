"""What of a backward is reduction is told of its own step, however many micro-batches it has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddpprobe.rank import phase_times, step_times
from ddpprobe.rank.phase_times import BACKWARD, DATA, FORWARD, OPTIMIZER, PhaseTimes
from ddpprobe.rank.step_times import StepTimes
from ddpprobe.records.step import QUEUED, REDUCE_SECONDS
from ddpprobe.rundir.stopwatch import Stopwatch

from .test_stopwatch import Time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    for room in (step_times, phase_times):
        monkeypatch.setattr(room, "time", SimpleNamespace(perf_counter=clock))
    return clock


def backward(times: StepTimes, clock: Time, reduction: float) -> None:
    clock.passes(5.0)
    times.backward_computed()
    clock.passes(reduction)
    times.backward_ended()


def test_the_reductions_of_a_step_are_added_up_and_begin_anew_with_the_next(clock: Time) -> None:
    times = StepTimes(PhaseTimes(), Stopwatch())
    backward(times, clock, 0.25)
    backward(times, clock, 0.5)
    assert times.told()[REDUCE_SECONDS] == 0.75
    times.end_step(sampled=True, following=True)
    backward(times, clock, 1.0)
    assert times.told()[REDUCE_SECONDS] == 1.0
    times.end_step(sampled=False, following=True)
    assert times.told()[REDUCE_SECONDS] == 0.0


def test_an_end_whose_backward_was_not_heard_adds_nothing(clock: Time) -> None:
    times = StepTimes(PhaseTimes(), Stopwatch())
    times.backward_ended()
    backward(times, clock, 0.25)
    clock.passes(7.0)
    times.backward_ended()
    assert times.told()[REDUCE_SECONDS] == 0.25


class Delay:
    """What the kernel says of a thread; None: nothing."""

    told: float | None = 0.0

    def begin(self) -> None:
        pass

    def seconds(self) -> float | None:
        return self.told

    def close(self) -> None:
        pass

    def passes(self, seconds: float) -> None:
        assert self.told is not None
        self.told += seconds


@pytest.fixture
def delay(monkeypatch: pytest.MonkeyPatch) -> Delay:
    delay = Delay()
    monkeypatch.setattr(phase_times, "RunDelay", lambda: delay)
    return delay


def queued(times: StepTimes) -> dict[str, float]:
    told = times.told()
    return {part: told[name] for part, name in QUEUED.items() if told.get(name)}


def a_step(phases: PhaseTimes, times: StepTimes, delay: Delay) -> None:
    delay.passes(1.0)
    phases.enter(FORWARD)
    delay.passes(2.0)
    phases.enter(BACKWARD)
    delay.passes(4.0)
    times.backward_computed()
    delay.passes(8.0)
    times.backward_ended()
    delay.passes(16.0)
    phases.enter(OPTIMIZER)
    delay.passes(32.0)
    phases.enter(DATA)


WHOLE = {"data": 1.0, "forward": 2.0, "backward": 28.0, "reduce": 8.0, "optimizer": 32.0}


def test_the_seconds_without_a_core_are_those_of_their_phase_and_step(delay: Delay) -> None:
    phases = PhaseTimes()
    times = StepTimes(phases, Stopwatch())
    for _ in range(2):
        a_step(phases, times, delay)
        assert queued(times) == WHOLE
        times.end_step(sampled=True, following=True)


def test_they_are_not_counted_in_a_step_that_is_not_sampled(delay: Delay) -> None:
    phases = PhaseTimes()
    times = StepTimes(phases, Stopwatch())
    times.end_step(sampled=True, following=False)
    a_step(phases, times, delay)
    assert queued(times) == {}
    times.end_step(sampled=False, following=True)
    a_step(phases, times, delay)
    assert queued(times) == WHOLE


def test_what_belongs_to_no_phase_is_none_of_them(delay: Delay) -> None:
    phases = PhaseTimes()
    times = StepTimes(phases, Stopwatch())
    phases.enter(BACKWARD)
    delay.passes(5.0)
    phases.leave_out()
    phases.enter(DATA)
    assert queued(times) == {}


def test_where_the_kernel_does_not_tell_there_are_no_such_scalars(delay: Delay) -> None:
    delay.told = None
    phases = PhaseTimes()
    times = StepTimes(phases, Stopwatch())
    phases.enter(DATA)
    assert not set(QUEUED.values()) & set(times.told())
    delay.told = 3.0
    times.end_step(sampled=True, following=True)
    assert set(QUEUED.values()) <= set(times.told())
