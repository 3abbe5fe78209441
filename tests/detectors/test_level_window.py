"""What moves at once and stays has shifted; noise, trends and what is not known have not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpprobe.detectors.level_window import LEAST_NOISE, LevelWindow

RECENT, BLOCKS = 4, 3
LENGTH = RECENT * (BLOCKS + 1)


def window(*series: list[float]) -> LevelWindow:
    made = LevelWindow(LENGTH)
    for step, values in enumerate(zip(*series, strict=True)):
        made.push(np.array(values), step)
    return made


def shift(values: list[float]) -> tuple[float, float]:
    found = window(values).shifts(RECENT, BLOCKS)
    return (float(found.size[0]), float(found.clear[0])) if len(found.places) else (0.0, 0.0)


BEFORE = [0.0, 0.1, 0.0, 0.1, 0.1, 0.1, 0.1, 0.2, 0.0, 0.1, 0.0, 0.1]  # medians .05, .1, .05


def test_size_is_the_step_between_the_medians_and_clear_is_that_by_the_largest_one_before() -> None:
    assert shift([*BEFORE, 0.7, 0.5, 0.6, 0.8]) == pytest.approx((0.6, 12.0), rel=1e-5)
    assert shift([*BEFORE, -0.7, -0.5, -0.6, -0.8]) == pytest.approx((-0.7, 14.0), rel=1e-5)


def test_one_of_the_last_that_is_not_beyond_all_before_is_no_shift() -> None:
    assert shift([*BEFORE, 0.7, 0.2, 0.6, 0.8]) == (0.0, 0.0)
    assert shift([*BEFORE, 0.7, 0.21, 0.6, 0.8]) != (0.0, 0.0)
    assert shift([*BEFORE, -0.7, 0.0, -0.6, -0.8]) == (0.0, 0.0)


def test_a_trend_is_no_clearer_than_its_own_steps() -> None:
    size, clear = shift([0.1 * i for i in range(LENGTH)])
    assert (size, clear) == pytest.approx((0.4, 1.0), rel=1e-5)


def test_a_trend_is_no_clearer_where_its_values_come_more_rarely() -> None:
    steps = [*range(12), 20, 30, 40, 50]
    made = LevelWindow(LENGTH)
    for step in steps:
        made.push(np.array([0.1 * step]), step)
    assert made.shifts(RECENT, BLOCKS).clear.tolist() == pytest.approx([1.0], rel=1e-5)
    often = LevelWindow(LENGTH)  # and no less clear where they come more often
    for step, value in zip([10 * i for i in range(16)], [*BEFORE, 0.7, 0.5, 0.6, 0.8], strict=True):
        often.push(np.array([value]), min(step, 110 + step // 10))
    assert often.shifts(RECENT, BLOCKS).clear.tolist() == pytest.approx([12.0], rel=1e-5)


def test_a_series_that_does_not_move_is_not_judged_by_its_rounding() -> None:
    size, clear = shift([*[0.0] * 12, *[0.02] * 4])
    assert clear == pytest.approx(size / LEAST_NOISE)


@pytest.mark.parametrize("place", [0, 5, 11, 12, 15])
def test_a_series_of_which_a_value_is_not_known_has_not_shifted(place: int) -> None:
    values = [*BEFORE, 0.7, 0.5, 0.6, 0.8]
    values[place] = np.nan
    assert shift(values) == (0.0, 0.0)


def test_nothing_is_known_before_the_window_is_full() -> None:
    assert shift([*BEFORE[1:], 0.7, 0.5, 0.6, 0.8]) == (0.0, 0.0)


def test_series_that_come_later_are_known_from_there_on() -> None:
    made = LevelWindow(LENGTH)
    made.push(np.array([0.0]), 0)
    for step, value in enumerate((*BEFORE, 0.7, 0.5, 0.6, 0.8), 1):
        made.push(np.array([0.0, value]), step)
    found = made.shifts(RECENT, BLOCKS)
    assert (found.places.tolist(), found.size.tolist()) == ([1], [pytest.approx(0.6, rel=1e-5)])


def test_the_last_values_count_and_older_ones_are_forgotten() -> None:
    values = [*BEFORE, 0.7, 0.5, 0.6, 0.8]
    assert shift([9.0, -9.0, 9.0, *values]) == shift(values)


def test_a_shorter_look_takes_the_last_of_what_is_remembered() -> None:
    made = window([5.0, -5.0, 5.0, -5.0, *[0.0, 0.1] * 4, *[0.5] * 4])
    assert not len(made.shifts(2, 5).places)  # the last two are no more than those before
    assert made.shifts(4, 2).size[0] == pytest.approx(0.45, rel=1e-5)
    assert not len(made.shifts(4, 3).places)  # 5 is above all of it


def test_the_largest_move_is_that_between_any_two_blocks_that_are_known() -> None:
    flat, stepped, young = [0.0] * LENGTH, [0.0] * 4 + [1.0] * 12, [np.nan] * 13 + [1.0] * 3
    assert window(flat, stepped, young).largest_move(RECENT).tolist() == [0.0, 1.0, 0.0]


@given(st.lists(st.floats(-5, 5), min_size=LENGTH, max_size=LENGTH), st.floats(-50, 50))
def test_another_unit_changes_nothing(values: list[float], unit: float) -> None:
    size, clear = shift(values)
    moved = shift([x + unit for x in values])
    if abs(size) > 0.1:  # float32 rounds what lies closer together
        assert moved == pytest.approx((size, clear), rel=0.01, abs=0.01) or moved == (0.0, 0.0)


@given(st.lists(st.floats(-5, 5), min_size=LENGTH, max_size=LENGTH))
def test_upside_down_it_is_the_same_shift_downwards(values: list[float]) -> None:
    size, clear = shift(values)
    assert shift([-x for x in values]) == pytest.approx((-size, clear), rel=1e-5)
