"""Labels that nobody has shifted, and outputs that are paired with all targets, are told."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ddpprobe.detectors.targets import TrainingTargets
from ddpprobe.records.step import (
    CLASS_RIGHT,
    COPIED,
    PULL,
    PULL_REST,
    PULLED_MEAN,
    PULLED_RMS,
    TARGET,
    StepRecord,
)
from tests.detectors.made_records import record, run


def texts(
    *ranks: Sequence[float], every: int = 1, right: float = 1.0, **changes: object
) -> list[StepRecord]:
    """A run whose ranks copy these shares of their inputs, and are right by the loss so often."""
    return [
        record(
            i * every,
            {r: {COPIED: share, CLASS_RIGHT: right} for r, share in enumerate(shares)},
            **changes,
        )
        for i, shares in enumerate(zip(*ranks, strict=True))
    ]


Line = tuple[float, float, float]  # slope, rest, target


def lines(*ranks: Sequence[Line], every: int = 1, **changes: object) -> list[StepRecord]:
    """A run in which the gradients of the ranks' outputs are these lines."""
    names = PULL, PULL_REST, TARGET
    return [
        record(
            i * every,
            {
                rank: {**dict(zip(names, one, strict=True)), PULLED_RMS: 1.0}
                for rank, one in enumerate(all_)
            },
            **changes,
        )
        for i, all_ in enumerate(zip(*ranks, strict=True))
    ]


def pairs(steps: int, slope: float = 2 / 32, rest: float = 1e-9) -> list[Line]:
    """Pairs of all with all: one slope, and the mean of each batch."""
    return [(slope, rest, 0.3 * math.sin(step)) for step in range(steps)]


@pytest.mark.parametrize("every", [1, 100])
def test_a_model_that_answers_with_its_input_is_told_once(every: int) -> None:
    shares = [0.1, 0.5, 0.98, *[1.0, 0.995] * 30]
    (warn,) = run(TrainingTargets(), texts(shares, shares, every=every))
    assert (warn.level, warn.step, warn.rank) == ("warn", 10 * every, None)
    assert (warn.phase, warn.kind) == ("forward", "output")
    assert warn.values == {"copied": warn.values["copied"], "looks": 8, "since": 3 * every}
    assert "shift the labels" in warn.message


@pytest.mark.parametrize(
    "ranks",
    [
        [[0.98] * 60],
        [[1.0] * 60, [0.9] * 60],
        [([1.0] * 7 + [0.5]) * 8],
        [[-1.0] * 60],
    ],
)
def test_a_model_that_answers_with_less_of_it_is_not(ranks) -> None:
    assert run(TrainingTargets(), texts(*ranks)) == []


def test_a_head_that_is_the_embedding_answers_so_before_it_is_trained_and_is_not_told() -> None:
    assert run(TrainingTargets(), texts([1.0] * 60, right=0.1)) == []
    assert run(TrainingTargets(), texts([1.0] * 60, right=math.nan)) == []  # of another loss


def test_texts_that_say_nothing_break_no_row_of_looks() -> None:
    (warn,) = run(TrainingTargets(), texts(([1.0] * 4 + [-1.0] * 3) * 5))
    assert (warn.step, warn.values["looks"]) == (10, 8)
    (warn,) = run(TrainingTargets(), texts([1.0] * 20, [-1.0] * 20))
    assert warn.step == 7


@pytest.mark.parametrize("every", [1, 100])
def test_outputs_that_are_paired_with_all_targets_are_told_once(every: int) -> None:
    before = [(0.01 * i, 0.3, 0.0) for i in range(4)]
    (warn,) = run(TrainingTargets(), lines(before + pairs(60), every=every))
    assert (warn.level, warn.step) == ("warn", 11 * every)
    assert warn.values == {"slope": 2 / 32, "looks": 8, "since": 4 * every}
    assert "give both one shape" in warn.message


def test_so_are_those_of_all_ranks_and_not_of_one() -> None:
    (warn,) = run(TrainingTargets(), lines(pairs(20), pairs(20)))
    assert warn.step == 7
    assert run(TrainingTargets(), lines(pairs(20), [(0.1, 0.4, 0.0)] * 20)) == []
    assert run(TrainingTargets(), lines(pairs(20), pairs(20, slope=2 / 31))) == []


@pytest.mark.parametrize(
    "one",
    [
        [(2 / 32, 0.0, 1.0)] * 60,  # a target that is meant, such as a discriminator's
        [(2 / 32, 0.0, 1.0 + 0.009 * (i % 2)) for i in range(60)],
        [(1 / 32, 0.0, 1e-9 * math.sin(i)) for i in range(60)],  # of a square: 0, but for rounding
        pairs(60, rest=2e-3),
        pairs(60, rest=math.nan),
        pairs(60, slope=-2 / 32),  # a line through one feature, as a linear model has
        [(0.01 * (i + 1), 0.0, math.sin(i)) for i in range(60)],
        [line for part in (pairs(7), [(0.1, 0.5, 0.0)]) * 6 for line in part],
        [(math.inf, 0.0, math.nan)] * 60,
        [(0.0, 0.0, math.sin(i)) for i in range(60)],
    ],
)
def test_other_lines_are_not(one: list[Line]) -> None:
    assert run(TrainingTargets(), lines(one)) == []


def test_a_logistic_loss_of_one_label_always_pulls_one_way_and_is_not_told() -> None:
    above = [(0.25 / 32, 1e-5, 0.1 * math.sin(i)) for i in range(60)]
    records = lines(above)
    for each in records:
        each.scalars[0][PULLED_MEAN] = each.scalars[0][TARGET] - 2
    assert run(TrainingTargets(), records) == []
    records[5].scalars[0][PULLED_MEAN] += 4
    assert len(run(TrainingTargets(), records)) == 1


def test_a_step_that_was_skipped_breaks_no_row_of_looks() -> None:
    told = [*lines(pairs(6)), record(6, {0: {PULL_REST: math.nan}}, skipped=True)]
    told += [record(7 + i, dict(one.scalars)) for i, one in enumerate(lines(pairs(3)))]
    (warn,) = run(TrainingTargets(), told)
    assert warn.step == 8


def test_it_is_told_again_behind_a_quiet_time() -> None:
    shares = ([1.0] * 10 + [0.0] * 30) * 3
    assert [w.step for w in run(TrainingTargets(quiet_steps=20), texts(shares))] == [7, 47, 87]
    assert len(run(TrainingTargets(), texts(shares))) == 1
