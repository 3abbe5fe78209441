"""Several steps on one batch are one look; a batch that is all there is gives a look at each."""

from __future__ import annotations

import numpy as np
import pytest

from ddpprobe.detectors.held_batches import LONGEST, HeldBatches
from ddpprobe.detectors.level_shift import LevelShift
from ddpprobe.detectors.rank_outlier import RankOutlier
from ddpprobe.records.step import DIGEST, Anomaly, StepRecord
from tests.detectors.made_records import record, run


def again(digests: list[float], every: int = 1) -> list[bool]:
    held = HeldBatches()
    return [held.again(record(i * every, {0: {DIGEST: d}})) for i, d in enumerate(digests)]


def test_a_batch_is_one_look_however_many_steps_are_taken_on_it() -> None:
    assert again([1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 2.0]) == [
        False, True, False, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(("every", "looks"), [(1, 31), (10, 3), (40, 0)])
def test_a_batch_that_stays_is_what_is_trained_on(every: int, looks: int) -> None:
    assert again([1.0] * 100, every) == [False] + [True] * looks + [False] * (99 - looks)
    assert (looks + 1) * every >= LONGEST


def test_a_rank_with_another_batch_and_one_that_says_nothing_are_a_look() -> None:
    held = HeldBatches()
    said = [(1.0, 1.0), (1.0, 3.0), (1.0, 3.0)]
    records = [record(i, {0: {DIGEST: a}, 1: {DIGEST: b}}) for i, (a, b) in enumerate(said)]
    assert [held.again(one) for one in records] == [False, False, True]
    assert not any(HeldBatches().again(record(i, {0: {}})) for i in range(3))


def losses(steps: int, times: int, seed: int) -> list[StepRecord]:
    """Several steps on each batch of two ranks, which differ by much and are learned a little."""
    rng, found = np.random.default_rng(seed), []
    for step in range(steps):
        if step % times == 0:
            level = 0.1 * np.exp(1.0 * rng.standard_normal(2))
        fitted = level * 0.93 ** (step % times) * np.exp(0.02 * rng.standard_normal(2))
        found.append(record(step, {
            r: {"loss": float(x), DIGEST: float(2 * (step // times) + r)}
            for r, x in enumerate(fitted)
        }))  # fmt: skip
    return found


def told(detector: type[RankOutlier | LevelShift], times: int) -> list[Anomaly]:
    said = [run(detector(), losses(300, times, seed)) for seed in range(10)]
    return [a for of in said for a in of if a.level != "info"]


@pytest.mark.parametrize("times", [1, 4, 8, 16])
def test_what_a_batch_is_by_chance_is_told_of_no_rank_and_no_loss(times: int) -> None:
    assert told(RankOutlier, times) == []
    assert times > 8 or told(LevelShift, times) == []  # of 16 steps each it knows two batches


def test_a_rank_that_leaves_the_others_is_told_as_well_where_each_batch_is_held() -> None:
    far = [
        record(one.step, {0: one.scalars[0], 1: one.scalars[1] | {"loss": 50.0}})
        if one.step >= 240 else one
        for one in losses(400, 4, 0)
    ]  # fmt: skip
    first, *_ = [a for a in run(RankOutlier(), far) if a.level != "info"]
    assert (first.rank, first.step) == (1, 256)
