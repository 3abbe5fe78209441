"""Gradients that nobody takes, at step after step, are told; what may be meant is not."""

from __future__ import annotations

import pytest

from ddpprobe.detectors.grad_dropped import GradDropped
from ddpprobe.records.step import DROPPED, NOTED, UNREGISTERED, StepRecord
from tests.detectors.made_records import levels, record, run


def thrown(times: float, steps: range = range(100), **more: object) -> list[StepRecord]:
    return [record(s, {0: {DROPPED: times} if times else {}}, **more) for s in steps]


@pytest.mark.parametrize(("every", "at"), [(1, 20), (10, 30)])
def test_gradients_that_are_thrown_away_in_each_step_are_told_once(every: int, at: int) -> None:
    (warn,) = run(GradDropped(), thrown(7, range(0, 300, every)))
    assert (warn.level, warn.step, warn.phase, warn.module) == ("warn", at, "backward", None)
    assert warn.values == {"times": 7}
    assert "thrown away 7 times within each step since step 0" in warn.message


def test_a_second_pass_and_one_step_now_and_then_are_left_alone() -> None:
    assert run(GradDropped(), thrown(0)) == []
    assert run(GradDropped(), thrown(2)) == []  # sharpness-aware steps, a warm-up pass
    mixed = [record(s, {0: {DROPPED: 7.0} if s % 10 else {}}) for s in range(100)]
    assert run(GradDropped(), mixed) == []
    assert run(GradDropped(), thrown(7, skipped=True)) == []
    assert run(GradDropped(), thrown(7, range(15))) == []


def test_what_is_noted_is_counted_anew() -> None:
    noted = [record(15, {0: {DROPPED: 7.0, NOTED: 1.0}})]
    stream = thrown(7, range(15)) + noted + thrown(7, range(16, 60))
    assert levels(run(GradDropped(), stream)) == [("warn", 35)]


def test_modules_that_torch_does_not_know_are_told_with_the_attribute() -> None:
    said = {0: {f"{UNREGISTERED}blocks": 24.0, f"{UNREGISTERED}encoder.heads": 2.0, "loss": 1.0}}
    other = {1: {f"{UNREGISTERED}blocks": 20.0}}
    (warn,) = run(GradDropped(), [record(s, said | other) for s in range(200)])
    assert (warn.level, warn.step, warn.module, warn.rank) == ("warn", 20, "blocks", None)
    assert warn.values == {"parameters": 26}
    assert "26 parameters in blocks" in warn.message
    assert "encoder.heads" in warn.message
    assert "nn.ModuleList" in warn.message


def test_both_are_told_each_for_itself() -> None:
    said = {0: {f"{UNREGISTERED}blocks": 24.0, DROPPED: 3.0}}
    assert levels(run(GradDropped(), [record(s, said) for s in range(99)])) == [("warn", 20)] * 2


def test_what_an_optimizer_gets_in_time_is_left_alone() -> None:
    late = [record(s, {0: {f"{UNREGISTERED}teacher": 8.0} if s < 19 else {}}) for s in range(100)]
    assert run(GradDropped(), late) == []
