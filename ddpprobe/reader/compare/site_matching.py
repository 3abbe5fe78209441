"""Which rows of two runs are the same tensor, and may be compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.reader.compare.tolerance import ComparedRows, RoundingLimits, Tolerance
from ddpprobe.reader.series import matches
from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import IN_TURN, NUMEL, Site, StepRecord

Sites = tuple[Site, ...]
Place = tuple[Site, int]  # a site, and its row, which is its place in the execution order
_TABLES = 64  # pairs of site tables that are remembered; two runs have a handful
# A loss is a mean over one rank's part of one micro-batch: what comes before the reduction is
# scaled by how the batch was split. What comes after it is not.
BY_SPLIT = ("grad_output", "grad_input", "grad_local")
ONE_RANKS = ("partial", "unknown")
_MERGED = ("local", "sharded")
OTHER_SPLIT = "gradients before the reduction, of a batch that was split in another way"
PART_MISSING = "the part of a missing rank belongs to it"
WEIGHTS = "they take turns, and an optimizer turns rounding into a whole step"
ONE_RANKS_PART = "one rank's part of a tensor, cut in another way"


@dataclass(frozen=True, slots=True)
class SiteMatching:
    """Two site tables side by side; the first six are parallel, in the first run's order.

    Attributes:
        sites: in the first run.
        a, b: rows of the two tables.
        order: place in the step, see `execution_order`.
        index: number of the site among all that were ever paired.
        limits: what rounding may do to each of them.
        alone: what is in one table only, in each of them.
        unlike: the kinds of these.
        left_out: what is in both and cannot be compared -> why.
        recast: what is compared and has another dtype in the other run.
    """

    sites: Sites
    a: NDArray[np.intp]
    b: NDArray[np.intp]
    order: NDArray[np.intp]
    index: NDArray[np.intp]
    limits: RoundingLimits
    alone: tuple[tuple[Place, ...], tuple[Place, ...]]
    unlike: frozenset[str]
    left_out: dict[Site, str]
    recast: tuple[tuple[Site, Site], ...]


@final
class SiteMatcher:
    """Pairs the tables of two runs, each two once.

    Args:
        tolerance: what counts as equal.
        glob: over the sites, see `series.matches`.
    """

    def __init__(self, tolerance: Tolerance, glob: str) -> None:
        self._tolerance, self._glob = tolerance, glob
        self._index: dict[tuple[str, str, str, int], int] = {}
        self._made = IdentityCache(self._pair, _TABLES)

    def __len__(self) -> int:
        """Return how many sites were ever paired."""
        return len(self._index)

    def __contains__(self, site: Site) -> bool:
        """Return whether a site was ever paired."""
        return (*site.key, 0) in self._index

    def of(self, a: StepRecord, b: StepRecord, *, resplit: bool) -> SiteMatching:
        """Pair two records of one step; `resplit`: the batch is split in another way."""
        whole = not a.missing and not b.missing
        return self._made(a.sites, b.sites, resplit, whole)

    def _pair(self, a: Sites, b: Sites, resplit: bool, whole: bool) -> SiteMatching:  # noqa: FBT001  (remembered by position)
        one, two = dict(self._numbered(a)), dict(self._numbered(b))
        order = execution_order(a)
        rows: list[tuple[int, int, int, int]] = []
        left_out: dict[Site, str] = {}
        in_order = sorted(one.items(), key=lambda item: order[item[1]])
        shared = [(key, i, two[key]) for key, i in in_order if key in two]
        for place, (key, i, j) in enumerate(shared):
            why = _obstacle(a[i], b[j], resplit=resplit)
            if not why and not whole and a[i].placement in _MERGED:
                why = PART_MISSING
            if why:
                left_out[a[i]] = why
            else:
                rows.append((i, j, self._index.setdefault(key, len(self._index)), place))
        at = np.array(rows, np.intp).reshape(-1, 4)
        alone = (
            tuple((a[i], i) for key, i in one.items() if key not in two),
            tuple((b[j], j) for key, j in two.items() if key not in one),
        )
        # The tolerance comes from all that was executed, compared or not.
        limits = self._tolerance.limits([(a[i], b[j]) for _, i, j in shared])
        return SiteMatching(
            sites=tuple(a[i] for i in at[:, 0]),
            a=at[:, 0], b=at[:, 1], index=at[:, 2],
            order=np.array([order[i] for i in at[:, 0]], np.intp),
            limits=limits.of(at[:, 3]),
            recast=tuple((a[i], b[j]) for i, j in at[:, :2] if a[i].dtype != b[j].dtype),
            alone=alone,
            unlike=frozenset(site.kind for places in alone for site, _ in places),
            left_out=left_out,
        )  # fmt: skip

    def _numbered(self, sites: Sites) -> Iterator[tuple[tuple[str, str, str, int], int]]:
        """Yield an identity for each row that matches; a site may stand in a table twice.

        Weights are left out. Adam divides a gradient by its own size, so rounding in one that is
        about zero moves a weight by a whole step: no tolerance follows from the dtype.
        """
        seen: dict[tuple[str, str, str], int] = {}
        for row, site in enumerate(sites):
            nth = seen[site.key] = seen.get(site.key, -1) + 1
            if site.kind not in IN_TURN and matches(site, self._glob):
                yield (*site.key, nth), row


def execution_order(sites: Sites) -> list[int]:
    """Return the place of each row in the order in which a step computes them.

    A table lists modules as they were called, and parameters as the model does. The backward pass
    goes the other way: first through the gradients of activations, then those of parameters.
    """
    back = len(sites)
    passes = {"grad_output": 1, "grad_input": 1, "grad_local": 2, "grad": 3, "param": 4}

    def when(row: int) -> tuple[int, int]:
        stage = passes.get(sites[row].kind, 0)
        return stage, back - row if stage in {1, 2} else row

    order = [0] * len(sites)
    for place, row in enumerate(sorted(range(len(sites)), key=when)):
        order[row] = place
    return order


def _obstacle(a: Site, b: Site, *, resplit: bool) -> str:
    if resplit and a.kind in BY_SPLIT:
        return OTHER_SPLIT
    if a.placement in ONE_RANKS or b.placement in ONE_RANKS:
        return "" if a.placement == b.placement and not resplit else ONE_RANKS_PART
    return ""


def renamed(
    a: StepRecord, b: StepRecord, pairing: SiteMatching, tolerance: Tolerance
) -> list[tuple[Site, Site]]:
    """Match sites that only one run has by their numbers: the same tensor under another name.

    Of the same kind, leaf and number of elements, all statistics within what is allowed; in
    execution order, each site once. A guess: equal tensors may be two.
    """
    found = []
    left: dict[tuple[str, str, int], list[Place]] = {}
    for site, row in pairing.alone[1]:
        left.setdefault((site.kind, site.leaf, int(b.counts[row, NUMEL])), []).append((site, row))
    for site, row in pairing.alone[0]:
        others = left.get((site.kind, site.leaf, int(a.counts[row, NUMEL])), [])
        if not others:
            continue
        theirs = [j for _, j in others]
        mine = [row] * len(theirs)
        excess = tolerance.excess(
            ComparedRows(a.counts[mine], a.values[mine]),
            ComparedRows(b.counts[theirs], b.values[theirs]),
            tolerance.limits([(site, other) for other, _ in others]),
        )
        near = np.flatnonzero(excess.max(axis=1) <= 1)
        if len(near):
            found.append((site, others.pop(int(near[0]))[0]))
    return found
