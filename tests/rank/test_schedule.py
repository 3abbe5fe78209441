"""Sampled steps are a pure function of the step, and wrong schedules say what a right one is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpprobe.rank.schedule import Schedule, as_schedule


@given(st.integers(1, 50), st.integers(0, 30), st.integers(0, 10**9))
def test_every_nth_step_and_the_dense_beginning_are_sampled(every, dense, step) -> None:
    schedule = Schedule(every=every, dense_until=dense)
    assert schedule.sampled(step) == (step % every == 0 or step < dense)


def test_ranges_are_sampled_densely_ends_included() -> None:
    schedule = Schedule(every=100, ranges=((7, 9),))
    assert [s for s in range(20) if schedule.sampled(s)] == [0, 7, 8, 9]


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "10", None])
def test_a_wrong_every_is_refused(every) -> None:
    with pytest.raises(ValueError, match=r"every must be an integer of at least 1 .*, got"):
        as_schedule(every)


def test_wrong_ranges_and_warm_up_are_refused() -> None:
    with pytest.raises(ValueError, match="ranges must be"):
        Schedule(ranges=((5, 3),))
    with pytest.raises(ValueError, match="dense_until must be"):
        Schedule(dense_until=-1)


def test_a_number_is_a_schedule_of_it() -> None:
    assert as_schedule(5) == Schedule(5)
