"""The first cause that the head tells: whom it names, when, and how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ddpprobe.daemon.daemon_journal import DaemonJournal
from ddpprobe.daemon.first_cause import SETTLE_SECONDS, FirstCause
from ddpprobe.detectors.suite import default_suite
from ddpprobe.ends.anomalies import anomalies_of
from ddpprobe.ends.end import CRASHED, HUNG, End
from ddpprobe.ends.evidence import Case
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.records.events import FirstCauseEvent
from ddpprobe.records.fate import Fate
from ddpprobe.records.gather import Gather
from ddpprobe.records.step import FirstBad, StepRecord
from ddpprobe.rundir import framing
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.rundir.paths import RunDir

from ..made_runs import record

RANKS = 4
GRACE, REORDER = 5.0, 1.0
SECOND = 10**9
Told = tuple[str, int, int | None, str | None]


def alarm(step: int, rank: int, phase: str = "forward", **changes: object) -> StepRecord:
    """Return what a rank says of a NaN on a step that nobody samples."""
    kind = "output" if phase == "forward" else "grad_output"
    witness = FirstBad(step, 0, phase, rank, rank, f"blocks.{rank}", kind, "", nan=1, numel=4)
    made = StepRecord(0, step, (rank,), step * SECOND, sampled=False, first_bad=witness)
    return replace(made, **changes)  # type: ignore[arg-type]


class Head:
    """The head's daemon, as far as it concerns first causes; ranks 2 and 3 are on another node."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.journal = DaemonJournal(directory, {"node": "node_0000"}, default_suite())
        self.gather = Gather(range(RANKS), GRACE, after=self.journal.last_step)
        self.causes = FirstCause(self.journal, range(RANKS))
        self.now = 0.0

    def hear(self, *records: StepRecord, final: bool = False) -> None:
        for made in records:
            self.gather.add(made, self.now, final=final)

    def wait(self, seconds: float = 0.1, *, running: bool = True, over: bool = False) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.1
            for merged in self.gather.ready(self.now):
                self.journal.take(merged)
            self.causes.look(self.now, self.gather, running=running, over=over)

    def sample(self, step: int) -> None:
        """Let all ranks deliver a healthy step."""
        self.hear(*(record(rank, step) for rank in range(RANKS)))
        self.wait()

    def end(self, state: str, rank: int, step: int) -> None:
        """Write down how the attempt ended, as `Ends` does."""
        case = Case(tuple(Fate(n) for n in range(RANKS)))
        end = End(state, (rank,), "SIGKILL", step, "forward", f"rank {rank}")
        self.journal.lose(end, anomalies_of(end, case, 0, self.journal.causes))

    def went_on(self) -> None:
        """Write down that the end that was told is none, as `Ends` does."""
        self.journal.take_back()
        self.wait()

    @property
    def told(self) -> list[Told]:
        """Everything that was told so far, in order."""
        self.journal.close()
        tail = JournalTail(self._directory)
        events = [f.event() for f in tail.poll() if f.type == framing.LIFE]
        tail.close()
        return [
            (e.detector, e.step, e.rank, e.module) for e in events if isinstance(e, FirstCauseEvent)
        ]

    @property
    def written(self) -> list[tuple[str, int, int | None, bool]]:
        """What a reader of the run finds in the journal: whom, when, and whether it is a cause."""
        self.journal.close()
        run = RunDir(self._directory.parents[3])
        assert run.daemon_journal(0, "node_0000") == self._directory
        found = MergedReader(run).daemon_anomalies(0)
        return [(a.detector, a.step, a.rank, a.first_cause) for a in found if a.level == "page"]

    @property
    def shown(self) -> Told | None:
        """What `/metrics` says."""
        e = self.journal.first_cause
        return None if e is None else (e.detector, e.step, e.rank, e.module)


@pytest.fixture
def head(tmp_path: Path) -> Head:
    return Head(RunDir(tmp_path).daemon_journal(0, "node_0000"))


def follow(head: Head) -> Head:
    """Return the daemon that goes on after a killed one."""
    head.journal.close()
    return Head(head._directory)


def nan_on_all(head: Head, step: int, rank: int) -> StepRecord:
    """NaN in the backward of `rank` at `step`, on a node that is late; the others have it next.

    Returns what the late node has not said yet.
    """
    head.hear(*(alarm(step + 1, other) for other in range(2)))
    head.wait(REORDER + 0.2)
    return alarm(step, rank, "backward")


def test_a_nan_on_all_ranks_is_told_once_and_names_the_late_node_that_had_it_first(head) -> None:
    head.sample(0)
    late = nan_on_all(head, 10, rank=3)
    assert [(a.step, a.rank) for a in head.journal.causes] == [(11, 0)]  # so far as it is known
    assert head.shown is None
    head.hear(late, final=True)
    assert head.gather.late == 1
    head.wait(SETTLE_SECONDS)
    head.hear(*(alarm(12, rank) for rank in range(RANKS)))
    head.wait(60)
    assert head.told == [("nonfinite", 10, 3, "blocks.3")]
    assert head.shown == head.told[-1]


def test_a_cause_is_told_as_soon_as_every_rank_has_gone_by_its_step(head) -> None:
    head.sample(0)
    head.hear(alarm(5, 1))
    head.wait(REORDER + 0.2)
    assert head.told == []
    head.sample(6)
    assert head.told == [("nonfinite", 5, 1, "blocks.1")]


def test_a_rank_that_is_gone_is_not_waited_for(head) -> None:
    head.sample(0)
    for rank in (1, 2, 3):
        head.gather.mark_dead(rank)
    head.hear(alarm(5, 1))
    head.wait(0.2)
    assert head.told == []
    head.hear(record(0, 6))
    head.wait(0.2)
    assert head.told == [("nonfinite", 5, 1, "blocks.1")]


def test_a_wrong_first_witness_is_corrected_once_and_then_it_stays(head) -> None:
    head.sample(0)
    late = nan_on_all(head, 10, rank=3)
    head.wait(SETTLE_SECONDS)
    assert head.shown == ("nonfinite", 11, 0, "blocks.0")
    head.hear(late, final=True)
    head.wait()
    assert head.shown == ("nonfinite", 10, 3, "blocks.3")
    head.hear(alarm(9, 2), final=True)
    head.wait(60)
    assert head.told == [("nonfinite", 11, 0, "blocks.0"), ("nonfinite", 10, 3, "blocks.3")]


@pytest.mark.parametrize("late_by", ["before it is told", "after it was told"])
def test_the_written_verdict_is_corrected_with_what_is_told(head, late_by) -> None:
    head.sample(0)
    late = nan_on_all(head, 10, rank=3)
    assert head.written == [("nonfinite", 11, 0, True)]
    if late_by == "after it was told":
        head.wait(SETTLE_SECONDS)
        assert head.written == [("nonfinite", 11, 0, True)]
    head.hear(late, final=True)
    head.wait(SETTLE_SECONDS)
    corrected = [("nonfinite", 10, 3, True), ("nonfinite", 11, 0, False)]
    assert head.written == corrected
    assert [(a.step, a.rank) for a in head.journal.causes] == [(10, 3)]
    head.hear(alarm(9, 2), final=True)
    head.wait(60)
    twice = late_by == "before it is told"  # an episode is told twice at most
    assert (head.written == corrected) != twice
    assert [first[:3] for first in head.written if first[3]] == [head.told[-1][:3]]
    again = follow(head)
    assert again.journal.anomalies == head.journal.anomalies
    assert [a.step for a in again.journal.causes] == [a.step for a in head.journal.causes]
    again.wait(60)
    assert (again.written, again.told) == (head.written, head.told)


def test_an_end_that_followed_from_a_nan_heard_of_late_is_written_as_such(head) -> None:
    head.sample(0)
    head.sample(20)
    head.end(CRASHED, 1, 21)
    head.wait(running=False)
    assert head.written == [("rank_lost", 21, 1, True)]
    head.hear(alarm(19, 3), final=True)
    head.wait(running=False)
    assert head.written == [("nonfinite", 19, 3, True), ("rank_lost", 21, 1, False)]
    head.end(CRASHED, 1, 21)
    assert len(head.written) == 2
    again = follow(head)
    assert again.journal.anomalies == {("nonfinite", "page"): 1, ("rank_lost", "page"): 1}


def test_what_comes_late_and_was_later_or_no_fault_changes_nothing(head) -> None:
    head.sample(0)
    nan_on_all(head, 10, rank=3)
    head.wait(SETTLE_SECONDS)
    scaled = alarm(10, 3, "backward", skipped=True)  # a GradScaler at work
    head.hear(scaled, alarm(11, 2), final=True)
    head.wait(60)
    assert head.told == [("nonfinite", 11, 0, "blocks.0")]


def test_a_later_episode_is_told_in_its_turn(head) -> None:
    for step in (0, 400):
        head.sample(step)
        late = nan_on_all(head, step + 10, rank=3)
        head.hear(late, final=True)
        head.wait(SETTLE_SECONDS + 1)
        assert head.shown == ("nonfinite", step + 10, 3, "blocks.3")
    assert len(head.told) == 2


def test_a_restarted_daemon_says_what_its_predecessor_said(head) -> None:
    head.sample(0)
    late = nan_on_all(head, 10, rank=3)
    head.wait(SETTLE_SECONDS)
    head.hear(late, final=True)
    head.wait(1)
    before = head.told
    again = follow(head)
    assert again.shown == before[-1] == ("nonfinite", 10, 3, "blocks.3")
    again.wait(60)
    assert again.told == before
    again.sample(400)
    again.hear(alarm(410, 1))
    again.wait(60)
    assert again.told == [*before, ("nonfinite", 410, 1, "blocks.1")]
    assert follow(head).told == again.told


@pytest.mark.parametrize("earlier", [False, True])
def test_what_a_killed_daemon_had_no_time_to_tell_its_successor_tells(head, earlier) -> None:
    first = 0
    if earlier:
        nan_on_all(head, 10, rank=3)
        head.wait(SETTLE_SECONDS)
        first = 400
    head.sample(first)
    nan_on_all(head, first + 10, rank=3)
    told = head.told
    again = follow(head)
    again.wait(SETTLE_SECONDS + 1)
    assert again.told == [*told, ("nonfinite", first + 11, 0, "blocks.0")]


def test_an_end_is_told_at_once_and_again_if_it_is_known_better(head) -> None:
    head.sample(0)
    head.end(CRASHED, 2, 1)
    head.wait(running=False)
    assert head.shown == ("rank_lost", 1, 2, None)
    assert head.journal.first_cause.time_ns > 0
    head.end(CRASHED, 1, 1)
    head.wait(60, running=False)
    assert head.told == [("rank_lost", 1, 2, None), ("rank_lost", 1, 1, None)]


@pytest.mark.parametrize("by", ["an end", "a detector"])
def test_however_it_is_known_better_an_episode_changes_once(head, by) -> None:
    head.sample(20)
    for rank in (2, 1):
        head.end(CRASHED, rank, 25)
        head.wait(running=False)
    if by == "an end":
        head.end(CRASHED, 3, 25)
    else:
        head.hear(alarm(22, 3))
    head.wait(60, running=False)
    assert head.told == [("rank_lost", 25, 2, None), ("rank_lost", 25, 1, None)]


def test_an_end_that_follows_from_a_nan_is_no_cause(head) -> None:
    head.sample(0)
    head.hear(alarm(5, 1))
    head.wait(60)
    head.end(CRASHED, 2, 6)
    head.wait(60, running=False, over=True)
    assert head.told == [("nonfinite", 5, 1, "blocks.1")]


def test_a_crash_behind_a_hang_that_passed_is_another_episode(head) -> None:
    head.sample(0)
    for rank in (2, 1):
        head.end(HUNG, rank, 1)
        head.wait(running=False)
    head.wait(running=True)  # it moved
    for rank in (3, 0):
        head.end(CRASHED, rank, 500)
        head.wait(running=False)
    assert [rank for _, _, rank, _ in head.told] == [2, 1, 3, 0]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_hang_that_is_over_is_no_cause_any_more_and_counts_on(head, restarted) -> None:
    head.sample(0)
    head.end(HUNG, 2, 1)
    head.wait(running=False)
    assert head.shown == ("rank_lost", 1, 2, None)
    head.went_on()
    if restarted:
        head = follow(head)
        head.wait()
    assert head.shown is None
    assert head.written == []  # a reader judges the end anew; nothing of the daemon's is a page
    assert head.journal.anomalies == {("rank_lost", "page"): 1}
    assert head.journal.blamed == {2: {"page": 1}}
    head.end(HUNG, 2, 1)  # once more, in the same place
    head.wait(running=False)
    assert head.shown == ("rank_lost", 1, 2, None)
    assert head.journal.anomalies == {("rank_lost", "page"): 2}
    assert head.written == [("rank_lost", 1, 2, True)]


@pytest.mark.parametrize("restarted", [False, True])
def test_behind_a_hang_that_is_over_the_cause_before_it_is_the_newest(head, restarted) -> None:
    head.sample(0)
    head.hear(alarm(5, 1))
    head.wait(60)
    nan = ("nonfinite", 5, 1, "blocks.1")
    assert head.shown == nan
    head.sample(400)
    head.end(HUNG, 2, 401)
    head.wait(running=False)
    assert head.shown == ("rank_lost", 401, 2, None)
    head.went_on()
    if restarted:
        head = follow(head)
    head.wait(60)
    assert head.shown == nan
    assert head.written == [("nonfinite", 5, 1, True)]
    assert head.told == [nan, ("rank_lost", 401, 2, None)]  # and not once more
    head.end(CRASHED, 0, 700)
    head.wait(running=False)
    assert head.shown == ("rank_lost", 700, 0, None)


def test_a_hang_that_followed_from_a_nan_leaves_that_as_the_cause_when_it_is_over(head) -> None:
    head.sample(0)
    head.hear(alarm(5, 1))
    head.wait(60)
    head.end(HUNG, 2, 6)
    head.wait(running=False)
    assert ("rank_lost", 6, 2, False) in head.written
    head.went_on()
    assert head.shown == ("nonfinite", 5, 1, "blocks.1")
    assert head.written == [("nonfinite", 5, 1, True)]


def test_a_nan_that_is_heard_of_behind_the_end_it_brought_about_is_the_cause(head) -> None:
    head.sample(0)
    head.sample(20)
    head.end(CRASHED, 1, 21)
    head.wait(running=False)
    head.hear(alarm(19, 3), final=True)
    head.wait(running=False)
    assert head.told == [("rank_lost", 21, 1, None), ("nonfinite", 19, 3, "blocks.3")]


def test_when_all_is_over_nothing_is_waited_for(head) -> None:
    head.sample(0)
    head.hear(alarm(5, 1))
    for merged in head.gather.drain():
        head.journal.take(merged)
    head.wait(over=True)
    assert head.told == [("nonfinite", 5, 1, "blocks.1")]


def test_without_a_page_nothing_is_told(head) -> None:
    head.sample(0)
    head.hear(*(alarm(5, rank, "backward", skipped=True) for rank in range(RANKS)))
    head.wait(60)
    head.sample(10)
    assert head.told == []


def test_late_parts_without_a_witness_are_only_counted() -> None:
    gather = Gather(range(2), GRACE)
    parts: Sequence[StepRecord] = [record(rank, 0) for rank in range(2)]
    gather.add(parts[0], 0.0)
    assert gather.ready(GRACE + 1)
    gather.add(parts[1], GRACE + 1)
    assert (gather.late, len(gather.late_witnesses)) == (1, 0)
