"""Where a run is outside of what other runs of the same job did.

Of each quantity (a statistic of a site, a scalar) the levels that the others had in a stretch of
steps are a range, which takes in those of the stretches beside it: runs get to a place sooner or
later. A run may be outside of it by the largest of

- its floor, which is not worth a word (`_floors`),
- 4 deviations over the looks of a stretch, the median of the others,
- 3 + 6 / n deviations between n others, as few of them do not say how far they are apart: those of
  the quantity, or of all of its kind if these are larger (root mean square, in units of their
  floors), times `sqrt(1 + 1 / n)`, as one more run varies around the mean of n.

What is farther out, on the same side, in two stretches in a row, was outside. What is above zero is
compared by its logarithm. The figures are from 210 comparisons of a healthy run of 300 steps, every
tenth of them sampled, with two of other seeds: in 10 of them anything was outside.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.reader.baseline.levels import (
    BAD,
    COUNT,
    ELEMENTS,
    LOG_SQUARES,
    LOG_SUM,
    LOOKS,
    MEAN,
    NONFINITE,
    POSITIVE,
    RANGE,
    RMS,
    SECONDS,
    SHIFT,
    SQUARES,
    SUM,
    ZEROS,
    Levels,
    Quantity,
)
from ddpprobe.records.step import INPUT_MEAN, INPUT_RMS

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
STRETCHES = 2  # what is outside in one alone is no level
_ENOUGH = LOOKS // 2  # looks of a stretch, of each run
FACTOR = 1.6  # of what is above zero
_OVER_STEPS = 4.0  # deviations
_OVER_RUNS, _OF_FEW = 3.0, 6.0
_FIXED = {NONFINITE: 0.0, ZEROS: 0.25, SHIFT: 0.4}
_LINEAR = {*_FIXED, *SECONDS, RANGE, INPUT_MEAN}  # also if all are above zero
_OF_A_STEP = 0.5
_FEW = 4.0  # standard errors of the rms of few elements
_NOTHING = 1e-3  # of the rms that sites of a kind have: less than that is as good as zero


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a quantity was outside of what the others did.

    Attributes:
        quantity: of what.
        first, last: the steps from and through which it was outside.
        lasts: it was until the last step that is compared.
        value: its level where it was farthest out; of what is above zero the geometric mean.
        low, high: those of the others there.
        excess: how far out it was, divided by how far it may be: above 1 it was outside. Infinite
            if it was no finite number, and theirs all were.
    """

    quantity: Quantity
    first: int
    last: int
    lasts: bool
    value: float
    low: float
    high: float
    excess: float


@dataclass(frozen=True, slots=True)
class Deviations:
    """A run beside others.

    Attributes:
        found: of each quantity that all of them have, the farthest outside first.
        first, last: the steps from and through which they are compared.
        stretches: how many stretches of steps all of them hold; in less than `STRETCHES` nothing is
            found.
        resplit: the batch is split over other ranks or micro-batches; what depends on it is left
            out.
        missing: what all others have, and the run has not.
        added: what the run has, and none of the others.
    """

    found: list[Deviation]
    first: int
    last: int
    stretches: int
    resplit: bool
    missing: list[Quantity]
    added: list[Quantity]

    @property
    def outside(self) -> list[Deviation]:
        """What was outside: the earliest first, and of these the farthest."""
        return sorted((d for d in self.found if d.excess > 1), key=lambda d: (d.first, -d.excess))


def deviations(run: Levels, others: Sequence[Levels]) -> Deviations:
    """Compare the levels of a run with those of others, whose stretches are the run's."""
    everyone = (run, *others)
    is_resplit = any(levels.splits != run.splits for levels in others)
    named = [
        {
            key
            for key, quantity in levels.quantities.items()
            if not (is_resplit and quantity.is_by_split)
        }
        for levels in everyone
    ]
    keys = [key for key in run.quantities if all(key in names for names in named)]
    through = [*(edge - 1 for edge in run.edges[1:]), run.last]
    stretches = list(zip(run.edges, through, strict=False))  # none of a run without records
    held = [
        at
        for at in range(len(stretches))
        if all(levels.looks(at) >= _ENOUGH for levels in everyone)
    ]
    found: list[Deviation] = []
    if len(held) >= STRETCHES:
        kept = np.stack([levels.table(keys)[..., held] for levels in everyone], axis=1)
        compared = _Compared([run.quantities[key] for key in keys], kept)
        found += compared.deviations([stretches[at] for at in held])
    known, by_all = set.union(*named[1:]), set.intersection(*named[1:])
    return Deviations(
        found=sorted(found, key=lambda d: -d.excess),
        first=stretches[held[0]][0] if held else -1,
        last=min((*(stretches[at][1] for at in held[-1:]), *(x.last for x in everyone))),
        stretches=len(held),
        resplit=is_resplit,
        missing=[others[0].quantities[key] for key in sorted(by_all - named[0])],
        added=[run.quantities[key] for key in sorted(named[0] - known)],
    )


@final
class _Compared:
    """Levels of some quantities [quantities, stretches]: the run's own, and the others' range.

    Args:
        quantities: what they are of.
        kept: what is kept of them [8, runs, quantities, stretches], the run's first.
    """

    def __init__(self, quantities: Sequence[Quantity], kept: Floats) -> None:
        self._quantities = quantities
        self._elements = kept[ELEMENTS].max(axis=(0, 2), initial=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            theirs = np.nan_to_num(np.abs(kept[SUM, 1:] / kept[COUNT, 1:]))
            self._largest = theirs.max(axis=(0, 2), initial=0.0)
            self._nothing = self._next_to_nothing()
            linear = np.array([q.stat in _LINEAR or q.scalar in _LINEAR for q in quantities], bool)
            positive = (kept[POSITIVE] == kept[COUNT]).all(axis=(0, 2))
            self._logs: Mask = positive & ~linear & (self._largest > self._nothing)
            which = self._logs[:, None]
            means = np.where(which, kept[LOG_SUM], kept[SUM]) / kept[COUNT]
            squares = np.where(which, kept[LOG_SQUARES], kept[SQUARES]) / kept[COUNT]
            spread = np.sqrt(np.maximum(squares - means**2, 0.0))
        self._spread = np.median(np.nan_to_num(spread[1:]), axis=0)
        self._own, self._theirs = means[0], means[1:]
        self._low = _widened(np.fmin.reduce(self._theirs), np.fmin)
        self._high = _widened(np.fmax.reduce(self._theirs), np.fmax)
        self._bad: Mask = (kept[BAD, 0] > 0) & (kept[BAD, 1:].sum(axis=0) == 0)

    def deviations(self, stretches: Sequence[tuple[int, int]]) -> Iterator[Deviation]:
        """Yield how far each quantity was outside; stretches are from and through these steps."""
        excess = self._excess()
        outside = excess > 1
        for i, at in enumerate(excess.argmax(axis=1).tolist()):
            first = last = at
            while first > 0 and outside[i, first - 1]:
                first -= 1
            while last + 1 < len(stretches) and outside[i, last + 1]:
                last += 1
            levels = (float(x[i, at]) for x in (self._own, self._low, self._high))
            value, low, high = (10**x if self._logs[i] else x for x in levels)
            yield Deviation(
                quantity=self._quantities[i],
                first=stretches[first][0], last=stretches[last][1],
                lasts=last + 1 == len(stretches),
                value=value, low=low, high=high, excess=float(excess[i, at]),
            )  # fmt: skip

    def _excess(self) -> Floats:
        """Return how far each is outside in two stretches in a row."""
        with np.errstate(divide="ignore", invalid="ignore"):
            out = np.fmax(self._own - self._high, 0) - np.fmax(self._low - self._own, 0)
            signed = np.nan_to_num(out / self._allowed(), nan=0.0, posinf=np.inf, neginf=-np.inf)
        far = np.abs(signed)
        same = np.sign(signed[:, 1:]) == np.sign(signed[:, :-1])
        pairs = np.where(same, np.minimum(far[:, 1:], far[:, :-1]), 0.0)
        none = np.zeros((len(far), 1))
        lasting: Floats = np.maximum(np.hstack((pairs, none)), np.hstack((none, pairs)))
        lasting[self._bad] = math.inf
        return lasting

    def _allowed(self) -> Floats:
        """Return how far outside each may be."""
        floors = np.broadcast_to(self._floors()[:, None], self._low.shape)
        has = ~np.isnan(self._theirs)
        n = np.maximum(has.sum(axis=0), 1)
        mean = np.where(has, self._theirs, 0.0).sum(axis=0) / n
        squares = np.where(has, self._theirs - mean, 0.0) ** 2
        units = np.where(floors > 0, floors, 1.0)
        own = squares.sum(axis=0) / np.maximum(n - 1, 1) / units**2
        of_kind = np.zeros_like(own)
        for rows in self._kinds().values():
            of_kind[rows] = own[rows].mean(axis=0)
        apart = units * np.sqrt(np.maximum(own, of_kind) * (1 + 1 / n))
        allowed = np.maximum(floors, (_OVER_RUNS + _OF_FEW / n) * apart)
        out: Floats = np.maximum(allowed, _OVER_STEPS * self._spread)
        return out

    def _floors(self) -> Floats:
        """Return what is not worth a word.

        Of what is above zero a factor of 1.6; of an rms of few elements 4 of its standard errors
        more, which are `1 / sqrt(2 n)` of it. Of a share of zeros 0.25, of a mean 0.4 of the rms,
        of a time half a step, of a share that is not finite nothing. Of other numbers that factor,
        of the largest that there was; of a range over ranks, and of the input's mean, of what these
        vary around.
        """
        means = {
            quantity.scalar: size
            for quantity, size in zip(self._quantities, self._largest, strict=True)
            if quantity.stat == MEAN
        }
        step = sum(size for name, size in means.items() if name in SECONDS)
        floors = np.zeros(len(self._quantities))
        for i, (_, _, scalar, stat) in enumerate(self._quantities):
            few = _FEW / math.sqrt(2 * self._elements[i]) if self._elements[i] else 0.0
            if self._logs[i]:
                floors[i] = math.log10(FACTOR + few)
            elif stat in _FIXED:
                floors[i] = _FIXED[stat] + (few if stat == SHIFT else 0.0)
            elif scalar in SECONDS:
                floors[i] = _OF_A_STEP * step
            else:
                around = INPUT_RMS if scalar == INPUT_MEAN else scalar
                size = means.get(around, self._largest[i])
                floors[i] = max((FACTOR - 1) * size, self._nothing[i])
        return floors

    def _next_to_nothing(self) -> Floats:
        """Return the rms that is as good as zero, by those of other sites of its kind."""
        out = np.zeros(len(self._quantities))
        for (_, _, stat), rows in self._kinds().items():
            if stat == RMS:
                out[rows] = _NOTHING * np.median(self._largest[rows])
        return out

    def _kinds(self) -> Mapping[tuple[str, str, str], list[int]]:
        """Return the rows of each kind of site, and of scalars, by statistic."""
        found = defaultdict(list)
        for i, (site, _, _, stat) in enumerate(self._quantities):
            leaf = site.leaf if site and site.kind == "optim_state" else ""
            found[site.kind if site else "", leaf, stat].append(i)
        return found


def _widened(levels: Floats, extreme: np.ufunc) -> Floats:
    """Return the lowest or highest level of each stretch and of those beside it."""
    out = levels.copy()
    out[:, 1:] = extreme(out[:, 1:], levels[:, :-1])
    out[:, :-1] = extreme(out[:, :-1], levels[:, 1:])
    return out
