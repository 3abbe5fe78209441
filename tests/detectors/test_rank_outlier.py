"""One rank that is not like the others is named; ranks that differ by design are let be."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddpprobe.detectors.rank_outlier import RankOutlier
from ddpprobe.records.step import StepRecord
from tests.detectors.made_records import levels, record, run


def step(number: int, name: str, values: list[float], **changes: object) -> StepRecord:
    return record(number, {r: {name: v} for r, v in enumerate(values)}, **changes)


def noisy(steps: int, name: str, scales: list[float], spread: float) -> list[StepRecord]:
    rng = np.random.default_rng(0)
    return [
        step(s, name, list(scales * np.exp(spread * rng.standard_normal(len(scales)))))
        for s in range(steps)
    ]


@pytest.mark.parametrize(("name", "factor"), [("loss", 1e-3), ("grad_norm_local", 1e4),
                                              ("output_rms", 0.2)])  # fmt: skip
def test_a_rank_that_leaves_the_others_is_named_at_the_third_step(name: str, factor: float) -> None:
    stream = noisy(50, name, [1.0] * 4, 0.1)
    stream += [step(s, name, [1.0, 1.0, factor, 1.0]) for s in range(50, 60)]
    (warn,) = run(RankOutlier(), stream)
    assert (warn.level, warn.step, warn.rank) == ("warn", 52, 2)
    assert ("above" if factor > 1 else "below") in warn.message


def test_a_rank_that_contributes_nothing_is_named_from_the_start() -> None:
    (warn,) = run(RankOutlier(), [step(s, "loss", [1.0, 0.0]) for s in range(20)])
    assert (warn.step, warn.rank) == (2, 1)
    assert "is zero" in warn.message


def test_of_two_ranks_that_part_none_is_named() -> None:
    stream = noisy(50, "output_rms", [1.0, 1.0], 0.05)
    stream += [step(s, "output_rms", [1.0, 30.0]) for s in range(50, 60)]
    (warn,) = run(RankOutlier(), stream)
    assert (warn.step, warn.rank) == (52, None)


def test_ranks_that_differ_by_design_are_let_be() -> None:
    for name in ("loss", "grad_norm_local", "output_rms"):
        assert run(RankOutlier(), noisy(400, name, [1.0, 1.3, 0.7, 2.0], 0.2)) == []
    assert run(RankOutlier(), noisy(400, "grad_norm_local", [1.0, 30.0, 1.0], 0.7)) == []


def test_two_batches_without_a_target_are_let_be() -> None:
    stream = noisy(100, "loss", [1.0] * 3, 0.1)
    for s in (50, 51, 70):
        stream[s] = step(s, "loss", [1.0, 0.0, 1.0])
    assert run(RankOutlier(), stream) == []


def test_a_rank_that_is_missing_or_says_nothing_is_not_compared() -> None:
    alone = [step(s, "loss", [1.0], missing=(1, 2)) for s in range(20)]
    silent = [record(s, {0: {"loss": 1.0}, 1: {}}) for s in range(20, 60)]
    assert run(RankOutlier(), [*alone, *silent]) == []


def test_values_that_nobody_expects_do_not_raise() -> None:
    odd = (math.nan, math.inf, 1e308, 5e-324, -1.0, 0.0)
    stream = [step(s, "output_rms", [odd[s % 6], odd[s % 5], 1.0]) for s in range(200)]
    run(RankOutlier(), [*stream, StepRecord(0, 300, (0, 1), 0)])
    zero = [step(s, "loss", [0.0, 0.0]) for s in range(50)]
    assert levels(run(RankOutlier(), zero)) == []
