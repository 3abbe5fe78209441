"""Whether a run is under way, as far as can be told on this machine."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.records.events import FinishedEvent
from ddpprobe.rundir import framing, paths, safe_read, tmpfs
from ddpprobe.rundir.journal import JournalTail, segments_of
from ddpprobe.rundir.validate import MALFORMED
from ddpprobe.store import segments


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


def is_here(run: paths.RunDir, attempt: int, node: str) -> bool:
    """Return whether the ranks of a node live on this machine, so that its clock is theirs.

    A machine that reads a shared disk may be minutes ahead of the one that trains. What a rank says
    is in memory beside what is in the run directory, and memory is seen by its own machine alone;
    of who has none there is the name of its host.
    """
    own = run.heartbeat(attempt, node, 0).parent
    if tmpfs.POINTER in safe_read.names(own.parent, own.name):
        return tmpfs.beside(own) is not None
    ranks = (s for s in segments.sources_of(run, attempt, node) if s.rank is not None)
    first = next(ranks, None)
    return first is not None and meta_of(first.directory).get("hostname") == socket.gethostname()


def meta_of(directory: Path) -> Mapping[str, Any]:
    """Return what the oldest segment of a journal says of who wrote it; {} if it says nothing."""
    held = segments_of(directory)
    tail = JournalTail(directory, held[0] if held else 0)
    try:
        first = next(tail.poll(), None)
        return first.json() if first is not None and first.type == framing.META else {}
    except (OSError, *MALFORMED):
        return {}
    finally:
        tail.close()
