"""Who left its own past, and how far the weights move: folds over merged records."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ddpprobe.records.site_memory import LEAST_STEPS, SLOTS, Outlier, Outliers, UpdateRatios
from ddpprobe.records.step import COUNTS, VALUES, Site, StepRecord

NUMEL, OBSERVED = COUNTS.index("numel"), COUNTS.index("observed")


def record(step: int, rms: dict[tuple[str, str], float], placement: str = "local") -> StepRecord:
    """A step in which each site has one element; NaN: it was not observed."""
    sites = tuple(Site(fqn, kind, placement=placement) for fqn, kind in rms)
    counts, values = np.zeros((len(sites), len(COUNTS)), np.int64), np.zeros((len(sites), 4))
    for row, number in enumerate(rms.values()):
        if not math.isnan(number):
            counts[row, [NUMEL, OBSERVED, COUNTS.index("tapped")]] = 1
            values[row, VALUES.index("sum_sq")] = number**2
    return StepRecord(0, step, (0,), 1, True, sites, counts, values)


def many(step: int, **changed: float) -> StepRecord:
    return record(step, {(f"m{i}", "output"): changed.get(f"m{i}", 1.0 + i) for i in range(30)})


def test_the_site_that_left_its_past_furthest_has_the_first_slot() -> None:
    outliers = Outliers()
    for step in range(20):
        outliers.update(many(step))
    assert outliers.now == ()
    outliers.update(many(20, m7=8e3, m9=1e-3))
    assert [(o.fqn, o.kind) for o in outliers.now] == [("m9", "output"), ("m7", "output")]
    assert outliers.now[0].score == pytest.approx(-4)
    assert outliers.now[1].score == pytest.approx(3)


def test_there_are_only_so_many_slots() -> None:
    outliers = Outliers()
    for step in range(20):
        outliers.update(many(step))
    outliers.update(many(20, **{f"m{i}": 100.0 * (i + 1) for i in range(30)}))
    assert len(outliers.now) == SLOTS


def test_without_a_past_nobody_has_left_it() -> None:
    outliers = Outliers()
    for step in range(LEAST_STEPS):
        outliers.update(many(step, m3=10.0**step))
        assert outliers.now == ()
    outliers.update(many(LEAST_STEPS, m3=1e12))
    assert outliers.now[0].fqn == "m3"


def test_a_new_level_becomes_the_usual_one() -> None:
    outliers = Outliers()
    for step in range(300):
        outliers.update(many(step, m3=4.0 if step < 20 else 400.0))
    assert all(abs(each.score) < 1e-6 for each in outliers.now)


def test_a_site_that_is_silent_for_a_step_keeps_its_past_and_zeros_are_no_level() -> None:
    outliers = Outliers()
    for step in range(40):
        outliers.update(many(step, m3=[4.0, math.nan, 0.0][step % 3]))
        assert outliers.now == ()
    outliers.update(many(40, m3=4e5))
    (one,) = outliers.now
    assert one == Outlier("m3", "output", one.score)
    assert one.score == pytest.approx(5)


def weights(step: int, **ratios: float) -> StepRecord:
    rows = {}
    for fqn, ratio in ratios.items():
        rows |= {(fqn, "param"): 2.0, (fqn, "update"): 2.0 * ratio}
    return record(step, rows)


def test_a_parameter_keeps_its_ratio_until_its_next_turn() -> None:
    ratios = UpdateRatios()
    ratios.update(weights(0, a=0.1, b=math.nan))
    assert ratios.now == pytest.approx({"a": 0.1})
    ratios.update(weights(1, a=math.nan, b=0.0))
    assert ratios.now == pytest.approx({"a": 0.1, "b": 0.0})
    ratios.update(weights(2, a=0.2))
    assert ratios.now == pytest.approx({"a": 0.2, "b": 0.0})


def test_a_step_that_was_skipped_and_one_rank_s_part_say_nothing_of_a_weight() -> None:
    ratios = UpdateRatios()
    ratios.update(replace(weights(0, a=0.0), skipped=True))
    ratios.update(record(1, {("a", "param"): 1.0, ("a", "update"): 0.5}, placement="partial"))
    assert ratios.now == {}
