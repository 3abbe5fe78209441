"""Which classes the labels of a cross-entropy are of: one that it ignores, or only a few."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.enough_looks import EnoughLooks
from ddpprobe.detectors.logits import logits_of
from ddpprobe.detectors.rank_scalars import looks_with
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

# How many rows must have no label, and how unlikely it must be that the class that comes most
# seldom stayed away: one that is as frequent as either does not do so by chance.
WITHOUT, BY_CHANCE = 20, 1e-7
FEWEST, MOST = 0.02, 0.9  # share of the rows of a rank that have no label
# Numbers that the model is given for a row. A place of a text or a point of an image has fewer: up
# to four tensors, or channels. Some of these are padding, whose label is often that of a token.
GIVEN = 4
# Labels that come, and classes that do not, at least; rows for each class; and the part of the
# looks of a rank beyond which each of these labels must have come: of classes of unlike shares some
# come now and then, and so may others.
FEW, ABSENT, ROWS_A_CLASS, STEADY = 2, 3, 10, 0.5


class Ignored(NamedTuple):
    """A label of `classes` that has never come in `rows`, and the share of these without any."""

    label: int
    classes: int
    rows: float
    share: float

    @property
    def kind(self) -> str:
        """The name of the finding."""
        return "ignored"

    @property
    def values(self) -> dict[str, float]:
        """The numbers of a verdict."""
        return {"label": self.label, "ignored": self.share, "classes": self.classes}

    def __str__(self) -> str:
        share = f"{100 * self.share:.2g}"
        return (
            f"none of {self.rows:.0f} rows that were looked at has had label {self.label}, each "
            f"other one of {self.classes} classes has come again and again, and {share} % of the "
            "rows have no label: if these are the rows of that class, nobody learns it; look "
            "whether `ignore_index` is its number, or whether its weight is 0"
        )


class Few(NamedTuple):
    """How many labels of `classes` have come in `rows`."""

    came: int
    classes: int
    rows: float

    @property
    def kind(self) -> str:
        """The name of the finding."""
        return "few"

    @property
    def values(self) -> dict[str, float]:
        """The numbers of a verdict."""
        return {"came": self.came, "classes": self.classes}

    def __str__(self) -> str:
        return (
            f"of the {self.classes} classes of the output {self.came} alone have come as labels in "
            f"{self.rows:.0f} rows that were looked at, each of these again and again: if the data "
            "have more, look at what draws the samples, and at the numbers of the labels"
        )


class ClassLabels:
    """Which labels have come, and how many rows had none.

    Args:
        enough: looks that are needed for a verdict.
    """

    def __init__(self, enough: EnoughLooks) -> None:
        self._enough = enough
        self._begin()

    def _begin(self) -> None:
        self._looks, self._first = 0, -1
        self._came = np.zeros(LABEL_BITS, np.int64)  # looks of a rank at which each label came
        self._rows: defaultdict[int, float] = defaultdict(float)  # that a rank has looked at
        self._without: defaultdict[int, float] = defaultdict(float)  # of these, without a label

    def take(
        self, record: StepRecord, ranks: Mapping[int, Mapping[str, float]]
    ) -> Ignored | Few | None:
        """Take the next look at a cross-entropy; return what its labels show.

        Nothing is learned of a look at which there may be several rows of a sample.
        """
        if not all(map(_is_of_samples, ranks.values())):
            return None
        if self._rows.keys() != ranks.keys():
            self._begin()
        self._first = self._first if self._looks else record.step
        self._looks += 1
        self._came += looks_with([int(said[CLASS_SEEN]) for said in ranks.values()])
        for rank, said in ranks.items():
            self._rows[rank] += said[CLASS_LOOKED]
            self._without[rank] += said[CLASS_LOOKED] * (1 - said[CLASS_LABELLED])
        if not self._enough.reached(self._looks, record.step - self._first, differ=False):
            return None
        logits = logits_of(record, ranks)
        if logits is None or logits.classes > LABEL_BITS or self._came[logits.classes :].any():
            return None
        came = self._came[: logits.classes]
        return self._ignored(came) or self._few(came)

    def _ignored(self, came: NDArray[np.int64]) -> Ignored | None:
        rows, without = sum(self._rows.values()), sum(self._without.values())
        shares = [self._without[rank] / self._rows[rank] for rank in self._rows]
        label, looks = int(came.argmin()), self._looks * len(self._rows)
        if came[label] or without < WITHOUT or not FEWEST <= min(shares) <= max(shares) <= MOST:
            return None
        rarest = int(np.delete(came, label).min())
        if (1 - (rarest + 1) / (looks + 2)) ** looks > BY_CHANCE:  # by the rule of succession
            return None
        return Ignored(label, len(came), rows, without / rows)

    def _few(self, came: NDArray[np.int64]) -> Few | None:
        rows, labels = sum(self._rows.values()), came[came > 0]
        absent = len(came) - len(labels)
        if (
            len(labels) < FEW
            or absent < max(ABSENT, len(labels))
            or rows < ROWS_A_CLASS * len(came)
        ):
            return None
        if labels.min() <= STEADY * self._looks * len(self._rows):
            return None
        return Few(len(labels), len(came), rows)


def _is_of_samples(said: Mapping[str, float]) -> bool:
    """Whether each row of the output is likely to be a sample, and each is looked at."""
    all_of_them = said[CLASS_LOOKED] == said[CLASS_ROWS]
    known = 0 <= said.get(CLASS_SEEN, -1.0) < 1 << LABEL_BITS  # NaN is not
    is_text = COPIED in said or not said.get(INPUT_ELEMENTS, 0.0) > GIVEN * said[CLASS_ROWS]
    return all_of_them and known and not is_text
