"""Which witness of a fault counts, when several come, come late, or come out of order."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ddpprobe.detectors.nonfinite import NonFinite
from ddpprobe.rank.journal_writer import FrameWriter, Identity
from ddpprobe.rank.passes import Passes
from ddpprobe.records.gather import Gather
from ddpprobe.records.step import Anomaly, FirstBad, StepRecord
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import RunDir

WITNESS = FirstBad(10, 0, "forward", 7, 1, "a", "output", "", 3, 0, 0, 64)


def record(step: int, bad: FirstBad | None = None, **changes: object) -> StepRecord:
    return replace(StepRecord(0, step, (0, 1), 1, first_bad=bad), **changes)  # type: ignore[arg-type]


def told(*records: StepRecord) -> list[Anomaly]:
    detector = NonFinite()
    return [a for r in records for a in detector.update(r)]


@pytest.mark.parametrize(
    ("loss", "counted", "word"),
    [(-math.inf, "neg_inf", "-Inf"), (math.inf, "pos_inf", "+Inf"), (math.nan, "nan", "NaN")],
)
def test_each_sort_of_bad_loss_is_counted_as_what_it_is(
    loss: float, counted: str, word: str
) -> None:
    (page,) = told(record(9, scalars={0: {"loss": 1.0}, 1: {"loss": loss}}))
    assert dict(page.values) == {"nan": 0, "pos_inf": 0, "neg_inf": 0, "numel": 1, counted: 1}
    assert (page.rank, page.phase, page.micro) == (1, "forward", 0)
    assert page.message == f"non-finite loss ({word})"


def test_a_late_witness_of_an_earlier_step_does_not_make_the_next_fault_a_new_one() -> None:
    """Quiet is counted from the newest bad step, not from the one that was heard last."""
    now, late = record(50, replace(WITNESS, step=50)), record(60, replace(WITNESS, step=5))
    assert [a.step for a in told(now, late, record(150, replace(WITNESS, step=150)))] == [50]
    assert len(told(now, late, record(151, replace(WITNESS, step=151)))) == 2


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_witness_of_a_rank_is_kept_whether_its_alarm_comes_before_or_behind_its_record(
    order: tuple[int, int],
) -> None:
    alarm = record(10, replace(WITNESS, fqn=None), ranks=(1,), sampled=False, partial=True)
    parts = (alarm, record(10, ranks=(1,)))
    gather = Gather((0, 1))
    for at in order:
        gather.add(parts[at], 0.0)
    gather.add(record(10, ranks=(0,)), 0.0)
    (merged,) = gather.ready(0.0)
    assert merged.first_bad == alarm.first_bad
    assert (merged.sampled, merged.partial, gather.late) == (True, False, 0)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_fuller_witness_of_a_rank_counts_whichever_comes_first(order: tuple[int, int]) -> None:
    alarm = record(10, replace(WITNESS, fqn=None), ranks=(1,), sampled=False, partial=True)
    parts = (alarm, record(10, WITNESS, ranks=(1,)))
    gather = Gather((1,))
    for at in order:
        gather.add(parts[at], 0.0)
    (merged,) = gather.ready(0.0)
    assert merged.first_bad == WITNESS


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_the_earliest_witness_of_all_ranks_is_the_origin_in_any_order_of_arrival(
    order: tuple[int, ...],
) -> None:
    places = [(1, "forward", 0), (0, "backward", 2), (0, "backward", 1)]
    found = [
        replace(WITNESS, rank=rank, micro=micro, phase=phase, order=at)
        for rank, (micro, phase, at) in enumerate(places)
    ]
    gather = Gather(range(3))
    for rank in order:
        gather.add(record(10, found[rank], ranks=(rank,)), 0.0)
    (merged,) = gather.ready(0.0)
    assert merged.first_bad == found[2]


PARAM = replace(WITNESS, step=10, phase="step", fqn="a.weight", kind="param")
HERE = replace(WITNESS, step=11, fqn="b")


@pytest.mark.parametrize(
    ("second", "at", "written"),
    [
        (PARAM, 11, [10]),  # what step 10 left bad, after what step 10 was told of
        (replace(PARAM, step=11), 11, [10, 11]),  # another one, and of this step
        (PARAM, 12, [10, 12]),  # the step between was fine, and told of nothing
        (HERE, 11, [10, 11]),
        (replace(HERE, fqn="a"), 11, [10]),
        (replace(HERE, fqn=None), 11, [10]),
    ],
)
@pytest.mark.parametrize("partial", [True, False])
def test_behind_a_bad_step_an_alarm_is_written_only_if_it_says_more(
    second: FirstBad, at: int, written: list[int], partial: bool, tmp_path: Path, records_of
) -> None:
    journal = JournalWriter(RunDir(tmp_path).rank_journal(0, "node_0000", 0), {})
    frame_writer = FrameWriter(journal, Identity(rank=0, world_size=1, attempt=0), Passes())
    frame_writer.alarm(WITNESS, 10, partial=False, skipped=False, sampled=False)
    frame_writer.alarm(second, at, partial=partial, skipped=False, sampled=False)
    journal.close()
    assert [r.step for r in records_of(tmp_path)] == written


def test_an_alarm_right_behind_a_step_that_a_scaler_gave_up_is_written(
    tmp_path: Path, records_of
) -> None:
    journal = JournalWriter(RunDir(tmp_path).rank_journal(0, "node_0000", 0), {})
    frame_writer = FrameWriter(journal, Identity(rank=0, world_size=1, attempt=0), Passes())
    for at, skipped in ((10, True), (11, True), (12, False), (13, False)):
        frame_writer.alarm(
            replace(WITNESS, step=at), at, partial=False, skipped=skipped, sampled=False
        )
    journal.close()
    assert [(r.step, r.skipped) for r in records_of(tmp_path)] == [(10, True), (12, False)]
