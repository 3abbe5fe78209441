"""A mean of the means of ranks, of unlike many rows, is information: many train like that."""

from __future__ import annotations

import numpy as np
import pytest

from ddpprobe.detectors.cross_entropy import CrossEntropy
from ddpprobe.records.step import (
    CLASS_LABELLED,
    CLASS_ROWS,
    CLASS_WEIGHT,
    INPUT_ELEMENTS,
    Anomaly,
    StepRecord,
)
from tests.detectors.made_records import record, run


def said(rows: float, by: float, *, given: float | None = None, scale: float = 1.0) -> dict:
    """What a rank says of so many rows, each divided by `by`; a few rows say no weight."""
    facts = {INPUT_ELEMENTS: rows if given is None else given}
    if scale != 1:
        facts["loss_scale"] = scale
    if rows >= 8:
        facts |= {CLASS_ROWS: rows, CLASS_LABELLED: 1.0, CLASS_WEIGHT: scale / by}
    return facts


def stream(sizes: list[tuple[float, ...]], micros: float = 8.0) -> list[StepRecord]:
    """Each rank divides by its own rows, and by the micro-batches."""
    return [
        record(
            i,
            {rank: said(n, n * micros) | {"micro_batches": micros} for rank, n in enumerate(each)},
        )
        for i, each in enumerate(sizes)
    ]


def told(records: list[StepRecord]) -> list[Anomaly]:
    return run(CrossEntropy(), records)


UNLIKE = [(32.0, 32.0), (6.0, 32.0), (32.0, 6.0), (6.0, 6.0)] * 4


def test_a_mean_of_unlike_means_is_told_once_and_no_rank_is_to_blame() -> None:
    (info,) = told(stream(UNLIKE))
    assert (info.level, info.step, info.rank, info.kind) == ("info", 5, None, "output")
    assert info.values == {"looks": 3, "of": 6, "fewest": 6, "most": 32}
    assert "counts for 5.33 x one of the larger" in info.message


def test_where_each_look_has_another_scale_it_is_told_as_well() -> None:
    scaled = [
        record(i, {r: said(n, n, scale=2.0**i) for r, n in enumerate(each)})
        for i, each in enumerate(UNLIKE)
    ]
    assert len(told(scaled)) == 1


def test_a_sum_over_all_rows_is_not_told() -> None:
    right = [
        record(i, {r: said(n, 8 * sum(each)) for r, n in enumerate(each)})
        for i, each in enumerate([(32.0, 32.0), (10.0, 32.0), (32.0, 9.0)] * 6)
    ]
    assert told(right) == []


@pytest.mark.parametrize("sizes", [
    [(32.0, 11.0)] * 20,  # less than three times as many
    [(32.0,), (8.0,)] * 10,  # one rank
    [(32.0, 32.0)] * 14 + [(32.0, 8.0)] * 2 + [(32.0, 32.0)] * 14,  # the end of an epoch
    [(6.0, 2.0)] * 20,  # no weight is known
], ids=["near", "alone", "an epoch", "unknown"])  # fmt: skip
def test_what_does_not_show_is_not_told(sizes: list[tuple[float, ...]]) -> None:
    assert told(stream(sizes)) == []


def test_a_sum_that_is_divided_by_a_number_is_told_only_if_the_rows_are_that_number() -> None:
    def by(number: float, sizes: list[tuple[float, ...]]) -> list[StepRecord]:
        return [record(i, {r: said(n, number) for r, n in enumerate(each)})
                for i, each in enumerate(sizes)]  # fmt: skip

    assert told(by(256.0, UNLIKE)) == []  # 32 rows at all looks that say a weight
    assert len(told(by(32.0, UNLIKE))) == 1
    halved = [record(i, {r: said(n, 2 * n) for r, n in enumerate(each)})
              for i, each in enumerate([(32.0, 9.0), (9.0, 32.0)] * 8)]  # fmt: skip
    assert len(told(halved)) == 1  # half of the loss, whatever the rows


def test_a_rank_without_an_input_is_not_compared() -> None:
    half = [record(i, {0: said(32.0, 32.0), 1: {}}) for i in range(20)]
    assert told(half) == []
    none = [record(i, {0: said(32.0, 32.0), 1: {INPUT_ELEMENTS: 0.0}}) for i in range(20)]
    assert told(none) == []


def test_weights_that_no_division_explains_are_not_told() -> None:
    rng = np.random.default_rng(0)
    odd = [
        record(i, {r: said(n, n * rng.uniform(0.9, 1.1)) for r, n in enumerate(each)})
        for i, each in enumerate([(32.0, 8.0), (8.0, 32.0)] * 8)
    ]
    assert [a for a in told(odd) if "own rows" in a.message] == []
