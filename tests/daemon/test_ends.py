"""How the ranks of a node end: nothing is said before all that they wrote was read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import ddpprobe
from ddpprobe.daemon import ends
from ddpprobe.daemon.liveness import Exit
from ddpprobe.ends.anomalies import RANK_LOST, WENT_ON
from ddpprobe.ends.end import HUNG, RUNNING
from ddpprobe.ends.evidence import Case
from ddpprobe.ends.judge import judge
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.records.fate import Fate
from ddpprobe.rundir import framing
from ddpprobe.rundir.pidfds import UNKNOWN

from ..made_cluster import Cluster, cluster


def test_no_verdict_is_made_while_a_dead_rank_s_journal_is_still_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that comes late has read a part of a long journal when it sees that all is over."""
    monkeypatch.setattr(ends, "SETTLED_SECONDS", -1.0)
    with cluster(tmp_path, nodes=1) as job:
        job.look()
        head = job.head
        assert head.ends is not None
        assert head.daemon_journal is not None
        for number, rank in head.ranks.items():
            rank.exit, rank.spent = Exit((0, number), UNKNOWN, 5), number > 0
        head.ends.look(head.ranks, over=False)
        assert head.state == "running"
        assert head.daemon_journal.lost == []
        for rank in head.ranks.values():
            rank.spent = True
        head.ends.look(head.ranks, over=False)
        assert head.state == "vanished"
        assert [a.detector for a in head.daemon_journal.lost] == [RANK_LOST]


def let_stand(job: Cluster, step: int, monkeypatch: pytest.MonkeyPatch, ago: float) -> None:
    """Let all ranks have given their last sign of life so long ago; the last one is behind."""
    now = time.time_ns
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now() - int(ago * 1e9))
        for rank in job.of(0):
            job.beat(rank, step + 1 if rank < job.ranks - 1 else step)
    job.look(1.0)
    job.look(1.0)


def hung_for(job: Cluster, rank: int) -> list[str]:
    """Assert that the run hangs and waits for one rank; return what is said of the ends."""
    told = job.head.daemon_journal
    assert job.head.state == HUNG
    assert told is not None
    assert told.first_cause is not None
    assert told.first_cause.rank == rank
    return [a.message for a in told.lost]


@pytest.mark.parametrize("then", ["trains", "ends", "another daemon"])
def test_a_hang_is_the_first_cause_while_it_lasts_and_none_when_the_ranks_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    monkeypatch.setattr(ends, "SETTLED_SECONDS", -1.0)
    with cluster(tmp_path, nodes=1) as job:
        let_stand(job, 5, monkeypatch, 60.0)
        told = job.head.daemon_journal
        assert told is not None
        assert job.head.state == HUNG
        assert told.first_cause is not None
        assert (told.first_cause.detector, told.first_cause.rank) == (RANK_LOST, 1)
        if then == "another daemon":
            job.kill()
            job.start()
            job.look(1.0)
            told = job.head.daemon_journal
            assert told is not None
            assert told.first_cause is not None
        if then == "ends":  # before anybody has looked again
            monkeypatch.setattr(ends, "SETTLED_SECONDS", 1e9)
        let_stand(job, 7, monkeypatch, 0.0)
        assert job.head.state == RUNNING
        if then == "ends":
            for number in job.of(0):
                job.writer(number).append_json(framing.LIFE, {"event": "closed", "status": "ok"})
            job.head.close()
        assert told.first_cause is None
        assert told.anomalies[RANK_LOST, "page"] == 1
        kept = MergedReader(job.run).daemon_anomalies(0)
        assert [a.level for a in kept if a.detector == RANK_LOST] == ["info"]
        (said,) = [a for a in ddpprobe.open(job.run.path).anomalies() if WENT_ON in a.values]
        assert (said.detector, said.level, said.first_cause) == (RANK_LOST, "info", False)
        assert said.message.endswith("; the ranks went on later")


def test_ranks_that_stand_in_a_step_which_another_left_before_wait_for_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "SETTLED_SECONDS", -1.0)
    with cluster(tmp_path, nodes=1) as job:
        last = job.ranks - 1
        let_stand(job, 5, monkeypatch, 0.0)
        job.writer(last).append_json(
            framing.LIFE,
            {
                "event": "closed",
                "status": "ok",
                "step": 5,
                "steps": 5,
                "micro": 0,
                "state": "closed",
            },
        )
        gone = job.head.ranks[last]
        gone.exit, gone.spent = Exit((0, last), "exit:0", time.time_ns()), True
        job.look(1.0)
        assert job.head.state == RUNNING
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 60_000_000_000)
        job.look(1.0)
        job.look(1.0)
        assert any(f"rank {last} had ended (exit:0)" in text for text in hung_for(job, last))
        job.beat(0, 7)
        job.look(1.0)
        job.look(1.0)
        assert job.head.state == RUNNING


def test_a_clock_that_is_set_back_takes_no_word_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "SETTLED_SECONDS", -1.0)
    with cluster(tmp_path, nodes=1) as job:
        let_stand(job, 5, monkeypatch, 60.0)
        assert job.head.state == HUNG
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() - 3_600_000_000_000)
        for rank in job.of(0):
            job.beat(rank, 7)
        job.look(1.0)
        job.look(1.0)
        assert job.head.state == RUNNING
        kept = MergedReader(job.run).events(0)
        assert [type(e.what).__name__ for e in kept if "Moving" in type(e.what).__name__] == [
            "MovingEvent"
        ]


def test_a_rank_that_closed_and_lives_is_named_by_those_that_wait_in_a_later_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ends, "SETTLED_SECONDS", -1.0)
    with cluster(tmp_path, nodes=1) as job:
        last, place = job.ranks - 1, {"step": 5, "steps": 5, "micro": 0}
        let_stand(job, 5, monkeypatch, 0.0)
        closed = {"event": "closed", "status": "ok", **place, "state": "data"}
        job.writer(last).append_json(framing.LIFE, closed)
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 60_000_000_000)
        job.look(1.0)
        assert job.head.state == RUNNING  # they may have something else to do
        stands = {"event": "stands", **place, "step": 6, "steps": 6, "state": "forward"}
        for number in range(last):
            where = {"where": "a.py:5 in f", "waits": True, "time_ns": now()}
            job.writer(number).append_json(framing.LIFE, {**stands, **where})
        job.look(1.0)
        job.look(1.0)
        text = f"rank {last} had closed in step 5; rank 0 waits for it, in forward of step 6"
        assert hung_for(job, last) == [text]


def test_a_job_that_is_over_is_judged_again_only_if_there_is_news(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its daemon looks for minutes: at thousands of ranks it had nothing else to do."""
    judged: list[Case] = []
    monkeypatch.setattr(ends, "judge", lambda case: (judged.append(case), judge(case))[-1])
    with cluster(tmp_path, ranks=2, nodes=2) as job:
        job.head.ends.hear(Fate(2, "node_0001", "SIGKILL", heard=True))
        job.look()
        job.head.close()
        before = len(judged)
        for _ in range(3):
            job.head.note_late_exits()
        assert len(judged) <= before + 1
        job.head.ends.hear(Fate(3, "node_0001", "SIGKILL", heard=True))
        job.head.note_late_exits()
        assert len(judged) > before
        assert judged[-1].fates[3].how == "SIGKILL"


def test_what_the_end_of_a_rank_adds_to_a_verdict_is_told_once_all_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that raised long before it exits: whether it outlived the cause is known only then."""
    monkeypatch.setattr(ends, "SETTLED_SECONDS", -1.0)
    with cluster(tmp_path, nodes=1) as job:
        job.look()
        head, victim, cause = job.head, 0, 1
        assert head.ends is not None
        assert head.daemon_journal is not None
        error = {"type": "RuntimeError", "message": "Connection closed by peer", "collective": True}
        place = {"step": 5, "steps": 5, "micro": 0, "state": "forward"}
        raised = {"event": "closed", "status": "exception", "error": error, **place}
        job.writer(victim).append_json(framing.LIFE, raised)
        job.look()
        head.ranks[cause].exit = Exit((0, cause), "SIGKILL", 5, order=1, memory_kills=1)
        head.ranks[cause].spent = True
        head.ends.look(head.ranks, over=False)
        told = head.daemon_journal.lost
        assert [(a.level, a.rank) for a in told] == [("page", cause), ("info", victim)]
        assert "the kernel killed 1 process for want of memory" in told[0].message
        assert f"rank {cause}" not in told[1].message  # nothing proves yet which was first
        head.ranks[victim].exit = Exit((0, victim), "exit:1", 4, order=0)
        head.ranks[victim].spent = True
        head.ends.look(head.ranks, over=False)
        assert len(told) == 2
        head.ends.look(head.ranks, over=True)
        head.ends.look(head.ranks, over=True)
        assert [(a.level, a.rank) for a in told[2:]] == [("info", victim)]
        assert told[2].message.endswith(f"before rank {cause}")
        assert head.daemon_journal.anomalies[RANK_LOST, "info"] == 1
