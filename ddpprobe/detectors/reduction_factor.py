"""By what number the reduced gradients are the mean of the ranks' own, and whether it stays."""

from __future__ import annotations

import math
from typing import NamedTuple

from ddpprobe.records.reduction_law import ReductionLaw, same_factor
from ddpprobe.records.step import StepRecord

# By a rank's norm: so far gradients may be from a multiple of the mean before it is known how far
# rounding takes them (6e-3 in bfloat16), and then, at the least, and by what was seen.
UNKNOWN, LEAST, TIMES = 0.1, 1e-3, 20.0
LESS = 0.02  # of a mean: so much more than rounding is a mean that was divided again
# Of the gradients that are compared, so many must be off at a look, and within some looks. A hook
# that compresses with error feedback (PowerSGD) leaves vectors alone: a quarter, in a Llama.
HALF, NEARLY_ALL = 0.5, 0.95


class Factor(NamedTuple):
    """What was found.

    Attributes:
        before: what the gradients were a multiple of the mean by; NaN from the start.
        now: what they are; NaN if they are no multiple of it.
        since: step; NaN from the start.
    """

    before: float
    now: float
    since: float


class ReductionFactor:
    """Follows the factor of `reduction_law` over the sampled steps of an attempt.

    Args:
        repeats: sampled steps in a row after which another factor, or none, is one.
        usual: sampled steps in a row with one factor that make it the usual one.
        young: first sampled steps, at all of which a mean must have been divided again.
    """

    def __init__(self, *, repeats: int, usual: int, young: int) -> None:
        self._repeats, self._needed, self._young = repeats, usual, young
        self._first: list[float] = []  # factors of the first sampled steps
        self.forget()

    def forget(self) -> None:
        """Take the next factor for a new one: something was announced."""
        self._usual, self._looks = math.nan, 0  # the factor, and sampled steps in a row with it
        self._rounding = 0.0  # how far any gradient was from it at these
        self._now, self._count, self._since = math.nan, 0, -1  # what it may be from some step on
        self._compared: set[str] = set()  # while it is none: parameters,
        self._off: set[str] = set()  # and those of them that were off

    def update(self, record: StepRecord, law: ReductionLaw) -> Factor | None:
        """Take what the next sampled step says; return what was found as of it."""
        factor = self._factor_of(law)
        if len(self._first) < self._young:
            self._first.append(factor)
            if self._is_divided():
                return Factor(math.nan, factor, math.nan)
        if math.isfinite(factor):
            return self._multiple(record.step, factor, float(law.off(factor).max()))
        return self._none(record, law) if self._settled else None

    def _factor_of(self, law: ReductionLaw) -> float:
        """Return of which multiple most gradients are, the usual one if it is that; NaN of none."""
        if self._settled and self._share_off(law, self._usual) < HALF:
            return law.factor if same_factor(law.factor, self._usual) else self._usual
        return law.factor if self._share_off(law, law.factor) < HALF else math.nan

    def _share_off(self, law: ReductionLaw, factor: float) -> float:
        off = law.off(factor) > self._bound
        return float(off.sum() / (off | law.tells).sum())

    @property
    def _settled(self) -> bool:
        return self._looks >= self._needed

    @property
    def _bound(self) -> float:
        """How far a gradient may be from a multiple of the mean."""
        return max(LEAST, TIMES * self._rounding) if self._settled else UNKNOWN

    def _is_divided(self) -> bool:
        """Whether all of the first sampled steps had one factor that no mean has."""
        whole = len(self._first) == self._young
        alike = all(same_factor(factor, self._first[0]) for factor in self._first)
        return whole and alike and self._first[0] < 1 - LESS

    def _multiple(self, step: int, factor: float, off: float) -> Factor | None:
        usual = same_factor(factor, self._usual)
        if usual or not self._settled:
            self._rounding = max(self._rounding, off) if off <= self._bound else self._rounding
            self._looks = self._looks + 1 if usual else 1
            self._usual, self._count = factor, 0
            return None
        self._count = self._count + 1 if self._count and same_factor(factor, self._now) else 1
        self._now = factor
        self._since = step if self._count == 1 else self._since
        if self._count < self._repeats:
            return None
        before, self._usual, self._count = self._usual, factor, 0
        return Factor(before, factor, self._since)

    def _none(self, record: StepRecord, law: ReductionLaw) -> Factor | None:
        off = law.off(self._usual) > self._bound
        if not self._count or math.isfinite(self._now):
            self._now, self._count, self._since = math.nan, 0, record.step
            self._compared, self._off = set(), set()
        self._count += 1
        self._compared |= {record.sites[row].fqn for row in law.rows[off | law.tells]}
        self._off |= {record.sites[row].fqn for row in law.rows[off]}
        far = len(self._off) >= NEARLY_ALL * len(self._compared)
        if self._count < self._repeats or not far:
            return None
        return Factor(self._usual, math.nan, self._since)
