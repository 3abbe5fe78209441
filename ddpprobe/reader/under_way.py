"""Whether a run is under way, as far as can be told on this machine."""

from __future__ import annotations

from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.records.events import FinishedEvent
from ddpprobe.rundir import paths, safe_read


def is_live(run: paths.RunDir) -> bool:
    """Return whether the run is under way: rank 0 holds its lock."""
    return paths.is_locked(run.lock)


def has_daemon(run: paths.RunDir) -> bool:
    """Return whether a daemon of the run is at work on this machine."""
    names = [n for n in safe_read.names(run.path, "daemon") if n.startswith("node_")]
    return any(paths.is_locked(run.path / "daemon" / n) for n in names if n.endswith(".lock"))


def is_under_way(merged_reader: MergedReader) -> bool:
    """Return whether the newest attempt trains, as far as can be told on this machine.

    Rank 0 holds the lock; or the daemon of a node, whose directory has no such lock if its disk is
    its own, still follows its ranks.
    """
    if is_live(merged_reader.run):
        return True
    attempts = merged_reader.attempts()
    if not attempts or not has_daemon(merged_reader.run):
        return False
    return not any(isinstance(e.what, FinishedEvent) for e in merged_reader.events(attempts[-1]))
