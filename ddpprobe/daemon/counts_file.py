"""What a daemon has counted in attempts that others followed, on the disk for its successor.

A successor goes on with the newest attempt. Without the others its counters would fall, and what
they hold then would be taken for a rise.
"""

from __future__ import annotations

from pathlib import Path

from ddpprobe.records.past_counts import PastCounts
from ddpprobe.rundir import paths, safe_read
from ddpprobe.rundir.validate import MALFORMED

COUNTS = "counts"  # suffix, see `RunDir.daemon_file`


def write(path: Path, attempt: int, past: PastCounts) -> None:
    """Keep the counts of all attempts before one that a daemon goes on with."""
    paths.write_json(path, {"attempt": attempt, **past.to_json()})


def read(path: Path, attempt: int) -> PastCounts:
    """Return what the daemon before had counted when it went on with an attempt; else nothing.

    A daemon that begins with another attempt has no predecessor whose counters it goes on with.
    """
    try:
        value = safe_read.parse(path.read_bytes())
        return PastCounts.of_json(value) if value["attempt"] == attempt else PastCounts()
    except (OSError, *MALFORMED):  # as a rule there is none
        return PastCounts()
