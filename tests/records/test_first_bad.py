"""Which of the ranks' bad tensors is the origin does not depend on who was merged first."""

from __future__ import annotations

from ddpprobe.records.merge import merge_all
from ddpprobe.records.step import SEVERAL, UNORDERED, FirstBad, StepRecord, empty_rows


def test_what_a_step_left_behind_comes_after_the_forwards_of_a_rank_with_more_micro_batches() -> (
    None
):
    """Else the blame would depend on which two of these three were merged first."""
    late = FirstBad(3, 1, "step", 0, 0, "a", "param")
    early = FirstBad(3, 0, "step", 0, 1, "a", "param")
    forward = FirstBad(3, 1, "forward", 0, 2, "b", "output")
    counts, values = empty_rows(0)
    a, b, c = (
        StepRecord(0, 3, (bad.rank,), 1, True, (), counts, values, first_bad=bad)
        for bad in (late, early, forward)
    )
    assert merge_all([merge_all([a, c]), b]).first_bad == forward
    assert merge_all([a, merge_all([b, c])]).first_bad == merge_all([a, b, c]).first_bad == forward


def test_what_a_later_step_left_behind_takes_no_blame_from_the_first() -> None:
    early = FirstBad(3, 0, "step", 0, 0, "a", "param", nan=1)
    later = FirstBad(4, 0, "step", 0, 1, "a", "param", nan=1)
    parts = [StepRecord(0, 4, (bad.rank,), 1, first_bad=bad) for bad in (early, later)]
    assert merge_all(parts).first_bad == merge_all(parts[::-1]).first_bad == early


def origin(*found: FirstBad) -> FirstBad | None:
    return merge_all([StepRecord(0, 3, (bad.rank,), 1, first_bad=bad) for bad in found]).first_bad


def test_of_stages_whose_order_is_not_known_none_is_the_origin_nor_its_module() -> None:
    first = FirstBad(3, 0, "forward", UNORDERED, 0, "a", "output", nan=1, numel=4)
    second = FirstBad(3, 0, "forward", UNORDERED, 1, "b", "output", nan=2, numel=4)
    known = FirstBad(3, 0, "forward", 5, 2, "c", "output", nan=3, numel=4)
    undecided = FirstBad(3, 0, "forward", UNORDERED, SEVERAL)
    assert origin(first, second) == origin(second, known) == origin(first, second, known)
    assert origin(first, second) == undecided


def test_a_stage_that_is_alone_bad_in_the_earliest_phase_is_the_origin() -> None:
    alone = FirstBad(3, 0, "forward", UNORDERED, 1, "b", "output", nan=2, numel=4)
    later = FirstBad(3, 0, "backward", UNORDERED, 0, "a", "grad_local")
    assert origin(alone, later) == alone
    assert origin(alone) == alone
