"""How the ranks of a node end: nothing is said before all that they wrote was read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpprobe.daemon import ends
from ddpprobe.daemon.liveness import Exit
from ddpprobe.ends.anomalies import RANK_LOST
from ddpprobe.rundir.pidfds import UNKNOWN

from ..made_cluster import cluster


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
