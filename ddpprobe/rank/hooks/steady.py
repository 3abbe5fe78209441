"""Infinities that belong to a model: masks, and whatever else is infinite and does no harm.

An infinity is known to do none once a sampled step was taken with it in which the loss and all
gradients were finite. At a site that has been infinite since it was first seen this goes without a
word (an attention mask); anywhere else it was told as a fault in that step. What is known is the
site and the sign: the other one is a fault, and so is a NaN, always.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.rank.hooks.site_table import SiteTable
from ddpprobe.rank.stats import rows as stats
from ddpprobe.records.step import KINDS, PHASE_OF_KIND, Site

PLUS, MINUS = 1, 2
_NAN, _PLUS, _MINUS = (stats.ROW.index(name) for name in ("nan", "pos_inf", "neg_inf"))
_FORWARD = np.array([PHASE_OF_KIND[kind] == "forward" for kind in KINDS])


def signs(pos_inf: float, neg_inf: float) -> int:
    """Return which infinities there are: the sum of `PLUS` and `MINUS`."""
    return PLUS * bool(pos_inf) + MINUS * bool(neg_inf)


@dataclass(frozen=True, slots=True)
class Learned:
    """A site whose infinities are known to do no harm from now on.

    Attributes:
        site: where.
        signs: which of them.
        told: the site had been finite before, so that its first infinity was told as a fault.
    """

    site: Site
    signs: int
    told: bool


@final
class Steady:
    """What is known of the sites of one rank; judged step by step, in their order."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}  # slot -> signs
        self._seen = np.zeros(0, bool)  # slot -> in a step before this one

    def excuses(self, slot: int, row: NDArray[np.float64]) -> bool:
        """Whether what is not finite in a row is known to do no harm."""
        found = signs(row[_PLUS], row[_MINUS])
        return not row[_NAN] and found == found & self._known.get(slot, 0)

    def may_excuse(self, table: SiteTable, slot: int, row: NDArray[np.float64]) -> bool:
        """Whether the end of the step may show so: an infinity where nothing was seen before."""
        forward = PHASE_OF_KIND[table.site(slot).kind] == "forward"
        return forward and not row[_NAN] and not self._was_seen(slot)

    def judge(
        self, table: SiteTable, rows: NDArray[np.float64], slots: NDArray[np.int64],
        bad: Iterable[int], *, finite: bool, ended: bool,
    ) -> tuple[list[int], list[Learned]]:  # fmt: skip
        """Judge a step at its end.

        Args:
            table: the sites.
            rows: float64 [rows, 9].
            slots: of each row, -1 for those that are of no site.
            bad: the indices of those that are not finite, in order.
            finite: its loss is, as far as it is known.
            ended: the step was taken; else nothing is learned of it, nor of what was seen in it.

        Returns:
            The indices of those that are faults, and what was learned.
        """
        left = [i for i in bad if not self.excuses(int(slots[i]), rows[i])]
        fresh = [i for i in left if self.may_excuse(table, int(slots[i]), rows[i])]
        learned: dict[int, Learned] = {}
        infinite = finite and all(self._is_infinite(table, int(slots[i]), rows[i]) for i in left)
        if infinite and ended and self._has_gradient(table, slots):
            for i in left:
                slot = int(slots[i])
                found = signs(rows[i, _PLUS], rows[i, _MINUS]) | self._known.get(slot, 0)
                self._known[slot] = found
                learned[slot] = Learned(table.site(slot), found, told=self._was_seen(slot))
            left = [i for i in left if i not in fresh]
        elif finite and not ended and len(fresh) == len(left):
            left = []
        if ended:
            self._see(table, slots)
        return left, list(learned.values())

    def _has_gradient(self, table: SiteTable, slots: NDArray[np.int64]) -> bool:
        return not _FORWARD[table.kinds()[slots[slots >= 0]]].all()

    def _is_infinite(self, table: SiteTable, slot: int, row: NDArray[np.float64]) -> bool:
        return not row[_NAN] and PHASE_OF_KIND[table.site(slot).kind] == "forward"

    def _was_seen(self, slot: int) -> bool:
        return slot < len(self._seen) and bool(self._seen[slot])

    def _see(self, table: SiteTable, slots: NDArray[np.int64]) -> None:
        count = len(table.kinds())
        if count > len(self._seen):
            self._seen = np.pad(self._seen, (0, count - len(self._seen)))
        self._seen[slots[slots >= 0]] = True


@final
class SteadyOutput:
    """The same of what the model returns, which is looked at on every step.

    Attributes:
        held: NaN, +Inf, -Inf and elements of the first output of this step that only the end of the
            step can judge; None without one.
    """

    def __init__(self) -> None:
        self.held: stats.Nonfinite | None = None
        self._known = self._told = 0
        self._seen = False  # finite, bad, or judged

    def clean(self) -> None:
        """An output was finite."""
        self._seen = True

    def is_fault(self, counts: stats.Nonfinite) -> bool:
        """Whether an output that is not finite is to be told at once."""
        nan, pos_inf, neg_inf, _ = counts
        seen = signs(pos_inf, neg_inf)
        if nan:
            self._seen = True
            return True
        if seen == seen & self._known:
            return False
        if not self._seen:
            self.held = self.held or counts
            return False
        self._told |= seen
        return True

    def end_step(self, *, harmless: bool) -> None:
        """Learn from a step whose gradients were all there, and finite (`harmless`)."""
        if harmless:
            self._known |= self._told | (signs(*self.held[1:3]) if self.held else 0)
            self._seen |= self.held is not None
        self.held, self._told = None, 0
