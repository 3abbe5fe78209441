"""What a step took each rank, and which rank set itself apart by it.

The time of a step cannot tell who is slow: where ranks wait for each other, all take as long. What
a rank does before it meets the others is its own: under DDP reading data, the forward, and the
backward until its gradients are there. Under FSDP they meet in the forward: reading data alone is.
Of its own time a rank may have been *queued*: ready, while others had all cores of its machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import numpy as np

from ddpprobe.detectors.sites_of_kind import Floats
from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import QUEUED, REDUCE_SECONDS, STEP_PHASES, TRAINABLE, StepRecord

_PHASES = tuple(f"{phase}_seconds" for phase in STEP_PHASES)
_QUEUED = tuple(QUEUED[part] for part in (*STEP_PHASES, "reduce"))
_PLACES = 3  # where ranks may meet


class RankSeconds(NamedTuple):
    """Host seconds of a rank's step; those of the backward without the reduction after it."""

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
    """Who was the slowest in a step, by how much, and how long the step took; seconds.

    `queued`: what of `behind` it was queued for; None where some rank does not tell.
    """

    rank: int
    behind: float
    step: float
    queued: float | None


def seconds_by_rank(record: StepRecord) -> dict[int, RankSeconds] | None:
    """Return the seconds of each rank; None where one of them does not tell its own."""
    return _seconds_of(record)


def queued_by_rank(record: StepRecord) -> dict[int, RankSeconds] | None:
    """Return of the seconds of each rank those it was queued; None where one does not tell."""
    return _queued_of(record)


def trains_nothing(record: StepRecord) -> bool:
    """Whether no parameter of the model requires a gradient on any rank, as of a frozen teacher.

    It has no backward and no reduction of its own: what is counted there is another model's step.
    """
    return all(record.scalars.get(rank, {}).get(TRAINABLE) == 0 for rank in record.ranks)


def _by_rank(
    record: StepRecord, read: Callable[[Mapping[str, float]], RankSeconds | None]
) -> dict[int, RankSeconds] | None:
    found = {rank: read(record.scalars.get(rank, {})) for rank in record.ranks}
    told = {rank: seconds for rank, seconds in found.items() if seconds is not None}
    return told if len(told) == len(found) else None


def _seconds(scalars: Mapping[str, float]) -> RankSeconds | None:
    phases = _told(scalars, _PHASES)
    if phases is None:
        return None
    reduction = float(scalars.get(REDUCE_SECONDS, math.nan))
    # A record that does not tell it may have waited for it all the while.
    reduction = max(reduction, 0.0) if math.isfinite(reduction) else math.inf
    return _split([*phases, reduction])


def _queued(scalars: Mapping[str, float]) -> RankSeconds | None:
    parts = _told(scalars, _QUEUED)
    return None if parts is None else _split(parts)


def _told(scalars: Mapping[str, float], names: Sequence[str]) -> list[float] | None:
    """Return the seconds of these names; None if one is not told, or is no length of time."""
    found = [float(scalars.get(name, math.nan)) for name in names]
    return found if min(found) >= 0 and math.isfinite(sum(found)) else None


def _split(parts: Sequence[float]) -> RankSeconds:
    """Take the reduction, the last of these, out of the backward: it is a part of it."""
    data, forward, backward, optimizer, reduction = parts
    reduction = min(reduction, backward)
    return RankSeconds(data, forward, backward - reduction, reduction, optimizer)


def gap_of(
    record: StepRecord, told: Mapping[int, RankSeconds],
    queued: Mapping[int, RankSeconds] | None = None, *, without_queued: bool = False,
) -> Gap | None:  # fmt: skip
    """Return who is the furthest behind the others of its kind; None where each is alone.

    Args:
        record: the step.
        told: what `seconds_by_rank` says of it.
        queued: what `queued_by_rank` says of it.
        without_queued: compare what ranks had a core for; only if they tell it. Who came no later
            than the others, with all that they were queued for, may have waited for them somewhere:
            in a broadcast of buffers, in a collective of the script.
    """
    kinds: dict[float, list[int]] = {}
    for rank in told:
        kind = float(record.scalars.get(rank, {}).get(TRAINABLE, 0))
        kinds.setdefault(kind, []).append(rank)
    step = median(seconds.step for seconds in told.values())
    slowest = []
    for alike in kinds.values():
        for place in range(_PLACES) if len(alike) > 1 else ():
            own = whole = {rank: told[rank].own[place] for rank in alike}
            waits = None if queued is None else {rank: queued[rank].own[place] for rank in alike}
            if without_queued and waits is not None:
                own = {rank: whole[rank] - waits[rank] for rank in alike}
                waits = dict.fromkeys(alike, 0.0)
            behind, rank = _slowest(own, {rank: told[rank].step for rank in alike})
            behind = max(0.0, min(behind, _behind(rank, whole)))
            slowest.append(Gap(rank, behind, step, None if waits is None else _behind(rank, waits)))
    return max(slowest, key=lambda gap: (gap.behind, gap.rank), default=None)


def queued_of_others(queued: Floats) -> Floats:
    """Return what another rank was queued for, at most, of what each was [ranks, ...]; 0: nobody.

    For so long a rank may have waited for that one.
    """
    if len(queued) == 1:
        return np.zeros_like(queued)
    second, longest = np.partition(queued, -2, axis=0)[-2:]
    others: Floats = np.where(queued == longest, second, longest)
    return others


def _slowest(own: dict[int, float], steps: dict[int, float]) -> tuple[float, int]:
    """Return by how much the slowest rank lies behind the median of the others, and the rank.

    Where its steps are longer than the others' by as much, nobody waits for it.
    """
    rank = max(own, key=lambda one: own[one])
    behind = _behind(rank, own)
    return (behind if _behind(rank, steps) < behind / 2 else 0.0), rank


def _behind(rank: int, times: dict[int, float]) -> float:
    """Return by how much a rank's time exceeds the median of the others'."""
    return times[rank] - median(time for other, time in times.items() if other != rank)


# Several detectors ask for those of one record.
_seconds_of = IdentityCache(partial(_by_rank, read=_seconds), 1)
_queued_of = IdentityCache(partial(_by_rank, read=_queued), 1)
