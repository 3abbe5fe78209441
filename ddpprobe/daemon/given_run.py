"""What `ddpprobe daemon` was told to watch: checked before anything is written there."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from ddpprobe.rundir import not_a_run, paths, safe_read
from ddpprobe.rundir.paths import RunDir
from ddpprobe.rundir.validate import MALFORMED

LISTED = 8
_NODE = re.compile(r"node_(\d{4,9})", re.ASCII)


def run_at(directory: Path) -> RunDir:
    """Return the run at a directory, or the one that a launcher is about to begin there.

    Raises:
        ValueError: no run is there, and something else is; the text says what to give.
    """
    run = RunDir(directory.absolute())
    if not run.path.is_dir():
        raise ValueError(f"{directory} is no directory: give the run's")
    if has_begun(run):
        return run
    if not_a_run.whole_of(run.path) or not not_a_run.may_become_one(run.path):
        raise ValueError(not_a_run.what_is_there(directory))
    return run


def has_begun(run: RunDir) -> bool:
    """Return whether a run is there, or what is left of one."""
    return run.run_json.exists() or bool(run.attempts()) or run.manifests.is_dir()


def node_of(run: RunDir, name: str | None) -> str:
    """Return the name of a node, by default of the first one.

    Args:
        run: as `run_at` returns it.
        name: as it was given; what a lock is called after, so it is held against the form of one.

    Raises:
        ValueError: it is no name of a node, or the run has none of this name and is over.
    """
    held = {
        node for attempt in run.attempts()
        for node in safe_read.directories(run.path, f"{paths.JOURNAL}/{attempt:03d}")
        if _NODE.fullmatch(node)
    }  # fmt: skip
    if name is None:
        return min(held, default=paths.node_name(0))
    found = _NODE.fullmatch(name)
    if found is None or paths.node_name(int(found[1])) != name:
        raise ValueError(
            f"--node {name!r}: expected the name of a node, which is node_ and its index in four "
            f"digits; {_listed(held)}"
        )
    if held and name not in held and not _may_come(run, name, int(found[1])):
        raise ValueError(f"--node {name}: the run has no such node, and is over; {_listed(held)}")
    return name


def leave_no_trace(run: RunDir, node: str) -> None:
    """Take the lock of a node away again, which is held, where no run has begun."""
    if not has_begun(run):
        with contextlib.suppress(OSError):
            run.daemon_file(node, "lock").unlink(missing_ok=True)
            run.daemon_file(node, "lock").parent.rmdir()  # unless somebody's log is in it


def _may_come(run: RunDir, node: str, index: int) -> bool:
    """Whether a node without records is one of the job's: who launches a daemon opens its log."""
    if run.daemon_file(node, "log").exists() or paths.is_locked(run.lock):
        return True
    try:
        told = safe_read.parse(safe_read.read_regular(run.path, paths.RUN_JSON))["nodes"]
    except (OSError, *MALFORMED):
        return False
    return isinstance(told, int) and index < told


def _listed(held: set[str]) -> str:
    if not held:
        return f"the first one is {paths.node_name(0)}"
    more = f" and {len(held) - LISTED} more" if len(held) > LISTED else ""
    return f"this run has {', '.join(sorted(held)[:LISTED])}{more}"
