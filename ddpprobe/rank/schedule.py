"""Which steps are sampled: a pure function of the step number, so that all ranks agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from ddpprobe.errors import InstallError

MOST_EVERY = 1 << 63  # what files have room for
KEPT_RANGES = 32  # of steps that were ordered one by one: "not long ago" is asked for as well


@dataclass(frozen=True, slots=True)
class Schedule:
    """Sampled steps.

    Attributes:
        every: a sampled step every `every` optimizer steps: 0, every, 2 * every, ...
        dense_until: every step below this one is sampled too (the warm-up, where most runs die).
        ranges: (first, last) pairs of steps, both included, in which every step is sampled.

    Raises:
        InstallError: a number that makes no schedule.
    """

    every: int = 10
    dense_until: int = 0
    ranges: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if not (is_step(self.every) and 0 < self.every < MOST_EVERY):
            raise InstallError(
                "every must be an integer of at least 1 (sample each N-th step), "
                f"got {self.every!r}"
            )
        if not is_step(self.dense_until):
            msg = f"dense_until must be a step number, 0 or more, got {self.dense_until!r}"
            raise InstallError(msg)
        pairs = self.ranges if isinstance(self.ranges, tuple | list) else (self.ranges,)
        for pair in pairs:
            if not _is_range(pair):
                msg = "ranges must be pairs (first, last) of steps, 0 <= first <= last, such as "
                raise InstallError(f"{msg}ranges=((100, 120),); got {pair!r}")

    def sampled(self, step: int) -> bool:
        """Whether `step` (counted from 0) is sampled."""
        return step % self.every == 0 or self.dense(step)

    def dense(self, step: int) -> bool:
        """Whether `step` is sampled whatever `every` is."""
        return step < self.dense_until or any(first <= step <= last for first, last in self.ranges)


def is_step(number: object) -> bool:
    """Whether a number is one of a step: whole, and 0 or more."""
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _is_range(pair: object) -> bool:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        return False
    return all(map(is_step, pair)) and pair[0] <= pair[1]


def as_schedule(every: int | Schedule) -> Schedule:
    """Turn `install`'s `every` into a schedule."""
    return every if isinstance(every, Schedule) else Schedule(every=every)


@dataclass(frozen=True, slots=True)
class IntervalChange:
    """From step `start` on a sampled step every `every` steps; step `extra` as well (-1: none)."""

    start: int
    every: int
    extra: int = -1


@final
class Pace:
    """A schedule whose interval may change as the run goes on: by orders that all ranks get.

    Args:
        schedule: what the user asked for; its warm-up and ranges always hold.
        narrowest: the least interval outside of them.
    """

    def __init__(self, schedule: Schedule, narrowest: int = 1) -> None:
        self.schedule = schedule
        self._order = IntervalChange(0, max(schedule.every, narrowest))
        self._before = self._order.every
        self._besides: list[range] = []

    def every(self, step: int) -> int:
        """Return the interval in force at `step`."""
        return self._order.every if step >= self._order.start else self._before

    def sampled(self, step: int) -> bool:
        """Whether `step` is sampled, as far as orders have come."""
        regular = step % self.every(step) == 0
        if regular or step == self._order.extra or self.schedule.dense(step):
            return True
        return bool(self._besides) and self.besides(step)

    def besides(self, step: int) -> bool:
        """Whether `step` was asked for by `add`."""
        return any(step in steps for steps in self._besides)

    def add(self, start: int, stop: int) -> None:
        """Sample the steps from `start` up to `stop - 1` as well, whatever the interval is."""
        self._besides = [*self._besides[1 - KEPT_RANGES :], range(start, stop)]

    def tell(self, order: IntervalChange, step: int) -> None:
        """Take an order, during `step`; one that should have come earlier holds from the next."""
        self._before = self.every(step)
        self._order = order
        if order.start <= step:
            self._order = IntervalChange(step + 1, order.every, order.extra)
