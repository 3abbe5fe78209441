"""What the verbs that compare runs print alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpprobe.reader.run import Run

MOST = 15  # rows of a table, names of a list: what fits beside the verdict; --json has all


def some_of(things: Iterable[object]) -> str:
    """Name the first of some things, and how many there are if these are not all."""
    texts = [str(thing) for thing in things]
    more = f", ... ({len(texts)} in all)" if len(texts) > MOST else ""
    return ", ".join(texts[:MOST]) + more


def times_allowed(excess: float) -> str:
    """Format a difference divided by what is allowed; `-` where nothing is."""
    return "-" if math.isinf(excess) else f"{excess:.3g}"


def lost_of(runs: Sequence[Run]) -> list[str]:
    """Return what is lost of each run, as far as it was read."""
    return [f"{run.path}: {thing}" for run in runs for thing in run.lost]
