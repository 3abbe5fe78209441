"""The weights that a resumed attempt begins with, beside those that attempts before it had."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.rank_scalars import largest
from ddpprobe.detectors.sites_of_kind import Floats, Mask, SitesOfKind, grown
from ddpprobe.records.step import LEARNING_RATE, StepRecord

_LOOKS = 4  # newest ones that are kept of a parameter: bounds the state
_ENOUGH_LOOKS = 3  # before the attempt: of fewer nobody knows how far it moves
_TOGETHER = 2  # of the numbers below must tell it: one alone may leap, but for the norm
_COLUMNS = ("sum", "norm", "min", "max")
_NORM = _COLUMNS.index("norm")
_FEWEST = 64  # elements: of few, chance alone moves all numbers far
# By this, as a share of each number (of the sum: of the norm), another tensor is another at least:
# a checkpoint may hold the weights in bfloat16, which rounds each to 2^-8.
_ROUNDING = np.array([4e-3, 1e-3, 4e-3, 4e-3])


@dataclass(frozen=True, slots=True)
class Move:
    """How far a parameter is from what it was before the attempt.

    Attributes:
        times: as far as it ever moved between two looks; infinite if it never moved.
        before, now: steps of the two looks.
        norm_before, norm: at these.
    """

    times: float
    before: int
    now: int
    norm_before: float
    norm: float


@dataclass(frozen=True, slots=True)
class OtherWeights:
    """Parameters that do not go on from what they were: FQNs in the order of the model.

    `compared`: how many parameters; `first`: how far the first of these is.
    """

    fqns: list[str]
    compared: int
    first: Move


class ResumedWeights:
    """Compares each parameter's first looks of an attempt with the nearest look before.

    Training moves a weight by little from step to step, so its sum, norm, least and largest element
    go on from what they were. Those of another tensor do not. How far one goes is taken from the
    moves between looks, of the attempts before and of this one: the larger counts, and further at a
    learning rate that is higher than it was.

    Args:
        times: so many times as far the norm, or two of the four numbers, must have moved.

    Of 180 resumes of three small nets (Adam, SGD with momentum; looks at each step, each tenth, and
    in turns; from the last step and from 13 before) a sound one came to 2.0, one without the
    optimizer's state to 2.3; one layer that began anew to 4 to 46 where each step was looked at.
    """

    def __init__(self, times: float) -> None:
        self._times = times
        self._weights = SitesOfKind("param")
        self._before, self._now = _Looks(), _Looks()
        self._rate = self._rate_before = np.nan  # the learning rate at the last looks
        self._faster = 1.0  # times the one before the attempt, at most

    def begin(self) -> None:
        """Begin an attempt."""
        self._before.extend(self._now)
        self._now, self._rate_before, self._faster = _Looks(), self._rate, 1.0

    def read(self, record: StepRecord) -> OtherWeights | None:
        """Take a sampled step; return what is other, of what has its second look in it."""
        numel = self._weights.read(record, "numel")
        numbers = np.stack([numel, *(self._weights.read(record, name) for name in _COLUMNS)], 1)
        seen = np.asarray(np.isfinite(numbers).all(axis=1))
        self._now.push(seen, record.step, numbers)
        self._rate = largest(record, LEARNING_RATE)
        if self._rate > self._faster * self._rate_before > 0:  # NaN: not known
            self._faster = self._rate / self._rate_before
        if not self._before.sites:
            return None
        second = np.flatnonzero(seen & (self._now.looks(len(seen)) == 2)).tolist()
        moved = {place: found for place in second if (found := self._compare(place)) is not None}
        other = {place: move for place, move in moved.items() if move.times >= self._times}
        if not other:
            return None
        fqns = [self._weights.fqns[place] for place in other]
        return OtherWeights(fqns, len(moved), next(iter(other.values())))

    def _compare(self, place: int) -> Move | None:
        """Return how far a parameter is from what it was; None: that is not known."""
        steps, before = self._before.of(place)
        (first, last), now = self._now.of(place)
        same = len(steps) >= _ENOUGH_LOOKS and (before[:, 0] == now[0, 0]).all()
        if not same or now[0, 0] < _FEWEST:  # hardly ever seen, or of another shape
            return None
        nearest = int(np.argmin(np.abs(steps - first)))
        # Both may have gone on from a checkpoint that lies as far back as looks do from each other.
        away = abs(first - steps[nearest]) + np.abs(np.diff(steps)).max()
        usual = np.abs(np.diff(before[:, 1:], axis=0)) / np.maximum(np.diff(steps), 1)[:, None]
        after = np.abs(now[1, 1:] - now[0, 1:]) / max(last - first, 1)
        norm, low, high = np.abs(before[nearest, 2:])
        rounding = _ROUNDING * np.array([norm, norm, low, high])
        moved = np.abs(now[0, 1:] - before[nearest, 1:])
        reach = away * np.maximum(usual.max(axis=0), after) + rounding
        times = np.divide(moved, reach, out=np.where(moved > 0, np.inf, 0.0), where=reach > 0)
        far = max(times[_NORM], np.sort(times)[-_TOGETHER])
        return Move(
            float(far / self._faster), int(steps[nearest]), int(first),
            float(before[nearest, 2]), float(now[0, 2]),
        )  # fmt: skip


class _Looks:
    """The newest looks at each parameter: steps [n, looks], numbers [n, looks, 5]; oldest first."""

    def __init__(self) -> None:
        self._steps = np.zeros((0, _LOOKS))
        self._numbers = np.zeros((0, _LOOKS, 1 + len(_COLUMNS)))
        self._count = np.zeros(0, np.int64)

    @property
    def sites(self) -> int:
        """How many parameters it knows."""
        return len(self._count)

    def push(self, seen: Mask, step: int, numbers: Floats) -> None:
        """Remember a look at some of the parameters [n]."""
        self._grow(len(seen))
        self._steps[seen, :-1] = self._steps[seen, 1:]
        self._numbers[seen, :-1] = self._numbers[seen, 1:]
        self._steps[seen, -1], self._numbers[seen, -1] = step, numbers[seen]
        self._count[seen] += 1

    def extend(self, later: _Looks) -> None:
        """Remember what came later, in place of as many looks before."""
        self._grow(later.sites)
        for place in range(later.sites):
            steps, numbers = later.of(place)
            new = len(steps)
            if new:
                self._steps[place] = np.concatenate((self._steps[place], steps))[-_LOOKS:]
                joined = np.concatenate((self._numbers[place], numbers))
                self._numbers[place] = joined[-_LOOKS:]
                self._count[place] += new

    def looks(self, sites: int) -> NDArray[np.int64]:
        """Return how many looks there were at each [sites]."""
        return grown(self._count, sites, 0)[:sites]

    def of(self, place: int) -> tuple[Floats, Floats]:
        """Return the steps and numbers of those that are kept; none of a parameter not known."""
        if place >= self.sites:
            return np.zeros(0), np.zeros((0, 1 + len(_COLUMNS)))
        known = min(int(self._count[place]), _LOOKS)
        return self._steps[place, _LOOKS - known :], self._numbers[place, _LOOKS - known :]

    def _grow(self, sites: int) -> None:
        self._steps = grown(self._steps, max(sites, self.sites), 0)
        self._numbers = grown(self._numbers, max(sites, self.sites), 0)
        self._count = grown(self._count, max(sites, self.sites), 0)
