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
        self._count: dict[Hashable, Callable[[], int]] = {}
        self._seen: dict[Hashable, deque[tuple[float, int]]] = {}

    def watch(self, key: Hashable, pid: int, now: float) -> None:
        """Count from now on around a process that lives (monotonic s)."""
        with contextlib.suppress(OSError, ValueError):
            group = MemoryGroup.of(pid)
            count = memory_group.machine_kills if group is None else group.kills
            self._seen[key] = deque([(now, count())])
            self._count[key] = count

    def look(self, now: float) -> None:
        """Read all counts (monotonic s); to be called every few seconds."""
        for key, seen in self._seen.items():
            seen.append((now, self._read(key)))
            while seen[1][0] < now - LATELY_SECONDS:
                seen.popleft()

    def take(self, key: Hashable) -> int:
        """Return how many processes it has killed lately around one that has ended; forget that."""
        found = max(0, self._read(key) - self._seen[key][0][1]) if key in self._seen else 0
        self._count.pop(key, None)
        self._seen.pop(key, None)
        return found

    def _read(self, key: Hashable) -> int:
        """Return a count; of a group that is gone with its last process, the one read last."""
        try:
            return self._count[key]()
        except (OSError, ValueError):
            return self._seen[key][-1][1]
