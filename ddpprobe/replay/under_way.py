"""Whether a run is under way, as far as can be told on this machine."""

from __future__ import annotations

from ddpprobe import inside, layout
from ddpprobe.replay.overlay import Overlay


def is_live(run: layout.RunDir) -> bool:
    """Return whether the run is under way: rank 0 holds its lock."""
    return layout.is_locked(run.lock)


def has_daemon(run: layout.RunDir) -> bool:
    """Return whether a daemon of the run is at work on this machine."""
    names = [n for n in inside.names(run.path, "daemon") if n.startswith("node_")]
    return any(layout.is_locked(run.path / "daemon" / n) for n in names if n.endswith(".lock"))


def is_under_way(overlay: Overlay) -> bool:
    """Return whether the newest attempt trains, as far as can be told on this machine.

    Rank 0 holds the lock; or the daemon of a node, whose directory has no such lock if its disk is
    its own, still follows its ranks.
    """
    if is_live(overlay.run):
        return True
    attempts = overlay.attempts()
    if not attempts or not has_daemon(overlay.run):
        return False
    return not any(e.what.get("event") == "finished" for e in overlay.events(attempts[-1]))
