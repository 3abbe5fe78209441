"""RUN may be left out: the newest run is taken, and named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpprobe.cli.verbs import VERBS
from ddpprobe.rundir.paths import RUN_VARIABLE

from ..made_runs import Made

Call = Callable[..., tuple[int, str, str]]
SITE = ("--site", "blocks.1.mlp:output")
LINES = {
    "info": (), "anomalies": (), "trace": SITE, "verify": (), "replay": (), "top": ("--once",),
    "report": ("-o", "page.html"), "export": ("--format", "csv"),
}  # fmt: skip
WITHOUT = {"ls", "collect", "run", "daemon", "up"}  # which take no RUN
SAID = "ddpprobe: the newest run: ddpprobe-runs/new\n"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two runs where `install` makes them, the newer one second by name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    for number, name in enumerate(("old", "new")):
        path = Made(tmp_path / "ddpprobe-runs" / name).whole(5 + number).close().path / "run.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "created_ns": 1 + number}))
    return tmp_path / "ddpprobe-runs"


@pytest.mark.parametrize("verb", LINES)
def test_without_run_a_verb_says_what_it_says_of_the_newest_run_and_which_it_is(
    call: Call, runs: Path, verb: str
) -> None:
    named = call(verb, "ddpprobe-runs/new", *LINES[verb])
    code, out, err = call(verb, *LINES[verb])
    assert (code, out) == named[:2]
    assert err == SAID + named[2]


def test_every_verb_that_takes_a_run_can_do_without_it() -> None:
    named = {"baseline"}  # before the good runs, so that none of these is taken for it
    assert set(VERBS) - WITHOUT - named == {*LINES, "compare", "trigger"}


def test_compare_takes_the_newest_run_as_the_second(call: Call, runs: Path) -> None:
    named = call("compare", "ddpprobe-runs/old", "ddpprobe-runs/new")
    assert call("compare", "ddpprobe-runs/old") == (*named[:2], SAID + named[2])
    code, out, err = call("compare", "ddpprobe-runs/../ddpprobe-runs/new")
    assert (code, out) == (2, "")
    assert "is the newest run itself: name the one to compare it with" in err


def test_trigger_asks_the_newest_run(call: Call, runs: Path) -> None:
    code, _, err = call("trigger")
    assert code == 2
    assert err.startswith(SAID)
    assert "ddpprobe-runs/new is not live here" in err


def test_as_json_the_run_is_named_and_stdout_is_json_alone(call: Call, runs: Path) -> None:
    code, out, err = call("info", "--json")
    assert (code, err) == (0, SAID)
    assert json.loads(out)["path"] == "ddpprobe-runs/new"


def test_the_run_of_the_environment_comes_before_the_directory_here(
    call: Call, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, str(runs / "old"))
    assert call("anomalies")[2] == f"ddpprobe: the newest run: {runs / 'old'}\n"


@pytest.mark.parametrize("said", ["", "gone", "empty"])
def test_where_there_is_no_run_it_says_what_to_type(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(RUN_VARIABLE, said)
    os.mkdir("empty")
    code, out, err = call("anomalies")
    assert (code, out, err.count("\n")) == (2, "", 1)
    where = f"{said} ($DDPPROBE_DIR)" if said else "ddpprobe-runs"
    assert err.startswith(f"ddpprobe: no run below {where}: give a run directory")
    assert "`ddpprobe ls DIR`" in err


def test_what_needs_no_run_looks_for_none(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("replay", "--list")[0] == 0
