"""Rows of statistics of all sites, merged over steps, and over neighbouring sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import (
    OBSERVED,
    Counts,
    Site,
    StepRecord,
    Values,
    derive,
    empty_rows,
    merge_counts,
    merge_runs,
    merge_values,
)

Floats = NDArray[np.float64]
_TABLES = 64


@final
class RunSites:
    """All sites of a run in order of first appearance, which is the order of execution."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self._index: dict[tuple[str, str, str], int] = {}
        self._places = IdentityCache(self._find, _TABLES)

    def places(self, sites: tuple[Site, ...]) -> NDArray[np.intp]:
        """Return the place of each row of a record."""
        return self._places(sites)

    def _find(self, sites: tuple[Site, ...]) -> NDArray[np.intp]:
        for site in sites:
            if site.key not in self._index:
                self._index[site.key] = len(self.sites)
                self.sites.append(site)
        return np.array([self._index[site.key] for site in sites], np.intp)


@final
@dataclass(slots=True)
class SiteRows:
    """Statistics of the first n sites of a table: counts int64 [n, 7], values float64 [n, 4].

    A site that a step said nothing of has the merge's identity: `numel` and `observed` are 0.
    `absent` is the most ranks that one of the steps lacks.
    """

    counts: Counts
    values: Values
    absent: int = 0

    @classmethod
    def none(cls) -> SiteRows:
        """Return what nobody said anything of."""
        return cls(*empty_rows(0))

    @classmethod
    def of(cls, record: StepRecord, table: RunSites) -> SiteRows:
        """Return a record's rows at their places of the table, which may grow."""
        places = table.places(record.sites)
        rows = cls(*empty_rows(len(table.sites)), absent=len(record.missing))
        if len(set(places.tolist())) == len(places):
            rows.counts[places], rows.values[places] = record.counts, record.values
            return rows
        for place, counts, values in zip(places, record.counts, record.values, strict=True):
            rows.counts[place] = merge_counts(rows.counts[place], counts)  # a site that came twice
            rows.values[place] = merge_values(rows.values[place], values)
        return rows

    def absorb(self, later: SiteRows) -> None:
        """Merge another step's rows into these."""
        counts, values = later.padded(len(self.counts))
        mine = self.padded(len(counts))
        self.counts = merge_counts(mine[0], counts)
        self.values = merge_values(mine[1], values)
        self.absent = max(self.absent, later.absent)

    def padded(self, n: int) -> tuple[Counts, Values]:
        """Return the rows of at least n sites; those that were not known yet are empty."""
        more = n - len(self.counts)
        if more <= 0:
            return self.counts, self.values
        counts, values = empty_rows(more)
        return np.concatenate((self.counts, counts)), np.concatenate((self.values, values))


def stat_of(rows: Sequence[SiteRows], groups: Sequence[Sequence[int]], stat: str) -> Floats:
    """Return one statistic [groups, rows]; NaN where nothing was observed, which is not 0.

    Args:
        rows: one per column.
        groups: places of the sites that are merged into each line.
        stat: name out of `records.STATS`.
    """
    most = max((place for group in groups for place in group), default=-1) + 1
    starts = np.cumsum([0, *(len(group) for group in groups)])[:-1]
    order = np.array([place for group in groups for place in group], np.intp)
    out = np.full((len(groups), len(rows)), np.nan)
    for column, row in enumerate(rows if len(order) else ()):
        counts, values = row.padded(most)
        counts, values = merge_runs(counts[order], values[order], starts)
        found = derive(stat, counts, values)
        out[:, column] = np.where(counts[:, OBSERVED] > 0, found, np.nan)
    return out
