"""A batch norm that lets through no more than which of two values is larger is told."""

from __future__ import annotations

import pytest

from ddpprobe.detectors.batch_norm import BatchNorm
from ddpprobe.records.step import NORM_MOMENTUM, NORM_VALUES, StepRecord
from tests.detectors.made_records import record, run


def stream(*ranks: list[float], **changes: object) -> list[StepRecord]:
    return [
        record(i, {rank: {NORM_VALUES: one} for rank, one in enumerate(values)}, **changes)
        for i, values in enumerate(zip(*ranks, strict=True))
    ]


@pytest.mark.parametrize("values", [1.0, 2.0])
def test_a_batch_norm_of_two_values_is_told_once_at_the_second_look(values: float) -> None:
    (warn,) = run(BatchNorm(), stream([32.0] * 5 + [values] * 20))
    assert (warn.level, warn.step, warn.phase) == ("warn", 6, "forward")
    assert warn.values == {"values": values}
    assert f"no more than {values:.0f} values" in warn.message


def test_that_of_one_rank_is_enough() -> None:
    (warn,) = run(BatchNorm(), stream([32.0] * 5, [2.0] * 5))
    assert (warn.step, warn.rank) == (1, None)


@pytest.mark.parametrize("values", [[3.0] * 9, [32.0, 2.0] * 9])
def test_more_values_or_one_small_last_batch_are_not(values: list[float]) -> None:
    assert run(BatchNorm(), stream(values)) == []


def test_the_number_is_a_setting() -> None:
    (warn,) = run(BatchNorm(values=8), stream([8.0] * 5))
    assert warn.step == 1


def test_without_a_batch_norm_nothing_is_told() -> None:
    assert run(BatchNorm(), [record(i, {0: {"loss": 1.0}}) for i in range(9)]) == []


def of_momentum(momenta: list[float]) -> list[StepRecord]:
    return [record(i, {0: {NORM_MOMENTUM: one}, 1: {}}) for i, one in enumerate(momenta)]


@pytest.mark.parametrize("momentum", [0.8, 0.99, 0.9997])
def test_statistics_of_the_last_batch_alone_are_told_once_at_the_second_look(
    momentum: float,
) -> None:
    (warn,) = run(BatchNorm(), of_momentum([momentum] * 9))
    assert (warn.level, warn.step, warn.rank, warn.phase) == ("warn", 1, None, "forward")
    assert warn.values == {"momentum": momentum}
    assert f"is {1 - momentum:.3g} here" in warn.message
    first, then = run(BatchNorm(), of_momentum([momentum] * 9 + [0.1] + [momentum] * 9))
    assert (first.step, then.step) == (1, 11)


def test_both_are_told_at_one_step() -> None:
    of_both = [record(i, {0: {NORM_MOMENTUM: 0.9, NORM_VALUES: 1.0}}) for i in range(5)]
    assert [next(iter(a.values)) for a in run(BatchNorm(), of_both)] == ["values", "momentum"]


@pytest.mark.parametrize("momentum", [0.0, 0.1, 0.5, 0.79, 1.0])
def test_what_others_take_and_one_are_meant(momentum: float) -> None:
    assert run(BatchNorm(), of_momentum([momentum] * 9)) == []
    assert len(run(BatchNorm(momentum=0.5), of_momentum([momentum] * 9))) == (0.5 <= momentum < 1)
