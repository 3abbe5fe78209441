"""Runs in a list: the same words and the same first cause as everywhere, whatever is damaged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

import ddpprobe
from ddpprobe.cli.main import main
from ddpprobe.reader.listed_run import ListedRun, listed, runs
from ddpprobe.reader.run import open_run
from ddpprobe.reader.run_directories import default_directory, run_directories
from ddpprobe.records.events import ExitEvent, to_json
from ddpprobe.rundir import framing, paths, safe_read
from ddpprobe.rundir.heartbeat import STATES, HeartbeatWriter
from ddpprobe.rundir.paths import RUN_VARIABLE, RUNS, DirectoryLock
from ddpprobe.store.writer import StoreWriter

from ..made_runs import ANOMALY, NODE, Made, head_merge, record


def create(path: Path, created_ns: int) -> None:
    """Say when a run was created."""
    file = path / paths.RUN_JSON
    paths.write_json(file, {**json.loads(file.read_bytes()), "created_ns": created_ns})


def fold(made: Made, *, cleanly: bool = True) -> Path:
    writer = StoreWriter(made.close(cleanly=cleanly), NODE, durable=False)
    writer.seal()
    writer.close()
    return made.path


def beat(made: Made, rank: int, step: int, state: str = "backward") -> None:
    writer = HeartbeatWriter(made.run.heartbeat(made.attempt, NODE, rank))
    writer.beat(step=step, micro=0, state=STATES.index(state), steps=step, skipped=0, sampled=step,
                phase_seconds=(0.1, 0.3, 0.6, 0.0), probe_seconds=0.0)  # fmt: skip
    writer.close()


# ---- one run


def ended(path: Path) -> Path:
    return Made(path).whole(6).close().path


def in_the_store(path: Path) -> Path:
    return fold(Made(path).whole(6))


def crashed(path: Path) -> Path:
    made = Made(path).whole(6)
    died = ExitEvent(rank=1, how="SIGKILL", order=0, witness="daemon", time_ns=10**18, step=5)
    made.tell(framing.LIFE, to_json(died))
    return made.close(cleanly=False).path


def vanished(path: Path) -> Path:
    made = Made(path).whole(6)
    for rank in range(made.ranks):
        beat(made, rank, 6)
    return made.close(cleanly=False).path


def without_a_daemon(path: Path) -> Path:
    return Made(path).whole(6, told=False).close().path


MADE = (ended, in_the_store, crashed, vanished, without_a_daemon)


@pytest.mark.parametrize("make", MADE)
def test_the_state_is_the_word_of_info(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path / "run")
    info, line = open_run(path).info(), listed(path)
    assert line.state == info["state"]
    assert line.ranks == info["world_size"]
    assert line.damage == ""


@pytest.mark.parametrize("make", [ended, in_the_store])
def test_what_the_daemon_judged_is_told_as_anomalies_tells_it(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    path = make(tmp_path / "run")
    line = listed(path)
    assert line.anomaly == open_run(path).anomalies()[0]
    assert line.verdict == (
        "PAGE step 3 rank 0 blocks.1.mlp:output nonfinite: 3 NaN in blocks.1.mlp (first cause)"
    )
    assert (line.whole, line.judged, line.sampled, line.step) == (True, 6, 6, 5)


def test_a_healthy_run_says_in_how_much_nothing_was_found(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    for step in range(3):
        parts = [record(rank, step) for rank in range(2)]
        made.write(parts)
        made.tell(framing.RECORD, head_merge(parts))
    assert listed(made.close().path).verdict == "no anomalies in 3 sampled steps"


def test_what_is_below_a_warning_is_not_said_to_be_nothing(tmp_path: Path) -> None:
    made = Made(tmp_path / "run").whole(3)
    made.tell(framing.ANOMALY, replace(ANOMALY, level="info", first_cause=False, step=2))
    line = listed(made.close().path)
    said = "no anomalies at level warn or above (1 below) in 3 sampled steps"
    assert (line.anomaly, line.verdict) == (None, said)
    assert line.to_json()["anomalies"] == {"page": 0, "warn": 0, "info": 1}


def test_a_step_that_never_came_to_its_end_is_none_that_was_judged(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    for step in range(4):
        parts = [replace(record(rank, step), partial=step == 3) for rank in range(2)]
        parts = parts[:1] if step == 3 else parts  # rank 1 left no word of it
        made.write(parts)
        merged = head_merge(parts)
        made.tell(framing.RECORD, replace(merged, missing=(1,)) if step == 3 else merged)
    died = ExitEvent(rank=1, how="SIGKILL", order=0, witness="daemon", time_ns=10**18, step=3)
    made.tell(framing.LIFE, to_json(died))
    for rank in range(2):
        beat(made, rank, 3)
    held, line = open_run(made.path).completeness(), listed(made.close(cleanly=False).path)
    assert (line.judged, line.sampled, line.step) == (held.held, held.sampled, 3) == (3, 3, 3)


@pytest.mark.parametrize(
    ("taken", "beats", "judged", "said"),
    [
        (6, True, 4, "nothing found; judged: 4 of 6 sampled steps"),  # its journal took no more
        (4, True, 6, "no anomalies in 6 sampled steps"),  # it has fewer batches
        (None, False, 4, "nothing found; judged: 4 of 6 sampled steps"),  # nobody knows
    ],
)
def test_what_was_judged_without_a_rank_that_was_there_is_not_counted_as_judged(
    taken: int | None, beats: bool, judged: int, said: str, tmp_path: Path
) -> None:
    made = Made(tmp_path / "run")
    for step in range(6):
        parts = [record(rank, step) for rank in range(1 if step >= 4 else 2)]
        made.write(parts)
        missing = (1,) if step >= 4 else ()
        made.tell(framing.RECORD, replace(head_merge(parts), missing=missing))
    for rank, sampled in ((0, 6), (1, taken)):
        if sampled is not None:
            closed = {"event": "closed", "status": "ok", "sampled": sampled}
            made.writer(rank).append_json(framing.LIFE, closed)
        if beats:
            beat(made, rank, sampled or 0, "closed")
    made.tell(framing.LIFE, {"event": "finished"})
    held, line = open_run(made.path).completeness(), listed(made.close(cleanly=False).path)
    assert (line.judged, line.sampled, line.verdict) == (judged, 6, said)
    assert held.held == 4
    assert held.complete is line.whole


def test_a_run_that_ended_before_its_first_step_is_told_in_the_same_words_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Made(tmp_path / "run")
    for rank in range(2):
        beat(made, rank, 0, "closed")
        said = {"event": "closed", "status": "ok", "sampled": 0}
        made.writer(rank).append_json(framing.LIFE, said)
    path = made.close(cleanly=False).path
    line = listed(path)
    words = "nothing to judge: no step was sampled"
    assert (line.verdict, line.step, line.whole) == (words, None, False)
    assert line.to_json()["judged"] == {"complete": False, "held": 0, "sampled": 0}
    info = open_run(path).info()
    assert (info["complete"], info["steps"]["last"]) == (False, None)
    assert main(["anomalies", str(path)]) == 4
    assert capsys.readouterr().out == f"{words}\n"
    for words in (["trace", path], ["export", path, "--format", "csv"], ["compare", path, path]):
        assert main([str(word) for word in words]) == 2
        assert "yet" not in capsys.readouterr().err


def test_of_a_rank_whose_last_word_is_lost_it_is_not_said_that_it_sampled_nothing(
    tmp_path: Path,
) -> None:
    made = Made(tmp_path / "run")
    made.writer(0).append_json(framing.LIFE, {"event": "closed", "status": "ok", "sampled": 0})
    made.writer(1)
    assert listed(made.close(cleanly=False).path).verdict == "not judged"


def test_a_run_under_way_says_so(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    made.tell(framing.RECORD, head_merge([record(rank, 0) for rank in range(2)]))
    made.write(record(rank, 0) for rank in range(2))
    for rank in range(2):
        beat(made, rank, 2)
    locks = [DirectoryLock(made.run.lock), DirectoryLock(made.run.daemon_file(NODE, "lock"))]
    paths.make_dir(locks[1].path.parent)
    assert all(lock.acquire() for lock in locks)
    line = listed(made.path)
    assert (line.state, line.step, line.sampled) == ("running", 2, 2)
    assert line.verdict == "no anomalies so far in 1 sampled step"
    for lock in locks:
        lock.release()
    made.close()


def test_without_a_daemon_nothing_is_said_of_what_nobody_judged(tmp_path: Path) -> None:
    line = listed(without_a_daemon(tmp_path / "run"))
    assert (line.anomaly, line.whole, line.verdict) == (None, False, "not judged")
    beat(Made(tmp_path / "run"), 0, 6)  # by which it is known how many there were
    assert listed(tmp_path / "run").verdict == "not judged (6 sampled steps)"


def test_of_a_daemon_that_died_before_the_end_no_cause_is_called_the_first(tmp_path: Path) -> None:
    made = Made(tmp_path / "run").whole(6)
    made.write(record(rank, step) for step in (6, 7) for rank in range(2))
    assert made.daemon is not None
    made.daemon.close()
    made.daemon = None
    line = listed(made.close().path)
    assert line.anomaly is not None
    assert (line.anomaly.first_cause, line.whole) == (False, False)
    assert line.verdict.endswith(
        "3 NaN in blocks.1.mlp; judged: 6 sampled steps, not all that is held"
    )
    beat(made, 1, 8)
    assert listed(made.path).verdict.endswith("; judged: 6 of 8 sampled steps")


def test_nothing_found_in_a_part_is_not_told_as_nothing_found(tmp_path: Path) -> None:
    made = Made(tmp_path / "run")
    for step in range(4):
        parts = [record(rank, step) for rank in range(2)]
        made.write(parts)
        if step < 3:
            made.tell(framing.RECORD, head_merge(parts))
    assert made.daemon is not None
    made.daemon.close()
    made.daemon = None
    beat(made, 0, 4)
    assert listed(made.close().path).verdict == "nothing found; judged: 3 of 4 sampled steps"


def test_a_rank_that_the_daemon_merged_without_leaves_the_first_cause_open(tmp_path: Path) -> None:
    """As if its node's daemon had been slow: its record came later, and nobody judged it."""
    made = Made(tmp_path / "run")
    for step in range(5):
        parts = [record(rank, step) for rank in range(2)]
        made.write(parts)
        merged = head_merge(parts[:1]) if step == 4 else head_merge(parts)
        made.tell(framing.RECORD, replace(merged, missing=(1,)) if step == 4 else merged)
        if step == 3:
            made.tell(framing.ANOMALY, ANOMALY)
    line = listed(made.close().path)
    assert line.anomaly is not None
    assert (line.anomaly.first_cause, line.whole) == (False, False)


def test_a_run_that_began_again_is_told_by_its_newest_attempt(tmp_path: Path) -> None:
    Made(tmp_path / "run").whole(6).close()
    again = Made(tmp_path / "run", attempt=1)
    parts = [record(rank, 6, attempt=1) for rank in range(2)]
    again.write(parts)
    again.tell(framing.RECORD, head_merge(parts))
    line = listed(again.close().path)
    assert line.attempt == 1
    assert line.verdict == "attempt 1 (before it: 1 page): no anomalies in 1 sampled step"


def test_what_is_counted_is_counted_in_all_attempts_as_info_does(tmp_path: Path) -> None:
    for attempt in range(2):
        path = Made(tmp_path / "run", attempt=attempt).whole(6).close().path
    line, info = listed(path), open_run(path).info()
    told = line.to_json()
    assert told["anomalies"] == info["anomalies"] == {"page": 2, "warn": 0, "info": 0}
    assert told["earlier"] == {"page": 1, "warn": 0, "info": 0}
    assert line.verdict.startswith("attempt 1 (before it: 1 page): PAGE step 3 ")


def test_of_a_folded_run_no_statistics_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs the same whether a run had ten steps or a million, and a thousand modules."""
    path = in_the_store(tmp_path / "run")
    opened: list[str] = []
    before = safe_read.open_regular

    def spy(root: Path, key: str) -> int:
        opened.append(f"{root}/{key}")
        return before(root, key)

    monkeypatch.setattr(safe_read, "open_regular", spy)
    assert listed(path).whole
    assert opened
    assert not [key for key in opened if "/counts/" in key or "/values/" in key]
    assert not [key for key in opened if "/rank_" in key and "/c/" in key]


# ---- damage


def cut_run_json(path: Path) -> None:
    (path / paths.RUN_JSON).write_text('{"format_ver')


def run_json_is_a_directory(path: Path) -> None:
    (path / paths.RUN_JSON).unlink()
    (path / paths.RUN_JSON).mkdir()


def of_a_newer_version(path: Path) -> None:
    (path / paths.RUN_JSON).write_text('{"format_version": 99}')


def flip_the_journals(path: Path) -> None:
    for file in path.rglob("*.wal"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 0xFF
        file.write_bytes(data)


def flip_the_store(path: Path) -> None:
    for file in [*path.glob("run.zarr/**/*"), *path.glob("manifest/*")]:
        if file.is_file() and file.stat().st_size:
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 0xFF
            file.write_bytes(data)


def empty_the_manifest(path: Path) -> None:
    for file in path.glob("manifest/*.log"):
        file.write_bytes(b"")


DAMAGES = (
    cut_run_json, run_json_is_a_directory, of_a_newer_version, flip_the_journals, flip_the_store,
    empty_the_manifest,
)  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("make", [ended, in_the_store])
def test_a_damaged_run_is_a_line_and_keeps_no_other_out(
    tmp_path: Path, make: Callable[[Path], Path], damage: Callable[[Path], None]
) -> None:
    make(tmp_path / "bad")
    ended(tmp_path / "good")
    damage(tmp_path / "bad")
    found = {line.path.name: line for line in runs(tmp_path)}
    assert found.keys() == {"bad", "good"}
    assert found["good"].whole
    bad = found["bad"]
    if bad.damage:
        assert bad.verdict.endswith(f"damaged: {bad.damage}")
        assert not bad.whole
        assert bad.anomaly is None or not bad.anomaly.first_cause
    json.dumps([line.to_json() for line in found.values()], allow_nan=True)


def test_damage_is_said(tmp_path: Path) -> None:
    for damage in (cut_run_json, run_json_is_a_directory, of_a_newer_version, flip_the_journals):
        path = ended(tmp_path / damage.__name__)
        damage(path)
        assert listed(path).damage
    path = in_the_store(tmp_path / "store")
    flip_the_store(path)
    assert listed(path).damage


# ---- which runs


def test_the_newest_run_comes_first(tmp_path: Path) -> None:
    for name, created in (("b", 3), ("c", 1), ("a", 2)):
        create(ended(tmp_path / name), created * 10**18)
    assert [path.name for path in run_directories(tmp_path)] == ["b", "a", "c"]


def test_a_run_that_began_again_is_as_new_as_its_newest_attempt(tmp_path: Path) -> None:
    create(ended(tmp_path / "old"), 10**18)
    create(ended(tmp_path / "new"), 2 * 10**18)
    again = paths.make_dir(paths.RunDir(tmp_path / "old").attempt_dir(1))
    os.utime(again, ns=(3 * 10**18, 3 * 10**18))
    assert [path.name for path in run_directories(tmp_path)] == ["old", "new"]


def test_a_run_given_itself_is_listed_alone(tmp_path: Path) -> None:
    path = ended(tmp_path / "run")
    assert run_directories(path) == [path]


def test_runs_are_found_below_and_not_inside_of_runs_nor_of_hidden_directories(
    tmp_path: Path,
) -> None:
    ended(tmp_path / "team" / "node0" / "run")
    ended(tmp_path / ".cache" / "run")
    ended(tmp_path / "a" / "b" / "c" / "too-deep")
    outer = ended(tmp_path / "outer")
    shutil.copytree(outer, outer / "inner")
    found = {path.relative_to(tmp_path).as_posix() for path in run_directories(tmp_path)}
    assert found == {"outer", "team/node0/run"}


def test_a_run_that_two_names_lead_to_is_listed_once_and_a_circle_of_links_ends(
    tmp_path: Path,
) -> None:
    ended(tmp_path / "run")
    (tmp_path / "latest").symlink_to("run")
    (tmp_path / "round").symlink_to(".")
    (tmp_path / "nowhere").symlink_to("gone")
    assert len(run_directories(tmp_path)) == 1


def test_what_is_left_of_a_run_without_run_json_is_listed(tmp_path: Path) -> None:
    path = ended(tmp_path / "run")
    (path / paths.RUN_JSON).unlink()
    assert [line.path for line in runs(tmp_path)] == [path]


@pytest.mark.parametrize("where", ["nowhere", "s3://bucket/runs", "file"])
def test_where_runs_cannot_be_listed_it_says_so(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ddpprobe.RunNotFound, match=where):
        runs(where if "://" in where else tmp_path / where)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("said", "where"), [("", RUNS), ("s3://b/run", RUNS), ("/scratch/run", Path("/scratch/run"))]
)
def test_runs_are_looked_for_where_install_makes_them(
    here: Path, monkeypatch: pytest.MonkeyPatch, said: str, where: Path
) -> None:
    monkeypatch.setenv(RUN_VARIABLE, said)
    assert default_directory() == where


def test_the_python_api_lists_what_the_default_directory_holds(here: Path) -> None:
    ended(here / RUNS / "run")
    (line,) = ddpprobe.runs()
    assert isinstance(line, ListedRun)
    assert isinstance(line, ddpprobe.ListedRun)
    assert line.path == RUNS / "run"
