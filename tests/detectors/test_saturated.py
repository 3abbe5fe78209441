"""A tanh whose outputs are all at its ends is named; what only looks like one is not."""

from __future__ import annotations

import math

import pytest

from ddpprobe.detectors.saturated import Saturated
from ddpprobe.records.step import Site, StepRecord
from tests.detectors.made_records import levels, record, run

A, B, SECOND = Site("tanh1", "output"), Site("tanh2", "output"), Site("tanh1", "output", leaf="1")
ALIVE, FLAT = math.sqrt(0.3), math.sqrt(0.99)  # rms of outputs whose mean slope is 0.7, 0.01


def of(rms: float, low: float = -1.0, high: float = 1.0, numel: int = 100) -> dict[str, float]:
    return {"rms": rms, "min": low, "max": high, "numel": numel}


def step(number: int, a: float, **shape: float) -> StepRecord:
    return record(number, rows={A: of(a, **shape), B: of(ALIVE)})


def test_a_tanh_that_is_flat_for_twenty_steps_is_named_once() -> None:
    stream = [step(s, ALIVE if s < 30 else FLAT) for s in range(200)]
    (warn,) = run(Saturated(), stream)
    assert (warn.level, warn.step, warn.module, warn.phase) == ("warn", 50, "tanh1", "forward")
    assert (warn.values["since"], warn.values["modules"]) == (30, 1)
    assert warn.values["slope"] == pytest.approx(0.01)
    assert "lets 0.01 of the gradient through" in warn.message


def test_at_an_interval_of_ten_four_looks_do_and_from_the_start_it_is_told_too() -> None:
    assert levels(run(Saturated(), [step(10 * s, FLAT) for s in range(10)])) == [("warn", 30)]


def test_the_first_of_several_is_named_and_a_module_with_two_outputs_is_named_once() -> None:
    both = {A: of(FLAT), SECOND: of(FLAT), B: of(FLAT)}
    (warn,) = run(Saturated(), [record(s, rows=both) for s in range(60)])
    assert (warn.module, warn.values["modules"]) == ("tanh1", 2)
    assert "also tanh2" in warn.message


def test_another_output_of_a_module_that_was_told_is_no_second_verdict() -> None:
    late = [record(s, rows={A: of(FLAT), SECOND: of(ALIVE if s < 50 else FLAT)}) for s in range(99)]
    assert levels(run(Saturated(), late)) == [("warn", 20)]


@pytest.mark.parametrize(
    "shape",
    [
        {"low": 0.0},  # a sigmoid, a mask, an attention
        {"low": -0.5},
        {"high": 0.5},
        {"low": -1.01},  # a norm, a linear layer
        {"high": 1.01},
        {"numel": 31},  # a few numbers
    ],
    ids=str,
)
def test_what_is_no_tanh_is_left_alone(shape: dict[str, float]) -> None:
    assert run(Saturated(), [step(s, FLAT, **shape) for s in range(100)]) == []


@pytest.mark.parametrize(("has", "told"), [((A, B), ["tanh1"]), ((A,), ["tanh1"]), ((B,), [])])
def test_an_output_without_a_gradient_lets_none_through_by_design(
    has: tuple[Site, ...], told: list[str]
) -> None:
    """Inputs or targets of -1 and 1, a code that is made without a gradient."""
    gradients = {Site(s.fqn, "grad_output"): {"rms": 1e-3, "numel": 100} for s in has}
    rows = {A: of(1.0), B: of(ALIVE)} | gradients
    found = run(Saturated(), [record(s, rows=rows) for s in range(60)])
    assert [warn.module for warn in found] == told


def test_a_look_in_between_at_which_it_is_alive_begins_anew() -> None:
    stream = [step(s, ALIVE if s == 15 else FLAT) for s in range(40)]
    assert levels(run(Saturated(), stream)) == [("warn", 36)]


def test_an_absence_is_neither() -> None:
    gone = [record(s, rows={B: of(ALIVE)}) for s in range(10, 19)]
    stream = [*(step(s, FLAT) for s in range(10)), *gone, *(step(s, FLAT) for s in range(19, 30))]
    assert levels(run(Saturated(), stream)) == [("warn", 20)]


def test_a_tanh_that_is_used_well_is_left_alone() -> None:
    assert run(Saturated(), [step(s, math.sqrt(0.94)) for s in range(100)]) == []


def test_an_rms_above_one_is_not_that_of_a_tanh_but_for_rounding() -> None:
    assert run(Saturated(), [step(s, 1.01) for s in range(100)]) == []
    assert levels(run(Saturated(), [step(s, 1 + 1e-7) for s in range(100)])) == [("warn", 20)]
