"""Ranks that compute the same bits are told; close numbers, and what is shared by design, not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ddpprobe.detectors.same_data import SameData
from ddpprobe.records.step import Site, StepRecord
from tests.detectors.made_records import levels, record, run


def step(number: int, losses: list[float], norms: list[float], **changes: object) -> StepRecord:
    told = zip(losses, norms, strict=True)
    scalars = {r: {"loss": x, "grad_norm_local": n} for r, (x, n) in enumerate(told)}
    return record(number, scalars, **changes)


def equal(number: int, ranks: int = 3, **changes: object) -> StepRecord:
    x = 1 + 1 / (number + 2)
    return step(number, [x] * ranks, [2 * x] * ranks, **changes)


def test_equal_numbers_at_three_sampled_steps_are_told_once() -> None:
    (warn,) = run(SameData(), [equal(s) for s in range(300)])
    assert (warn.level, warn.step, warn.rank) == ("warn", 2, None)
    assert warn.message.startswith("ranks 0-2 report the same")


def test_two_ranks_are_enough_and_one_has_none_to_share_with() -> None:
    (warn,) = run(SameData(), [equal(s, ranks=2) for s in range(20)])
    assert warn.message.startswith("ranks 0-1 report the same")
    assert run(SameData(), [equal(s, ranks=1) for s in range(20)]) == []


def test_two_of_four_ranks_that_share_a_shard_are_told() -> None:
    rng = np.random.default_rng(0)
    stream = []
    for s in range(20):
        a, b, c = rng.random((3, 2))
        stream.append(step(s, [a[0], b[0], c[0], b[0]], [a[1], b[1], c[1], b[1]]))
    (warn,) = run(SameData(), stream)
    assert warn.message.startswith("ranks 1, 3 report")


def test_a_loss_that_was_averaged_over_the_ranks_is_let_be() -> None:
    rng = np.random.default_rng(0)
    assert run(SameData(), [step(s, [1.0] * 2, list(rng.random(2))) for s in range(50)]) == []


def test_the_last_bit_may_differ() -> None:
    next_to = math.nextafter(1.0, 2.0)
    assert run(SameData(), [step(s, [1.0, next_to], [3.0, 3.0]) for s in range(50)]) == []


def test_zeros_and_one_number_alone_are_no_evidence() -> None:
    assert run(SameData(), [step(s, [0.0] * 2, [0.0] * 2) for s in range(50)]) == []
    assert run(SameData(), [step(s, [1.0] * 2, [math.nan] * 2) for s in range(50)]) == []


@pytest.mark.parametrize("placement", ["replicated", "sharded", "partial", "unknown"])
def test_ranks_that_share_outputs_read_the_same_by_design(placement: str) -> None:
    rows = {Site("fc", "output", placement=placement): {"max": 1}}
    scalars = {r: {"loss": 1.0, "grad_norm_local": 2.0} for r in range(2)}
    assert run(SameData(), [record(s, scalars, rows) for s in range(50)]) == []


def test_a_restart_begins_anew() -> None:
    stream = [*(equal(s) for s in range(5)), *(equal(s, attempt=1) for s in range(5, 10))]
    assert levels(run(SameData(), stream)) == [("warn", 2), ("warn", 7)]
