"""What a daemon had counted is read back by its successor, and by nobody else."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ddpprobe.daemon import counts_file
from ddpprobe.records.node_view import NodeView, RankView
from ddpprobe.records.past_counts import PastCounts


def view(**counts: object) -> NodeView:
    empty = NodeView(
        time_ns=0, run_id="", directory="", attempt=0, node="", world_size=1, torch="", backend="",
        is_head=True, detectors=(), ranks=(),
    )  # fmt: skip
    return replace(empty, **counts)  # type: ignore[arg-type]


COUNTED = view(
    anomalies={("grad_spike", "warn"): 2, ("nonfinite", "page"): 1},
    orders={"capture": 3}, records_dropped={"full": 4},
    ranks=(RankView(1, 0, 0, "", anomalies={"warn": 2}, nonfinite={"grad": 5}),),
)  # fmt: skip


@pytest.mark.parametrize("now", [view(), COUNTED, view(ranks=(RankView(0, 0, 0, ""),))])
def test_a_successor_adds_what_was_counted_before(tmp_path: Path, now: NodeView) -> None:
    past = PastCounts()
    past.take(COUNTED)
    counts_file.write(tmp_path / "x.counts", 3, past)
    assert counts_file.read(tmp_path / "x.counts", 3).over(now) == past.over(now)
    assert past.over(COUNTED).anomalies["grad_spike", "warn"] == 4


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "{}", '{"attempt": 3}', "not json",
     *(json.dumps({"attempt": 3, "anomalies": [], "orders": {}, "dropped": {}, "blamed": {},
                   "nonfinite": {}} | bad)
       for bad in ({"attempt": 4}, {"anomalies": [["a"]]}, {"orders": 3}, {"blamed": {"x": {}}},
                   {"nonfinite": {"0": [1]}}, {"dropped": {"a": "b"}}))],
)  # fmt: skip
def test_a_file_that_is_none_or_of_another_attempt_has_counted_nothing(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "x.counts").write_text(text)
    assert counts_file.read(tmp_path / "x.counts", 3).over(COUNTED) == COUNTED
    assert counts_file.read(tmp_path / "none.counts", 3).over(COUNTED) == COUNTED
