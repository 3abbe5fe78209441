"""The statistics of a record, each computed once for all detectors that ask for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import NONFINITE, OBSERVED, Floats, Site, StepRecord, derive

Mask = NDArray[np.bool_]
Rows = NDArray[np.intp]

NO_ROWS: Rows = np.zeros(0, np.intp)
_TABLES = 8  # of sites: of the last attempts, and of steps that lack ranks
_KNOWN = ("local", "sharded", "replicated")  # the row is the whole tensor, or all that is known


@final
class RowsOfKind:
    """The rows of one kind of site in one record, of those that hold a whole tensor.

    Attributes:
        record: which.
        rows: which they are, in execution order.
        counts: int64 [rows, len(COUNTS)].
        seen: which were observed.
        finite: which have no element that is not finite; None: all of them.
    """

    def __init__(self, derived: _Derived, rows: Rows) -> None:
        self.record, self.rows = derived.record, rows
        self.counts = self.record.counts[rows]
        self.seen: Mask = self.counts[:, OBSERVED] > 0
        bad = self.counts[:, NONFINITE]
        self.finite: Mask | None = None
        if bad.any():
            self.finite = (bad == 0).all(axis=1)
        self._derived = derived
        self._columns: dict[str, Floats] = {}

    def column(self, stat: str) -> Floats:
        """Return a statistic of each row; NaN where it was not observed. Not to be changed."""
        known = self._columns.get(stat)
        if known is None:
            known = np.where(self.seen, self._derived.column(stat)[self.rows], np.nan)
            known.flags.writeable = False
            self._columns[stat] = known
        return known


@final
class _Derived:
    """What has been asked of one record: never of another, whoever asks meanwhile."""

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self._columns: dict[str, Floats] = {}
        self._kinds: dict[str, RowsOfKind] = {}

    def column(self, stat: str) -> Floats:
        known = self._columns.get(stat)
        if known is None:
            known = derive(stat, self.record.counts, self.record.values)
            known.flags.writeable = False
            self._columns[stat] = known
        return known

    def of_kind(self, kind: str) -> RowsOfKind:
        known = self._kinds.get(kind)
        if known is None:
            rows = _rows_by_kind(self.record.sites).get(kind, NO_ROWS)
            known = self._kinds[kind] = RowsOfKind(self, rows)
        return known


_newest: _Derived | None = None


def statistic_of(record: StepRecord, stat: str) -> Floats:
    """Return a statistic of `STATS` of each row [sites], as `derive` does; not to be changed.

    Two dozen detectors ask for the same ones, one record after the other: those of the record that
    was asked for last are kept.
    """
    return _derived(record).column(stat)


def rows_of_kind(record: StepRecord, kind: str) -> RowsOfKind:
    """Return the rows of one of `KINDS`; kept as statistics are."""
    return _derived(record).of_kind(kind)


def _derived(record: StepRecord) -> _Derived:
    global _newest  # noqa: PLW0603  (a memory of one)
    derived = _newest
    if derived is None or derived.record is not record:
        _newest = derived = _Derived(record)
    return derived


def placements_of(record: StepRecord, kind: str) -> frozenset[str]:
    """Return the placements of all sites of one of `KINDS`."""
    return _placements_by_kind(record.sites).get(kind, frozenset())


def _rows(sites: tuple[Site, ...]) -> Mapping[str, Rows]:
    rows: dict[str, list[int]] = {}
    for row, site in enumerate(sites):
        if site.placement in _KNOWN:
            rows.setdefault(site.kind, []).append(row)
    return {kind: np.array(those, np.intp) for kind, those in rows.items()}


def _placements(sites: tuple[Site, ...]) -> Mapping[str, frozenset[str]]:
    found: dict[str, set[str]] = {}
    for site in sites:
        found.setdefault(site.kind, set()).add(site.placement)
    return {kind: frozenset(those) for kind, those in found.items()}


_rows_by_kind = IdentityCache(_rows, _TABLES)
_placements_by_kind = IdentityCache(_placements, _TABLES)
