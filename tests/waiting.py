"""How long a test waits before it calls something hung.

The seconds in tests are many times what a quiet machine needs. One that is busy, or slow, needs
more for the same, and nothing is wrong with it: all of them are multiplied here. They bound
failures only. No test takes longer by it, and none may pass by it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil

PATIENCE = 6.0


def deadline(seconds: float) -> float:
    """Return the monotonic time at which to give up what takes `seconds` at most when quiet."""
    return time.monotonic() + PATIENCE * seconds


def is_gone(process: psutil.Process) -> bool:
    """Whether it has ended: whoever has inherited it may take its time to reap it."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def daemons_below(directory: Path) -> list[Path]:
    """Return where daemons say that they live, in whatever run directory below this one.

    Not by `rglob`, which raises where they remove a directory meanwhile.
    """
    return [
        Path(top) / name
        for top, _, names in os.walk(directory)
        for name in names
        if os.path.basename(top) == "daemon" and name.endswith(".json")
    ]
