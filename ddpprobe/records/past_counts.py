"""What the attempts before the newest one have counted, so that no counter falls behind them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar, final

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

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain values, without the anomalies that stand for them."""
        return {
            "anomalies": [[*key, count] for key, count in self._anomalies.items()],
            "orders": dict(self._orders),
            "dropped": dict(self._dropped),
            "blamed": {str(rank): dict(counts) for rank, counts in self._blamed.items()},
            "nonfinite": {str(rank): dict(counts) for rank, counts in self._nonfinite.items()},
        }

    @classmethod
    def of_json(cls, value: Mapping[str, Any]) -> PastCounts:
        """Return what `to_json` said; raises as `rundir.validate.MALFORMED` for anything else."""
        past = cls()
        for who, level, count in value["anomalies"]:
            past._anomalies[str(who), str(level)] = int(count)
        past._orders, past._dropped = _counts(value["orders"]), _counts(value["dropped"])
        past._blamed.update({int(rank): _counts(of) for rank, of in value["blamed"].items()})
        past._nonfinite.update({int(rank): _counts(of) for rank, of in value["nonfinite"].items()})
        return past

    def _over_rank(self, rank: RankView) -> RankView:
        return replace(
            rank,
            anomalies=_sum(self._blamed[rank.rank], rank.anomalies),
            nonfinite=_sum(self._nonfinite[rank.rank], rank.nonfinite),
        )


def _counts(value: Mapping[str, Any]) -> Counter[str]:
    return Counter({str(key): int(count) for key, count in value.items()})


def _sum(past: Mapping[K, int], now: Mapping[K, int]) -> dict[K, int]:
    return {key: past.get(key, 0) + now.get(key, 0) for key in {**past, **now}}
