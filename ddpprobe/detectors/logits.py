"""What the numbers that a model returns show where a loss takes them for logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ddpprobe.detectors.first_outputs import gradient_rows, stat_of
from ddpprobe.detectors.sites_of_kind import SitesOfKind
from ddpprobe.records.step import CLASS_ROWS, StepRecord

WHOLE = 0.01  # by which a row of probabilities in bfloat16 may miss 1
# Over the norm of a gradient, its sum. That of a cross-entropy sums to zero in each row, and
# rounding leaves a part of this; numbers of any sign sum to about their norm.
BALANCED = 0.05
ZEROS = 0.05  # share of exact zeros, from which they are a ReLU's
WIDE = 0.5  # of outputs in [0, 1], the smallest to the largest: first logits are closer to another
MESSAGES = {
    "softmax": (
        "each row that the model returns holds numbers between 0 and 1 whose sum is 1, and the "
        "loss takes them for logits: leave out the softmax in the model, as a cross-entropy has "
        "its own"
    ),
    "sigmoid": (
        "all numbers that the model returns lie between 0 and 1, and the loss takes them for "
        "logits, so that no answer can be sure: leave out the sigmoid in the model, as a "
        "cross-entropy has a softmax"
    ),
    "relu": (
        "no number that the model returns is negative, many are exactly zero, and the loss takes "
        "them for logits: leave out the ReLU after the last layer, as a class whose score it has "
        "set to zero gets no gradient"
    ),
}


class Logits(NamedTuple):
    """Which row of a record is of the logits, and how many classes these have."""

    row: int
    classes: int


def logits_of(record: StepRecord, ranks: Mapping[int, Mapping[str, float]]) -> Logits | None:
    """Return the output of which the ranks tell class facts; None where nobody knows which it is.

    That is the first one that has a gradient, as `hooks.class_facts` takes it, and a number for
    each row and class. Features that are returned beside logits have another gradient, and
    probabilities have none.
    """
    rows = sum(said[CLASS_ROWS] * said.get("micro_batches", 1.0) for said in ranks.values())
    for _, row, gradient in gradient_rows(record):
        numel = stat_of(record, row, "numel")
        total, norm = (stat_of(record, gradient, stat) for stat in ("sum", "norm"))
        whole = 0 < 2 * rows <= numel and numel % rows == 0
        if whole and abs(total) < BALANCED * norm:
            return Logits(row, int(numel / rows))
    return None


class LogitsShape:
    """For how many looks in a row logits have been such as a softmax, sigmoid or ReLU returns."""

    def __init__(self) -> None:
        self._outputs = SitesOfKind("output")
        self.kind = ""  # of the last look; "": none of these
        self.looks = 0  # in a row, of this kind
        self.since = -1  # step of the first of them

    def take(self, record: StepRecord, ranks: Mapping[int, Mapping[str, float]]) -> None:
        """Take the next look at a cross-entropy."""
        kind = self._kind_of(record, ranks)
        if kind != self.kind:
            self.kind, self.looks, self.since = kind, 0, record.step
        self.looks += 1

    def _kind_of(self, record: StepRecord, ranks: Mapping[int, Mapping[str, float]]) -> str:
        low = self._outputs.read(record, "min")
        if not any(not self._outputs.fqns[place] for place in np.flatnonzero(low >= 0)):
            return ""  # as nearly always: nobody need look for the logits
        logits = logits_of(record, ranks)
        if logits is None or stat_of(record, logits.row, "nonfinite"):
            return ""
        smallest, largest, mean, zeros = (
            stat_of(record, logits.row, stat) for stat in ("min", "max", "mean", "zero_ratio")
        )
        return _kind(smallest, largest, mean * logits.classes, zeros)


def _kind(low: float, high: float, whole: float, zeros: float) -> str:
    """Return what has made logits, by the extremes, the mean sum of a row, the share of zeros."""
    if low < 0 or not 0 < high < math.inf:  # all are zero, as of a head that begins so
        return ""
    if high <= 1 + WHOLE and abs(whole - 1) <= WHOLE:
        return "softmax"
    if zeros > ZEROS:
        return "relu"
    return "sigmoid" if high <= 1 and high - low >= WIDE else ""
