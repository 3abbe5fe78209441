"""Batches that come again, after others that did not, are told; from the start on they are not."""

from __future__ import annotations

import pytest

from ddpprobe.detectors.stuck_data import StuckData
from ddpprobe.records.step import DIGEST, StepRecord
from tests.detectors.made_records import record, run

NEW = [float(i) for i in range(100)]


def stream(digests: list[float], every: int = 1) -> list[StepRecord]:
    """A run of one rank that reads these."""
    return [record(i * every, {0: {DIGEST: d}}) for i, d in enumerate(digests)]


def rounds(batches: int, times: int) -> list[float]:
    """So many rounds of batches that were not read before."""
    return [1000.0 + i for i in range(batches)] * times


@pytest.mark.parametrize("batches", [2, 3, 6, 8, 20])
@pytest.mark.parametrize("every", [1, 10])
def test_a_few_batches_in_turn_are_told_a_dozen_looks_after_the_first_round(
    batches: int, every: int
) -> None:
    said = run(StuckData(), stream(NEW + rounds(batches, 200 // batches), every))
    (warn,) = [a for a in said if a.level == "warn"]
    first = len(NEW) + batches
    looks, of = warn.values["looks"], warn.values["batches"]
    assert (warn.level, warn.step, warn.rank) == ("warn", (first + 11) * every, 0)
    assert (looks, of, warn.values["since"]) == (12, min(batches, 12), first * every)
    assert "rank 0 reads batches again: at 12 of the last 20 sampled steps" in warn.message


@pytest.mark.parametrize("times", [3, 8])
def test_batches_that_come_several_times_each_are_told(times: int) -> None:
    (warn,) = run(StuckData(), stream(NEW + [x for x in rounds(50, 1) for _ in range(times)]))
    assert (warn.level, warn.rank, warn.values["since"]) == ("warn", 0, 101)
    assert warn.step <= 100 + 12 * times // (times - 1)


def test_two_of_three_known_are_enough_and_every_second_is_not() -> None:
    (warn,) = run(StuckData(), stream(NEW + [x for x in rounds(90, 1) for _ in range(3)]))
    assert warn.values["looks"] == 12
    assert run(StuckData(), stream(NEW + [x for x in rounds(90, 1) for _ in range(2)])) == []


def test_two_ranks_are_counted_and_none_is_blamed_and_one_of_two_is() -> None:
    reads = NEW + rounds(4, 8)
    both = [record(i, {0: {DIGEST: d}, 1: {DIGEST: d + 0.5}}) for i, d in enumerate(reads)]
    (warn,) = run(StuckData(), both)
    assert (warn.rank, warn.values["ranks"]) == (None, 2)
    assert "ranks 0-1 read batches again" in warn.message
    one = [record(i, {0: {DIGEST: -1.0 - i}, 1: {DIGEST: d}}) for i, d in enumerate(reads)]
    (warn,) = run(StuckData(), one)
    assert warn.rank == 1


@pytest.mark.parametrize("digests", [
    rounds(4, 50),  # from the start
    rounds(21, 20),  # an epoch that nobody shuffles
    [*range(35), *rounds(4, 50)],  # after too few others
    [x for i in range(60) for x in (i, i, i - 1)],  # each batch is read several times
    NEW + rounds(4, 3)[:11] + [x + 500 for x in NEW],  # eleven looks
], ids=["from the start", "an epoch", "too early", "each three times", "eleven looks"])  # fmt: skip
def test_what_a_loop_may_mean_says_nothing(digests: list[float]) -> None:
    said = run(StuckData(), stream([float(d) for d in digests]))
    assert [a for a in said if a.level != "info"] == []


def test_a_loader_that_goes_round_is_not_told_at_another_interval() -> None:
    """Of 40 batches in one order each tenth is one of four."""
    steps = [*range(120), *range(120, 1000, 10)]
    said = run(StuckData(), [record(s, {0: {DIGEST: float(s % 40)}}) for s in steps])
    assert [a for a in said if a.level != "info"] == []


def test_a_restart_begins_anew() -> None:
    first, then = stream(NEW), stream(rounds(4, 30))
    again = [record(r.step, r.scalars, attempt=1) for r in then]
    assert [a for a in run(StuckData(), [*first, *again]) if a.level != "info"] == []
