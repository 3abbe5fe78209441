"""The loss of a run as one number per sampled step."""

from __future__ import annotations

import math

from ddpprobe.records.step import StepRecord


def mean_loss(record: StepRecord) -> float:
    """Return the mean of the ranks' finite losses, NaN without one.

    One rank's own loss is no ground to wake somebody: with heavy-tailed data its chance outliers,
    which are its gradient's as well, grow with the number of ranks.
    """
    losses = [float(s["loss"]) for s in record.scalars.values() if "loss" in s]
    finite = [x for x in losses if math.isfinite(x)]
    return math.fsum(x / len(finite) for x in finite) if finite else math.nan


class PositiveLoss:
    """The mean losses of an attempt, as long as none has been zero or negative.

    Behind such a one a ratio of losses says nothing.

    Attributes:
        first: the first one; NaN before.
    """

    def __init__(self) -> None:
        self.first = math.nan
        self._signed = False

    def read(self, record: StepRecord) -> float | None:
        """Return the mean loss of the next record; None if it has none that can be judged."""
        loss = mean_loss(record)
        self._signed |= loss <= 0
        if self._signed or not math.isfinite(loss):
            return None
        if math.isnan(self.first):
            self.first = loss
        return loss
