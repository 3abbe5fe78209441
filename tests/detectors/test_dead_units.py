"""A ReLU that dies is named; one that is mostly zero in good health is not."""

from __future__ import annotations

from ddpprobe.detectors.dead_units import DeadUnits
from ddpprobe.records.step import Site, StepRecord
from tests.detectors.made_records import levels, record, run

A, B = Site("act1", "output"), Site("act2", "output")


def step(number: int, a: float, b: float = 50) -> StepRecord:
    return record(number, rows={A: {"zeros": a}, B: {"zeros": b}})


def test_a_module_that_puts_out_zeros_for_ten_steps_is_named_once() -> None:
    stream = [step(s, 60) for s in range(30)] + [step(s, 100) for s in range(30, 200)]
    (warn,) = run(DeadUnits(), stream)
    assert (warn.level, warn.step, warn.module, warn.phase) == ("warn", 40, "act1", "forward")
    assert warn.values == {"zero_ratio": 1.0, "since": 30, "modules": 1}


def test_at_an_interval_of_ten_three_sampled_steps_do() -> None:
    stream = [step(10 * s, 60 if s < 10 else 100) for s in range(20)]
    assert levels(run(DeadUnits(), stream)) == [("warn", 120)]


def test_modules_that_die_together_are_one_verdict() -> None:
    stream = [step(s, 60) for s in range(30)] + [step(s, 100, 100) for s in range(30, 60)]
    (warn,) = run(DeadUnits(), stream)
    assert warn.values["modules"] == 2
    assert "so do act2" in warn.message


def test_a_wide_relu_that_is_always_nearly_zero_is_left_alone() -> None:
    assert run(DeadUnits(), [step(s, 95 + s % 6) for s in range(100)]) == []


def test_a_few_steps_of_zeros_are_left_alone() -> None:
    assert run(DeadUnits(), [step(s, 100 if s % 20 < 9 else 50) for s in range(200)]) == []


def test_an_absence_is_no_death_and_no_life() -> None:
    gone = [record(s, rows={B: {"zeros": 50}}) for s in range(30, 60)]
    assert run(DeadUnits(), [*(step(s, 60) for s in range(30)), *gone]) == []


def test_it_is_told_again_once_it_has_lived() -> None:
    stream = [step(s, 100 if 30 <= s < 60 or s >= 90 else 50) for s in range(120)]
    assert levels(run(DeadUnits(), stream)) == [("warn", 40), ("warn", 100)]
