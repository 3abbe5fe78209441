"""Labels that nobody has shifted, outputs paired with all targets, and raw targets are told."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ddpprobe.detectors.targets import TrainingTargets
from ddpprobe.records.step import (
    CLASS_LABELLED,
    CLASS_RIGHT,
    COPIED,
    PULL,
    PULL_REST,
    PULLED_MEAN,
    PULLED_RMS,
    TARGET,
    Site,
    StepRecord,
)
from tests.detectors.made_records import record, run


def texts(
    *ranks: Sequence[float],
    every: int = 1,
    right: float = 1.0,
    labelled: float = math.nan,
    **changes: object,
) -> list[StepRecord]:
    """A run whose ranks copy these shares of their inputs, and are right by the loss so often."""
    return [
        record(
            i * every,
            {
                r: {COPIED: share, CLASS_RIGHT: right, CLASS_LABELLED: labelled}
                for r, share in enumerate(shares)
            },
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


def test_places_that_the_loss_ignores_may_be_answered_otherwise() -> None:
    """Padding has the number of a token: what looks like it in a text is ignored, too."""
    shares = [0.94, 1.0, 0.97] * 20
    (warn,) = run(TrainingTargets(), texts(shares, labelled=0.6))
    assert (warn.step, warn.values["copied"]) == (7, 1.0)
    assert run(TrainingTargets(), texts(shares, labelled=0.15)) == []  # a masked text
    assert run(TrainingTargets(), texts(shares, labelled=0.6, right=0.95)) == []
    assert run(TrainingTargets(), texts([0.89, 1.0] * 30, labelled=0.6)) == []
    assert run(TrainingTargets(copied=0.5), texts([0.6] * 20, labelled=0.6, right=0.6))


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


ROOT_OUT, HEAD_OUT, HEAD_GRAD = (
    Site(*which) for which in (("", "output"), ("head", "output"), ("head", "grad_output"))
)


def regression(
    middle: float, spread: float, steps: int = 20, ranks: int = 2, columns: int = 3,
    sums: bool = False, outputs: float = 0.1, every: int = 1,
) -> list[StepRecord]:  # fmt: skip
    """A run by a squared error of the first of some columns, to targets as far away as that."""
    draw, found = np.random.default_rng(7), []
    for step in range(steps):
        x = draw.normal(0, outputs, (ranks, 32, columns))
        residuals = x[:, :, 0] - draw.normal(middle, spread, (ranks, 32))
        g = np.zeros_like(x)
        g[:, :, 0] = 2 * residuals * (1 if sums else 1 / 32)
        squares = np.square(residuals)
        losses = squares.sum(1) if sums else squares.mean(1)
        rows = {site: _row(x) for site in (HEAD_OUT, ROOT_OUT)} | {HEAD_GRAD: _row(g)}
        scalars = {rank: {"loss": float(loss)} for rank, loss in enumerate(losses)}
        found.append(record(step * every, scalars, rows))
    return found


def _row(x: np.ndarray) -> dict[str, float]:
    return {
        "numel": x.size, "zeros": int((x == 0).sum()), "sum": float(x.sum()),
        "sum_sq": float(np.square(x).sum()), "min": float(x.min()), "max": float(x.max()),
    }  # fmt: skip


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("columns", [1, 3])
def test_targets_that_nobody_has_normalized_are_told_once(
    every: int, ranks: int, columns: int
) -> None:
    records = regression(2e5, 5e4, ranks=ranks, columns=columns, every=every)
    (warn,) = run(TrainingTargets(), records)
    assert (warn.level, warn.step, warn.module, warn.rank) == ("warn", 4 * every, "head", None)
    assert warn.values["output"] == pytest.approx(0.1, rel=0.2)
    assert warn.values["error"] == pytest.approx(math.hypot(2e5, 5e4), rel=0.1)
    assert warn.values["offset"] == pytest.approx(2e5, rel=0.1)
    assert (warn.values["looks"], warn.values["since"]) == (5, 0)
    assert "normalize the targets" in warn.message


@pytest.mark.parametrize(
    "records",
    [
        regression(0.0, 1.0),
        regression(300.0, 20.0),  # a temperature in kelvins
        regression(0.0, 900.0, outputs=1e-6),  # a head that begins at zero
        regression(2e5, 5e4, outputs=3e3),  # one that is coming near
        regression(2e5, 5e4, sums=True),  # of which it is not known how many it sums
        regression(2e5, 5e4, steps=4),
        [*regression(2e5, 5e4, steps=4), *regression(0.0, 1.0), *regression(2e5, 5e4, steps=4)],
    ],
)
def test_targets_within_reach_of_the_outputs_are_not(records: list[StepRecord]) -> None:
    told = [replace(one, step=step) for step, one in enumerate(records)]
    assert run(TrainingTargets(), told) == []
