"""What retention took away."""

from __future__ import annotations

from ddpprobe.errors import StoreDamaged
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.rundir import paths
from ddpprobe.store.captures.event import captures_key
from ddpprobe.store.captures.reader import expired_steps
from ddpprobe.store.format import attempt_key
from ddpprobe.store.manifest import Lost

WHY = "expired (max_bytes, max_age)"


def expired_in(merged_reader: MergedReader) -> list[Lost]:
    """Return the spans of steps whose records or captures are gone, by group."""
    found = []
    for attempt in merged_reader.attempts():
        for name in merged_reader.groups(attempt):
            group = merged_reader.group(attempt, name) if _has_steps(name) else None
            where = f"run.zarr/{attempt_key(attempt)}/{name}"
            found += [Lost(where, span, WHY) for span in (group.expired() if group else ())]
        found += [
            Lost(f"run.zarr/{captures_key(attempt)}", (step, step), WHY)
            for step in _captures(merged_reader.run, attempt)
        ]
    return found


def _captures(run: paths.RunDir, attempt: int) -> list[int]:
    try:
        return sorted(expired_steps(run, attempt))
    except StoreDamaged:
        return []  # `verify` says what is wrong with it


def _has_steps(name: str) -> bool:
    return name == "merged" or name.startswith("rank_")
