"""What comes out of the gather depends on what was delivered, not on who came first."""

from __future__ import annotations

import re
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpprobe.records.gather import Gather
from ddpprobe.records.merge import merge_all
from ddpprobe.records.step import FirstBad, Site, StepRecord

from ..made_runs import head_merge

LOCAL = Site("a", "output")
SHARDED = Site("w", "grad", placement="sharded")
REPLICATED = Site("w", "param", placement="replicated")
SITES = (LOCAL, SHARDED, REPLICATED)


def full(
    rank: int, step: int, *, seed: int = 0, bad: bool = False, **changes: object
) -> StepRecord:
    """Return a rank's complete record; its numbers are integers, so that sums are exact."""
    rng = np.random.default_rng((rank, step, seed))
    counts = rng.integers(0, 1 << 40, (3, 7))
    values = rng.integers(-(1 << 30), 1 << 30, (3, 4)).astype(float)
    record = StepRecord(
        0, step, (rank,), 1000 * step + rank, sites=SITES, counts=counts, values=values,
        scalars={rank: {"loss": float(rank)}}, first_bad=witness(rank, step) if bad else None,
        digests={("v", ""): {step: 1 << rank}, ("w", ""): {rank % 3: 1 << rank}},
    )  # fmt: skip
    return replace(record, **changes)  # type: ignore[arg-type]


def witness(rank: int, step: int, fqn: str | None = "a") -> FirstBad:
    return FirstBad(step, 0, "forward", rank, rank, fqn, "output" if fqn else None, nan=1)


def alarm(rank: int, step: int, *, partial: bool = False) -> StepRecord:
    """Return what the every-step watch says before, or instead of, the full record."""
    bad = witness(rank, step, None)
    return StepRecord(0, step, (rank,), 0, sampled=False, first_bad=bad, partial=partial)


def same(a: StepRecord, b: StepRecord) -> bool:
    nothing = {"counts": np.zeros((0, 7), int), "values": np.zeros((0, 4)), "sites": ()}
    nothing |= {"digests": {}}
    plain = [repr(replace(r, scalars={}, **nothing)) for r in (a, b)]
    arrays = np.array_equal(a.counts, b.counts) and np.array_equal(a.values, b.values)
    told = (a.scalars, a.sites, a.digests) == (b.scalars, b.sites, b.digests)
    return plain[0] == plain[1] and told and arrays


def all_same(a: list[StepRecord], b: list[StepRecord]) -> bool:
    return len(a) == len(b) and all(map(same, a, b))


def deliveries(ranks: int, steps: int) -> list[StepRecord]:
    return [full(r, s, bad=(r + s) % 3 == 0) for s in range(steps) for r in range(ranks)]


def test_a_step_comes_out_when_the_last_rank_has_delivered() -> None:
    gather = Gather((0, 1))
    gather.add(full(0, 5), 0.0)
    assert gather.ready(1.0) == []
    gather.add(full(1, 5), 2.0)
    (merged,) = gather.ready(2.0)
    assert same(merged, head_merge([full(0, 5), full(1, 5)]))
    assert merged.missing == ()
    assert gather.pending == 0


def test_a_slow_rank_is_waited_for_only_so_long_and_then_named() -> None:
    gather = Gather((0, 1, 2), grace_seconds=5.0)
    gather.add(full(0, 3), 10.0)
    gather.add(full(2, 3), 11.0)
    assert gather.ready(14.9) == []
    (merged,) = gather.ready(15.0)
    assert (merged.ranks, merged.missing) == ((0, 2), (1,))


def test_a_record_that_comes_too_late_is_dropped_and_counted() -> None:
    gather = Gather((0, 1))
    gather.add(full(0, 3), 0.0)
    assert len(gather.ready(5.0)) == 1
    gather.add(full(1, 3), 6.0)
    gather.add(full(1, 2), 6.0)  # nor may an earlier step come out after a later one
    assert (gather.late, gather.drain()) == (2, [])


def test_a_dead_rank_is_not_waited_for() -> None:
    gather = Gather((0, 1))
    gather.add(full(0, 3), 0.0)
    gather.mark_dead(1)
    assert gather.waiting_for == {0}
    (merged,) = gather.ready(0.0)
    assert (merged.ranks, merged.missing) == ((0,), (1,))


def test_what_a_rank_wrote_before_it_died_counts() -> None:
    gather = Gather((0, 1))
    gather.add(full(1, 3), 0.0)
    gather.mark_dead(1)
    gather.add(full(0, 3), 0.1)
    assert [r.ranks for r in gather.ready(0.1)] == [(0, 1)]


def test_a_rank_that_went_on_will_not_deliver_the_step_any_more() -> None:
    gather = Gather((0, 1))
    for record in (full(0, 3), full(0, 4), full(1, 4)):
        gather.add(record, 0.0)
    first, second = gather.ready(0.0)
    assert (first.step, first.missing) == (3, (1,))
    assert (second.step, second.missing) == (4, ())


def test_a_partial_record_waits_for_the_full_one_and_is_replaced() -> None:
    gather = Gather((0, 1))
    gather.add(alarm(0, 3, partial=True), 0.0)
    gather.add(full(1, 3), 0.0)
    assert gather.ready(2.0) == []
    gather.add(full(0, 3, bad=True), 2.0)
    (merged,) = gather.ready(2.0)
    assert not merged.partial
    assert merged.first_bad is not None
    assert merged.first_bad.fqn == "a"
    assert gather.late == 0


def test_the_partial_record_of_a_rank_that_died_is_merged_at_once() -> None:
    gather = Gather((0, 1))
    gather.add(full(0, 3), 0.0)
    gather.add(full(1, 3, partial=True, bad=True), 0.0)
    gather.mark_dead(1)
    (merged,) = gather.ready(0.0)
    assert (merged.ranks, merged.partial, merged.missing) == ((0, 1), True, ())
    assert merged.first_bad is not None


def test_an_alarm_waits_for_the_end_of_a_slow_step_which_may_have_been_skipped() -> None:
    gather = Gather((0, 1), grace_seconds=5.0)
    gather.add(alarm(1, 7, partial=True), 0.0)
    assert gather.ready(30.0) == []
    gather.add(replace(alarm(1, 7), skipped=True), 30.0)
    (merged,) = gather.ready(30.0)
    assert merged.skipped


def test_the_alarm_of_a_rank_that_died_waits_for_nobody() -> None:
    gather = Gather((0, 1), reorder_seconds=1.0)
    gather.add(alarm(1, 7, partial=True), 0.0)
    gather.mark_dead(1)
    assert [r.step for r in gather.ready(1.0)] == [7]


def test_a_lone_alarm_comes_out_in_a_minute_although_the_loop_hangs() -> None:
    gather = Gather((0, 1), grace_seconds=5.0)
    gather.add(alarm(1, 7, partial=True), 0.0)
    (merged,) = gather.ready(60.0)
    assert merged.first_bad is not None
    assert (merged.sampled, merged.ranks, merged.missing) == (False, (1,), ())


def test_an_unsampled_alarm_lets_an_earlier_one_of_a_slower_rank_pass() -> None:
    gather = Gather((0, 1), reorder_seconds=1.0)
    gather.add(alarm(0, 8), 0.0)
    assert gather.ready(0.9) == []
    gather.add(alarm(1, 7), 0.9)
    assert [r.step for r in gather.ready(1.0)] == []  # 7 arrived just now
    assert [r.step for r in gather.ready(2.0)] == [7, 8]


def test_an_unsampled_alarm_comes_out_before_the_next_sampled_step() -> None:
    gather = Gather((0, 1))
    for record in (full(0, 10), alarm(1, 7), full(1, 10)):
        gather.add(record, 0.0)
    assert [r.step for r in gather.ready(0.0)] == [7, 10]


def test_an_alarm_and_full_records_of_one_step_become_one_record() -> None:
    gather = Gather((0, 1))
    gather.add(alarm(0, 4), 0.0)
    gather.add(full(1, 4), 0.0)
    (merged,) = gather.ready(5.0)
    assert (merged.ranks, merged.sampled) == ((0, 1), True)
    assert merged.first_bad is not None


def test_a_full_record_without_a_witness_keeps_the_alarm_s() -> None:
    gather = Gather((0,))
    gather.add(full(0, 4), 0.0)
    gather.add(alarm(0, 4, partial=True), 0.0)
    (merged,) = gather.ready(0.0)
    assert merged.first_bad == witness(0, 4, None)
    assert merged.sampled


def test_a_node_s_block_speaks_for_all_its_ranks_and_for_the_missing_ones() -> None:
    head = Gather((0, 1, 2, 3))
    head.add(full(0, 5), 0.0)
    head.add(full(1, 5), 0.0)
    head.add(replace(full(2, 5), missing=(3,)), 0.0, final=True)
    (merged,) = head.ready(0.0)
    assert (merged.ranks, merged.missing) == ((0, 1, 2), (3,))


def test_a_partial_block_of_a_node_is_final() -> None:
    head = Gather((0, 1))
    head.add(full(0, 5), 0.0)
    head.add(full(1, 5, partial=True), 0.0, final=True)
    assert [r.partial for r in head.ready(0.0)] == [True]


def test_a_block_sent_twice_counts_once() -> None:
    head = Gather((0, 1))
    for _ in range(2):
        head.add(full(1, 5), 0.0, final=True)
    head.add(full(0, 5), 0.0)
    (merged,) = head.ready(0.0)
    assert same(merged, head_merge([full(0, 5), full(1, 5)]))
    head.add(full(1, 5), 0.0, final=True)
    assert head.drain() == []


def test_steps_of_an_earlier_life_are_ignored_and_not_called_late() -> None:
    gather = Gather((0,), after=4)
    for step in range(7):
        gather.add(full(0, step), 0.0)
    assert [r.step for r in gather.ready(0.0)] == [5, 6]
    assert gather.late == 0


def test_records_of_a_rank_nobody_expected_are_merged_too() -> None:
    gather = Gather((0,))
    gather.add(full(7, 1), 0.0)
    gather.add(full(0, 1), 0.0)
    assert [r.ranks for r in gather.ready(0.0)] == [(0, 7)]


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_any_interleaving_gives_the_same_records(
    ranks: int, steps: int, data: st.DataObject
) -> None:
    """Each rank's own order holds; how the ranks interleave and when one looks does not matter."""
    reference = Gather(range(ranks))
    for record in deliveries(ranks, steps):
        reference.add(record, 0.0)
    wanted = reference.ready(0.0)
    queues = [[r for r in deliveries(ranks, steps) if r.ranks == (n,)] for n in range(ranks)]
    gather, got = Gather(range(ranks)), []
    while any(queues):
        queue = data.draw(st.sampled_from([q for q in queues if q]))
        if data.draw(st.booleans()) and queue[0].first_bad:
            early = replace(alarm(queue[0].ranks[0], queue[0].step), partial=True)
            gather.add(early, 0.0)
        gather.add(queue.pop(0), 0.0)
        if data.draw(st.booleans()):
            got += gather.ready(0.0)
    got += gather.ready(0.0)
    assert all_same(got, wanted)
    assert [r.step for r in got] == list(range(steps))
    assert gather.late == 0


@given(st.permutations(range(12)), st.lists(st.booleans(), min_size=12, max_size=12))
def test_any_order_of_arrival_gives_the_same_records(order: list[int], early: list[bool]) -> None:
    records = deliveries(3, 4)
    gather, wanted = Gather(range(3)), Gather(range(3))
    for record in records:
        wanted.add(record, 0.0)
    for at in order:
        gather.add(records[at], 0.0)
        if early[at] and records[at].first_bad:  # the alarm overtaken by its full record
            gather.add(alarm(records[at].ranks[0], records[at].step, partial=True), 0.0)
    assert all_same(gather.drain(), wanted.drain())


@given(st.integers(1, 6), st.lists(st.integers(0, 3), min_size=6, max_size=6), st.data())
def test_any_split_of_the_ranks_over_nodes_gives_the_same_records(
    ranks: int, node_of: list[int], data: st.DataObject
) -> None:
    """Merging per node, then at the head, equals merging at once; a dead rank included."""
    dead = data.draw(st.none() | st.integers(0, ranks - 1))
    dies_at = data.draw(st.integers(0, 3))
    records = [r for r in deliveries(ranks, 3) if r.ranks != (dead,) or r.step < dies_at]
    flat, head = Gather(range(ranks)), Gather(range(ranks))
    for record in records:
        flat.add(record, 0.0)
    for node in set(node_of[:ranks]):
        members = [r for r in range(ranks) if node_of[r] == node]
        local = Gather(members, judges=False)
        for record in records:
            if record.ranks[0] in members:
                local.add(record, 0.0)
        if dead in members:
            local.mark_dead(dead)
        for merged in (*local.ready(0.0), *local.drain()):
            head.add(merged, 0.0, final=True)
    assert all_same(head.drain(), flat.drain())


def test_of_the_checksums_the_head_keeps_what_ranks_disagree_on_and_a_node_keeps_all() -> None:
    kept = []
    for judges in (False, True):
        gather = Gather((0, 1), judges=judges)
        gather.add(full(0, 7), 0.0)
        gather.add(full(1, 7), 0.0)
        kept.append(gather.ready(0.0)[0].digests)
    disputed = {("w", ""): {0: 1, 1: 2}}
    assert kept == [{("v", ""): {7: 3}, **disputed}, disputed]


def test_a_rank_that_is_alone_disputes_nothing() -> None:
    gather = Gather((0,))
    gather.add(full(0, 7), 0.0)
    assert gather.ready(0.0)[0].digests == {}


def test_the_disputes_of_ranks_that_went_apart_are_bounded_and_the_first_one_is_there() -> None:
    for ranks, parameters, kept in ((2, 3000, 2048), (5000, 3, 1)):
        gather = Gather(range(ranks))
        for rank in range(ranks):
            digests = {(f"w{i}", ""): {rank: 1 << rank} for i in range(parameters)}
            part = StepRecord(0, 1, (rank,), 0, digests=digests)
            gather.add(part, 0.0)
        (merged,) = gather.ready(0.0)
        assert list(merged.digests) == [(f"w{i}", "") for i in range(kept)]


@given(st.permutations(range(5)))
def test_the_merge_does_not_depend_on_the_grouping(order: list[int]) -> None:
    parts = [full(rank, 0) for rank in range(5)]
    a, b, c, d, e = (parts[i] for i in order)
    left = merge_all((merge_all((merge_all((merge_all((a, b)), c)), d)), e))
    right = merge_all((a, merge_all((b, merge_all((c, merge_all((d, e))))))))
    assert same(left, right)
    assert same(merge_all(parts), left)


def test_a_backlog_is_merged_in_linear_time() -> None:
    """A guard against a quadratic gather, not a measurement."""
    records = [full(rank, step) for step in range(300) for rank in range(8)]
    gather, start = Gather(range(8)), time.process_time()
    for record in records:
        gather.add(record, 0.0)
    assert len(gather.ready(0.0)) == 300
    assert time.process_time() - start < 5.0


def test_many_ranks_are_merged_in_linear_time_however_often_one_looks() -> None:
    """A guard against a quadratic gather, not a measurement."""
    ranks = 8_000
    gather, start = Gather(range(ranks)), time.process_time()
    for rank in range(ranks):
        gather.add(StepRecord(0, 1, (rank,), 0, scalars={rank: {"loss": 1.0}}), 0.0)
        assert bool(gather.ready(0.0)) == (rank == ranks - 1)
    assert time.process_time() - start < 10.0


def test_a_record_of_another_attempt_is_set_aside() -> None:
    gather = Gather((0, 1))
    gather.add(full(0, 1), 0.0)
    gather.add(replace(full(1, 1), attempt=1), 0.0)
    (merged,) = gather.drain()
    assert (merged.ranks, merged.missing, gather.set_aside) == ((0,), (1,), 1)
    with pytest.raises(ValueError, match="attempt"):
        merge_all([full(0, 1), replace(full(1, 1), attempt=1)])


def test_the_log_says_once_why_a_part_was_set_aside(caplog) -> None:
    gather = Gather((0, 1))
    for step in (1, 2):
        gather.add(full(0, step), 0.0)
        gather.add(replace(full(1, step), attempt=1), 0.0)
    gather.drain()
    assert gather.set_aside == 2
    (said,) = caplog.messages
    assert re.search(r"a part of step 1 cannot be merged .* \(.*attempt.*\); said once", said)


def test_what_a_late_part_saw_that_is_bad_is_kept_for_whom_it_concerns() -> None:
    gather = Gather((0, 1), after=1)
    gather.add(full(0, 3), 0.0)
    gather.ready(5.0)
    late = full(1, 3, bad=True)
    for record in (full(1, 1, bad=True), full(1, 2), late):
        gather.add(record, 6.0)
    assert (gather.late, list(gather.late_witnesses)) == (2, [late])


def test_a_record_of_an_earlier_step_takes_back_nothing_of_where_a_rank_is() -> None:
    gather = Gather((0, 1))
    for record in (full(0, 5), full(0, 4), full(1, 5)):
        gather.add(record, 0.0)
    assert gather.is_past(5)
    assert [merged.step for merged in gather.ready(0.0)] == [4, 5]


def test_of_a_step_that_one_rank_samples_the_others_alarm_is_not_the_last_word() -> None:
    gather = Gather((0, 1))
    gather.add(full(0, 3), 0.0)
    gather.add(alarm(1, 3), 0.0)
    assert gather.ready(1.0) == []
    gather.add(full(1, 3), 1.0)
    (merged,) = gather.ready(1.0)
    assert same(
        merged, head_merge([full(0, 3), replace(full(1, 3), first_bad=witness(1, 3, None))])
    )


def test_a_record_in_which_a_rank_stands_twice_is_set_aside_and_said(caplog) -> None:
    gather = Gather((0, 1))
    gather.add(replace(full(0, 3), ranks=(0, 0)), 0.0)
    gather.add(full(0, 3), 0.0)
    gather.add(full(1, 3), 0.0)
    (merged,) = gather.ready(0.0)
    assert (merged.ranks, gather.set_aside, gather.late) == ((0, 1), 1, 0)
    (said,) = caplog.messages
    assert "a part of step 3 cannot be merged" in said
    assert "a rank stands twice in (0, 0)" in said


def test_what_overlaps_others_is_counted_each_time_and_what_says_no_more_is_not() -> None:
    gather = Gather(range(4))
    gather.add(merge_all([full(0, 3), full(1, 3)]), 0.0)
    for _ in range(2):
        gather.add(merge_all([full(1, 3), full(2, 3)]), 0.0)  # whose are the numbers of rank 1?
    assert gather.late == 2
    gather.add(full(3, 3), 0.0)
    gather.add(alarm(3, 3), 0.0)  # after the whole of it
    assert gather.late == 2


def test_an_alarm_comes_out_at_once_when_all_others_are_past_its_step() -> None:
    gather = Gather((0, 1))
    gather.add(alarm(0, 3), 0.0)
    assert gather.ready(0.0) == []
    gather.add(full(1, 4), 0.0)
    (out,) = gather.ready(0.0)
    assert (out.step, out.ranks) == (3, (0,))


def test_what_a_final_block_says_is_missing_is_not_waited_for_on_any_step() -> None:
    for block in (alarm(0, 3), full(0, 3)):
        head = Gather((0, 1))
        head.add(replace(block, missing=(1,)), 0.0, final=True)
        (out,) = head.ready(0.0)
        assert (out.step, out.ranks) == (3, (0,))


def test_who_is_missing_in_another_ranks_block_is_not_waited_for_behind_an_alarm() -> None:
    head = Gather((0, 1, 2))
    head.add(replace(alarm(2, 3), missing=(0,)), 0.0, final=True)
    assert head.ready(0.0) == []
    head.add(alarm(1, 3), 0.0)
    (out,) = head.ready(0.0)
    assert (out.step, out.ranks) == (3, (1, 2))
