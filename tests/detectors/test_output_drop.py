"""A module that puts out far less than ever is named; what spoke seldom or never is not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddpprobe.detectors.output_drop import OutputDrop
from ddpprobe.records.step import Site, StepRecord
from tests.detectors.made_records import levels, record, run

A, B, C = (Site(name, "output") for name in ("a", "b", "c"))


def step(number: int, a: float = 1.0, b: float = 1.0, **changes: object) -> StepRecord:
    return record(number, rows={A: {"rms": a}, B: {"rms": b}}, **changes)


def quiet(steps: int, **changes: object) -> list[StepRecord]:
    rng = np.random.default_rng(0)
    return [step(s, *np.exp(0.2 * rng.standard_normal(2)), **changes) for s in range(steps)]


@pytest.mark.parametrize("left", [0.05, 0.0])
def test_the_first_module_in_execution_order_is_named_at_the_second_look(left: float) -> None:
    stream = [*quiet(40), *(step(s, left, left / 2) for s in range(40, 60))]
    (warn,) = run(OutputDrop(), stream)
    assert (warn.level, warn.step, warn.module, warn.rank) == ("warn", 41, "a", 0)
    assert (warn.kind, warn.phase, warn.values["modules"]) == ("output", "forward", 2)
    assert "then b" in warn.message
    assert ("nothing is left of the lowest" in warn.message) == (left == 0)


def test_of_several_ranks_none_is_named() -> None:
    stream = [*quiet(40, ranks=2), *(step(s, b=0.05, ranks=2) for s in (40, 41))]
    (warn,) = run(OutputDrop(), stream)
    assert (warn.module, warn.rank) == ("b", None)


def test_one_look_is_not_enough_and_a_look_without_the_module_is_none() -> None:
    assert run(OutputDrop(), [*quiet(40), step(40, 0.01), *(step(s) for s in range(41, 60))]) == []
    away = [record(s, rows={B: {"rms": 1.0}}) for s in range(41, 45)]
    found = run(OutputDrop(), [*quiet(40), step(40, 0.01), *away, step(45, 0.01)])
    assert levels(found) == [("warn", 45)]


def test_half_of_what_it_was_is_no_drop_nor_is_a_slow_decline() -> None:
    half = [step(s) for s in range(40)] + [step(s, 0.4) for s in range(40, 60)]
    assert run(OutputDrop(), half) == []
    assert run(OutputDrop(), [step(s, 0.7**s) for s in range(30)]) == []


def test_twelve_sampled_steps_of_a_module_are_needed() -> None:
    for before, found in ((11, 0), (12, 1)):
        stream = [step(s) for s in range(before)] + [step(s, 0.01) for s in range(before, 30)]
        assert len(run(OutputDrop(), stream)) == found


def test_what_puts_out_nothing_cannot_drop() -> None:
    stream = [record(s, rows={C: {"rms": 1e-6 if s < 40 else 0.0}}) for s in range(60)]
    assert run(OutputDrop(), stream) == []


def test_it_is_told_again_behind_a_quiet_time_and_a_restart_begins_anew() -> None:
    stream = quiet(400)
    for s in (50, 51, 60, 61, 300, 301):
        stream[s] = step(s, 0.01)
    assert levels(run(OutputDrop(), stream)) == [("warn", 51), ("warn", 301)]
    later = [step(s, 0.01, attempt=1) for s in range(41, 60)]
    assert run(OutputDrop(), [*quiet(40), *later]) == []


def test_values_that_nobody_expects_do_not_raise() -> None:
    odd = (math.nan, math.inf, 1e150, 5e-324, 0.0)
    stream = [step(s, odd[s % 5], odd[s % 4], attempt=s // 90) for s in range(200)]
    run(OutputDrop(), [*stream, StepRecord(2, 300, (0, 1), 0), record(301)])
