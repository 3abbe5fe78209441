"""Whether a rank reads batches again that it has just read, which it did not do before."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

LAST = 20  # looks that a batch is compared with, and that are judged; bounds the state
FRESH = 40  # looks before them at a batch that was not among the last ones
MOST_AGAIN = 0.1  # of these: as many looks at one that was


class Repeated(NamedTuple):
    """What came again, in the last `LAST` looks: at how many of them, how many batches, since."""

    looks: int
    batches: int
    since: int


class RepeatedBatches:
    """Follows the digests of one rank's input.

    Who goes round in a few batches from the first step on means to, or takes several steps on each:
    only one whose batches used to be new ones is judged. An epoch that is read in one order has
    more of them, or has shown no more before. A single batch is left to who counts how long it
    stays.

    All looks are at one interval: at another one a loader that goes round in one order shows
    other batches, and fewer.

    Args:
        looks: of the last ones, at a batch that was among those before it.
    """

    def __init__(self, looks: int) -> None:
        self._looks = looks
        self._step, self._gap = -1, 0  # of the last look, and steps since the one before
        self._begin()

    def _begin(self) -> None:
        self._last: deque[float] = deque(maxlen=LAST)
        self._judged: deque[tuple[int, float, bool]] = deque(maxlen=LAST)
        self._fresh = self._again = 0  # looks before those that are judged

    def look(self, step: int, digest: float) -> Repeated | None:
        """Take the input of a step; return what has come again, if it is too much."""
        gap, self._step = step - self._step, step
        if gap != self._gap:
            self._gap = gap
            self._begin()
        if len(self._judged) == LAST:
            _, _, again = self._judged[0]
            self._again += again
            self._fresh += not again
        self._judged.append((step, digest, digest in self._last))
        self._last.append(digest)
        if self._fresh < FRESH or self._again > MOST_AGAIN * self._fresh:
            return None
        known = [(at, which) for at, which, again in self._judged if again]
        batches = len({which for _, which in known})
        if batches < 2 or len(known) < self._looks:
            return None
        return Repeated(len(known), batches, known[0][0])
