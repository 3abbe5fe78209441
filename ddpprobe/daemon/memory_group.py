"""The control group that a process's memory counts in: what is left, and how many were killed.

A container, a Slurm step and a systemd unit are control groups (cgroups(7)). Where one may have
less memory than the machine, the kernel kills within it while the machine has memory left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_NO_LIMIT = 1 << 60  # version 1 writes the greatest number of pages for none


@dataclass(frozen=True, slots=True)
class MemoryGroup:
    """One control group.

    Attributes:
        path: its directory.
        top: that of the topmost one of which anything can be read.
        unified: it is of cgroup version 2.
    """

    path: Path
    top: Path
    unified: bool

    @classmethod
    def of(cls, pid: int) -> Self | None:
        """Return the group of a process; None where there is none that can be read.

        Raises:
            OSError: there is no such process, or no /proc.
        """
        found = None
        for line in (PROC / str(pid) / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if "memory" in controllers.split(","):
                return cls._at(ROOT / "memory", path, unified=False)
            if not controllers:
                found = cls._at(ROOT, path, unified=True)
        return found

    @classmethod
    def _at(cls, top: Path, path: str, *, unified: bool) -> Self | None:
        """Return a group by its path, or the topmost one: a container may see a path of its host's.

        That is the container's own, then.
        """
        for place in (top / path.strip("/"), top):
            group = cls(place, top, unified)
            if group._events.exists():
                return group
        return None

    @property
    def _events(self) -> Path:
        return self.path / ("memory.events" if self.unified else "memory.oom_control")

    def kills(self) -> int:
        """Return how many of its processes the kernel has killed for want of memory.

        It is counted before the process hears of it (`mm/oom_kill.c` of Linux).

        Raises:
            OSError: it is gone.
        """
        return _numbers(self._events).get("oom_kill", 0)

    def left(self) -> tuple[float, float] | None:
        """Return what it can still have, and its limit, in bytes; None without a limit.

        Of the groups that it lies in, the one with the least left counts. Used is what cannot be
        had back at once, as Kubernetes counts a working set: all but the inactive pages of files.

        Raises:
            OSError: it is gone.
        """
        return min(self._rooms(), default=None)

    def _rooms(self) -> Iterator[tuple[float, float]]:
        limit_of, used_of, files = (
            ("memory.max", "memory.current", "inactive_file") if self.unified else
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )  # fmt: skip
        for place in (self.path, *self.path.parents):
            limit = place / limit_of
            said = limit.read_text().strip() if limit.exists() else ""
            if said.isdigit() and int(said) < _NO_LIMIT:
                used = int((place / used_of).read_text())
                used -= _numbers(place / "memory.stat").get(files, 0)
                yield max(0.0, float(int(said) - used)), float(said)
            if place == self.top:
                break


def machine_kills() -> int:
    """Return how many processes of the machine the kernel has killed for want of memory.

    Raises:
        OSError: there is no /proc.
    """
    return _numbers(PROC / "vmstat").get("oom_kill", 0)


def _numbers(path: Path) -> dict[str, int]:
    """Return what a file says that has a name and a number in each line."""
    pairs = (line.split() for line in path.read_text().splitlines())
    return {name: int(value) for name, value in pairs}
