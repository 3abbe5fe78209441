"""What the attempts before the newest one have counted, so that no counter falls behind them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar, final

from ddpprobe.records.node_view import NodeView, RankView
from ddpprobe.records.step import Anomaly

K = TypeVar("K")


@final
class PastCounts:
    """Adds up what is counted of a run by who watches it: verdicts, orders, bad elements, losses.

    What a rank counts itself (its steps, its seconds) begins anew with its process, as it says.
    """

    def __init__(self) -> None:
        self._anomalies: Counter[tuple[str, str]] = Counter()
        self._exemplars: dict[tuple[str, str], Anomaly] = {}
        self._orders: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._blamed: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self._nonfinite: defaultdict[int, Counter[str]] = defaultdict(Counter)

    def over(self, view: NodeView) -> NodeView:
        """Return a view of an attempt whose counts are those of the ones before it as well."""
        return replace(
            view,
            anomalies=_sum(self._anomalies, view.anomalies),
            exemplars={**self._exemplars, **view.exemplars},
            orders=_sum(self._orders, view.orders),
            records_dropped=_sum(self._dropped, view.records_dropped),
            ranks=tuple(map(self._over_rank, view.ranks)),
        )

    def take(self, view: NodeView) -> None:
        """Take the last view of an attempt, as it is by itself."""
        self._anomalies.update(view.anomalies)
        self._exemplars.update(view.exemplars)
        self._orders.update(view.orders)
        self._dropped.update(view.records_dropped)
        for rank in view.ranks:
            self._blamed[rank.rank].update(rank.anomalies)
            self._nonfinite[rank.rank].update(rank.nonfinite)

    def _over_rank(self, rank: RankView) -> RankView:
        return replace(
            rank,
            anomalies=_sum(self._blamed[rank.rank], rank.anomalies),
            nonfinite=_sum(self._nonfinite[rank.rank], rank.nonfinite),
        )


def _sum(past: Mapping[K, int], now: Mapping[K, int]) -> dict[K, int]:
    return {key: past.get(key, 0) + now.get(key, 0) for key in {**past, **now}}
