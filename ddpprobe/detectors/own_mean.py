"""Whether each rank's loss is the mean of its own rows, of which ranks have unlike many."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, final

from ddpprobe.detectors.rank_scalars import loss_scale_of, micro_batches_of, scalars
from ddpprobe.records.step import (
    CLASS_LABELLED,
    CLASS_ROWS,
    CLASS_WEIGHT,
    INPUT_ELEMENTS,
    StepRecord,
)

OF = 16  # looks that are judged; bounds the state
FEWEST_KNOWN, FEWEST_APART = 4, 3  # of them: rows are known to be divided by, and ranks differ
APART = 3.0  # times as many rows
SAME = math.log(1.01)  # a row's weight, times the rows: by how much it may vary
VARIED = 1.5  # times as many rows


class UnlikeSizes(NamedTuple):
    """At how many looks ranks differed, and how many numbers they were given at the last one."""

    looks: int
    of: int
    fewest: float
    most: float


@final
class OwnMean:
    """Follows what a row weighs in each rank's loss, and how much each rank is given.

    Where a row weighs one by the rows of its own rank, whatever they are, and the gradients of
    ranks are averaged, a row of a small batch counts for more than one of a large batch.
    """

    def __init__(self) -> None:
        # A look: rows, and weight times rows, of each rank that says them, and how many times as
        # much as another one a rank was given.
        self._looks: deque[tuple[list[_Rows], float]] = deque(maxlen=OF)

    def take(self, record: StepRecord) -> UnlikeSizes | None:
        """Take the next look; return what ranks were given if it is so."""
        sizes = scalars(record, INPUT_ELEMENTS)
        if len(sizes) < max(2, len(record.ranks)) or min(sizes) <= 0:
            return None
        apart = max(sizes) / min(sizes)
        self._looks.append((_rows(record), apart))
        known = [rows for rows, _ in self._looks if rows]
        looks = sum(of >= APART for _, of in self._looks)
        if apart < APART or looks < FEWEST_APART or len(known) < FEWEST_KNOWN:
            return None
        each = [one for rows in known for one in rows]
        if not _are_divided_by(each, micro_batches_of(record)):
            return None
        return UnlikeSizes(looks, len(self._looks), min(sizes), max(sizes))


class _Rows(NamedTuple):
    """Rows of a rank with a label, and the logarithm of these times what one weighs."""

    rows: float
    product: float


def _rows(record: StepRecord) -> list[_Rows]:
    scale = loss_scale_of(record)
    found = []
    for said in record.scalars.values():
        rows = said.get(CLASS_ROWS, math.nan) * said.get(CLASS_LABELLED, math.nan)
        product = rows * said.get(CLASS_WEIGHT, math.nan) / scale
        if 0 < rows < math.inf and 0 < product < math.inf:
            found.append(_Rows(rows, math.log(product)))
    return found


def _are_divided_by(known: list[_Rows], micros: float) -> bool:
    """Whether a row weighs one by the rows, or by these times the micro-batches.

    Or as much times any number, if there are not always as many rows: else that number may be what
    is divided by.
    """
    rows, products = [of.rows for of in known], [of.product for of in known]
    if max(products) - min(products) > SAME:
        return False
    one = min(abs(products[0]), abs(products[0] + math.log(micros)))
    return one <= SAME or max(rows) >= VARIED * min(rows)
