"""Whether some ranks have fewer gradients than any rank ever had, and which parameters lack them.

After the reduction such a gradient is the others' alone, and smaller: nothing in it is zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.coverage import NEVER
from ddpprobe.detectors.sites_of_kind import SitesOfKind, grown
from ddpprobe.detectors.subtrees import subtrees
from ddpprobe.records.step import ACTIVE, StepRecord


@dataclass(frozen=True, slots=True)
class LostGradients:
    """Gradients that some ranks have lost.

    Attributes:
        ranks: that lost them, ascending.
        parameters: how many of them the worst rank lacks.
        since: step.
        modules: largest ones that lack them as a whole; none where the merged rows do not tell.
    """

    ranks: tuple[int, ...]
    parameters: int
    since: int
    modules: tuple[str, ...]


class RankGradients:
    """Follows how many parameters have a local gradient that is not zero, on each rank.

    If nothing else is known, the next k numbers of a rank lie below all n of all ranks before them
    with a probability of one in C(n + k, k) (see `coverage.patience`). What all ranks lose together
    is another matter, and the new state from which they go on.

    Args:
        needed: by the numbers known [most + 1], those in a row below all of them that are a loss.
        samples: sampled steps without which there is none.
        steps: for which it must last.
    """

    def __init__(self, needed: NDArray[np.int64], samples: int, steps: int) -> None:
        self._needed, self._samples, self._steps = needed, samples, steps
        self._gradients = SitesOfKind("grad_local")
        self._begin(NEVER)

    def _begin(self, lowest: int) -> None:
        # Of all ranks and sampled steps, but of those that are below it now.
        self._lowest: int = lowest
        self._known, self._seen = 0, 0  # numbers, and sampled steps, that it is the lowest of
        self._since: dict[int, int] = {}  # rank that is below it -> first step,
        self._away: dict[int, int] = {}  # sampled steps in a row,
        self._least: dict[int, int] = {}  # and the lowest number at them
        self._told: set[int] = set()
        # Elements of each gradient that were not zero, of all ranks together: the fewest.
        self._usual = np.zeros(0)

    def update(self, record: StepRecord) -> LostGradients | None:
        """Take the next whole record; return what has been lost as of it."""
        said = {rank: scalars.get(ACTIVE, math.nan) for rank, scalars in record.scalars.items()}
        now = {rank: int(count) for rank, count in said.items() if 0 <= count < math.inf}
        alive = self._alive(record)
        if len(now) < 2 or len(now) != len(record.ranks):
            return None
        low = {rank for rank, count in now.items() if count < self._lowest}
        if len(low) == len(now):
            self._begin(min(now.values()))
            low = set()
        for rank in [r for r in self._since if r not in low]:
            # It came back: what it had meanwhile is as usual as anything.
            self._lowest = min(self._lowest, self._least.pop(rank))
            self._known += self._away.pop(rank)
            del self._since[rank]
        for rank in low:
            self._since.setdefault(rank, record.step)
            self._away[rank] = self._away.get(rank, 0) + 1
            self._least[rank] = min(now[rank], self._least.get(rank, now[rank]))
        self._known = min(self._known + len(now) - len(low), len(self._needed) - 1)
        if not low:
            self._seen += 1
            self._told.clear()
            self._usual = np.fmin(grown(self._usual, len(alive), np.inf), alive)
            return None
        return self._judge(record, now, low, alive)

    def _judge(
        self, record: StepRecord, now: dict[int, int], low: set[int], alive: NDArray[np.float64]
    ) -> LostGradients | None:
        lost = [
            rank
            for rank in sorted(low)
            if self._away[rank] >= self._needed[self._known]
            and record.step - self._since[rank] >= self._steps
        ]
        if self._seen < self._samples or set(lost) <= self._told:
            return None
        self._told.update(lost)
        usual = grown(self._usual, len(alive), np.nan)
        share = (len(now) - len(lost) / 2) / len(now)  # half of what the ranks had is gone, or more
        fqns = self._gradients.fqns
        away = (usual > 0) & (alive <= share * usual)
        names = [fqns[i] for i in np.flatnonzero(away)]
        modules = subtrees(names, [fqns[i] for i in np.flatnonzero(~away)])
        parameters = self._lowest - min(now[rank] for rank in lost)
        since = min(self._since[rank] for rank in lost)
        return LostGradients(tuple(lost), parameters, since, tuple(modules))

    def _alive(self, record: StepRecord) -> NDArray[np.float64]:
        """Return how many elements of each local gradient are not zero, of all ranks together."""
        found = self._gradients.read(record, "numel") - self._gradients.read(record, "zeros")
        return np.nan_to_num(found, nan=0.0)
