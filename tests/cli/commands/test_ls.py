"""Runs in a list: what a person and a script see."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from ddpprobe.cli.commands import ls
from ddpprobe.ends.end import STATES
from ddpprobe.reader.listed_run import listed
from ddpprobe.rundir.paths import RUN_VARIABLE

from ...made_runs import Made

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def three(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of a run, a damaged one, and one whose verdict holds what moves a terminal."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    runs = tmp_path / "ddpprobe-runs"
    Made(runs / "a").whole(5).close()
    Made(runs / "b\x1b[31m\u202e").whole(5).close()
    Made(runs / "c").close()
    (runs / "c" / "run.json").write_text("{")
    return runs


def test_a_run_is_a_line_with_its_state_and_what_went_wrong_first(call: Call, three: Path) -> None:
    code, out, err = call("ls")
    assert (code, err) == (0, "")
    head, *rows = out.splitlines()
    assert head.split() == ["run", "began", "state", "ranks", "step", "verdict"]
    (whole,) = [row for row in rows if row.startswith("ddpprobe-runs/a ")]
    cells = [cell.strip() for cell in whole.split("  ") if cell]
    assert cells == [
        "ddpprobe-runs/a", "1970-01-01 00:00", "ended", "2", "4",
        "PAGE step 3 rank 0 blocks.1.mlp:output nonfinite: 3 NaN in blocks.1.mlp (first cause)",
    ]  # fmt: skip
    (bad,) = [row for row in rows if row.startswith("ddpprobe-runs/c ")]
    assert "not judged; damaged: ddpprobe-runs/c/run.json: half written or damaged" in bad


def test_no_name_can_move_the_terminal(call: Call, three: Path) -> None:
    out = call("ls")[1]
    assert "ddpprobe-runs/b?[31m?" in out
    assert not {"\x1b", "\u202e"} & set(out)


def test_as_json_it_says_the_same_and_more(call: Call, three: Path) -> None:
    code, out, _ = call("ls", three, "--json")
    found = json.loads(out)
    assert (code, found["directory"], len(found["runs"])) == (0, str(three), 3)
    first = next(one for one in found["runs"] if one["path"].endswith("/a"))
    assert first["anomaly"]["detector"] == "nonfinite"
    assert first["judged"] == {"complete": True, "held": 5, "sampled": 5}
    assert first["verdict"] == listed(three / "a").verdict
    assert {one["state"] for one in found["runs"]} <= set(STATES)


def test_only_the_newest_are_looked_at_where_that_is_asked_for(call: Call, three: Path) -> None:
    assert len(call("ls", "-n", 1)[1].splitlines()) == 2
    assert len(json.loads(call("ls", "--newest", 2, "--json")[1])["runs"]) == 2


@pytest.mark.parametrize("number", ["0", "-1", "x", "1.5"])
def test_a_number_that_is_none_is_wrong_use(call: Call, three: Path, number: str) -> None:
    code, _, err = call("ls", f"--newest={number}")
    assert code == 2
    assert "expected a number of at least 1" in err


def test_where_there_is_no_run_it_says_so(call: Call, tmp_path: Path) -> None:
    assert call("ls", tmp_path) == (0, "", f"ddpprobe: no run below {tmp_path}\n")
    assert json.loads(call("ls", tmp_path, "--json")[1])["runs"] == []
    code, out, err = call("ls", tmp_path / "gone")
    assert (code, out) == (2, "")
    assert "no such directory" in err


@pytest.mark.parametrize("width", [60, 120, 400])
def test_on_a_terminal_a_verdict_is_cut_and_not_wrapped(three: Path, width: int) -> None:
    found = [listed(three / "a")]
    whole = list(ls.lines(found))
    cut = list(ls.lines(found, width))
    before = whole[0].index("verdict")
    assert max(map(cell_len, cut)) <= max(width, before + ls.LEAST_VERDICT)
    assert [line[:before] for line in cut] == [line[:before] for line in whole]
    assert (cut == whole) == (max(map(cell_len, whole)) <= width)


def test_into_a_pipe_nothing_is_cut(
    call: Call, three: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert not sys.stdout.isatty()
    assert "(first cause)" in call("ls")[1]
