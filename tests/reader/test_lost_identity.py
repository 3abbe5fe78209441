"""A run whose run.json is lost: what else says it is read, and what nothing says is told."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ddpprobe
from ddpprobe.cli.main import main
from ddpprobe.reader.identity import identity_of
from ddpprobe.reader.listed_run import listed
from ddpprobe.reader.models import models_in
from ddpprobe.reader.run import open_run
from ddpprobe.report.story import gather
from ddpprobe.report.tables import facts
from ddpprobe.store.writer import StoreWriter

from ..made_runs import NODE, Made

TAKEN = "run.json is missing; name, id and what else it said are taken from"
STORE = f"{TAKEN} the store"
RANKS = f"{TAKEN} what the ranks wrote down; not known: start, number of nodes"
NOWHERE = (
    "run.json is missing; not known: name, id, start, number of nodes, version of torch, host of "
    "rank 0, sampling interval"
)


def of_a_store(path: Path) -> Path:
    writer = StoreWriter(Made(path).whole(6).close(), NODE, durable=False)
    writer.seal()
    writer.close()
    return path


def of_journals(path: Path) -> Path:
    return Made(path).whole(6).close().path


def of_groups(path: Path) -> Path:
    """Make one whose store has lost its root, and whose journals are in the store."""
    (of_a_store(path) / "run.zarr/zarr.json").unlink()
    return path


def of_a_stranger(path: Path) -> Path:
    """Make one whose store's root says anything."""
    root = of_a_store(path) / "run.zarr/zarr.json"
    root.write_text('{"attributes": {"ddpprobe": {"run_id": 3}}}')
    return path


def of_nothing(path: Path) -> Path:
    """Make one of which only the daemon's own journal is left."""
    made = Made(path)
    made.tell(4, {"event": "finished"})
    return made.close().path


MADE: dict[Callable[[Path], Path], str] = {
    of_a_store: STORE, of_journals: RANKS, of_groups: RANKS, of_a_stranger: RANKS,
    of_nothing: NOWHERE,
}  # fmt: skip


def lose(path: Path) -> Path:
    (path / "run.json").unlink()
    return path


@pytest.mark.parametrize("make", MADE)
def test_what_else_says_it_is_read(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path / "run")
    assert identity_of(path).lost == ""
    before = open_run(path)
    assert (before.identity_lost, before.info()["identity_lost"]) == ("", None)
    told = before.identity
    found = identity_of(lose(path))
    assert found.lost == MADE[make]
    kept = {key: value for key, value in found.told.items() if key in told}
    assert kept == {key: told[key] for key in kept}
    assert make is of_nothing or {"name", "run_id", "torch", "every", "hostname"} <= kept.keys()
    assert make is not of_a_store or kept == told


@pytest.mark.parametrize("make", [of_a_store, of_journals])
def test_every_reader_says_it_once_and_judges_what_is_held_as_before(
    tmp_path: Path, make: Callable[[Path], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(tmp_path / "run")
    goods = [shutil.copytree(path, tmp_path / f"good-{i}") for i in range(2)]
    words: list[list[Any]] = [
        ["anomalies", path], ["info", path], ["trace", path], ["replay", path],
        ["report", path, "-o", tmp_path / "r.html"], ["export", path, "--format", "csv"],
        ["compare", path, path], ["baseline", path, *goods], ["top", path, "--once"],
        ["trigger", path],
    ]  # fmt: skip
    before = {}
    for asked in words:
        code = main([*map(str, asked)])
        before[asked[0]] = (code, capsys.readouterr())
    lose(path)
    for asked in words:
        code = main([*map(str, asked)])
        out, err = capsys.readouterr()
        was, (out_before, err_before) = before[asked[0]]
        assert code == was
        line = f"ddpprobe: {path}: {MADE[make]}\n"
        assert err == line * (2 if asked[0] == "compare" else 1) + err_before
        assert asked[0] in {"info", "report"} or out == out_before
    assert main(["verify", str(path)]) == 3
    why = MADE[make].removeprefix("run.json is ")
    assert capsys.readouterr().err == f"ddpprobe: lost: run.json: {why}\n"


def test_a_store_that_is_sealed_once_more_still_says_it(tmp_path: Path) -> None:
    path = of_a_store(tmp_path / "run")
    told = identity_of(path).told
    lose(path)
    Made(path, attempt=1).whole(3).close()
    lose(path)  # which Made has written anew
    writer = StoreWriter(Made(path, attempt=1).run, NODE, durable=False)
    lose(path)
    writer.seal()
    writer.close()
    found = identity_of(path)
    assert (found.lost, {key: found.told[key] for key in told}) == (STORE, told)
    assert found.told["attempts"] == [0, 1]


def test_a_list_a_report_and_python_say_it_too(tmp_path: Path) -> None:
    path = lose(of_a_store(tmp_path / "run"))
    line = listed(path)
    assert (line.name, line.run_id, line.damage) == ("made", "id", STORE)
    assert line.verdict.endswith(f"; damaged: {STORE}")
    assert line.anomaly is not None
    assert line.anomaly.first_cause
    run = ddpprobe.open(path)
    assert (run.name, run.identity["run_id"], run.identity_lost) == ("made", "id", STORE)
    assert json.loads(json.dumps(run.info()))["identity_lost"] == STORE
    assert dict(facts(gather(run)))["identity"] == STORE


def test_a_model_whose_run_has_lost_it_is_still_one_of_its_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("generator", "critic"):
        Made(tmp_path / name, process="p").whole(4).close()
    lose(tmp_path / "critic")
    models = models_in(tmp_path)
    assert models is not None
    assert list(models) == ["critic", "generator"]
    assert main(["anomalies", str(tmp_path)]) == 1
    assert f"ddpprobe: {tmp_path / 'critic'}: {RANKS}" in capsys.readouterr().err
    assert models_in(tmp_path / "critic") is None
