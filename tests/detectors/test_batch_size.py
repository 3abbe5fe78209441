"""A step that is given a part of what each was given before."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from ddpprobe.detectors.batch_size import BatchSize
from ddpprobe.records.step import INPUT_ELEMENTS, LEARNING_RATE, Anomaly, StepRecord
from tests.detectors.made_records import record, run

Row = dict[str, float]


def given(elements: float, micros: int = 1, rate: float = 0.1) -> Row:
    return {INPUT_ELEMENTS: elements, "micro_batches": micros, LEARNING_RATE: rate}


def told(looks: Sequence[Row], *others: Sequence[Row], **settings: int) -> list[Anomaly]:
    ranks = [looks, *others]
    records = [
        record(10 * i, {rank: each[i] for rank, each in enumerate(ranks)})
        for i in range(len(looks))
    ]
    return run(BatchSize(**settings), records)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (given(64, 8), given(64, 1)),  # nobody accumulates
        (given(4096, 2), given(1024, 2)),  # texts are cut
        (given(1024, 1, 0.1), given(256, 1, 0.09)),  # as the rate falls anyway
    ],
)
def test_a_smaller_step_is_told_once_at_the_third_look(before: Row, now: Row) -> None:
    (warn,) = told([before] * 10 + [now] * 100, [before] * 10 + [now] * 100)
    assert (warn.level, warn.step, warn.rank, warn.module) == ("warn", 120, None, "")
    size, was = (2 * each[INPUT_ELEMENTS] * each["micro_batches"] for each in (now, before))
    assert warn.values == {"elements": size, "before": was}
    assert f"is given {size:.6g} numbers in a step where it was given {was:.6g}," in warn.message


@pytest.mark.parametrize(
    ("before", "now", "says"),
    [
        (0.1, 0.1, ", at the same learning rate: look"),
        (0.1, 0.09, ", at a learning rate of 0.09, before 0.1: look"),
        (math.nan, math.nan, "was given 64: look"),
        (math.nan, 0.1, "was given 64: look"),
    ],
)
def test_the_learning_rate_is_told_as_far_as_it_is_known(
    before: float, now: float, says: str
) -> None:
    (warn,) = told([given(64, 1, before)] * 10 + [given(8, 1, now)] * 5)
    assert says in warn.message


@pytest.mark.parametrize(
    "looks",
    [
        [given(64)] * 100,
        [given(64, 2)] * 20 + [given(64, 1)] * 20,  # half: an accumulation that was set so
        [given(64)] * 20 + [given(16, 4)] * 20,
        [given(64, 1)] * 20 + [given(64, 8)] * 20,  # more
        [*[given(64)] * 20, given(4)] * 5,  # the end of an epoch
        [given(64, 8, 0.1)] * 20 + [given(64, 1, 0.0125)] * 20,  # the rate goes with it
        [given(64)] * 7 + [given(4)] * 9,  # too few before
        [given(length) for length in (10, 40, 20, 80)] * 4 + [given(3)] * 20,  # they vary by more
        [given(math.nan)] * 20 + [given(1)] * 20,
    ],
)
def test_what_is_as_large_or_meant_is_not(looks: list[Row]) -> None:
    assert told(looks) == []


def test_texts_of_any_length_never_are() -> None:
    draw = random.Random(0)
    for _ in range(20):
        assert told([given(draw.lognormvariate(6, 1)) for _ in range(1000)]) == []


def test_a_rank_that_is_missing_or_says_nothing_is_no_look() -> None:
    looks = [given(64)] * 20 + [given(4)] * 20
    assert told(looks, [{}] * 40) == []

    def made(**changes: object) -> list[StepRecord]:
        return [record(i, {0: one}, **changes) for i, one in enumerate(looks)]

    assert run(BatchSize(), made(missing=(1,))) == []
    assert len(run(BatchSize(), made())) == 1
    gone = [record(i, {0: given(64), 1: given(256)}) for i in range(20)]
    gone += [record(i, {0: given(64)}, missing=(1,)) for i in range(20, 40)]
    assert run(BatchSize(), gone) == []


def test_it_is_told_again_behind_a_quiet_time_and_without_a_known_rate() -> None:
    looks = ([given(640)] * 80 + [given(64)] * 20) * 2
    assert [warn.step for warn in told(looks, quiet_steps=100)] == [820, 1820]
    assert [warn.step for warn in told(looks, quiet_steps=1000)] == [820]
    assert len(told([given(640, 1, math.nan)] * 20 + [given(64, 1, math.nan)] * 20)) == 1
