"""A learning rate that has come down to next to nothing of its highest, long before the end."""

from __future__ import annotations

import math

from ddpprobe.records.step import LEARNING_RATE, StepRecord

LOOKS = 3  # sampled steps that it must have lasted
# Of the steps so far that it must have lasted. A cosine is below 1e-5 of its highest rate for the
# last 0.2 % of its steps, a line for 0.001 %, a polynomial of degree 4 for 5.6 %.
PART = 0.07


class FadedRate:
    """Follows the learning rate; a rate of 0 is left to who looks at the weights.

    Args:
        share: of its highest that is next to nothing.
        steps: for which it must have been no more than that.
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
        said = [float(s[LEARNING_RATE]) for s in record.scalars.values() if LEARNING_RATE in s]
        rate = max(said, default=math.nan)
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
