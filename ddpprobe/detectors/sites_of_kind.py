"""Where the sites of one kind stand in a record, and a memory of one number for each of them."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.statistics_of import NO_ROWS, Rows, RowsOfKind, rows_of_kind
from ddpprobe.records.step import NAN, OF_FINITE, Site, StepRecord

MOST_SITES = 1 << 14  # bounds the state: 64 float32 a site are 4 MiB
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
Number = TypeVar("Number", np.float64, np.float32, np.int64, np.bool_)

_NOTHING = np.array([np.nan])


def grown(state: NDArray[Number], sites: int, fresh: float) -> NDArray[Number]:
    """Return what is known of each site [sites, ...]; `fresh` of those that are new."""
    more = sites - len(state)
    if not more:
        return state
    return np.concatenate((state, np.full((more, *state.shape[1:]), fresh, state.dtype)))


class SitesOfKind:
    """The sites of one kind that a run has shown, each with a number that stays.

    Args:
        kind: one of `KINDS`.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._slot: dict[tuple[str, str, str], int] = {}
        self._table: tuple[Site, ...] = ()
        self._kept: slice | Rows = slice(None)  # of its rows of the kind, if they are too many
        self._slots = NO_ROWS  # the sites of these rows
        self._in_order = True  # each site has one, in the order of their numbers
        self.fqns: list[str] = []
        self.dtypes: list[str] = []
        self._was_finite = np.zeros(0, np.bool_)  # all elements, at some look
        self._now: RowsOfKind | None = None  # of the last record read; and of which of these
        self._comparable: Mask | None = None  # the finite elements may be compared, None: of all

    def read(self, record: StepRecord, stat: str) -> Floats:
        """Return a statistic of each site [sites]; NaN where it has no row or was not observed.

        So it is of what has elements that are not finite, but for counts: the rest of it is another
        tensor than it was before. Infinities that a site has had at each look (a mask) are its own.
        """
        now = self._now
        if now is None or now.record is not record:
            now = self._now = self._take(record)
        found = now.column(stat)[self._kept]
        if self._comparable is not None and stat in OF_FINITE:
            found = np.where(self._comparable, found, np.nan)
        if self._in_order:
            return found.copy()
        out = np.full(len(self.fqns), np.nan)
        out[self._slots] = found
        return out

    def _take(self, record: StepRecord) -> RowsOfKind:
        now = rows_of_kind(record, self._kind)
        if record.sites is not self._table:
            self._index(record.sites, now.rows)
        self._was_finite = grown(self._was_finite, len(self.fqns), 0)
        seen = now.seen[self._kept]
        if now.finite is None:
            self._was_finite[self._slots[seen]] = True
            self._comparable = None
            return now
        finite = now.finite[self._kept]
        self._was_finite[self._slots[finite & seen]] = True
        own = (now.counts[self._kept, NAN] == 0) & ~self._was_finite[self._slots]
        self._comparable = finite | own
        return now

    def lost(self, record: StepRecord) -> Mask:
        """Return which sites [sites], all of which once was finite, have elements that are not."""
        many = self.read(record, "nonfinite")
        seen = many >= 0
        self._was_finite = grown(self._was_finite, len(self.fqns), 0) | (seen & (many == 0))
        bad: Mask = (many > 0) & self._was_finite
        return bad

    def order(self) -> NDArray[np.intp]:
        """Return the sites in the last record, in execution order."""
        return self._slots

    def marked(self, those: Mask) -> tuple[int, list[str]]:
        """Return the first of some sites [sites] in execution order, and their modules, each once.

        A module with several outputs has a site for each.
        """
        sites = self._slots[those[self._slots]]
        return int(sites[0]), list(dict.fromkeys(self.fqns[site] for site in sites))

    def _index(self, sites: tuple[Site, ...], rows: Rows) -> None:
        kept, slots = [], []
        for place, row in enumerate(rows.tolist()):
            site = sites[row]
            key = site.key
            if key not in self._slot and len(self._slot) < MOST_SITES:
                self._slot[key] = len(self.fqns)
                self.fqns.append(site.fqn)
                self.dtypes.append(site.dtype)
            if key in self._slot:
                kept.append(place)
                slots.append(self._slot[key])
        self._table, self._slots = sites, np.array(slots, np.intp)
        self._kept = np.array(kept, np.intp) if len(kept) < len(rows) else slice(None)
        self._in_order = slots == list(range(len(self.fqns)))


class Beside:
    """What another kind of site says of the same parameters; NaN where it says nothing.

    Args:
        of: whose FQNs count; it has read each record before.
        kind: the other one of `KINDS`.
    """

    def __init__(self, of: SitesOfKind, kind: str) -> None:
        self._of, self._other = of, SitesOfKind(kind)
        self._size = (0, 0)  # for which `_places` are
        self._places = np.zeros(0, np.intp)

    def read(self, record: StepRecord, stat: str) -> Floats:
        """Return a statistic beside each site of the first kind [sites]."""
        found = np.concatenate((self._other.read(record, stat), _NOTHING))
        size = len(self._of.fqns), len(self._other.fqns)
        if size != self._size:
            index = {fqn: place for place, fqn in enumerate(self._other.fqns)}
            self._places = np.array([index.get(fqn, -1) for fqn in self._of.fqns], np.intp)
            self._size = size
        return found[self._places]


class SiteWindow:
    """The last `window` values of each site; NaN is no value and is not remembered."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._past = np.full((window, 0), np.nan, np.float32)
        self._given = np.zeros(0, np.int64)  # values that each site has had

    def add(self, values: Floats) -> None:
        """Remember a value of each site [sites]; sites may be more than before, never fewer."""
        more = len(values) - len(self._given)
        if more:
            self._given = grown(self._given, len(values), 0)
            fresh = np.full((self._window, more), np.nan, np.float32)
            self._past = np.concatenate((self._past, fresh), axis=1)
        given = np.flatnonzero(np.isfinite(values))
        with np.errstate(over="ignore"):
            self._past[self._given[given] % self._window, given] = values[given]
        self._given[given] += 1

    def forget(self, those: Mask) -> None:
        """Begin anew with some sites [sites]."""
        mine = those[: len(self._given)]
        self._past[:, mine], self._given[mine] = np.nan, 0

    def points(self, sites: int) -> NDArray[np.int64]:
        """Return how many values each of so many sites has in the window."""
        out = np.zeros(sites, np.int64)
        out[: len(self._given)] = np.minimum(self._given, self._window)
        return out

    def highest(self, sites: int) -> Floats:
        """Return the largest value of each site; -inf without one."""
        return self._extreme(np.fmax, -np.inf, sites)

    def lowest(self, sites: int) -> Floats:
        """Return the smallest value of each site; inf without one."""
        return self._extreme(np.fmin, np.inf, sites)

    def _extreme(self, rule: np.ufunc, otherwise: float, sites: int) -> Floats:
        out = np.full(sites, otherwise)
        known = len(self._given)
        out[:known] = rule.reduce(self._past, axis=0, initial=otherwise)
        return out
