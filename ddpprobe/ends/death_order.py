"""Who died before whom, asked of one rank and all of some others at once: jobs have thousands."""

from __future__ import annotations

from collections.abc import Iterable

from ddpprobe.records.fate import Fate


class DeathOrder:
    """What `Fate.died_before` says of one rank and some others, which are looked at once.

    Args:
        fates: of the others.
    """

    def __init__(self, fates: Iterable[Fate]) -> None:
        self._fates = tuple(fates)
        self._ranks = frozenset(f.rank for f in self._fates)
        self._outlived = frozenset(rank for f in self._fates for rank in f.outlived_by)
        self._witnesses = {f.witness for f in self._fates}
        self._least = min((f.order for f in self._fates), default=-1)
        self._first: dict[str, int] = {}
        self._last: dict[str, int] = {}
        for f in (f for f in self._fates if f.order >= 0):
            self._first[f.witness] = min(f.order, self._first.get(f.witness, f.order))
            self._last[f.witness] = max(f.order, self._last.get(f.witness, f.order))

    def before_any(self, fate: Fate) -> bool:
        """Whether a rank died before any of them."""
        ordered = 0 <= fate.order < self._last.get(fate.witness, -1)
        return ordered or not self._ranks.isdisjoint(fate.outlived_by)

    def after_any(self, fate: Fate) -> bool:
        """Whether any of them died before a rank."""
        ordered = 0 <= self._first.get(fate.witness, fate.order) < fate.order
        return ordered or fate.rank in self._outlived

    def before_all(self, fate: Fate, *, together: bool = False) -> bool:
        """Whether a rank died before each of them, or (`together`) was seen not to be later."""
        least = fate.order + (not together)
        if self._witnesses <= {fate.witness} and fate.order >= 0 and self._least >= least:
            return True
        if not fate.outlived_by:
            return not self._fates
        outlived = set(fate.outlived_by)
        return all(
            (f.witness == fate.witness and fate.order >= 0 and f.order >= least)
            or f.rank in outlived
            for f in self._fates
        )

    def unordered(self, fates: Iterable[Fate]) -> list[Fate]:
        """Return the ranks of which it is not known whether they died before or after any."""
        return [f for f in fates if not (self.before_any(f) or self.after_any(f))]
