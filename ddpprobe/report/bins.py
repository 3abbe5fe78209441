"""Histograms of the named sites, merged over steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.histogram import BINS
from ddpprobe.records.step import COUNTS, Counts, Site, StepRecord

MOST_SITES = 24  # the first in execution order


@final
@dataclass(slots=True)
class SiteBins:
    """Histograms of the first n named sites: `bins` int64 [n, BINS], `counts` as of a record.

    `absent` is the most ranks that one of the steps lacks.
    """

    bins: NDArray[np.int64]
    counts: Counts
    absent: int = 0

    @classmethod
    def of(cls, record: StepRecord, sites: dict[Site, int]) -> SiteBins:
        """Return a record's histograms at their places in `sites`, which may grow."""
        rows = record.binned.tolist()
        for row in rows:
            if len(sites) < MOST_SITES:
                sites.setdefault(record.sites[row], len(sites))
        made = cls(*_empty(len(sites)), len(record.missing))
        for row, bins in zip(rows, record.bins, strict=True):
            place = sites.get(record.sites[row])
            if place is not None:
                made.bins[place] += bins
                made.counts[place] += record.counts[row]
        return made

    def absorb(self, later: SiteBins) -> None:
        """Add another step's histograms to these."""
        n = max(len(self.bins), len(later.bins))
        (bins, counts), (more, rest) = self.padded(n), later.padded(n)
        self.bins, self.counts = bins + more, counts + rest
        self.absent = max(self.absent, later.absent)

    def padded(self, n: int) -> tuple[NDArray[np.int64], Counts]:
        """Return what there is of n sites; of those that were not known yet nothing."""
        bins, counts = _empty(n - len(self.bins))
        return np.concatenate((self.bins, bins)), np.concatenate((self.counts, counts))


def _empty(n: int) -> tuple[NDArray[np.int64], Counts]:
    return np.zeros((n, BINS), np.int64), np.zeros((n, len(COUNTS)), np.int64)
