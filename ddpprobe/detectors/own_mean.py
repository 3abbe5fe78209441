"""Whether each rank's loss is the mean of its own rows, of which ranks have unlike many."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, final

from ddpprobe.detectors.rank_scalars import scalars
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
        # A look: the logarithms of weight times rows of each rank that says them, and of how many
        # times as much as another one a rank was given.
        self._looks: deque[tuple[list[float], float]] = deque(maxlen=OF)

    def take(self, record: StepRecord) -> UnlikeSizes | None:
        """Take the next look; return what ranks were given if it is so."""
        sizes = scalars(record, INPUT_ELEMENTS)
        if len(sizes) < max(2, len(record.ranks)) or min(sizes) <= 0:
            return None
        apart = max(sizes) / min(sizes)
        self._looks.append((_weights(record), apart))
        weights = [found for found, _ in self._looks if found]
        each = [one for found in weights for one in found]
        looks = sum(of >= APART for _, of in self._looks)
        if apart < APART or looks < FEWEST_APART or len(weights) < FEWEST_KNOWN:
            return None
        if max(each) - min(each) > SAME:
            return None
        return UnlikeSizes(looks, len(self._looks), min(sizes), max(sizes))


def _weights(record: StepRecord) -> list[float]:
    """Return the logarithm of a row's weight times the labelled rows, of each rank that has it."""
    scale = next((one for one in scalars(record, "loss_scale") if one > 0), 1.0)
    names = CLASS_WEIGHT, CLASS_ROWS, CLASS_LABELLED
    said = (
        math.prod(float(of.get(name, math.nan)) for name in names) for of in record.scalars.values()
    )
    return [math.log(one / scale) for one in said if 0 < one < math.inf]
