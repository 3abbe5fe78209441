"""The rows of two kinds that are of the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import Site

Rows = NDArray[np.intp]


class PairedRows(NamedTuple):
    """Parameters [n] that have a row of either kind, in the order of the first."""

    fqns: tuple[str, ...]
    first: Rows
    second: Rows


def paired_rows(
    sites: tuple[Site, ...], first: str, second: str, counts: Callable[[Site], bool]
) -> PairedRows:
    """Find them.

    Args:
        sites: of a record.
        first: kind.
        second: kind.
        counts: whether a site's row is one that can be compared.
    """
    rows = {
        (site.fqn, site.kind): row
        for row, site in enumerate(sites)
        if site.kind in (first, second) and counts(site)
    }
    fqns = tuple(fqn for fqn, kind in rows if kind == first and (fqn, second) in rows)
    of_first, of_second = (
        np.array([rows[fqn, kind] for fqn in fqns], np.intp) for kind in (first, second)
    )
    return PairedRows(fqns, of_first, of_second)
