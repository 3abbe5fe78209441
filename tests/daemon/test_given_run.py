"""What `ddpprobe daemon` refuses, and that it leaves nothing behind where it does."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpprobe.daemon import given_run
from ddpprobe.daemon.__main__ import main
from ddpprobe.rundir import paths
from ddpprobe.rundir.paths import DirectoryLock, RunDir

from ..conftest import handlers_kept

NODE = "node_0000"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of one node that is over, as far as names go."""
    made = RunDir(paths.make_dir(tmp_path / "runs" / "run"))
    paths.write_json(made.run_json, {"format_version": 1, "run_id": "r", "nodes": 2})
    paths.make_dir(made.rank_journal(0, NODE, 0))
    return made


def files_of(directory: Path) -> set[Path]:
    return set(directory.rglob("*"))


@pytest.mark.parametrize(
    "name",
    ["../../x", "node_0000/../../x", "..", "", "node_7", "node_00007", "x", "node_٠٠٠٠", "a\0b"],
)
def test_what_is_no_name_of_a_node_is_refused_and_nothing_is_written(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    before = files_of(tmp_path)
    assert main(["--dir", str(run.path), "--node", name, "--wait", "0"]) == 2
    said = capsys.readouterr().err
    assert "expected the name of a node, which is node_ and its index in four digits" in said
    assert f"this run has {NODE}" in said
    assert files_of(tmp_path) == before


def test_a_node_that_a_run_has_not_is_refused_once_it_is_over(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(run.path)
    assert main(["--dir", str(run.path), "--node", "node_0002", "--wait", "0"]) == 2
    assert f"no such node, and is over; this run has {NODE}" in capsys.readouterr().err
    assert files_of(run.path) == before


def test_a_node_that_may_still_come_is_taken(run: RunDir) -> None:
    assert given_run.node_of(run, "node_0001") == "node_0001"  # run.json says that there are two
    lock = DirectoryLock(run.lock)
    assert lock.acquire()  # as rank 0 does: a later attempt may have more nodes
    assert given_run.node_of(run, "node_0002") == "node_0002"
    lock.release()
    paths.make_dir(run.path / "daemon")
    run.daemon_file("node_0003", "log").touch()  # by who launches a daemon
    assert given_run.node_of(run, "node_0003") == "node_0003"


def test_before_the_first_attempt_every_node_may_come(tmp_path: Path) -> None:
    assert given_run.node_of(RunDir(tmp_path), "node_0012") == "node_0012"
    assert given_run.node_of(RunDir(tmp_path), None) == NODE


def test_without_a_name_the_first_node_is_taken(run: RunDir) -> None:
    paths.make_dir(run.attempt_dir(1) / "node_0003")
    (run.attempt_dir(0) / "node_").mkdir()
    assert given_run.node_of(run, None) == NODE


@pytest.mark.parametrize("part", ["run.zarr", "run.zarr/attempt_000", "journal", "journal/000"])
def test_a_part_of_a_run_is_refused(
    run: RunDir, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    paths.make_dir(run.path / part)
    before = files_of(run.path)
    assert main(["--dir", str(run.path / part), "--wait", "0"]) == 2
    assert f"a part of a run; give its directory: {run.path}" in capsys.readouterr().err
    assert files_of(run.path) == before


def test_what_holds_something_else_is_refused_and_names_the_runs_in_it(
    run: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(tmp_path)
    assert main(["--dir", str(run.path.parent), "--wait", "0"]) == 2
    assert f"holds 1 runs, name one of them: {run.path}" in capsys.readouterr().err
    (tmp_path / "train.py").touch()
    assert main(["--dir", str(tmp_path), "--wait", "0"]) == 2
    assert "not a ddpprobe run (no run.json; it holds runs, train.py)" in capsys.readouterr().err
    assert files_of(tmp_path) == before | {tmp_path / "train.py"}


def test_where_no_run_begins_the_end_of_the_wait_is_an_error_and_no_lock_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with handlers_kept():
        assert main(["--dir", str(tmp_path), "--listen", "127.0.0.1:0", "--wait", "0"]) == 2
    said = capsys.readouterr().err
    assert f"no run began in {tmp_path} within 0 s: give the directory that install() made" in said
    assert files_of(tmp_path) == set()


def test_what_a_launcher_has_begun_is_waited_for(tmp_path: Path) -> None:
    begun = RunDir(tmp_path)
    begun.lock.touch()
    paths.make_dir(tmp_path / "daemon")
    (tmp_path / ".run.json.0123").touch()
    assert given_run.run_at(tmp_path).path == tmp_path


@pytest.mark.parametrize(
    ("words", "environment", "says"),
    [
        (["--listen", "1"], "", "--listen: cannot listen at '1': write HOST:PORT"),
        (["--listen", ""], "", "--listen: cannot listen at ''"),
        (["--gather-listen", "x:99999"], "", "--gather-listen: cannot listen at 'x:99999'"),
        ([], "1", "DDPPROBE_LISTEN: cannot listen at '1': write HOST:PORT"),
        (["--linger", "-1"], "", "--linger: expected seconds, 0 or more, as in 20; got '-1'"),
        (["--linger", "nan"], "", "--linger: expected seconds, 0 or more, as in 20; got 'nan'"),
        (["--wait", "inf"], "", "--wait: expected seconds, 0 or more, as in 20; got 'inf'"),
        (["--wait", "long"], "", "--wait: expected seconds, 0 or more, as in 20; got 'long'"),
    ],
)
def test_an_address_or_a_time_that_is_none_is_refused_before_anything_is_written(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    words: list[str], environment: str, says: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("DDPPROBE_LISTEN", environment)
    before = files_of(run.path)
    assert main_code(["--dir", str(run.path), *words]) == 2
    assert says in capsys.readouterr().err
    assert files_of(run.path) == before


def main_code(words: list[str]) -> int:
    try:
        return main(words)
    except SystemExit as done:  # argparse has said it
        return int(str(done.code))
