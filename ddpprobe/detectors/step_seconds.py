"""What a step took each rank, and which rank set itself apart by it.

The time of a step cannot tell who is slow: where ranks wait for each other, all take as long. What
a rank does before it meets the others is its own: under DDP reading data, the forward, and the
backward until its gradients are there. Under FSDP they meet in the forward: reading data alone is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from ddpprobe.records.step import REDUCE_SECONDS, STEP_PHASES, TRAINABLE, StepRecord

_PHASES = tuple(f"{phase}_seconds" for phase in STEP_PHASES)
_PLACES = 3  # where ranks may meet


class RankSeconds(NamedTuple):
    """Host seconds of a rank's step; those of the backward without the reduction behind it."""

    data: float
    forward: float
    backward: float
    reduction: float
    optimizer: float

    @property
    def step(self) -> float:
        """All of it."""
        return sum(self)

    @property
    def own(self) -> tuple[float, float, float]:
        """The rank's own time up to three places where it may meet the others."""
        arrived = self.data + self.forward
        return self.data, arrived, arrived + self.backward


class Gap(NamedTuple):
    """Who was the slowest in a step, by how much, and how long the step took; seconds."""

    rank: int
    behind: float
    step: float


def seconds_by_rank(record: StepRecord) -> dict[int, RankSeconds] | None:
    """Return the seconds of each rank; None where one of them does not tell its own."""
    found = {rank: _seconds(record.scalars.get(rank, {})) for rank in record.ranks}
    told = {rank: seconds for rank, seconds in found.items() if seconds is not None}
    return told if len(told) == len(found) else None


def _seconds(scalars: Mapping[str, float]) -> RankSeconds | None:
    data, forward, backward, optimizer = (float(scalars.get(p, math.nan)) for p in _PHASES)
    if not (
        min(data, forward, backward, optimizer) >= 0
        and math.isfinite(data + forward + backward + optimizer)
    ):
        return None
    reduction = float(scalars.get(REDUCE_SECONDS, math.nan))
    # A record that does not tell it may have waited for it all the while.
    reduction = min(max(reduction, 0.0), backward) if math.isfinite(reduction) else backward
    return RankSeconds(data, forward, backward - reduction, reduction, optimizer)


def gap_of(record: StepRecord, told: Mapping[int, RankSeconds]) -> Gap | None:
    """Return who is the furthest behind the others of its kind; None where each is alone.

    `told`: what `seconds_by_rank` says of the record.
    """
    kinds: dict[float, dict[int, RankSeconds]] = {}
    for rank, seconds in told.items():
        kind = float(record.scalars.get(rank, {}).get(TRAINABLE, 0))
        kinds.setdefault(kind, {})[rank] = seconds
    slowest = [
        _slowest({rank: (seconds.own[place], seconds.step) for rank, seconds in alike.items()})
        for alike in kinds.values()
        if len(alike) > 1
        for place in range(_PLACES)
    ]
    if not slowest:
        return None
    behind, rank = max(slowest)
    step = median(seconds.step for alike in kinds.values() for seconds in alike.values())
    return Gap(rank, behind, step)


def _slowest(times: dict[int, tuple[float, float]]) -> tuple[float, int]:
    """Return by how much the slowest rank lies behind the median of the others, and the rank.

    Where its steps are longer than the others' by as much, nobody waits for it.
    """
    rank = max(times, key=lambda one: times[one][0])
    others = [time for other, time in times.items() if other != rank]
    own, whole = times[rank]
    behind = own - median(other for other, _ in others)
    alone = whole - median(other for _, other in others)
    return (behind if alone < behind / 2 else 0.0), rank
