"""The sites a rank has seen, and the slot that each has for good."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import KINDS, Site

# Each record tells all sites. A model whose outputs are named anew at each call (`f"image_{n}"`)
# would make journal, store and every step grow for as long as it trains.
MOST_LATE = 64  # leaves of an (fqn, kind) that come after the step in which its first one came
OTHERS = "..."  # the leaf that stands for all others


class SiteTable:
    """Grows one slot per (fqn, kind, leaf), in the order of first sight; slots never change."""

    def __init__(self) -> None:
        self._old: set[tuple[str, str]] = set()  # (fqn, kind) that an earlier step had
        self._young: set[tuple[str, str]] = set()  # of this step
        self._late: Counter[tuple[str, str]] = Counter()
        self._slots: dict[tuple[str, str, str], int] = {}
        self._sites: list[Site] = []
        self._kinds: list[int] = []
        self._frozen: tuple[Site, ...] = ()

    def begin(self) -> None:
        """Hear that a step begins."""
        self._old |= self._young
        self._young.clear()

    def slot(self, site: Site) -> int:
        """Return the slot of `site`, taken by its first caller; or the one of all other leaves."""
        slot = self._slots.get(site.key)
        if slot is None and self._is_one_too_many(site):
            site = replace(site, leaf=OTHERS)
            slot = self._slots.get(site.key)
        if slot is None:
            slot = self._slots[site.key] = len(self._sites)
            self._sites.append(site)
            self._kinds.append(KINDS.index(site.kind))
        return slot

    def _is_one_too_many(self, site: Site) -> bool:
        of = site.fqn, site.kind
        if of not in self._old:
            self._young.add(of)
            return False
        self._late[of] += 1
        return self._late[of] > MOST_LATE

    def amend(self, slot: int, layout: tuple[str, bool]) -> None:
        """Set a site's placement, and whether this rank is its primary, now that it is known."""
        site = self._sites[slot]
        if (site.placement, site.primary) != layout:
            self._sites[slot] = replace(site, placement=layout[0], primary=layout[1])
            self._frozen = ()

    def find(self, key: tuple[str, str, str]) -> int | None:
        """Return the slot of (fqn, kind, leaf), None if it was never seen."""
        return self._slots.get(key)

    def site(self, slot: int) -> Site:
        """Return the site of a slot."""
        return self._sites[slot]

    def kinds(self) -> NDArray[np.int64]:
        """Kind of each slot, int64 [slots]: its index in `KINDS`."""
        return np.array(self._kinds, np.int64)

    def sites(self) -> tuple[Site, ...]:
        """All sites so far; the same object as long as none was added."""
        if len(self._frozen) != len(self._sites):
            self._frozen = tuple(self._sites)
        return self._frozen
