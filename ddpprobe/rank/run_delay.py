"""How long a thread could have run and had no core: others had them all."""

from __future__ import annotations

import os
from typing import final

from ddpprobe.rundir.own_descriptor import OwnDescriptor

_PATH = "/proc/thread-self/schedstat"  # ns on a core, ns on a run queue, turns


@final
class RunDelay:
    """Reads what the kernel counts of one thread (Documentation/scheduler/sched-stats.rst).

    Nothing is known on another kernel than Linux, in a sandbox without this file, and where it is
    built without CONFIG_SCHED_INFO.
    """

    def __init__(self) -> None:
        self._file: OwnDescriptor | None = None
        self._process: int | None = None

    def begin(self) -> None:
        """Be about the thread that calls; in a forked child, anew."""
        if self._file is None or self._process != os.getpid():
            self.close()
            try:
                self._file = OwnDescriptor(os.open(_PATH, os.O_RDONLY | os.O_CLOEXEC))
            except OSError:
                return
            self._process = os.getpid()

    def seconds(self) -> float | None:
        """Return the thread's seconds on a run queue so far; None: not known."""
        if self._file is None:
            return None
        try:
            return int(os.pread(self._file.number, 64, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # the thread has ended
            self.close()
            return None

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
