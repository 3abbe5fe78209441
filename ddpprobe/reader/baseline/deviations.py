"""Where a run is outside of what other runs of the same job did.

Of each quantity (a statistic of a site, a scalar) the levels that the others had in a stretch of
steps are a range, which takes in those of the stretches beside it: runs get to a place sooner or
later. A run may be outside of it by the largest of

- its floor, which is not worth a word (`_floors`),
- 2 deviations over the looks of a stretch, the median of the others: more than 5 standard errors of
  the mean of 8,
- 3 + 6 / n deviations between n others, as few of them do not say how far they are apart: those of
  the quantity, or of all of its kind if these are larger (root mean square, in units of their
  floors), times `sqrt(1 + 1 / n)`, as one more run varies around the mean of n.

What is farther out, on the same side, in two stretches in a row, was outside; at once what is not
finite, if all the others are. What is above zero is compared by its logarithm. Settings on which
the others agree, step by step, may not differ. How often that is right: docs/baseline.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

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
ENOUGH = LOOKS // 2  # looks of a stretch, of each run
FACTOR = 1.6  # of what is above zero
_OVER_STEPS = 2.0  # deviations
_OVER_RUNS, _OF_FEW = 3.0, 6.0
_FIXED = {NONFINITE: 0.0, ZEROS: 0.25, SHIFT: 0.4}
_LINEAR = {*_FIXED, *SECONDS, RANGE, INPUT_MEAN}  # also if all are above zero
_OF_A_STEP = 0.5
_FEW = 4.0  # standard errors of the rms of few elements
_SAME, _ANOTHER = 1e-9, 1e-3  # relative: settings that agree, and that do not
_NOTHING = 1e-3  # of the rms that sites of a kind have: less than that is as good as zero


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far a quantity was outside of what the others did.

    Attributes:
        quantity: of what.
        first, by: the first step and the newest sampled one of the stretch since which it was.
        last: the newest sampled step through which it was.
        lasts: until the end of what is compared.
        farthest: the first step of the stretch in which it was farthest out.
        value: its level there, of what is above zero the geometric mean; NaN if it was no finite
            number.
        low, high: those of the others there.
        excess: how far out it was, divided by how far it may be: above 1 it was outside. Infinite
            where it may not be outside at all.
    """

    quantity: Quantity
    first: int
    by: int
    last: int
    lasts: bool
    farthest: int
    value: float
    low: float
    high: float
    excess: float


@dataclass(frozen=True, slots=True)
class Deviations:
    """A run beside others.

    Attributes:
        found: of each quantity that all of them have, the farthest outside first.
        first, last: the sampled steps from and through which they are compared; -1: none are.
        looks: how many sampled steps of the run that is.
        sure: the last step at which something may have begun that is seen for certain.
        stretches: how many stretches of steps all of them hold; in less than `STRETCHES` nothing is
            found.
        resplit: the batch is split over other ranks or micro-batches; what depends on it is left
            out.
        missing: what all others have, and the run has not.
        added: what the run has, and none of the others.
        lacking: of each of the others, how many quantities of the run it has not.
        not_finite: of each of the others the first step of a stretch in which it is not finite,
            while another one is; None: there is none.
    """

    found: list[Deviation]
    first: int
    last: int
    looks: int
    sure: int
    stretches: int
    resplit: bool
    missing: list[Quantity]
    added: list[Quantity]
    lacking: list[int]
    not_finite: list[int | None]

    @property
    def outside(self) -> list[Deviation]:
        """What was outside: the earliest first, of these what was set, then the farthest."""
        found = (deviation for deviation in self.found if deviation.excess > 1)
        return sorted(found, key=lambda d: (d.first, not d.quantity.is_setting, -d.excess))


class _Stretch(NamedTuple):
    """Stretches that are compared as one: the last one may have too few looks."""

    first: int  # step
    newest: int  # sampled step
    of: list[int]


def deviations(run: Levels, others: Sequence[Levels]) -> Deviations:
    """Compare the levels of a run with those of others, whose stretches are the run's."""
    everyone = (run, *others)
    is_resplit = any(levels.splits != run.splits for levels in others)
    named = [
        {
            key: quantity
            for key, quantity in levels.quantities.items()
            if not (is_resplit and quantity.is_by_split)
        }
        for levels in everyone
    ]
    keys = [key for key in named[0] if all(key in names for names in named)]
    held = _held(run, others)
    found: list[Deviation] = []
    not_finite: list[int | None] = [None for _ in others]
    if len(held) >= STRETCHES:
        kept = np.stack([_joined(levels.table(keys), held) for levels in everyone], axis=1)
        compared = _Compared([run.quantities[key] for key in keys], kept)
        found += compared.deviations(held)
        not_finite = compared.not_finite(held)
    # How far the ranks are apart is not known of one rank, and nothing that is missing.
    own, *theirs = (
        {key for key, quantity in names.items() if quantity.stat != RANGE} for names in named
    )
    return Deviations(
        found=sorted(found, key=lambda d: -d.excess),
        first=held[0].first if held else -1,
        last=held[-1].newest if held else -1,
        looks=sum(run.looks(at) for stretch in held for at in stretch.of),
        sure=held[-STRETCHES].first if len(held) >= STRETCHES else -1,
        stretches=len(held),
        resplit=is_resplit,
        missing=[named[1][key] for key in sorted(set.intersection(*theirs) - own)],
        added=[named[0][key] for key in sorted(own - set[tuple[str, ...]]().union(*theirs))],
        lacking=[len(own - names) for names in theirs],
        not_finite=not_finite,
    )


def _held(run: Levels, others: Sequence[Levels]) -> list[_Stretch]:
    """Return the stretches of which all runs hold enough, the last with what is left after it."""
    held: list[_Stretch] = []
    for at, first in enumerate(run.edges):
        fewest = min(levels.looks(at) for levels in (run, *others))
        if fewest >= ENOUGH:
            held.append(_Stretch(first, run.newest(at), [at]))
        elif held and fewest and at == len(run.edges) - 1 and held[-1].of == [at - 1]:
            held[-1] = held[-1]._replace(newest=run.newest(at), of=[at - 1, at])
    return held


def _joined(table: Floats, held: Sequence[_Stretch]) -> Floats:
    """Return what is kept [8, quantities, stretches] of these stretches."""
    out = np.stack([table[..., stretch.of].sum(axis=-1) for stretch in held], axis=-1)
    elements = [table[ELEMENTS][..., stretch.of].max(axis=-1) for stretch in held]
    out[ELEMENTS] = np.stack(elements, axis=-1)
    return out


@final
class _Compared:
    """Levels of some quantities [quantities, stretches]: the run's own, and the others' range.

    Args:
        quantities: what they are of.
        kept: what is kept of them [8, runs, quantities, stretches], the run's first.
    """

    def __init__(self, quantities: Sequence[Quantity], kept: Floats) -> None:
        self._quantities, self._rows_of_kind = quantities, _by_kind(quantities)
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
        of_scalars = np.array([quantity.site is None for quantity in quantities], bool)[:, None]
        shares = np.array([quantity.stat == NONFINITE for quantity in quantities], bool)[:, None]
        bad = (of_scalars & (kept[BAD] > 0)) | (shares & (kept[SUM] > 0))
        self._theirs_bad = bad[1:]
        highest = np.nan_to_num(self._high).max(axis=1, keepdims=True)
        self._at_once: Mask = np.where(
            shares, self._own > highest, bad[0] & ~bad[1:].any(axis=(0, 2))[:, None]
        )

    def deviations(self, held: Sequence[_Stretch]) -> Iterator[Deviation]:
        """Yield how far each quantity was outside."""
        excess = self._excess()
        outside = excess > 1
        for i, at in enumerate(excess.argmax(axis=1).tolist()):
            first = last = at
            while first > 0 and outside[i, first - 1]:
                first -= 1
            while last + 1 < len(held) and outside[i, last + 1]:
                last += 1
            levels = (float(x[i, at]) for x in (self._own, self._low, self._high))
            value, low, high = (10**x if self._logs[i] else x for x in levels)
            of_a_scalar = self._quantities[i].site is None
            yield Deviation(
                quantity=self._quantities[i],
                first=held[first].first, by=held[first].newest, last=held[last].newest,
                lasts=last + 1 == len(held), farthest=held[at].first,
                value=math.nan if of_a_scalar and self._at_once[i, at] else value,
                low=low, high=high, excess=float(excess[i, at]),
            )  # fmt: skip

    def not_finite(self, held: Sequence[_Stretch]) -> list[int | None]:
        """Return of each of the others where it is first not finite, while another one is."""
        some = self._theirs_bad & ~self._theirs_bad.all(axis=0)
        when = some.any(axis=1)  # [others, stretches]
        return [held[int(at.argmax())].first if at.any() else None for at in when]

    def _excess(self) -> Floats:
        """Return how far each is outside in two stretches in a row; of what counts at once, inf."""
        with np.errstate(divide="ignore", invalid="ignore"):
            out = np.fmax(self._own - self._high, 0) - np.fmax(self._low - self._own, 0)
            signed = np.nan_to_num(out / self._allowed(), nan=0.0, posinf=np.inf, neginf=-np.inf)
        self._hold_to_settings(signed)
        far = np.abs(signed)
        same = np.sign(signed[:, 1:]) == np.sign(signed[:, :-1])
        pairs = np.where(same, np.minimum(far[:, 1:], far[:, :-1]), 0.0)
        none = np.zeros((len(far), 1))
        lasting: Floats = np.maximum(np.hstack((pairs, none)), np.hstack((none, pairs)))
        lasting[self._at_once] = math.inf
        return lasting

    def _hold_to_settings(self, signed: Floats) -> None:
        """Mark where a setting is another one than that of all others, if these agree."""
        for i, quantity in enumerate(self._quantities):
            if not quantity.is_setting:
                continue
            own, theirs = self._own[i], self._theirs[:, i]
            if self._logs[i]:
                own, theirs = 10.0**own, 10.0**theirs
            size = np.maximum(np.abs(theirs).max(axis=0), np.abs(own))
            if (np.ptp(theirs, axis=0) <= _SAME * size).all():
                apart = own - theirs[0]
                is_another = np.abs(apart) > _ANOTHER * size
                signed[i, is_another] = np.copysign(math.inf, apart[is_another])

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
        for rows in self._rows_of_kind.values():
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
        for (_, _, stat), rows in self._rows_of_kind.items():
            if stat == RMS:
                out[rows] = _NOTHING * np.median(self._largest[rows])
        return out


def _by_kind(quantities: Sequence[Quantity]) -> Mapping[tuple[str, str, str], list[int]]:
    """Return the places of each kind of site, and of scalars, by statistic."""
    found = defaultdict(list)
    for i, (site, _, _, stat) in enumerate(quantities):
        leaf = site.leaf if site and site.kind == "optim_state" else ""
        found[site.kind if site else "", leaf, stat].append(i)
    return found


def _widened(levels: Floats, extreme: np.ufunc) -> Floats:
    """Return the lowest or highest level of each stretch and of those beside it."""
    out = levels.copy()
    out[:, 1:] = extreme(out[:, 1:], levels[:, :-1])
    out[:, :-1] = extreme(out[:, :-1], levels[:, 1:])
    return out
