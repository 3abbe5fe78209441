"""A learning rate that fades long before the end, rises after a rest, or begins anew."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from ddpprobe.detectors.rank_scalars import largest, scalars
from ddpprobe.records.step import LEARNING_RATE, TRAINABLE, StepRecord

LOOKS = 3  # sampled steps that it must have lasted
# Of the steps so far that it must have lasted. A cosine is below 1e-5 of its highest rate for the
# last 0.2 % of its steps, a line for 0.001 %, a polynomial of degree 4 for 5.6 %.
PART = 0.07
REST_STEPS, REST_LOOKS = 50, 5  # in which it was no higher than before: what rises is no warm-up
SAME = 1.01  # so much higher is no rise
# A step of a schedule falls to half or less, and so many steps after it, and looks, it has rested.
FALLEN, FALLEN_STEPS, FALLEN_LOOKS = 0.5, 25, 3


class FadedRate:
    """Follows the learning rate; a rate of 0 is left to who looks at the weights.

    Args:
        share: of its highest that is next to nothing.
        steps: for which it must have been no more than that.

    Attributes:
        highest: the highest rate so far.
    """

    def __init__(self, share: float, steps: int) -> None:
        self._share, self._steps = share, steps
        self._first: int | None = None
        self.highest = 0.0
        self._since: int | None = None
        self._looks = 0
        self._told = False

    def update(self, record: StepRecord) -> tuple[float, int] | None:
        """Take the next sampled step; return rate and first step of a fading, once for each."""
        rate = largest(record, LEARNING_RATE)
        if not math.isfinite(rate):
            return None
        self._first = record.step if self._first is None else self._first
        self.highest = max(self.highest, rate)
        if rate > self._share * self.highest or rate == 0:
            self._since, self._looks, self._told = None, 0, False
            return None
        self._since = record.step if self._since is None else self._since
        self._looks += 1
        lasted, all_steps = record.step - self._since, record.step - self._first
        long = lasted >= max(self._steps, PART * all_steps) and self._looks >= LOOKS
        if not long or self._told:
            return None
        self._told = True
        return rate, self._since


class _RateOfSchedule(ABC):
    """Follows the learning rate of what is trained.

    Other parameters to train, and another optimizer that steps instead, may bring a rate of their
    own, and begin anew.
    """

    def __init__(self) -> None:
        self._trained = math.nan
        self._begin()

    @abstractmethod
    def _begin(self) -> None:
        """Forget all rates so far."""

    @abstractmethod
    def _take(self, step: int, rate: float) -> tuple[float, float] | None:
        """Take the next rate; return what is told of it."""

    def update(self, record: StepRecord, *, others: bool) -> tuple[float, float] | None:
        """Take the next sampled step; return two rates, once for each time that it is told.

        Args:
            record: of the step.
            others: whether other parameters move than at the step before.
        """
        rate = largest(record, LEARNING_RATE)
        trained = max(scalars(record, TRAINABLE), default=0.0)
        if not math.isfinite(rate):
            return None
        if trained != self._trained or others:
            self._trained = trained
            self._begin()
        return self._take(record.step, rate)


class RisenRate(_RateOfSchedule):
    """Once the learning rate has rested, no schedule takes it far above its highest.

    A warm restart comes back to the highest, and one cycle rises from the start. Told are the rate,
    and the highest before, once for each rise.

    Args:
        ratio: how many times its highest before the rest.
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        super().__init__()

    def _begin(self) -> None:
        self._highest, self._at = 0.0, 0  # and the step of it
        self._looks = 0  # since then
        self._rested: float | None = None  # the highest after which it rested
        self._told = False

    def _take(self, step: int, rate: float) -> tuple[float, float] | None:
        if rate <= SAME * self._highest:
            self._looks += 1
            rested = self._looks >= REST_LOOKS and step - self._at >= REST_STEPS
            if rested and not self._told:
                self._rested = self._highest
            return None
        self._highest, self._at, self._looks = rate, step, 0
        if self._told or self._rested is None or rate < self._ratio * self._rested:
            return None
        self._told = True
        return rate, self._rested


class ReturnedRate(_RateOfSchedule):
    """A schedule of steps never comes back to an earlier learning rate.

    It has rested at a rate, fallen at least to half and rested there, and is at the earlier one
    again within one look. A cosine does not rest, and a warm-up that is seen takes several looks.
    Told are the rate, and that which it had fallen to, once.
    """

    def _begin(self) -> None:
        self._rate, self._since, self._looks = math.nan, 0, 0  # it has been the same so long
        self._rested = 0.0  # the highest at which it rested
        self._told = False

    def _take(self, step: int, rate: float) -> tuple[float, float] | None:
        if rate == self._rate:
            self._looks += 1
            return None
        before, lasted, looks = self._rate, step - self._since, self._looks
        self._rate, self._since, self._looks = rate, step, 1
        is_back = rate <= SAME * self._rested and self._rested <= SAME * rate
        fallen = lasted >= FALLEN_STEPS and looks >= FALLEN_LOOKS and before <= FALLEN * rate
        if lasted >= REST_STEPS and looks >= REST_LOOKS:
            self._rested = max(self._rested, before)
        if self._told or not (is_back and fallen):
            return None
        self._told = True
        return rate, before
