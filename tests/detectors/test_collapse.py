"""A model that returns the same for all samples is told; one that was given one sample is not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ddpprobe.detectors.collapse import Collapse
from ddpprobe.records.step import INPUT_SPREAD, OUTPUT_SPREAD, StepRecord
from tests.detectors.made_records import record, run

ALIKE, APART = 1e-14, 1e-9  # what rounding leaves, and a little more than that


def stream(
    output: Sequence[float], given: Sequence[float] | None = None, *, every: int = 1,
    others: int = 0, **changes: object,
) -> list[StepRecord]:  # fmt: skip
    """A run whose rank 0 has these spreads; the samples of `others` ranks differ."""
    given = [0.9] * len(output) if given is None else given
    apart = {rank: {OUTPUT_SPREAD: 0.5, INPUT_SPREAD: 0.9} for rank in range(1, others + 1)}
    return [
        record(i * every, {0: {OUTPUT_SPREAD: o, INPUT_SPREAD: g}, **apart}, **changes)
        for i, (o, g) in enumerate(zip(output, given, strict=True))
    ]


@pytest.mark.parametrize(("every", "looks"), [(1, 8), (5, 8), (10, 5), (100, 5)])
@pytest.mark.parametrize("before", [0, 20])
def test_a_model_that_returns_the_same_for_all_samples_is_told_once(
    every: int, looks: int, before: int
) -> None:
    (warn,) = run(Collapse(), stream([0.7] * before + [ALIKE] * 60, every=every))
    assert (warn.level, warn.step, warn.rank) == ("warn", (before + looks - 1) * every, 0)
    assert (warn.kind, warn.phase) == ("output", "forward")
    assert warn.values == {"looks": looks, "since": before * every, "ranks": 1}
    assert "returns the same for all samples" in warn.message


def test_samples_that_hardly_differ_are_not_alike() -> None:
    assert run(Collapse(), stream([0.7] * 20 + [APART] * 60)) == []


def test_eight_looks_are_needed_and_five_beside_a_rank_whose_samples_differ() -> None:
    assert run(Collapse(), stream(([0.7] * 20 + [ALIKE] * 7) * 3)) == []
    assert run(Collapse(), stream(([0.7] * 20 + [ALIKE] * 4) * 3, others=2)) == []
    (warn,) = run(Collapse(), stream([0.7] * 20 + [ALIKE] * 60, others=2))
    assert (warn.step, warn.rank) == (24, 0)


def test_a_rank_whose_samples_differ_since_less_says_nothing_of_another() -> None:
    later = [ALIKE] * 3 + [0.5] * 4
    both = [
        record(i, {r: {OUTPUT_SPREAD: x, INPUT_SPREAD: 0.9} for r, x in ((0, ALIKE), (1, one))})
        for i, one in enumerate(later)
    ]
    assert run(Collapse(), both) == []


def test_from_the_start_only_a_model_that_is_given_different_samples_is_judged() -> None:
    assert run(Collapse(), stream([ALIKE] * 60, [ALIKE] * 60)) == []
    assert run(Collapse(), stream([ALIKE] * 60, [math.nan] * 60)) == []
    assert run(Collapse(), stream([ALIKE] * 60, [ALIKE] * 50 + [0.9] * 10)) == []
    (warn,) = run(Collapse(), stream([ALIKE] * 60))
    assert warn.step == 7


def test_an_output_that_varied_before_is_judged_whatever_is_known_of_the_input() -> None:
    (warn,) = run(Collapse(), stream([0.7] * 8 + [ALIKE] * 20, [math.nan] * 28))
    assert (warn.step, warn.kind) == (15, "output")
    assert run(Collapse(), stream([0.7] * 7 + [ALIKE] * 20, [math.nan] * 27)) == []


def test_samples_that_are_copies_of_one_are_told_as_the_input_of_their_rank() -> None:
    """Dropout makes the outputs differ."""
    for output in ([0.7] * 80, [0.7] * 20 + [ALIKE] * 60):
        (warn,) = run(Collapse(), stream(output, [0.9] * 20 + [ALIKE] * 60, others=1))
        assert (warn.step, warn.rank, warn.kind) == (24, 0, "input")
        assert "sampler" in warn.message


def test_of_a_rank_whose_output_alone_is_alike_nothing_is_said_of_its_input() -> None:
    """While another rank is given copies, and dropout makes what it returns differ."""
    both = [
        record(i, {0: {OUTPUT_SPREAD: 0.5 if i < 20 else 0.0, INPUT_SPREAD: 0.9},
                   1: {OUTPUT_SPREAD: 0.5, INPUT_SPREAD: 0.9 if i < 20 else 0.0}})
        for i in range(60)
    ]  # fmt: skip
    (warn,) = run(Collapse(), both)
    assert (warn.rank, warn.kind, warn.step) == (1, "input", 24)
    assert warn.values == {"looks": 5, "since": 20, "ranks": 1}


def test_an_input_that_is_alike_from_the_start_or_now_and_then_is_nothing() -> None:
    assert run(Collapse(), stream([0.7] * 80, [ALIKE] * 80, others=1)) == []
    assert run(Collapse(), stream([0.7] * 88, [*[0.9] * 7, ALIKE] * 11, others=1)) == []


def test_several_ranks_are_counted_and_none_is_blamed() -> None:
    both = [
        record(i, {r: {OUTPUT_SPREAD: 0.5 if i < 20 else 0.0} for r in (0, 1)}) for i in range(60)
    ]
    (warn,) = run(Collapse(), both)
    assert (warn.rank, warn.step, warn.values["ranks"]) == (None, 27, 2)
    assert "ranks 0-1" in warn.message


def test_an_output_that_is_not_finite_now_and_then_is_not_alike_all_the_time() -> None:
    assert run(Collapse(), stream([0.7] * 20 + [*[ALIKE] * 4, math.nan] * 20)) == []
    (warn,) = run(Collapse(), stream([0.7] * 20 + [math.nan] * 9 + [ALIKE] * 8))
    assert warn.values == {"looks": 8, "since": 29, "ranks": 1}


def test_a_skipped_step_is_no_look() -> None:
    """Of a head that begins as zeros, as long as a GradScaler finds its scale."""
    skipped = stream([ALIKE] * 60, skipped=True)
    assert run(Collapse(), skipped) == []


def test_it_is_told_again_where_it_comes_back_or_more_ranks_have_it() -> None:
    back = [0.7] * 20 + [ALIKE] * 10 + [0.7] * 102 + [ALIKE] * 10
    assert [warn.step for warn in run(Collapse(), stream(back))] == [27, 139]
    more = [
        record(i, {r: {OUTPUT_SPREAD: 0.5 if i < 20 + 10 * r else 0.0} for r in (0, 1)})
        for i in range(60)
    ]
    assert [(w.rank, w.values["ranks"]) for w in run(Collapse(), more)] == [(0, 1), (None, 2)]
