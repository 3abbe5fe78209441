"""What of a backward is reduction is told of its own step, however many micro-batches it has."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ddpprobe.rank import step_times
from ddpprobe.rank.step_times import StepTimes
from ddpprobe.records.step import REDUCE_SECONDS
from ddpprobe.rundir.stopwatch import Stopwatch

from .test_stopwatch import Time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    clock = Time()
    monkeypatch.setattr(step_times, "time", SimpleNamespace(perf_counter=clock))
    return clock


def backward(times: StepTimes, clock: Time, reduction: float) -> None:
    clock.passes(5.0)
    times.backward_computed()
    clock.passes(reduction)
    times.backward_ended()


def test_the_reductions_of_a_step_are_added_up_and_begin_anew_with_the_next(clock: Time) -> None:
    times = StepTimes([0.0] * 4, Stopwatch())
    backward(times, clock, 0.25)
    backward(times, clock, 0.5)
    assert times.told()[REDUCE_SECONDS] == 0.75
    times.end_step(sampled=True)
    backward(times, clock, 1.0)
    assert times.told()[REDUCE_SECONDS] == 1.0
    times.end_step(sampled=False)
    assert times.told()[REDUCE_SECONDS] == 0.0


def test_an_end_whose_backward_was_not_heard_adds_nothing(clock: Time) -> None:
    times = StepTimes([0.0] * 4, Stopwatch())
    times.backward_ended()
    backward(times, clock, 0.25)
    clock.passes(7.0)
    times.backward_ended()
    assert times.told()[REDUCE_SECONDS] == 0.25
