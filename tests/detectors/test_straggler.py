"""The rank that all others wait for is named; one long step, and small differences, are not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ddpprobe.detectors.straggler import Straggler
from ddpprobe.records.step import QUEUED, TRAINABLE, StepRecord
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


def phased(number: int, *ranks: tuple[float, ...]) -> StepRecord:
    """Ranks by their seconds of data, forward, backward, and of these for the reduction."""
    names = ("data_seconds", "forward_seconds", "backward_seconds", "reduce_seconds")
    told = {r: dict(zip(names, seconds, strict=False)) for r, seconds in enumerate(ranks)}
    return record(number, {r: {**one, "optimizer_seconds": 0.001} for r, one in told.items()})


def test_under_fsdp_where_ranks_meet_in_the_forward_slow_data_is_seen() -> None:
    fast, slow = (0.001, 0.034, 0.005, 0.001), (0.031, 0.004, 0.005, 0.001)
    (warn,) = run(Straggler(), [phased(n, fast, slow, fast) for n in range(100)])
    assert (warn.rank, warn.values["behind"]) == (1, pytest.approx(0.03))


def test_a_backward_that_takes_one_rank_longer_is_told_from_waiting_for_it() -> None:
    fast, slow = (0.001, 0.004, 0.045, 0.040), (0.001, 0.004, 0.045, 0.001)
    (warn,) = run(Straggler(), [phased(n, slow, fast, fast) for n in range(100)])
    assert (warn.rank, warn.values["behind"]) == (0, pytest.approx(0.039))


def test_records_that_do_not_tell_a_reduction_are_judged_without_it() -> None:
    short, long = (0.001, 0.004, 0.005), (0.001, 0.004, 0.045)
    assert run(Straggler(), [phased(n, short, long, long) for n in range(100)]) == []


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


def lasting(
    seconds: float = 1.0, every: int = 1, share: float = 0.25, steps: int = 1400
) -> list[StepRecord]:
    """Steps of so many seconds; from step 700 on rank 2 is late by a share of them."""
    rng = np.random.default_rng(1)
    out = []
    for number in range(0, steps, every):
        forward = list(seconds / 3 * np.exp(0.05 * rng.standard_normal(4)))
        if number >= 700:
            forward[2] += share * seconds
        scalars = {
            rank: {
                "data_seconds": 0.0, "forward_seconds": own, "optimizer_seconds": 0.0,
                "backward_seconds": seconds - own,
            }
            for rank, own in enumerate(forward)
        }  # fmt: skip
        out.append(record(number, scalars, wall_time_ns=int(1e9 * seconds * number)))
    return out


@pytest.mark.parametrize(("seconds", "every"), [(1.0, 1), (1.0, 10), (12.0, 10)])
def test_a_smaller_share_of_the_step_is_told_once_it_lasts_for_minutes(
    seconds: float, every: int
) -> None:
    (warn,) = run(Straggler(), lasting(seconds, every))
    assert (warn.level, warn.rank) == ("warn", 2)
    # In nine tenths of the points it must be the slowest; where steps are rare, of 20 points.
    span = max(600, 20 * every * seconds)
    assert 0.75 * span < (warn.step - 700) * seconds <= span
    assert warn.values["share"] == pytest.approx(0.25, rel=0.2)
    assert warn.values["points"] == (20 if seconds > 1 else 61)


def test_a_smaller_share_that_has_not_lasted_or_is_too_small_is_left_alone() -> None:
    assert run(Straggler(), lasting(steps=700 + 450)) == []
    assert run(Straggler(), lasting(share=0.15)) == []
    assert run(Straggler(minutes=60), lasting()) == []


def test_where_the_clock_is_set_back_the_minutes_begin_anew() -> None:
    stream = lasting(steps=2200)
    back = [replace(r, wall_time_ns=r.wall_time_ns - 10**13 * (r.step >= 1000)) for r in stream]
    (warn,) = run(Straggler(), back)
    assert warn.step == pytest.approx(1600, abs=20)


def test_ranks_that_train_other_parameters_are_not_compared() -> None:
    def stages(trained: list[float], late: float = 0.0) -> list[StepRecord]:
        out = [step(s, [0.001, 0.001 + late * (s >= 50), SLOW, SLOW]) for s in range(100)]
        for one in out:
            for rank, said in one.scalars.items():
                said[TRAINABLE] = trained[rank]  # type: ignore[index]
        return out

    assert run(Straggler(), stages([4.0, 4.0, 7.0, 7.0])) == []
    assert run(Straggler(), stages([4.0, 5.0, 6.0, 7.0], 2 * SLOW)) == []
    (warn,) = run(Straggler(), stages([4.0, 4.0, 7.0, 7.0], SLOW))
    assert warn.rank == 1


def test_a_slow_rank_for_which_nobody_waits_is_left_alone() -> None:
    """Ranks that each train a model of their own meet in no collective."""

    def alone(number: int) -> StepRecord:
        one = step(number, [0.001, SLOW])
        for said in one.scalars.values():
            said["backward_seconds"] = 0.005  # type: ignore[index]
        return one

    assert run(Straggler(), [alone(s) for s in range(100)]) == []


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


def starved(
    seconds: float, queued: float, *, share: float, steps: int, wall: float = 0.05
) -> list[StepRecord]:
    """Steps in which rank 1 is late by a share of them; of that it is queued for a part."""
    out = []
    for number in range(steps):
        late = share * seconds
        scalars = {
            rank: {
                "data_seconds": 0.0, "forward_seconds": seconds / 4 + late * (rank == 1),
                "backward_seconds": 3 * seconds / 4 - late * (rank == 1), "optimizer_seconds": 0.0,
                **dict.fromkeys(QUEUED.values(), 0.0),
                QUEUED["forward"]: queued * late * (rank == 1),
            }
            for rank in range(2)
        }  # fmt: skip
        out.append(record(number, scalars, wall_time_ns=int(1e9 * wall * number)))
    return out


def test_a_rank_that_had_no_core_for_some_steps_is_left_alone() -> None:
    assert run(Straggler(), starved(0.05, 0.9, share=0.7, steps=500)) == []
    (warn,) = run(Straggler(), starved(0.05, 0.1, share=0.7, steps=50))
    assert (warn.rank, warn.values["queued"]) == (1, 0.0)
    assert warn.values["share"] == pytest.approx(0.63)


def test_half_of_a_step_is_enough_only_where_ranks_tell_what_they_had_no_core_for() -> None:
    stream = starved(0.05, 0.0, share=0.5, steps=50)
    assert levels(run(Straggler(), stream)) == [("warn", 14)]
    silent = set(QUEUED.values())
    untold = [
        replace(one, scalars={**one.scalars, 1: {
            name: number for name, number in one.scalars[1].items() if name not in silent
        }})
        for one in stream
    ]  # fmt: skip
    assert run(Straggler(), untold) == []


def test_a_rank_that_has_no_core_for_minutes_is_told_with_the_reason() -> None:
    (warn,) = run(Straggler(), starved(1.0, 0.8, share=0.3, steps=700, wall=1.0))
    assert (warn.rank, warn.values["queued"]) == (1, pytest.approx(0.24))
    assert "look at what else runs on its host: for 0.24 s of that it had no core" in warn.message
    (other,) = run(Straggler(), starved(1.0, 0.2, share=0.3, steps=700, wall=1.0))
    assert "look at its data loader, host and clocks" in other.message


def waiting(queued: float, *, late: float = 0.0, trained: float = 4.0) -> list[StepRecord]:
    """Rank 1 had no core while it read its data; rank 0 waits in its forward until it is there."""
    out = []
    for number in range(100):
        named = ("data_seconds", "forward_seconds", "backward_seconds", "optimizer_seconds")
        seconds = {0: (0.005, 0.01 + queued + late), 1: (0.005 + queued, 0.01)}
        scalars = {
            rank: {
                **dict(zip(named, (*own, 0.05 + late * (rank == 1), 0.001), strict=True)),
                **dict.fromkeys(QUEUED.values(), 0.0), TRAINABLE: trained,
                QUEUED["data"]: queued * (rank == 1),
            }
            for rank, own in seconds.items()
        }  # fmt: skip
        out.append(record(number, scalars))
    return out


def test_a_rank_that_waits_in_its_forward_for_one_with_no_core_is_not_the_slow_one() -> None:
    assert run(Straggler(), waiting(0.08)) == []
    (warn,) = run(Straggler(), waiting(0.08, late=0.15))
    assert (warn.rank, warn.values["behind"]) == (0, pytest.approx(0.15))


def test_a_model_that_trains_nothing_has_no_collectives() -> None:
    assert len(run(Straggler(), waiting(0.0, late=0.15))) == 1
    assert run(Straggler(), waiting(0.0, late=0.15, trained=0.0)) == []
