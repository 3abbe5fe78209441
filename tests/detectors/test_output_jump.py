"""A module that puts out far more than ever is named; growth, and what never spoke, is not."""

from __future__ import annotations

import numpy as np
import pytest

from ddpprobe.detectors.output_jump import OutputJump
from ddpprobe.records.step import VALUES, Site, StepRecord
from tests.detectors.made_records import levels, record, run

A, B, C = (Site(name, "output") for name in ("a", "b", "c"))


def step(number: int, a: float = 1.0, b: float = 1.0, **changes: object) -> StepRecord:
    rows = {A: {"max": a}, B: {"min": -b}}
    return record(number, rows=rows, **changes)


def quiet(steps: int, **changes: object) -> list[StepRecord]:
    rng = np.random.default_rng(0)
    return [step(s, *np.exp(0.2 * rng.standard_normal(2)), **changes) for s in range(steps)]


def test_the_first_module_in_execution_order_is_named_not_the_largest() -> None:
    (warn,) = run(OutputJump(), [*quiet(40), step(40, 20.0, 900.0)])
    assert (warn.level, warn.step, warn.module, warn.rank) == ("warn", 40, "a", 0)
    assert (warn.kind, warn.phase) == ("output", "forward")
    assert warn.values["modules"] == 2
    assert "then b" in warn.message


def test_of_several_ranks_none_is_named() -> None:
    (warn,) = run(OutputJump(), [*quiet(40, ranks=2), step(40, b=20.0, ranks=2)])
    assert (warn.module, warn.rank) == ("b", None)


def test_eight_sampled_steps_of_a_module_are_needed() -> None:
    assert run(OutputJump(), [*quiet(7), step(7, 100.0)]) == []
    assert levels(run(OutputJump(), [*quiet(8), step(8, 100.0)])) == [("warn", 8)]


@pytest.mark.parametrize(("samples", "ratio", "told"), [(15, 7, 0), (15, 9, 1), (16, 7, 1)])
def test_below_sixteen_sampled_steps_a_jump_must_be_twice_as_far(
    samples: int, ratio: float, told: int
) -> None:
    highest = max(r.values[0, VALUES.index("max")] for r in quiet(samples))
    assert len(run(OutputJump(), [*quiet(samples), step(samples, ratio * highest)])) == told


def test_the_jump_itself_is_not_among_the_looks_before() -> None:
    (warn,) = run(OutputJump(), [step(s, 1.0 if s < 20 else 100.0) for s in range(21)])
    assert "of the last 20 sampled steps" in warn.message


def test_growth_however_far_is_no_jump() -> None:
    assert run(OutputJump(), [step(s, 1.5**s) for s in range(60)]) == []


def test_a_module_that_put_out_zeros_may_begin_to_speak() -> None:
    branch = [record(s, rows={A: {"max": 1}, C: {}}) for s in range(20)]
    assert run(OutputJump(), [*branch, record(20, rows={A: {"max": 1}, C: {"max": 1e-6}})]) == []


@pytest.mark.parametrize("nothing", [0.0, 1e-7])
def test_a_past_of_nothing_is_none_to_compare_with(nothing: float) -> None:
    """A head of zeros whose loss joins later: it grows from its first real outputs on."""
    outputs = [nothing] * 40 + [0.02 * (s + 1) for s in range(20)]
    stream = [record(s, rows={A: {"max": 1}, C: {"max": x}}) for s, x in enumerate(outputs)]
    assert run(OutputJump(), stream) == []
    assert levels(run(OutputJump(), [*stream, step(60), record(61, rows={C: {"max": 4.0}})])) == [
        ("warn", 61)
    ]


def test_it_is_told_again_when_ten_times_worse_or_after_a_quiet_time() -> None:
    stream = quiet(400)
    stream[50], stream[60], stream[70] = step(50, 20.0), step(60, 150.0), step(70, 9e4)
    stream[300] = step(300, 9e4)
    assert levels(run(OutputJump(), stream)) == [("warn", 50), ("warn", 70), ("warn", 300)]


def test_a_restart_begins_anew() -> None:
    later = [step(s, 50.0, attempt=1) for s in range(41, 60)]
    assert run(OutputJump(), [*quiet(40), *later]) == []


def test_values_that_nobody_expects_do_not_raise() -> None:
    odd = (np.nan, np.inf, -np.inf, 1e308, 0.0)
    stream = [step(s, odd[s % 5], odd[s % 3]) for s in range(60)]
    missing = [record(60 + s, rows={B: {"max": 1}} if s % 2 else {}) for s in range(40)]
    run(OutputJump(), [*quiet(20), *stream, *missing, StepRecord(0, 200, (0,), 0)])
