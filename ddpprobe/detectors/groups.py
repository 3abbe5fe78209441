"""Which part of the model grew: gradient norms of groups of parameters against their own past."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import NONFINITE, SUM_SQ, Site, StepRecord

MOST_GROUPS = 512  # bounds the state: 64 x 512 float64 are 256 KiB
STANDS_OUT = 2.0  # x the median group's ratio; below it the whole model grew, and none is to blame


class GroupNorms:
    """L2 norms of the gradient by module group, over the last `window` sampled records.

    A group is the parameter's module cut after the first index and one name more:
    `blocks.2.mlp.fc.weight` belongs to `blocks.2.mlp`. The local gradient is taken where it was
    observed, else the reduced one. A new table of sites starts anew.
    """

    def __init__(self, window: int, least: int) -> None:
        self._least = least
        self._past: deque[NDArray[np.float64]] = deque(maxlen=window)
        self._sites: tuple[Site, ...] = ()
        self._rows: NDArray[np.intp] = np.zeros(0, np.intp)
        self._group: NDArray[np.intp] = np.zeros(0, np.intp)
        self._names: list[str] = []

    def add(self, record: StepRecord) -> None:
        """Remember a record's norms."""
        norms = self._norms(record)
        if np.isfinite(norms).all():
            self._past.append(norms)

    def largest(self, record: StepRecord, *, of_one: int = 1) -> str | None:
        """Name the group whose norm grew most against its own median; None if none stands out.

        Args:
            record: that is judged.
            of_one: how many ranks the rows are the sum of, if one of them alone is meant. What it
                has is then what is there beyond the others' usual share, and a group that does not
                exceed all of the window by that is not told from what the others do by chance.
        """
        now = self._norms(record)
        if len(self._past) < self._least or len(self._names) < 2:
            return None
        past = np.stack(self._past)
        middle = np.median(past, axis=0)
        known = np.flatnonzero((middle > 0) & np.isfinite(now))
        if len(known) == 0:
            return None
        with np.errstate(over="ignore"):
            whole = np.square(now[known] / middle[known])
        ratio = np.sqrt(np.maximum(1 + of_one * (whole - 1), 0))
        best = int(np.argmax(ratio))
        typical = float(np.median(ratio))
        if of_one > 1:
            if now[known[best]] <= past[:, known[best]].max():
                return None
            typical = max(1.0, typical)
        return self._names[known[best]] if ratio[best] > STANDS_OUT * typical else None

    def _norms(self, record: StepRecord) -> NDArray[np.float64]:
        if record.sites is not self._sites and record.sites != self._sites:
            self._index(record.sites)
        square = record.values[self._rows, SUM_SQ]
        square = np.where(np.isfinite(square) & (square > 0), square, 0.0)
        square[record.counts[self._rows][:, NONFINITE].any(axis=1)] = np.nan  # a part of it is left
        return np.sqrt(np.bincount(self._group, square, minlength=len(self._names)))

    def _index(self, sites: tuple[Site, ...]) -> None:
        self._sites = sites
        self._past.clear()
        kinds = {s.kind for s in sites}
        kind = "grad_local" if "grad_local" in kinds else "grad"
        numbers: dict[str, int] = {}
        rows, groups = [], []
        for row, site in enumerate(sites):
            name = group_of(site.fqn)
            if site.kind == kind and (name in numbers or len(numbers) < MOST_GROUPS):
                rows.append(row)
                groups.append(numbers.setdefault(name, len(numbers)))
        self._rows, self._group = np.array(rows, np.intp), np.array(groups, np.intp)
        self._names = list(numbers)


def group_of(parameter: str) -> str:
    """Return the module group of a parameter: its module, cut one name after the first index."""
    parts = parameter.split(".")[:-1]
    index = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: index + 2])
