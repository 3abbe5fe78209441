"""What ranks last said of themselves in their heartbeats."""

from __future__ import annotations

import re

from ddpprobe.rundir import heartbeat, paths, safe_read
from ddpprobe.rundir.heartbeat import Heartbeat

_RANK = re.compile(r"rank_(\d{5,})")


def last_beats(run: paths.RunDir, attempt: int) -> dict[int, tuple[str, Heartbeat]]:
    """Return what each rank of an attempt last said of itself, and on which node.

    A full disk takes its records, not its heartbeat. Each node's directory is listed once: hundreds
    of nodes have thousands of ranks, and each of these is on one of them.
    """
    found: dict[int, tuple[str, Heartbeat]] = {}
    top = f"heartbeat/{attempt:03d}"
    for node in safe_read.directories(run.path, top):
        for name in safe_read.names(run.path, f"{top}/{node}"):
            match = _RANK.fullmatch(name)
            beat = heartbeat.read(run.path / top / node / name) if match else None
            if match and beat is not None:
                found[int(match[1])] = node, beat
    return found
