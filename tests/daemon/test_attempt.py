"""One attempt on one node: whether its launcher may start it again, and what is still unread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ddpprobe.daemon import attempt
from ddpprobe.daemon.attempt import RESTART_SECONDS, Attempt
from ddpprobe.daemon.folding import Folding
from ddpprobe.daemon.liveness import Exit
from ddpprobe.ends.end import CRASHED, ENDED, HUNG, RUNNING, STOPPED, UNDECIDED, VANISHED, End
from ddpprobe.records.step import StepRecord
from ddpprobe.rundir.journal import segments_of
from ddpprobe.rundir.journal_tail import RankTail

from ..made_cluster import cluster
from ..made_runs import NODE

LAUNCHER = 4711


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Attempt]:
    """An attempt whose ranks, which have ended, a living torchrun may start again."""
    with cluster(tmp_path) as made:
        head = made.head
        head.meta = {**head.meta, "restarts_left": 1}
        for rank in head.ranks.values():
            rank.launcher = LAUNCHER
        assert head.ends is not None
        head.ends.end = End(CRASHED, (0,), "SIGKILL")
        yield head


def test_a_restart_is_awaited_while_a_launcher_lives_that_has_one_left(started: Attempt) -> None:
    assert started.awaits_restart(0.0)
    started.meta = {**started.meta, "restarts_left": 0}
    assert not started.awaits_restart(0.0)


@pytest.mark.parametrize("state", [HUNG, VANISHED, UNDECIDED])
def test_it_is_awaited_behind_any_end_that_nobody_asked_for(started: Attempt, state: str) -> None:
    assert started.ends is not None
    started.ends.end = End(state)
    assert started.awaits_restart(0.0)


@pytest.mark.parametrize("state", [RUNNING, ENDED, STOPPED])
def test_nobody_starts_what_runs_or_was_to_end(started: Attempt, state: str) -> None:
    assert started.ends is not None
    started.ends.end = End(state)
    assert not started.awaits_restart(0.0)


def test_no_restart_is_awaited_of_a_launcher_that_is_gone(started: Attempt) -> None:
    started._launcher = Exit((0, attempt._LAUNCHER), "exit:1", 5)
    assert not started.awaits_restart(0.0)


def test_no_restart_is_awaited_where_several_launchers_started_the_ranks(started: Attempt) -> None:
    next(iter(started.ranks.values())).launcher = LAUNCHER + 1
    assert not started.awaits_restart(0.0)


def test_a_restart_that_takes_too_long_is_awaited_no_more(started: Attempt) -> None:
    started._over_at = 100.0
    assert started.awaits_restart(99.0 + RESTART_SECONDS)
    assert not started.awaits_restart(100.0 + RESTART_SECONDS)


def test_what_a_rank_closes_behind_the_last_look_is_there_for_the_next_daemon(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, nodes=1, rostered=False) as made:
        for step in range(1, 20):
            made.train(step)
        made.look(1.0)
        first = made.head
        first.close(ended=False)  # told to end, while the ranks go on
        assert [r.step for r in made.merged()] == list(range(20))
        for step in range(20, 60):
            made.train(step)  # segments of eight frames
        folding = Folding(made.run, NODE, None, None)
        assert folding.seal(unread=first.unread)
        folding.close()
        assert first.daemon_journal is not None
        first.daemon_journal.close()
        made.start()
        made.look(1.0)
        made.look(10.0)
        assert [r.step for r in made.merged()] == list(range(60))


def test_a_daemon_that_is_told_to_end_does_not_follow_a_rank_that_writes_faster_than_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(tmp_path, nodes=1, rostered=False) as made:
        steps = iter(range(1, 100))
        for _ in range(19):
            made.train(next(steps))
        read = RankTail.read

        def read_and_write(tail: RankTail, most: int) -> list[StepRecord]:
            made.train(next(steps))
            return read(tail, most)

        monkeypatch.setattr(RankTail, "read", read_and_write)
        made.head.close(ended=False)
        assert next(steps) < 30
        assert [r.step for r in made.merged()][:20] == list(range(20))


def test_what_is_written_while_it_is_read_is_as_old_as_one_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster(tmp_path, nodes=1) as made:
        steps = iter(range(1, 100))
        # A quick rank has written something more whenever what it wrote was read.
        monkeypatch.setattr(made.head, "_note_command", lambda: made.train(next(steps)))
        for _ in range(40):  # over several segments
            made.look(1.0)
            assert made.head.unread_since == made.now
        monkeypatch.undo()
        made.look(1.0)
        assert made.head.unread_since is None
        made.train(next(steps))
        monkeypatch.setattr(attempt, "MAX_PENDING", 0)  # nothing more is read
        made.look(1.0)
        since = made.now
        for _ in range(20):
            made.train(next(steps))
            made.look(1.0)
        assert made.head.unread_since == since
        monkeypatch.undo()
        made.look(1.0)
        assert made.head.unread_since is None


def test_a_rank_is_watched_before_anything_is_made_of_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, watched = Attempt._begin, []

    def begun(own: Attempt, meta: Mapping[str, Any]) -> None:
        watched.append(any(rank.watched for rank in own.ranks.values()))
        begin(own, meta)

    monkeypatch.setattr(Attempt, "_begin", begun)
    with cluster(tmp_path, nodes=1):
        assert watched == [True]  # the script of a short job may end in the next moment


@pytest.mark.parametrize("how", ["half a frame", "damage", "closed"])
def test_what_nobody_will_ever_read_is_not_unread(tmp_path: Path, how: str) -> None:
    with cluster(tmp_path, nodes=1) as made:
        made.train(1)
        if how == "closed":
            made.head.poll(1.0)
            made.train(2)
            made.head.close(ended=False)
            assert made.head.unread_since is None
            return
        made.look(1.0)
        journal = made.run.rank_journal(0, NODE, 1)
        segment = journal / f"{max(segments_of(journal)):08d}.wal"
        with segment.open("ab") as file:
            file.write(b"?" * 64 if how == "damage" else segment.read_bytes()[:20])
        if how == "half a frame":
            made.head.ranks[1].exit = Exit((0, 1), "SIGKILL", 5)
        for _ in range(3):
            made.look(1.0)
        assert made.head.unread_since is None
