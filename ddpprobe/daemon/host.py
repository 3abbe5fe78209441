"""Readings of the node and of the ranks' processes, for the journal and for `/metrics`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import psutil

INTERVAL_SECONDS = 5.0


def read_host(run_path: Path) -> dict[str, float]:
    """Return the node's load: a ratio is a share of 1, bytes are bytes.

    The first reading of `cpu_ratio` in a process is 0: it is the share since the last reading. What
    cannot be read is left out (no /proc in a sandbox, a disk that is gone).
    """
    found: dict[str, float] = {}
    for read in (_processor, _memory, partial(_disk, run_path)):
        with contextlib.suppress(OSError, psutil.Error):
            found |= read()
    return found


def _processor() -> dict[str, float]:
    return {"load1": psutil.getloadavg()[0], "cpu_ratio": psutil.cpu_percent() / 100}


def _memory() -> dict[str, float]:
    memory = psutil.virtual_memory()
    return {
        "memory_available_bytes": float(memory.available),
        "memory_total_bytes": float(memory.total),
    }


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
