"""The rows of an ended step, on their way to the host and merged per site when they are there."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ddpprobe.rank.hooks.bin_rows import PendingBins
from ddpprobe.rank.hooks.constants import Constants
from ddpprobe.rank.hooks.execution_order import ExecutionOrder
from ddpprobe.rank.hooks.lanes import Arrival
from ddpprobe.rank.hooks.site_table import SiteTable
from ddpprobe.rank.hooks.steady import Learned, Steady
from ddpprobe.rank.stats import rows as stats
from ddpprobe.records.histogram import (
    BINS,
    PATTERNS,
    Bins,
    fold,
    is_whole,
    no_histograms,
)
from ddpprobe.records.step import (
    BUFFER,
    IN_TURN,
    KINDS,
    PHASE_OF_KIND,
    SQUARES,
    TAPPED,
    Counts,
    Digests,
    FirstBad,
    Site,
    Values,
)

SCALAR = -1  # the slot of a row that holds one number in its first column
_UNLESS_LOGGED = "\0"
_GRAD, _GRAD_LOCAL = KINDS.index("grad"), KINDS.index("grad_local")
_FORWARD = np.array([PHASE_OF_KIND[kind] == "forward" for kind in KINDS])
_IN_TURN = np.array([kind in IN_TURN for kind in KINDS])
# Of a module's input that was bad: its place, and what is not finite in it.
CameIn = tuple[str, stats.Nonfinite]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A sampled step on the host: rows per site, scalars, first bad tensor, what was left out.

    `unread`: nobody knows what the module of `first_bad` was given. `learned` are sites whose
    infinities are known to do no harm since this step; `binned` and `bins` are as in `StepRecord`.
    Gradients are unscaled: divided by the scalar `loss_scale`, if it is there.
    """

    sites: tuple[Site, ...]
    counts: Counts
    values: Values
    scalars: dict[str, float]
    first_bad: FirstBad | None
    unread: bool
    unsupported: Counter[str]
    digests: Digests
    learned: list[Learned]
    binned: NDArray[np.int64]
    bins: Bins


@dataclass(frozen=True, slots=True)
class PendingRows:
    """Rows on their way to the host; `ready()` before `result()` keeps the host from waiting.

    `parts` are (indices, rows up to the last of them) of other devices, to be put among `rows`.
    """

    rows: Tensor
    parts: tuple[tuple[NDArray[np.int64], Tensor], ...]
    bins: tuple[PendingBins, ...]
    arrivals: tuple[Arrival, ...]
    slots: NDArray[np.int64]
    micros: NDArray[np.int64]
    times: NDArray[np.int64] | None
    order: ExecutionOrder
    names: dict[int, str]
    digests: dict[int, tuple[str, str]]
    scaled_kinds: tuple[str, ...]
    tapped: NDArray[np.int64]
    confirmed: frozenset[int]
    lent: int
    came_in: dict[int, CameIn]
    unread: frozenset[int]
    unsupported: Counter[str]
    table: SiteTable
    steady: Steady
    constants: Constants
    rank: int

    def ready(self) -> bool:
        """Whether the copy is over; never waits."""
        return all(arrival.query() for arrival in self.arrivals)

    def wait(self) -> None:
        """Wait for the copy: only at the end of a run."""
        for arrival in self.arrivals:
            arrival.synchronize()

    def result(self, step: int, *, partial: bool, skipped: bool = False) -> StepResult:
        """Merge the rows per site. `partial` keeps forwards whose backward never came.

        Of the steps of a rank each is asked once, in their order.
        """
        rows = self._joined()
        keep = self._kept(partial=partial)
        self._label_parts(keep)
        sites = self.table.sites() if keep.size or self.tapped.size else ()
        counts, values = stats.split_rows(rows[keep], self.slots[keep], len(sites))
        if self.tapped.size:
            counts[:, TAPPED] += np.bincount(self.tapped, minlength=len(sites))
        scalars: dict[str, list[float]] = {}
        for index, name in self.names.items():
            scalars.setdefault(name, []).append(float(rows[index, 0]))
        for name in [name for name in scalars if name.endswith(_UNLESS_LOGGED)]:
            scalars.setdefault(name.removesuffix(_UNLESS_LOGGED), scalars.pop(name))
        means = {name: sum(v) / len(v) for name, v in scalars.items()}
        scale = means.get("loss_scale", 1.0)
        binned, bins = self._histograms(keep, sites, counts, scale)
        self._unscale(sites, values, scale)
        bad, learned = self.steady.judge(
            self.table, rows, self.slots, self._bad(rows),
            finite=math.isfinite(means.get("loss", 0.0)), ended=not (partial or skipped),
        )  # fmt: skip
        # A reduced gradient is bad on all ranks at once: it counts only without a local witness.
        first = min(bad, key=lambda i: (self._phase(i) == "step", i), default=None)
        return StepResult(
            sites,
            counts,
            values,
            means,
            None if first is None else self._first(rows, first, step),
            first in self.unread,
            self.unsupported,
            self._checksums(rows),
            learned,
            binned,
            bins,
        )

    def _histograms(
        self, keep: NDArray[np.intp], sites: tuple[Site, ...], counts: Counts, scale: float
    ) -> tuple[NDArray[np.int64], Bins]:
        """Return which sites have a histogram, and their bins; gradients' are unscaled."""
        if not self.bins:
            return no_histograms()
        patterns = np.zeros((len(sites), PATTERNS))
        has = np.zeros(len(sites), bool)
        for each in self.bins:
            kept = np.isin(each.rows, keep)
            slots = self.slots[each.rows[kept]]
            np.add.at(patterns, slots, each.counts.numpy()[kept])
            has[slots] = True
        bins = np.zeros((len(sites), BINS), np.int64)
        scaled = np.array([site.kind in self.scaled_kinds for site in sites], bool)
        for chosen, factor in ((has & scaled, scale), (has & ~scaled, 1.0)):
            bins[chosen] = fold(patterns[chosen], factor)
        binned = np.flatnonzero(has & is_whole(counts, bins))
        return binned, bins[binned]

    def _joined(self) -> NDArray[np.float64]:
        rows: NDArray[np.float64] = self.rows.numpy()
        for indices, part in self.parts:  # as bits: a checksum is no number
            rows.view(np.int64)[indices] = part.numpy().view(np.int64)[indices]
        return rows

    def _label_parts(self, keep: NDArray[np.intp]) -> None:
        """Label parameters whose local gradient arrived in parts, of which only the sum is it.

        Several backwards of one micro-batch do that: two losses, or a module called several times
        under reentrant checkpointing.
        """
        local = keep[self.table.kinds()[self.slots[keep]] == _GRAD_LOCAL]
        stride = self.micros.max(initial=0) + 2  # micro-batches count from -1: not known
        calls = np.sort(self.slots[local] * stride + self.micros[local] + 1)
        for slot in np.unique(calls[1:][calls[1:] == calls[:-1]] // stride).tolist():
            self.table.amend(slot, ("partial", self.table.site(slot).primary))

    def _unscale(self, sites: tuple[Site, ...], values: Values, scale: float) -> None:
        """Divide the gradients' statistics by the loss scale (exact for a power of two)."""
        if scale == 1.0 or not 0.0 < scale < math.inf:
            return
        scaled = [i for i, site in enumerate(sites) if site.kind in self.scaled_kinds]
        values[scaled] /= np.where(SQUARES, scale * scale, scale)

    def _checksums(self, rows: NDArray[np.float64]) -> Digests:
        bits = rows.view(np.int64)[np.array([*self.digests], np.int64), 0].tolist()
        return {
            key: {word: 1 << self.rank}
            for key, word in zip(self.digests.values(), bits, strict=True)
            if key[1] != BUFFER or self.constants.take(key[0], word)
        }

    def _kept(self, *, partial: bool) -> NDArray[np.intp]:
        """Indices of the rows that belong to the step, in execution order."""
        of_sites = np.flatnonzero(self.slots != SCALAR)
        kinds, micros = self.table.kinds()[self.slots[of_sites]], self.micros[of_sites]
        kept = (kinds != _GRAD) | (micros >= 0)  # -1: forgotten, as each reading is by the next
        kept &= (micros < 0) | (micros >= self.lent)
        if not partial:
            latest = max(micros.max(initial=0), *self.confirmed, 0)
            trained = np.zeros(latest + 2, bool)  # the last one stands for -1
            trained[list(self.confirmed)] = True
            kept &= trained[micros] | ~_FORWARD[kinds]
        found: NDArray[np.intp] = of_sites[kept]
        return found

    def _bad(self, rows: NDArray[np.float64]) -> list[int]:
        """Indices of what is not finite, also in forwards that got no gradient: why they did not.

        A loop that leaves out the batches whose loss is NaN ends there. Weights are left to
        `StateCheck`, which looks at all of them.
        """
        of_sites = self.slots != SCALAR
        at = np.flatnonzero(of_sites & rows[:, stats.NONFINITE].any(axis=1))
        kinds = self.table.kinds()[self.slots[at]]
        told = ((kinds != _GRAD) | (self.micros[at] >= 0)) & ~_IN_TURN[kinds]
        bad: list[int] = at[told].tolist()
        return bad

    def _first(self, rows: NDArray[np.float64], first: int, step: int) -> FirstBad:
        place = first if self.times is None else int(self.times[first])
        order = self.order.number(self._phase(first), place)
        site, micro = self.table.site(int(self.slots[first])), int(self.micros[first])
        found = witness(site, rows[first], step=step, micro=micro, order=order, rank=self.rank)
        return as_input(found, self.came_in.get(first))

    def _phase(self, index: int) -> str:
        return PHASE_OF_KIND[self.table.site(int(self.slots[index])).kind]


def unless_logged(name: str) -> str:
    """Return the name under which a number stands only where the script logs none by that name."""
    return name + _UNLESS_LOGGED


def witness(
    site: Site, row: NDArray[np.float64], *, step: int, micro: int, order: int, rank: int
) -> FirstBad:
    """Return what a row [9] tells as the first bad tensor of a step."""
    numel, nan, pos_inf, neg_inf = (int(v) for v in row[:4])
    return FirstBad(
        step=step, micro=micro, phase=PHASE_OF_KIND[site.kind], order=order, rank=rank,
        fqn=site.fqn, kind=site.kind, leaf=site.leaf,
        nan=nan, pos_inf=pos_inf, neg_inf=neg_inf, numel=numel,
    )  # fmt: skip


def as_input(found: FirstBad, came_in: CameIn | None) -> FirstBad:
    """Return the witness, or the module's input in its stead, which was bad before its output.

    Args:
        found: of an output.
        came_in: the input, if it was bad.
    """
    if came_in is None:
        return found
    leaf, (nan, pos_inf, neg_inf, numel) = came_in
    return replace(
        found, kind="input", leaf=leaf, nan=nan, pos_inf=pos_inf, neg_inf=neg_inf, numel=numel
    )
