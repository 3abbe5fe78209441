"""Readings of the node and of the ranks' processes, for the journal and for `/metrics`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import psutil

from ddpprobe.daemon.memory_group import MemoryGroup

INTERVAL_SECONDS = 5.0


def read_host(run_path: Path, pids: Iterable[int]) -> dict[str, float]:
    """Return the node's load: a ratio is a share of 1, bytes are bytes.

    Memory is the machine's, or that of the control group of one of these processes (a container, a
    Slurm step) where less is left of that.

    The first reading of `cpu_ratio` in a process is 0: it is the share since the last reading. What
    cannot be read is left out (no /proc in a sandbox, a disk that is gone).
    """
    found: dict[str, float] = {}
    for read in (_processor, partial(_memory, pids), partial(_disk, run_path)):
        with contextlib.suppress(OSError, psutil.Error):
            found |= read()
    return found


def _processor() -> dict[str, float]:
    return {"load1": psutil.getloadavg()[0], "cpu_ratio": psutil.cpu_percent() / 100}


def _memory(pids: Iterable[int]) -> dict[str, float]:
    memory = psutil.virtual_memory()
    lefts = [(float(memory.available), float(memory.total)), *_lefts(pids)]
    available, total = min(lefts)
    return {"memory_available_bytes": available, "memory_total_bytes": total}


def _lefts(pids: Iterable[int]) -> Iterator[tuple[float, float]]:
    """Yield what is left of each control group that has a limit, and the limit, in bytes."""
    groups = set()
    for pid in pids:
        with contextlib.suppress(OSError, ValueError):  # it died a moment ago
            groups.add(MemoryGroup.of(pid))
    for group in filter(None, groups):
        with contextlib.suppress(OSError, ValueError):
            if (left := group.left()) is not None:
                yield left


def _disk(run_path: Path) -> dict[str, float]:
    return {"disk_free_bytes": float(psutil.disk_usage(str(run_path)).free)}


def read_ranks(pids: Mapping[int, int]) -> dict[int, dict[str, float]]:
    """Return resident memory and CPU time (user + system, s) of each rank whose process is there.

    Args:
        pids: process id by rank.
    """
    found = {}
    for rank, pid in pids.items():
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                resident = float(process.memory_info().rss)
                if not resident:
                    continue  # it has ended, and its launcher has not waited for it yet
                times = process.cpu_times()
                found[rank] = {
                    "resident_bytes": resident,
                    "cpu_seconds": times.user + times.system,
                }
        except (psutil.Error, OSError):
            continue  # it died a moment ago, or is another user's, or there is no /proc
    return found
