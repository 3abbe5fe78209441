"""The rank that all others wait for is named; one long step, and small differences, are not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddpprobe.detectors.straggler import Straggler
from ddpprobe.records.step import StepRecord
from tests.detectors.made_records import levels, record, run

SLOW = 0.03


def step(number: int, forward: list[float], **changes: object) -> StepRecord:
    """Ranks whose backwards end together: who is slow in the forward waits least."""
    scalars = {
        rank: {
            "data_seconds": 0.001, "forward_seconds": seconds, "optimizer_seconds": 0.001,
            "backward_seconds": 0.005 + max(forward) - seconds,
        }
        for rank, seconds in enumerate(forward)
    }  # fmt: skip
    return record(number, scalars, **changes)


def noisy(steps: int, every: int = 1, slow: int | None = None, start: int = 0) -> list[StepRecord]:
    rng = np.random.default_rng(0)
    out = []
    for number in range(0, steps, every):
        forward = list(0.004 * np.exp(0.5 * rng.standard_normal(3)))
        if slow is not None and number >= start:
            forward[slow] += SLOW
        out.append(step(number, forward))
    return out


@pytest.mark.parametrize("every", [1, 10])
def test_a_rank_that_is_slow_in_its_forward_is_named(every: int) -> None:
    (warn,) = run(Straggler(), noisy(300, every, slow=1, start=150))
    assert (warn.level, warn.rank, warn.phase) == ("warn", 1, "forward")
    assert 150 < warn.step <= (165 if every == 1 else 190)
    assert warn.values["behind"] == pytest.approx(SLOW, rel=0.3)
    assert warn.values["share"] == warn.values["behind"] / warn.values["step_seconds"]


def test_noise_is_left_alone() -> None:
    assert run(Straggler(), noisy(2000)) == []


def test_one_long_step_of_a_rank_is_left_alone() -> None:
    stream = noisy(300)
    stream[150] = step(150, [40.0, 0.004, 0.004])
    assert run(Straggler(), stream) == []


def test_ranks_that_are_slow_in_turn_are_left_alone() -> None:
    stream = [step(s, [SLOW if s % 3 == r else 0.001 for r in range(3)]) for s in range(300)]
    assert run(Straggler(), stream) == []


def test_a_difference_below_five_milliseconds_is_noise() -> None:
    assert run(Straggler(), [step(s, [0.0001, 0.0049]) for s in range(300)]) == []


def test_it_is_told_again_after_a_quiet_time() -> None:
    slow = noisy(500, slow=1)
    stream = [*slow[:100], *noisy(250)[100:250], *slow[250:]]
    assert levels(run(Straggler(), stream)) == [("warn", 14), ("warn", 262)]


def test_steps_without_all_ranks_or_times_are_not_judged() -> None:
    missing = [step(s, [0.001, SLOW], missing=(2,)) for s in range(50)]
    untold = [record(s, {0: {"forward_seconds": 1.0}, 1: {}}) for s in range(50, 100)]
    odd = [step(s, [math.nan, SLOW]) for s in range(100, 150)]
    assert run(Straggler(), [*missing, *untold, *odd]) == []


def test_of_two_ranks_the_slower_one_is_named_and_of_one_nobody_speaks() -> None:
    stream = [step(s, [0.004, 0.004 + (SLOW if s >= 20 else 0.0)]) for s in range(100)]
    (warn,) = run(Straggler(), stream)
    assert (warn.rank, warn.values["behind"]) == (1, pytest.approx(SLOW))
    assert run(Straggler(), [step(s, [0.004 + SLOW]) for s in range(100)]) == []
