"""Tensors of a record and its gradient norm: what was seen, once over the model, or no number."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ddpprobe.records.site_stats import TensorRowsCache, global_grad_norm
from ddpprobe.records.step import (
    COUNTS,
    NONFINITE,
    STATS,
    VALUES,
    Site,
    StepRecord,
    columns_of,
    derive,
    empty_rows,
    observed,
)

SITES = (
    Site("a", "output", "0"), Site("b", "output"), Site("a", "output", "1"),
    Site("a", "output", "2", "partial"), Site("b", "optim_state"),
    Site("a", "output", "3", "unknown"),
)  # fmt: skip


def record(sites: tuple[Site, ...], norms: list[float]) -> StepRecord:
    """Return a record in which each site has one element, of that norm."""
    counts, values = empty_rows(len(sites))
    counts[:, [COUNTS.index(name) for name in ("numel", "tapped", "observed")]] = 1
    values[:, VALUES.index("min")] = values[:, VALUES.index("max")] = norms
    values[:, VALUES.index("sum_sq")] = np.square(norms)
    return StepRecord(0, 1, (0,), 0, sites=sites, counts=counts, values=values)


def unseen(of: StepRecord, row: int) -> StepRecord:
    counts, values = of.counts.copy(), of.values.copy()
    counts[row], values[row] = (part[0] for part in empty_rows(1))
    return replace(of, counts=counts, values=values)


def test_leaves_of_one_output_are_one_tensor_and_one_ranks_part_is_none() -> None:
    made = record(SITES, [3.0, 5.0, 4.0, 100.0, 1.0, 100.0])
    rows = TensorRowsCache().of(made)
    assert rows.names[:2] == (("a", "output"), ("b", "output"))
    assert rows.rows[:3].tolist() == [0, 2, 1]
    assert rows.starts[:2].tolist() == [0, 2]
    norm, largest = rows.numbers(made, ("norm", "max"))
    assert norm[:2].tolist() == [5.0, 5.0]
    assert largest[:2].tolist() == [4.0, 5.0]


def test_of_a_record_in_which_nothing_was_seen_there_are_no_numbers() -> None:
    made = record((), [])
    assert [x.tolist() for x in TensorRowsCache().of(made).numbers(made, ("norm", "max"))] == [
        [], [],
    ]  # fmt: skip


def test_the_rows_of_a_table_are_laid_out_anew_when_another_site_was_seen() -> None:
    cache, made = TensorRowsCache(), record(SITES[:2], [3.0, 5.0])
    both = cache.of(made)
    assert cache.of(made) is both
    assert cache.of(unseen(made, 0)).names == (("b", "output"),)
    assert cache.of(made).names == both.names


def test_the_same_rows_of_the_next_attempts_table_are_the_same_layout() -> None:
    cache = TensorRowsCache()
    first = cache.of(record(SITES, [1.0] * 6))
    assert cache.of(record(tuple(map(replace, SITES)), [1.0] * 6)) is first
    assert cache.of(record(SITES[1:2], [1.0])).names == (("b", "output"),)


def test_another_table_of_as_many_sites_is_another_layout() -> None:
    cache = TensorRowsCache()
    for name in "ab":
        assert cache.of(record((Site(name, "output"),), [1.0])).names == ((name, "output"),)


def test_what_takes_turns_is_no_tensor_of_a_series() -> None:
    made = record((Site("a", "output"), Site("w", "param")), [1.0, 1.0])
    assert TensorRowsCache().of(made).names == (("a", "output"),)


def of_gradients(*placements: str) -> StepRecord:
    """Return a step whose gradients have the norms 3, 4, 12."""
    sites = tuple(Site(f"w{i}", "grad", "", each) for i, each in enumerate(placements))
    return record(sites, [3.0, 4.0, 12.0][: len(sites)])


def test_the_gradient_norm_is_that_of_all_reduced_gradients() -> None:
    for placements in (("replicated",) * 2, ("sharded",) * 2, ("sharded", "replicated")):
        for ranks in ((0,), (0, 1)):
            assert global_grad_norm(replace(of_gradients(*placements), ranks=ranks)) == 5.0


def test_a_lone_ranks_own_gradient_is_the_whole_one_and_of_several_ranks_it_is_not() -> None:
    lone = of_gradients("local", "replicated")
    assert global_grad_norm(lone) == 5.0
    assert global_grad_norm(replace(lone, ranks=(0, 1))) is None
    assert global_grad_norm(replace(lone, missing=(1,))) is None


def test_no_gradient_norm_is_told_of_a_part() -> None:
    for placement in ("partial", "unknown"):
        assert global_grad_norm(of_gradients("replicated", placement)) is None
    torn = of_gradients("sharded", "replicated")
    assert global_grad_norm(replace(torn, missing=(1,))) is None
    assert global_grad_norm(replace(of_gradients("replicated"), missing=(1,))) == 3.0
    assert global_grad_norm(unseen(of_gradients("replicated"), 0)) is None


@pytest.mark.parametrize(("column", "norm"), [(0, math.nan), (1, math.inf), (2, math.inf)])
def test_one_bad_element_makes_the_gradient_norm_what_torch_would_compute(
    column: int, norm: float
) -> None:
    made = of_gradients("replicated", "replicated", "replicated")
    counts = made.counts.copy()
    counts[2, np.arange(len(COUNTS))[NONFINITE][column]] = 1
    assert global_grad_norm(replace(made, counts=counts)) == pytest.approx(norm, nan_ok=True)


def test_of_a_tensor_that_did_not_arrive_only_that_is_known() -> None:
    made = unseen(record((Site("a", "output"), Site("b", "output")), [3.0, 5.0]), 0)
    for stat in STATS:
        derived = derive(stat, made.counts, made.values)
        found = observed(stat, made.counts, made.values)
        if stat in ("tapped", "observed"):
            np.testing.assert_array_equal(found, derived)
        else:
            np.testing.assert_array_equal(found, [np.nan, derived[1]])


@pytest.mark.parametrize("stat", STATS)
def test_a_statistic_follows_from_the_columns_that_it_needs_and_no_other_one_changes_it(
    stat: str,
) -> None:
    needed = columns_of(stat)
    assert needed <= {*COUNTS, *VALUES}
    rng = np.random.default_rng(0)
    counts = np.concatenate([rng.integers(50, 99, (5, 1)), rng.integers(0, 9, (5, 6))], axis=1)
    values = rng.uniform(10, 20, (5, 4))
    before = derive(stat, counts, values)
    for name in {*COUNTS, *VALUES} - needed:
        others = counts.copy(), values.copy()
        columns, rows = (COUNTS, others[0]) if name in COUNTS else (VALUES, others[1])
        rows[:, columns.index(name)] += 1
        np.testing.assert_array_equal(derive(stat, *others), before)
