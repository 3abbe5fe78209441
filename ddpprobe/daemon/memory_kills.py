"""Whether the kernel has killed for want of memory when a process ended.

It sends SIGKILL, as everybody else can; what it counts says that it was there.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable

from ddpprobe.daemon import memory_group
from ddpprobe.daemon.memory_group import MemoryGroup

# A process of a hundred gigabytes is seconds on its way out, and more where the machine swaps.
LATELY_SECONDS = 60.0


class MemoryKills:
    """What the kernel has counted around each of some processes, over the last minute.

    In the process's control group; on the machine, where that has no such count.
    """

    def __init__(self) -> None:
        self._watched: dict[Hashable, _Counted] = {}

    def watch(self, key: Hashable, pid: int, now: float) -> None:
        """Count from now on around a process that lives (monotonic s)."""
        with contextlib.suppress(OSError, ValueError):
            group = MemoryGroup.of(pid)
            count = memory_group.machine_kills if group is None else group.kills
            self._watched[key] = _Counted(count, now)

    def look(self, now: float) -> None:
        """Read all counts (monotonic s); to be called every few seconds."""
        for counted in self._watched.values():
            counted.look(now)

    def take(self, key: Hashable) -> int:
        """Return how many processes it has killed lately around one that has ended; forget that."""
        counted = self._watched.pop(key, None)
        return 0 if counted is None else counted.lately()


class _Counted:
    """A count, and what it was over the last minute."""

    def __init__(self, count: Callable[[], int], now: float) -> None:
        self._count, self._seen = count, deque([(now, count())])

    def look(self, now: float) -> None:
        self._seen.append((now, self._read()))
        while self._seen[1][0] < now - LATELY_SECONDS:
            self._seen.popleft()

    def lately(self) -> int:
        """Return by how much it has grown; that of a group that was made anew by nothing."""
        return max(0, self._read() - self._seen[0][1])

    def _read(self) -> int:
        """Return the count; of a group that is gone with its last process, the one read last."""
        try:
            return self._count()
        except (OSError, ValueError):
            return self._seen[-1][1]
