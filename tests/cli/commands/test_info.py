"""What ran, of the newest attempt, and how much of it is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddpprobe
from ddpprobe.reader.text import per_cent
from ddpprobe.records.events import SealedEvent, to_json
from ddpprobe.report.story import gather
from ddpprobe.report.tables import ranks
from ddpprobe.rundir import framing

from ...made_runs import Made, record

Call = Callable[..., tuple[int, str, str]]


@dataclass
class Elsewhere(Made):
    """A later attempt: on another host, of another version, with another interval."""

    def _meta(self, rank: int) -> dict[str, Any]:
        nodes = ("node_0000", "node_0001")
        said = {"every": 5, "torch": "3", "hostname": f"host {rank}", "node": nodes[rank]}
        return {**super()._meta(rank), **said}


@dataclass
class RunsOn(Made):
    """An attempt whose lowest rank says what it runs on."""

    environment: tuple[tuple[str, str], ...] = ()

    def _meta(self, rank: int) -> dict[str, Any]:
        said = {
            "environment_of": 0,
            **({"environment": dict(self.environment)} if not rank else {}),
        }
        return {**super()._meta(rank), **said}


def test_what_an_attempt_runs_on_is_compared_with_the_one_before_it(
    call: Call, tmp_path: Path
) -> None:
    for attempt, environment in enumerate(
        (
            {"torch": "2.12", "code/train.py": "aa", "numpy": "2"},
            {"torch": "2.13", "code/train.py": "bb", "wandb": "1", "numpy": "2"},
            {"torch": "2.13", "code/train.py": "bb", "numpy": "2"},
        )
    ):
        told = RunsOn(tmp_path / "run", attempt=attempt, environment=tuple(environment.items()))
        path = told.whole(3).close().path
    assert [attempt["changed"] for attempt in ddpprobe.open(path).info()["attempts"]] == [
        [],
        [
            {"name": "code/train.py", "before": "aa", "now": "bb"},
            {"name": "torch", "before": "2.12", "now": "2.13"},
        ],
        [],
    ]
    said = [line for line in call("info", path)[1].splitlines() if line.startswith("since")]
    assert said == [
        "since the attempt before: code/train.py: bb, it was aa",
        "since the attempt before: torch: 2.13, it was 2.12",
    ]


def test_a_rank_that_lacks_one_step_of_many_is_not_said_to_be_complete(
    call: Call, tmp_path: Path
) -> None:
    assert [per_cent(1 - lacking) for lacking in (0, 1e-9, 4e-4)] == ["100 %", "99.9 %", "99.9 %"]
    made = Made(tmp_path / "run")
    made.write(record(r, step) for step in range(3) for r in range(2) if (r, step) != (1, 1))
    path = made.close().path
    code, out, _ = call("info", path)
    assert (code, "3 of 3  100 %" in out, "2 of 3  66.6 %" in out) == (4, True, True)
    assert [row["complete"] for row in ranks(gather(ddpprobe.open(path)))["rows"]] == [
        "100 %",
        "66.6 %",
    ]


def test_what_ran_is_told_of_the_newest_attempt(call: Call, tmp_path: Path) -> None:
    Made(tmp_path / "run").whole(3).close()
    path = Elsewhere(tmp_path / "run", attempt=1).whole(3).close().path
    out = call("info", path)[1]
    assert "topology   2 ranks on 2 nodes, ddp, gloo, torch 3, rank 0 on host 0\n" in out
    assert "sampling   every 5 steps\n" in out


def test_an_attempt_is_sealed_if_all_of_its_nodes_are(call: Call, tmp_path: Path) -> None:
    nodes = [Made(tmp_path / "run", node=f"node_000{n}") for n in range(2)]
    for rank, made in enumerate(nodes):
        made.write(record(rank, step) for step in range(3))
    for sealed, made in zip((False, True), nodes, strict=True):
        made.tell(framing.LIFE, to_json(SealedEvent()))
        made.close()
        (attempt,) = ddpprobe.open(made.path).info()["attempts"]
        assert (attempt["sealed"], attempt["unsealed"] == []) == (sealed, sealed)
        assert (", sealed" in call("info", made.path)[1]) == sealed


def test_how_a_run_ended_is_told_also_where_nobody_saw_with_which_exit_code(
    call: Call, tmp_path: Path
) -> None:
    made = Made(tmp_path / "run").whole(3)
    for writer in made.writers.values():
        writer.append_json(framing.LIFE, {"event": "closed", "status": "ok", "at_exit": True})
    out = call("info", made.close(cleanly=False).path)[1]
    said = "every rank came to its end; nobody saw with which exit code"
    assert f"end        {said}\n" in out
    whole = call("info", Made(tmp_path / "whole").whole(3).close().path)[1]
    assert "end        every rank came to its end\n" in whole


def test_of_many_ranks_those_of_which_the_same_is_said_have_one_line(
    call: Call, tmp_path: Path
) -> None:
    made = Made(tmp_path / "run", ranks=80)
    made.write(record(r, step) for step in range(3) for r in range(80) if (r, step) != (7, 1))
    path = made.close().path
    out = call("info", path)[1].splitlines()
    table = out[next(i for i, line in enumerate(out) if "rank  node" in line) + 1 :]
    assert [line.split()[:3] for line in table if "node_0000" in line] == [
        ["0-6,", "8-79", "node_0000"],
        ["7", "node_0000", "cpu"],
    ]
    assert len(ddpprobe.open(path).info()["attempts"][0]["ranks"]) == 80
