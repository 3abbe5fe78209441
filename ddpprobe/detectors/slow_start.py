"""A model that guesses, and hardly moves: its learning rate is far too low from the start."""

from __future__ import annotations

import math
from functools import reduce
from operator import or_
from typing import NamedTuple

from ddpprobe.detectors.learning_rate import SAME
from ddpprobe.detectors.loss import loss_of
from ddpprobe.detectors.rank_scalars import labels_seen, largest, scalars
from ddpprobe.records.step import CLASS_RIGHT, LEARNING_RATE, StepRecord

STEPS, LOOKS = 50, 5  # for which it must have been so
# Times the share of right answers that a guess has. A model that answers with the most frequent
# token, as one does that has begun to learn, has more than a guess among all of them.
LUCKY = 1.5


class Guess(NamedTuple):
    """What a model that guesses shows.

    Attributes:
        share: by which the step changed the weights that it trains, of their size.
        labels: how many there are, modulo `LABEL_BITS`; a guess among them has their log as loss.
        loss: mean of the ranks and looks.
        rate: learning rate, the largest.
        since: the first step at which it was so.
    """

    share: float
    labels: int
    loss: float
    rate: float
    since: int


class SlowStart:
    """Follows whether a model guesses while its weights hardly move and its rate does not rise.

    A fine-tuning has as low a rate, but its answers are better than a guess; and a warm-up rises.

    Args:
        share: of the weights' size; a step that changes those it trains by more is not slow.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._told = False
        self._begin()

    def _begin(self) -> None:
        self._since, self._rate, self._looks = -1, math.inf, 0
        self._labels, self._losses, self._rights = 0, 0.0, 0.0

    def update(self, record: StepRecord, share: float | None) -> Guess | None:
        """Take the next sampled step; return what is so, once.

        Args:
            record: of the step.
            share: by which it changed the weights that it trains, of their size; None: nobody
                knows, and the step is passed over.
        """
        if share is None:
            return None
        rate, right = largest(record, LEARNING_RATE), scalars(record, CLASS_RIGHT)
        loss = loss_of(record)
        is_slow = share <= self._share and right and math.isfinite(loss + sum(right))
        if not is_slow or not rate <= SAME * self._rate:  # a rate that nobody knows does neither
            self._begin()
        if not is_slow or not math.isfinite(rate):
            return None
        if not self._looks:
            self._since, self._rate = record.step, rate
        self._looks += 1
        self._labels = reduce(or_, labels_seen(record), self._labels)
        self._losses += loss
        self._rights += sum(right) / len(right)
        return self._judge(record, share, rate)

    def _judge(self, record: StepRecord, share: float, rate: float) -> Guess | None:
        labels = self._labels.bit_count()
        if self._told or self._looks < LOOKS or record.step - self._since < STEPS or labels < 2:
            return None
        loss, right = self._losses / self._looks, self._rights / self._looks
        if loss < math.log(labels) or right * labels > LUCKY:
            return None
        self._told = True
        return Guess(share, labels, loss, rate, self._since)
