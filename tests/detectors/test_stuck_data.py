"""A loader that hangs on one batch is told; one that always had the same batch is not."""

from __future__ import annotations

import numpy as np
import pytest

from ddpprobe.detectors.same_epochs import MOST_BATCHES
from ddpprobe.detectors.stuck_data import StuckData
from ddpprobe.records.step import DIGEST, StepRecord
from tests.detectors.made_records import levels, record, run


def stream(digests: list[float], every: int = 1, **changes: object) -> list[StepRecord]:
    """A run of one rank that reads these."""
    return [record(i * every, {0: {DIGEST: d}}, **changes) for i, d in enumerate(digests)]


def beside(digests: list[float], every: int = 1) -> list[StepRecord]:
    """Rank 1 reads these, rank 0 something else at every step."""
    return [
        record(i * every, {0: {DIGEST: 1e6 + i}, 1: {DIGEST: digest}})
        for i, digest in enumerate(digests)
    ]


VARIED = [float(i) for i in range(30)]


def test_a_rank_whose_data_stop_to_vary_is_told_once_and_named() -> None:
    for every, looks in ((1, 20), (2, 20), (3, 15), (10, 5), (100, 5)):
        (warn,) = run(StuckData(), stream(VARIED + [5.0] * 60, every))
        last = 29 + looks
        assert (warn.level, warn.step, warn.rank) == ("warn", last * every, 0)
        assert warn.values["looks"] == looks


def test_beside_a_rank_whose_data_vary_five_looks_are_enough() -> None:
    for every in (1, 10):
        (warn,) = run(StuckData(), beside(VARIED + [5.0] * 60, every))
        assert (warn.level, warn.step, warn.rank) == ("warn", 34 * every, 1)
        assert "while that of others varied" in warn.message
    assert run(StuckData(), beside(VARIED + [5.0] * 4 + VARIED)) == []


def test_a_rank_that_varies_since_less_than_five_looks_itself_says_nothing_of_another() -> None:
    """All may have been given the same batch on purpose, and go on one after the other."""
    first = VARIED + [5.0] * 8 + [90.0, 91.0, 92.0]
    both = [record(i, {0: {DIGEST: d}, 1: {DIGEST: e}})
            for i, (d, e) in enumerate(zip(first, VARIED + [5.0] * 11, strict=True))]  # fmt: skip
    assert run(StuckData(), both) == []


def test_several_ranks_are_counted_and_none_is_blamed() -> None:
    both = [record(i, {r: {DIGEST: float(min(i, 30))} for r in (0, 1)}) for i in range(60)]
    (warn,) = run(StuckData(), both)
    assert (warn.rank, warn.step, warn.values["ranks"]) == (None, 49, 2)


def test_one_batch_from_the_start_is_meant() -> None:
    assert run(StuckData(), stream([5.0] * 200)) == []
    assert run(StuckData(), stream([4.0, *[5.0] * 200])) == []


def test_an_input_that_often_stays_the_same_tells_nothing() -> None:
    mask = [float(i // 5) for i in range(100)]
    assert run(StuckData(), stream(mask + [1.0] * 60)) == []


def test_a_loader_that_goes_round_is_not_stuck_at_an_interval_of_its_round() -> None:
    dense = [record(i, {0: {DIGEST: float(i % 10)}}) for i in range(50)]
    sparse = [record(i, {0: {DIGEST: float(i % 10)}}) for i in range(50, 600, 10)]
    assert levels(run(StuckData(), dense + sparse)) == [("info", 25)]  # the epochs are the same


def test_19_looks_are_not_enough_and_a_restart_begins_anew() -> None:
    assert run(StuckData(), stream(VARIED + [5.0] * 19 + VARIED)) == []
    again = stream([5.0] * 40, attempt=1)
    assert run(StuckData(), stream(VARIED + [5.0] * 10) + again) == []


def test_it_is_told_again_behind_a_quiet_time() -> None:
    quiet = [1000.0 + i for i in range(120)]
    found = run(StuckData(), stream(VARIED + [5.0] * 30 + quiet + [6.0] * 30))
    assert [level for level, _ in levels(found)] == ["warn", "warn"]


def test_a_quiet_time_is_more_than_a_hundred_steps_without_it() -> None:
    for steps, told in ((100, 1), (101, 2)):
        # The last look of the first time is 59; the 20th look makes the second one known.
        varied = [1000.0 + i for i in range(steps - 20)]
        found = run(StuckData(), stream(VARIED + [5.0] * 30 + varied + [6.0] * 20))
        assert len(found) == told


@pytest.mark.parametrize(("every", "length"), [(1, 20), (10, 200), (10, 40 * 7)])
def test_an_epoch_whose_batches_come_again_in_the_same_order_is_information_once(
    every: int, length: int
) -> None:
    digests = [float(step % length) for step in range(0, 4 * length, every)]
    (info,) = run(StuckData(), stream(digests, every))
    assert (info.level, info.rank, info.values["steps"]) == ("info", None, length)
    assert "sampler.set_epoch(epoch)" in info.message
    assert info.step == 2 * length - every


def test_epochs_of_a_few_batches_are_told_behind_as_many_looks() -> None:
    (info,) = run(StuckData(), stream([float(step % 8) for step in range(100)]))
    assert info.step == 8 + 15
    assert run(StuckData(), stream([float(step % 7) for step in range(100)])) == []


def test_batches_that_are_shuffled_anew_are_none() -> None:
    rng = np.random.default_rng(0)
    digests = [float(batch) for _ in range(40) for batch in rng.permutation(20)]
    assert run(StuckData(), stream(digests)) == []


def test_a_batch_in_each_epoch_that_is_another_one_begins_anew() -> None:
    digests = [float(step % 20) if step % 20 else 1e6 + step for step in range(400)]
    assert run(StuckData(), stream(digests)) == []


def test_what_is_remembered_of_epochs_is_bounded() -> None:
    detector = StuckData()
    run(detector, stream([float(step) for step in range(MOST_BATCHES + 50)]))
    assert detector._epochs is not None
    assert len(detector._epochs._seen) == MOST_BATCHES
    long = [float(step % (MOST_BATCHES + 8)) for step in range(3 * MOST_BATCHES)]
    assert run(StuckData(), stream(long)) == []


def test_the_rank_whose_epochs_are_followed_is_another_one_once_it_is_gone() -> None:
    first = [record(step, {0: {DIGEST: float(step)}, 1: {DIGEST: -1.0}}) for step in range(10)]
    other = [record(10 + step, {1: {DIGEST: float(step % 20)}}) for step in range(60)]
    (info,) = run(StuckData(), [*first, *other])
    assert info.step == 10 + 39
