"""What a merged step says of its sites and of all its gradients: the numbers behind the metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import (
    IN_TURN,
    NONFINITE,
    OBSERVED,
    SUM_SQ,
    Site,
    StepRecord,
    derive,
    merge_runs,
)


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Which rows of a record are one tensor: several leaves of one output count as one.

    Attributes:
        names: (FQN, kind) of each tensor, in execution order.
        rows: the rows of all of them, one tensor after the other.
        starts: where in `rows` each of them begins.
    """

    names: tuple[tuple[str, str], ...]
    rows: NDArray[np.intp]
    starts: NDArray[np.intp]

    def numbers(self, record: StepRecord, stats: Sequence[str]) -> list[NDArray[np.float64]]:
        """Return statistics of `records.STATS`, each [names]; NaN where nothing was finite."""
        if not self.names:
            return [np.zeros(0) for _ in stats]
        rows = self.rows
        counts, values = merge_runs(record.counts[rows], record.values[rows], self.starts)
        return [derive(stat, counts, values) for stat in stats]


class TensorRowsCache:
    """Makes the layout of a record; gives the last one again as long as it holds."""

    def __init__(self) -> None:
        self._sites: tuple[Site, ...] = ()
        self._observed = b""
        self._lasting = np.zeros(0, bool)
        self._layout = _layout((), np.zeros(0, bool))

    def of(self, record: StepRecord) -> TensorRows:
        """Return the layout of the sites that were observed, and are merged as one tensor.

        What takes turns is left out: its series would end with each record.
        """
        if record.sites is not self._sites:
            self._lasting = np.array([site.kind not in IN_TURN for site in record.sites], bool)
        observed = (record.counts[:, OBSERVED] > 0) & self._lasting
        code = observed.tobytes()
        if record.sites is not self._sites or code != self._observed:
            self._sites, self._observed = record.sites, code
            made = _layout(record.sites, observed)
            # The next attempt's tables are other objects and most often say the same.
            old = self._layout
            if made.names != old.names or not np.array_equal(made.rows, old.rows):
                self._layout = made
        return self._layout


def _layout(sites: tuple[Site, ...], observed: NDArray[np.bool_]) -> TensorRows:
    rows: dict[tuple[str, str], list[int]] = {}
    for row, site in enumerate(sites):
        # One rank's part is no value of the tensor, and no data is not the number 0.
        if site.placement not in ("partial", "unknown") and observed[row]:
            rows.setdefault((site.fqn, site.kind), []).append(row)
    sizes = [len(found) for found in rows.values()]
    return TensorRows(
        tuple(rows),
        np.array([row for found in rows.values() for row in found], np.intp),
        np.cumsum([0, *sizes])[: len(sizes)].astype(np.intp),
    )


def global_grad_norm(merged: StepRecord) -> float | None:
    """Return the L2 norm of all reduced gradients of a step; None where it is not known.

    Rows of `grad` add up once over the model: replicated ones are the whole gradient, merged
    sharded ones too unless a rank is missing. With any other row (`local` of several ranks,
    `partial`, `unknown`) the norm of the rest would be too small, so there is none. The sums are
    over finite elements, so one bad element makes the norm what torch would compute.
    """
    known = {"sharded", "replicated"}
    if len(merged.ranks + merged.missing) == 1:
        known.add("local")
    observed = merged.counts[:, OBSERVED] > 0
    rows = [i for i, s in enumerate(merged.sites) if s.kind == "grad" and observed[i]]
    placements = {merged.sites[i].placement for i in rows}
    if not rows or placements - known or ("sharded" in placements and merged.missing):
        return None
    nan, *infinite = merged.counts[rows, NONFINITE].sum(axis=0)
    if nan or any(infinite):
        return math.nan if nan else math.inf
    return math.sqrt(float(merged.values[rows, SUM_SQ].sum()))
