"""Which rank has been the first, or the last, of all for so long that it is no chance."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median


class RankOrder:
    """Follows who has the largest number, and who the smallest, and how far it is to the next.

    Where ranks draw from the same data, one of n is the largest so many times in a row by chance
    once in n to the power of them.

    Args:
        steps: in a row.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._ends: dict[int, tuple[int, deque[float]]] = {}  # 1: largest, -1: smallest -> rank

    def look(self, logs: Mapping[int, float]) -> tuple[int, float] | None:
        """Take the numbers of a step, by rank; return the rank that stands apart, and how far.

        That is the median of how far it was from the next one: below 0 if it is the smallest. Of
        two ranks it is the larger one.
        """
        if len(logs) < 2:
            return None
        ordered = sorted(logs, key=lambda rank: (logs[rank], rank))
        found = [
            self._follow(1, ordered[-1], logs[ordered[-1]] - logs[ordered[-2]]),
            self._follow(-1, ordered[0], logs[ordered[1]] - logs[ordered[0]]),
        ]
        apart = [each for each in found if each is not None]
        return max(apart, key=lambda each: abs(each[1]), default=None)

    def _follow(self, side: int, rank: int, gap: float) -> tuple[int, float] | None:
        before, gaps = self._ends.get(side, (rank, deque[float](maxlen=self._steps)))
        if rank != before or gap <= 0:
            gaps.clear()
        if gap > 0:
            gaps.append(gap)
        self._ends[side] = rank, gaps
        return (rank, side * median(gaps)) if len(gaps) == self._steps else None
