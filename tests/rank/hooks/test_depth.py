"""A deep model gets room on the stack for its hooks, and gives it back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddpprobe.rank.hooks.depth import FRAMES, OWN, Room


@pytest.fixture
def limit() -> Iterator[int]:
    """The recursion limit, which is as before when the test is over."""
    before = sys.getrecursionlimit()
    yield before
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("there", [1000, 3001, 100_000])
def test_the_limit_is_raised_by_a_frame_for_each_module_that_fits_below_it(
    there: int, limit: int
) -> None:
    sys.setrecursionlimit(there)
    room = Room()
    raised = sys.getrecursionlimit()
    assert there / FRAMES <= raised - there - OWN < there / FRAMES + 1
    room.give_back()
    assert sys.getrecursionlimit() == there
    room.give_back()
    assert sys.getrecursionlimit() == there


def test_however_many_want_room_it_is_made_once_and_given_back_by_the_last(limit: int) -> None:
    first, second = Room(), Room()
    raised = sys.getrecursionlimit()
    first.give_back()
    first.give_back()
    third = Room()
    assert sys.getrecursionlimit() == raised
    second.give_back()
    assert sys.getrecursionlimit() == raised
    third.give_back()
    assert sys.getrecursionlimit() == limit


def test_where_the_stack_is_too_deep_just_now_it_is_given_back_the_next_time(limit: int) -> None:
    room = Room()
    raised = sys.getrecursionlimit()

    def deeper(frames: int) -> None:
        if frames:
            deeper(frames - 1)
        else:
            room.give_back()

    # In a thread of its own: what torch 2.6 compiles on Python 3.12 leaves less room in this one.
    with ThreadPoolExecutor(1) as pool:
        pool.submit(deeper, limit + OWN // 2).result()
    assert sys.getrecursionlimit() == raised
    room.give_back()
    assert sys.getrecursionlimit() == limit


@pytest.mark.parametrize("theirs", [500, 50_000])
def test_a_limit_that_somebody_has_set_meanwhile_stays(theirs: int, limit: int) -> None:
    room = Room()
    sys.setrecursionlimit(theirs)
    room.give_back()
    now = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    assert now == theirs
    Room().give_back()
    assert sys.getrecursionlimit() == limit
