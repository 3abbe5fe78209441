"""One statistic of some sites: only the columns that it needs, of only these sites."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import COUNTS, VALUES, columns_of
from ddpprobe.store import format as fmt
from ddpprobe.store.verified_files import GroupArrays

Found = tuple[NDArray[np.bool_], NDArray[Any], NDArray[Any]]


class StatisticReader:
    """Reads what one statistic is derived from.

    Args:
        arrays: of the group.
        stat: one of `records.STATS`.
        places: of the sites, ascending, at least one.

    Attributes:
        widest: sites that are read at once, at most.
    """

    def __init__(self, arrays: GroupArrays, stat: str, places: Sequence[int]) -> None:
        self._arrays = arrays
        needed = {"observed", *columns_of(stat)}
        self._counts = [i for i, name in enumerate(COUNTS) if name in needed]
        self._values = [i for i, name in enumerate(VALUES) if name in needed]
        self._near = _near_each_other(places)
        self.widest = max(near[-1] - near[0] + 1 for near in self._near)

    def read(self, span: tuple[int, int], start: int, stop: int) -> Found | None:
        """Return (whether there is a row, counts, values) of rows [start, stop) at the places.

        Args:
            span: first and last step of these rows, to say what is lost.
            start: first row.
            stop: after the last one.

        Returns:
            Arrays [rows, places], [rows, places, COUNTS] and [rows, places, VALUES]; columns that
            the statistic does not need hold 0 and NaN. None if any of it is lost.
        """
        parts = [self._part(near, span, start, stop) for near in self._near]
        whole = [part for part in parts if part is not None]
        if len(whole) < len(parts):
            return None
        here, counts, values = zip(*whole, strict=True)
        return (
            np.concatenate(here, axis=1),
            np.concatenate(counts, axis=1),
            np.concatenate(values, axis=1),
        )

    def _part(
        self, places: Sequence[int], span: tuple[int, int], start: int, stop: int
    ) -> Found | None:
        low, high = places[0], places[-1] + 1
        pick, sites = np.asarray(places) - low, slice(low, high)
        counts = self._arrays.attempt("counts", span, start, stop, (sites,), self._counts)
        values = (
            self._arrays.attempt("values", span, start, stop, (sites,), self._values)
            if self._values
            else np.full((stop - start, high - low, len(VALUES)), np.nan)
        )
        if counts is None or values is None:
            return None
        counts, values = counts[:, pick], values[:, pick]
        # Which records have a row of which site; without looking where a count tells.
        here = np.asarray(counts.any(axis=-1))
        if here.all():
            return here, counts, values
        order = self._arrays.attempt("order", span, start, stop, (sites,))
        return None if order is None else (order[:, pick] >= 0, counts, values)


def _near_each_other(places: Sequence[int]) -> list[list[int]]:
    """Split ascending places where whole parts of the sites, as they are stored, lie between."""
    out: list[list[int]] = []
    for place in places:
        if out and place // fmt.SITE_PART - out[-1][-1] // fmt.SITE_PART <= 1:
            out[-1].append(place)
        else:
            out.append([place])
    return out
