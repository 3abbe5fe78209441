"""Whether the rows that a cross-entropy ignores are those of a class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ddpprobe.detectors.logits import logits_of
from ddpprobe.records.step import (
    CLASS_LABELLED,
    CLASS_LOOKED,
    CLASS_ROWS,
    CLASS_SEEN,
    COPIED,
    INPUT_ELEMENTS,
    LABEL_BITS,
    StepRecord,
)

ROWS = 200  # that are looked at, of all ranks and looks
# How often a label must have come on some rank, and how many rows must have none: one that is as
# frequent as these does not stay away by chance.
OFTEN = 20
FEWEST, MOST = 0.02, 0.9  # share of the rows of a rank that have no label
# Numbers that the model is given for a row. A place of a text or a point of an image has fewer: up
# to four tensors, or channels. Some of these are padding, whose label is often that of a token.
GIVEN = 4


class Ignored(NamedTuple):
    """A label of `classes` that has never come in `rows`, and the share of these without any."""

    label: int
    classes: int
    rows: float
    share: float


class IgnoredClass:
    """Which labels have come, and how many rows had none.

    Args:
        looks: that are needed for a verdict.
    """

    def __init__(self, looks: int) -> None:
        self._fewest = looks
        self._begin()

    def _begin(self) -> None:
        self._looks = 0
        self._came = np.zeros(LABEL_BITS, np.int64)  # looks of a rank at which each label came
        self._rows: defaultdict[int, float] = defaultdict(float)  # that a rank has looked at
        self._without: defaultdict[int, float] = defaultdict(float)  # of these, without a label

    def take(self, record: StepRecord, ranks: Mapping[int, Mapping[str, float]]) -> Ignored | None:
        """Take the next look at a cross-entropy; return the class that it ignores.

        Nothing is learned of a look at which there may be several rows of a sample.
        """
        if not all(map(_is_of_samples, ranks.values())):
            return None
        if self._rows.keys() != ranks.keys():
            self._begin()
        self._looks += 1
        for rank, said in ranks.items():
            seen = int(said[CLASS_SEEN])
            self._came += [seen >> label & 1 for label in range(LABEL_BITS)]
            self._rows[rank] += said[CLASS_LOOKED]
            self._without[rank] += said[CLASS_LOOKED] * (1 - said[CLASS_LABELLED])
        return self._verdict(record, ranks)

    def _verdict(
        self, record: StepRecord, ranks: Mapping[int, Mapping[str, float]]
    ) -> Ignored | None:
        rows, without = sum(self._rows.values()), sum(self._without.values())
        shares = [self._without[rank] / self._rows[rank] for rank in self._rows]
        enough = self._looks >= self._fewest and rows >= ROWS and without >= OFTEN
        if not enough or not FEWEST <= min(shares) <= max(shares) <= MOST:
            return None
        logits = logits_of(record, ranks)
        if logits is None or logits.classes > LABEL_BITS:
            return None
        came, beyond = self._came[: logits.classes], self._came[logits.classes :]
        label = int(came.argmin())
        if came[label] or beyond.any() or np.delete(came, label).min() < OFTEN:
            return None
        return Ignored(label, logits.classes, rows, without / rows)


def _is_of_samples(said: Mapping[str, float]) -> bool:
    """Whether each row of the output is likely to be a sample, and each is looked at."""
    all_of_them = said[CLASS_LOOKED] == said[CLASS_ROWS]
    known = 0 <= said.get(CLASS_SEEN, -1.0) < 1 << LABEL_BITS  # NaN is not
    is_text = COPIED in said or not said.get(INPUT_ELEMENTS, 0.0) > GIVEN * said[CLASS_ROWS]
    return all_of_them and known and not is_text
