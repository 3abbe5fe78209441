"""What retention took away."""

from __future__ import annotations

import math
from collections.abc import Iterator

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
        found += [Lost(where, span, WHY) for where, span in _records(merged_reader, attempt)]
        found += [
            Lost(f"run.zarr/{captures_key(attempt)}", (step, step), WHY)
            for step in _captures(merged_reader.run, attempt)
        ]
    return found


def _records(merged_reader: MergedReader, attempt: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the groups of an attempt, and the spans of steps whose records are gone there."""
    for name in merged_reader.groups(attempt):
        group = merged_reader.group(attempt, name) if _has_steps(name) else None
        where = f"run.zarr/{attempt_key(attempt)}/{name}"
        yield from ((where, span) for span in (group.expired() if group else ()))


def in_words(gone: tuple[int, int]) -> str:
    """Say what `expired_of` found, to who asked for these steps."""
    first, last = gone
    return (
        f"the records of steps {first} to {last} have {WHY}: `ddpprobe verify RUN` lists what is "
        "gone"
    )


def expired_of(merged_reader: MergedReader, wanted: slice) -> tuple[int, int] | None:
    """Return the first and last step in a range whose records retention took away; None: of none.

    Args:
        merged_reader: of the run.
        wanted: steps, the first and the one after the last; None: from or to the end.
    """
    least, end = wanted.start or 0, math.inf if wanted.stop is None else wanted.stop
    spans = [
        (max(first, least), int(min(last, end - 1)))
        for attempt in merged_reader.attempts()
        for _, (first, last) in _records(merged_reader, attempt)
    ]
    within = [span for span in spans if span[0] <= span[1]]
    return (min(s for s, _ in within), max(s for _, s in within)) if within else None


def _captures(run: paths.RunDir, attempt: int) -> list[int]:
    try:
        return sorted(expired_steps(run, attempt))
    except StoreDamaged:
        return []  # `verify` says what is wrong with it


def _has_steps(name: str) -> bool:
    return name == "merged" or name.startswith("rank_")
