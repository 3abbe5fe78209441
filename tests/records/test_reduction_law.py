"""A reduced gradient is told to be a multiple of the mean of the ranks' own, and by how much."""

from __future__ import annotations

import numpy as np
import pytest

from ddpprobe.records.derived import DERIVED, gradient_noise
from ddpprobe.records.reduction_law import ReductionLaw, reduction_law
from ddpprobe.records.step import JOINED, KEPT, LOCAL_SGD, UNREDUCED
from tests.made_reduction import NAMES, Gradient, but_the_last, mean, scaled, step

FACTOR = next(each for each in DERIVED if each.name == "reduction_factor")


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("micros", [1, 4])
@pytest.mark.parametrize("placement", ["replicated", "sharded"])
@pytest.mark.parametrize("factor", [1.0, 1.7, 8.0])
def test_the_factor_of_the_mean_is_told_exactly(
    ranks: int, micros: int, placement: str, factor: float
) -> None:
    for number in range(20):
        record = step(number, scaled(factor), ranks=ranks, micros=micros, placement=placement)
        law = reduction_law(record)
        assert law is not None
        assert law.factor == pytest.approx(factor, rel=1e-9)
        assert law.off(law.factor).max() < 1e-9
        assert FACTOR.of(record) == law.factor


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_mean_that_is_divided_again_is_told_of_one_micro_batch(ranks: int) -> None:
    law = reduction_law(step(0, scaled(1 / ranks), ranks=ranks))
    assert law is not None
    assert law.factor == pytest.approx(1 / ranks)


def test_less_than_the_mean_of_several_micro_batches_may_be_that_of_the_last_one() -> None:
    """LBFGS calls a closure, which sets gradients to zero, several times a step."""
    assert reduction_law(step(0, scaled(1 / 3), micros=3)) is None


@pytest.mark.parametrize("ranks", [2, 16, 256])
def test_what_a_rank_had_no_part_in_is_no_multiple_of_the_mean(ranks: int) -> None:
    off = []
    for number in range(50):
        law = reduction_law(step(number, but_the_last, ranks=ranks))
        assert law is not None
        off.append(law.off(1.0))
    assert 0.65 < np.mean(np.array(off) > 0.3) < 0.9


def test_a_parameter_that_is_not_reduced_is_off_and_the_others_are_not() -> None:
    def but_one(gradients: Gradient, name: str) -> Gradient:
        return gradients[0] if name == "b.weight" else mean(gradients, name)

    record = step(1, but_one, ranks=3)
    law = reduction_law(record)
    assert law is not None
    off = law.off(law.factor) > 1e-6
    assert [record.sites[row].fqn for row in law.rows[off]] == ["b.weight"]


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": 1},
        {"missing": (7,)},
        {"partial": True},
        {"skipped": True},
        {"told": {UNREDUCED: 1.0}},
        {"told": {JOINED: 1.0}},
        {"told": {LOCAL_SGD: 1.0}},
        {"told": {KEPT: 0.5}},
        {"tapped": 1},
        {"placement": "local"},
        {"placement": "partial"},
        {"own_placement": "sharded"},
        {"cancelled": NAMES},
    ],
)
def test_where_no_mean_over_all_ranks_is_known_nothing_is_told(changes: dict) -> None:
    assert reduction_law(step(0, **changes)) is None
    assert FACTOR.of(step(0, **changes)) is None


def test_gradients_that_cancel_each_other_or_are_not_finite_do_not_tell() -> None:
    def zero(gradients: Gradient, _: str) -> Gradient:
        return 0 * mean(gradients, _)

    record = step(0)
    record.values[:, :] = 0.0
    assert reduction_law(record) is None
    for odd in (np.nan, np.inf, -1.0, 1e308):
        record = step(0)
        record.values[:2] = odd
        law = reduction_law(record)
        assert law is not None
        assert law.factor == pytest.approx(1.0)
    bad = step(0)
    bad.counts[0, 1] = 3  # NaN
    law = reduction_law(bad)
    assert law is not None
    assert "a.weight" not in {bad.sites[row].fqn for row in law.rows}
    law = reduction_law(step(0, zero))
    assert law is not None
    assert law.factor == 0.0


def test_the_factor_is_that_of_most_gradients() -> None:
    def uneven(gradients: Gradient, name: str) -> Gradient:
        factor = {"a.weight": 5.0, "b.weight": 0.2}.get(name, 1.0)
        return factor * mean(gradients, name)

    laws = [reduction_law(step(number, uneven, ranks=3)) for number in range(100)]
    factors = [round(law.factor, 6) for law in laws if law is not None]
    assert factors.count(1.0) > 60
    assert factors.count(5.0) < 25


def test_how_far_a_gradient_is_from_a_multiple_is_by_that_multiple() -> None:
    law = ReductionLaw(1.0, np.array([0]), np.array([2.0]), np.array([2001.0]))
    assert law.off(1000.0).tolist() == [0.001]
    assert law.off(-1000.0).tolist() == [4.001]
    assert law.off(0.5).tolist() == [2000.0]


def test_of_gradients_that_are_no_mean_no_noise_is_told() -> None:
    assert gradient_noise(step(0, mean, ranks=4)) is not None
    for factor in (1 / 4, 1.1, 4.0):
        assert gradient_noise(step(0, scaled(factor), ranks=4)) is None
