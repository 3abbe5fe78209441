"""What the merged steps so far say of the sites: who left its own past, and how far weights move.

Pure folds over merged records, in bounded memory: the live daemon and a replay come to the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.histogram import count_below
from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.paired_rows import paired_rows
from ddpprobe.records.site_stats import TensorRowsCache
from ddpprobe.records.step import OBSERVED, Site, StepRecord, derive

SLOTS = 10  # outliers that are told of
USUAL_STEPS = 16  # sampled steps over which the usual level of a site is averaged
LEAST_STEPS = 8  # of these without which no site has a usual level
_TABLES = 8  # of sites that are remembered
_WEIGHT = 2 / (USUAL_STEPS + 1)
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Outlier:
    """A site and how far its rms is from its usual level, in powers of ten; positive: above."""

    fqn: str
    kind: str
    score: float


@final
class Outliers:
    """The sites that are furthest from their own past, in the newest sampled step.

    The score is log10 of the rms less its exponential mean over the steps before (`USUAL_STEPS`).
    Zeros and what is not finite have no level; other series tell of them.
    """

    def __init__(self) -> None:
        self._layouts = TensorRowsCache()
        self._names: tuple[tuple[str, str], ...] = ()
        self._place: dict[tuple[str, str], int] = {}
        self._places = np.zeros(0, np.intp)  # of `_names`
        self._usual: Floats = np.zeros(0)
        self._steps: NDArray[np.int64] = np.zeros(0, np.int64)
        self._now: tuple[Outlier, ...] = ()

    def update(self, record: StepRecord) -> None:
        """Take the next merged record of a sampled step."""
        layout = self._layouts.of(record)
        if layout.names is not self._names:
            self._follow(layout.names)
        (rms,) = layout.numbers(record, ["rms"])
        usual, steps = self._usual[self._places], self._steps[self._places]
        known = np.isfinite(rms) & (rms > 0)
        away = np.log10(rms, where=known, out=usual.copy()) - usual
        score = np.where(steps >= LEAST_STEPS, away, 0.0)
        most = np.argsort(-np.abs(score), kind="stable")[:SLOTS]
        named = ((*layout.names[i], float(score[i])) for i in most if score[i])
        self._now = tuple(Outlier(fqn, kind, far) for fqn, kind, far in named)
        self._usual[self._places] = usual + np.where(steps == 0, 1.0, _WEIGHT) * away
        self._steps[self._places] = steps + known

    @property
    def now(self) -> tuple[Outlier, ...]:
        """The furthest first; at most `SLOTS`."""
        return self._now

    def _follow(self, names: tuple[tuple[str, str], ...]) -> None:
        """Find the places of what is observed now; what is not (an expert without rows) stays."""
        for name in names:
            self._place.setdefault(name, len(self._place))
        more = len(self._place) - len(self._usual)
        self._usual = np.append(self._usual, np.zeros(more))
        self._steps = np.append(self._steps, np.zeros(more, np.int64))
        self._places = np.array([self._place[name] for name in names], np.intp)
        self._names = names


@final
class UpdateRatios:
    """The change by an optimizer step over the weight, of each parameter at its last turn."""

    def __init__(self) -> None:
        self._known: dict[str, float] = {}

    def update(self, record: StepRecord) -> None:
        """Take the next merged record of a sampled step."""
        pairs = _pairs(record.sites)
        if not pairs.fqns or record.skipped:
            return
        rows = pairs.first, pairs.second
        weight, change = (derive("rms", record.counts[r], record.values[r]) for r in rows)
        seen = (record.counts[rows, OBSERVED] > 0).all(axis=0)
        for i in np.flatnonzero(seen & np.isfinite(change) & (weight > 0)):
            self._known[pairs.fqns[i]] = float(change[i] / weight[i])

    @property
    def now(self) -> dict[str, float]:
        """By the parameter's FQN, in the order in which they came first."""
        return dict(self._known)


@final
class Magnitudes:
    """How many elements of each site with a histogram were below which magnitude so far."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], NDArray[np.int64]] = {}

    def update(self, record: StepRecord) -> None:
        """Take the next merged record of a sampled step."""
        if len(record.binned):
            below = count_below(record.counts[record.binned], record.bins)
            for row, counts in zip(record.binned.tolist(), below, strict=True):
                site = record.sites[row]
                before = self._known.get((site.fqn, site.kind), 0)
                self._known[site.fqn, site.kind] = before + counts

    @property
    def now(self) -> dict[tuple[str, str], NDArray[np.int64]]:
        """By FQN and kind, in the order in which they came first: int64 [len(BORDERS) + 1].

        The last one is of all elements. Several tensors of one output are one site.
        """
        return dict(self._known)


def _is_whole(site: Site) -> bool:
    return site.placement not in ("partial", "unknown")  # one rank's part is no value of the tensor


_pairs = IdentityCache(lambda sites: paired_rows(sites, "param", "update", _is_whole), _TABLES)
