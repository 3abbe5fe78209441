"""A deep model gets room on the stack for its hooks, and gives it back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

from ddpprobe.rank.hooks.depth import DEEP, FRAMES, OWN, Room


def nested(depth: int) -> nn.Module:
    """Return modules in one another: `depth` below the root."""
    model: nn.Module = nn.Identity()
    for _ in range(depth):
        model = nn.Sequential(model)
    return model


@pytest.fixture
def limit() -> Iterator[int]:
    """The recursion limit, which is as before when the test is over."""
    before = sys.getrecursionlimit()
    yield before
    sys.setrecursionlimit(before)


@pytest.mark.parametrize("depth", [0, DEEP - 1, DEEP, 100])
def test_the_limit_is_raised_by_a_frame_for_each_module_of_a_deep_model(
    depth: int, limit: int
) -> None:
    room = Room(nested(depth))
    more = FRAMES * depth + OWN if depth >= DEEP else 0
    assert sys.getrecursionlimit() == limit + more
    room.give_back()
    assert sys.getrecursionlimit() == limit
    room.give_back()
    assert sys.getrecursionlimit() == limit


def test_where_the_stack_is_too_deep_just_now_it_is_given_back_the_next_time(limit: int) -> None:
    room = Room(nested(100))
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


def test_a_limit_that_somebody_has_lowered_is_never_brought_to_nothing(limit: int) -> None:
    room = Room(nested(100))
    lowered = sys.getrecursionlimit() - limit + OWN
    sys.setrecursionlimit(lowered)
    room.give_back()
    now = sys.getrecursionlimit()
    sys.setrecursionlimit(limit)
    assert now == lowered
