"""What a daemon has counted in attempts that others followed, on the disk for its successor.

A successor goes on with the newest attempt. Without the others its counters would fall, and what
they hold then would be taken for a rise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpprobe.records.node_view import NodeView, RankView
from ddpprobe.rundir import paths, safe_read
from ddpprobe.rundir.validate import MALFORMED

COUNTS = "counts"  # suffix, see `RunDir.daemon_file`


def write(path: Path, attempt: int, view: NodeView) -> None:
    """Keep the counts of all attempts before one that a daemon goes on with."""
    value = {
        "attempt": attempt,
        "anomalies": [[*key, count] for key, count in view.anomalies.items()],
        "orders": dict(view.orders),
        "dropped": dict(view.records_dropped),
        "blamed": {str(rank.rank): dict(rank.anomalies) for rank in view.ranks},
        "nonfinite": {str(rank.rank): dict(rank.nonfinite) for rank in view.ranks},
    }
    paths.write_json(path, value)


def read(path: Path, attempt: int) -> NodeView | None:
    """Return what the daemon before had counted when it went on with an attempt; else None.

    A daemon that begins with another attempt has no predecessor whose counters it goes on with.
    """
    try:
        value = safe_read.parse(path.read_bytes())
        return _view(value, attempt) if value["attempt"] == attempt else None
    except (OSError, *MALFORMED):  # as a rule there is none
        return None


def _view(value: Mapping[str, Any], attempt: int) -> NodeView:
    blamed, nonfinite = value["blamed"], value["nonfinite"]
    ranks = (
        RankView(
            int(rank),
            -1,
            0,
            "",
            anomalies=_counts(blamed[rank]),
            nonfinite=_counts(nonfinite[rank]),
        )
        for rank in blamed
    )
    return NodeView(
        time_ns=0,
        run_id="",
        directory="",
        attempt=attempt,
        node="",
        world_size=0,
        torch="",
        backend="",
        is_head=False,
        detectors=(),
        ranks=tuple(ranks),
        anomalies={(str(who), str(level)): int(count) for who, level, count in value["anomalies"]},
        orders=_counts(value["orders"]),
        records_dropped=_counts(value["dropped"]),
    )


def _counts(value: Mapping[str, Any]) -> dict[str, int]:
    return {str(key): int(count) for key, count in value.items()}
