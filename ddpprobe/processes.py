"""Whether a process is there, and since when; also where /proc is not mounted (some sandboxes)."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

MAX_PID = 1 << 22  # of Linux, see proc(5)
# psutil derives the start from the boot time, which a stepped clock moves: two readings in two
# processes may differ a little, while a reused pid starts much later.
SAME_START_SECONDS = 2.0
_PROC = Path("/proc/self")


def own_start() -> float | None:
    """Return the Unix time at which this process started; None if nobody can tell."""
    try:
        return psutil.Process().create_time()
    except (psutil.Error, OSError):
        return None


def exists(pid: object) -> bool:
    """Return whether there is a process of this number, be it a zombie."""
    if type(pid) is not int or not 0 < pid <= MAX_PID:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        return True
    return True


def is_process(pid: int, started: float | None) -> bool:
    """Return whether `pid` is (or was, as a zombie) the process started at Unix time `started`.

    Without a start, or without /proc, the number alone has to do.
    """
    try:
        created = psutil.Process(pid).create_time()
    except (psutil.Error, OSError):
        return exists(pid) and not _PROC.exists()
    return started is None or abs(created - started) <= SAME_START_SECONDS
