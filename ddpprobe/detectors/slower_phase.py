"""A phase of the step that takes all ranks several times what it did, and the others do not."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple, final

import numpy as np

from ddpprobe.detectors.sites_of_kind import Floats
from ddpprobe.detectors.spaced_looks import SpacedLooks
from ddpprobe.detectors.step_seconds import RankSeconds, queued_of_others

PHASES = ("forward", "backward", "optimizer")
BLOCKS = 2  # of looks that must have been, so that one of them is usual
SHARE = 0.25  # of the step, that the phase takes
LEAST_SECONDS = 0.005  # that it takes more
STEP_TIMES = 1.3  # as long as it took, the step with it
ALONE = 1.5  # times as much as any other phase: clocks and neighbours slow all of them
_OUTER = 0.2  # of the looks on either side, which may be anywhere
_NOTHING = 1e-4  # seconds; what is shorter is not divided by


class PhaseLook(NamedTuple):
    """A sampled step: seconds of each of `PHASES` with a core, on the rank that needed least.

    `unwaited` are the same without what another rank was queued for in that phase: the rank that
    needed least came last, so it waited there for nothing else. `whole` is the time of the step,
    and `work` how many elements modules returned.
    """

    step: int
    phases: tuple[float, ...]
    unwaited: tuple[float, ...]
    whole: float
    work: float


class Grown(NamedTuple):
    """A phase that takes so many seconds, and took so many; the same of the whole step.

    `many` of the newest `looks` are nearer to what it takes now than to what it took, of which
    `since` is the first. Each of the other phases takes no more than `others` times what it took.
    """

    phase: str
    now: float
    before: float
    step_now: float
    step_before: float
    others: float
    since: int
    many: int
    looks: int


def phase_look(
    step: int, told: Mapping[int, RankSeconds], queued: Mapping[int, RankSeconds], work: float
) -> PhaseLook:
    """Return the look at a step, from what ranks took and what of it they were queued for."""
    taken = np.array([[getattr(told[rank], name) for name in PHASES] for rank in told])
    waits = np.array([[getattr(queued[rank], name) for name in PHASES] for rank in told])
    phases, unwaited = taken - waits, taken - waits - queued_of_others(waits)
    whole = median(seconds.step for seconds in told.values())
    return PhaseLook(step, _least(phases), _least(unwaited), whole, work)


def _least(seconds: Floats) -> tuple[float, ...]:
    """Return those of the rank with least, by phase, of [ranks, phases]."""
    return tuple(np.maximum(seconds.min(axis=0), 0.0).tolist())


@final
class SlowerPhase:
    """Compares the newest looks with the block of looks in which a phase took least.

    That may be long ago: what piles up step by step is never far above the step before.

    Args:
        times: as long as it took, beyond the growth of the work.
        steps: that the newest looks lie over.
        looks: so many of them at least.
    """

    def __init__(self, times: float, steps: int, looks: int) -> None:
        self._times = times
        self._looks = SpacedLooks[PhaseLook](steps - 1.0, looks)
        self._blocks, self._closed = 0, -1  # how many, and the last step of the last one
        self._high = self._middle = np.full(len(PHASES), np.inf)  # of the block with least
        self._work = np.zeros(len(PHASES))  # of it
        self._whole = np.inf

    def take(self, look: PhaseLook) -> Grown | None:
        """Take the next look; return the phase that has grown most, if one has grown so far."""
        self._looks.add(look, look.step)
        looks = self._looks.newest()
        if looks is None:
            return None
        found = self._grown(looks) if self._blocks >= BLOCKS else None
        if looks[0].step > self._closed:
            self._close(looks)
        return found

    def _close(self, looks: list[PhaseLook]) -> None:
        """Take a block of looks for the usual one of each phase that took less than before."""
        self._blocks, self._closed = self._blocks + 1, looks[-1].step
        times = _times(looks)
        high = np.quantile(times, 1 - _OUTER, axis=0)
        less = high < self._high
        self._high = np.where(less, high, self._high)
        self._middle = np.where(less, np.median(times, axis=0), self._middle)
        self._work = np.where(less, median(one.work for one in looks), self._work)
        self._whole = min(self._whole, median(one.whole for one in looks))

    def _grown(self, looks: list[PhaseLook]) -> Grown | None:
        times = _times(looks)
        unwaited = np.array([one.unwaited for one in looks])
        middle, low = np.median(times, axis=0), np.quantile(unwaited, _OUTER, axis=0)
        whole = median(one.whole for one in looks)
        work = median(one.work for one in looks)
        more_work = np.divide(work, self._work, out=np.ones(len(PHASES)), where=self._work > 0)
        growth = middle / np.maximum(self._middle, _NOTHING)
        long = self._times * np.maximum(more_work, 1.0) * np.maximum(self._high, _NOTHING)
        # What has piled up is there in each step; a rank that waits for threads, of which nobody
        # knows that they have no core, is through now and then.
        found = (low >= long) & (np.diff(times >= long, axis=0).sum(axis=0) <= 1)
        found &= times[-1] >= long
        found &= (middle >= SHARE * whole) & (low - self._middle >= LEAST_SECONDS)
        place = int(np.where(found, growth, 0.0).argmax())
        others = np.delete(growth, place).max()
        if not found[place] or growth[place] < ALONE * others or whole < STEP_TIMES * self._whole:
            return None
        now, before = float(middle[place]), max(float(self._middle[place]), _NOTHING)
        longer = [one.step for one in looks if one.phases[place] >= (before + now) / 2]
        return Grown(
            PHASES[place], now, before, whole, max(self._whole, _NOTHING), float(others),
            longer[0], len(longer), len(looks),
        )  # fmt: skip


def _times(looks: list[PhaseLook]) -> Floats:
    """Return the seconds [looks, phases]."""
    return np.array([one.phases for one in looks])
