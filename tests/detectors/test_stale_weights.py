"""A forward with weights of before the optimizer's step is paged; one stale step alone is not."""

from __future__ import annotations

from ddpprobe.detectors.stale_weights import StaleWeights
from ddpprobe.records.step import NOTED, STALE, StepRecord
from tests.detectors.made_records import levels, record, run


def step(number: int, *units: float | None, **more: object) -> StepRecord:
    said = {rank: {} if n is None else {STALE: n} for rank, n in enumerate(units)}
    return record(number, said, **more)


def test_units_that_stay_gathered_are_paged_once_at_the_second_sampled_step() -> None:
    (page,) = run(StaleWeights(), [step(s, 3, 3) for s in range(0, 300, 10)])
    assert (page.level, page.step, page.phase, page.rank) == ("page", 10, "forward", None)
    assert (page.module, page.kind, page.values) == ("", "param", {"units": 3})
    assert "3 units of FSDP2" in page.message
    assert "reshard()" in page.message


def test_it_is_told_again_where_it_had_ended_and_in_each_attempt() -> None:
    stale = [0, 2, 2, 0, 2, 2, 2]
    first = [step(s, n) for s, n in enumerate(stale)]
    again = [step(s, n, attempt=1) for s, n in enumerate(stale)]
    assert levels(run(StaleWeights(), first + again)) == [
        ("page", 2), ("page", 5), ("page", 2), ("page", 5),
    ]  # fmt: skip


def test_a_note_does_not_tell_again_what_has_not_ended() -> None:
    noted = record(5, {0: {STALE: 2.0, NOTED: 1.0}})
    stream = [*(step(s, 2) for s in range(5)), noted, *(step(s, 2) for s in range(6, 20))]
    assert levels(run(StaleWeights(), stream)) == [("page", 1)]
    ended = [step(s, 0 if s == 12 else 2) for s in range(6, 20)]
    assert levels(run(StaleWeights(), [*stream[:6], *ended])) == [("page", 1), ("page", 14)]


def test_one_rank_that_is_stale_is_enough_and_one_without_the_number_is_no_rank() -> None:
    assert levels(run(StaleWeights(), [step(s, 0, None, 1) for s in range(4)])) == [("page", 1)]


def test_a_single_stale_step_fresh_units_and_other_wrappers_are_let_be() -> None:
    assert run(StaleWeights(), [step(s, s % 2) for s in range(50)]) == []
    assert run(StaleWeights(), [step(s, 0, 0) for s in range(50)]) == []
    assert run(StaleWeights(), [step(s, None, None) for s in range(50)]) == []


def test_what_is_noted_or_was_not_sampled_does_not_count() -> None:
    noted = record(1, {0: {STALE: 1.0, NOTED: 1.0}})
    assert run(StaleWeights(), [step(0, 1), noted]) == []
    assert run(StaleWeights(), [step(0, 1), step(1, 1, sampled=False)]) == []
