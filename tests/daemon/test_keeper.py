"""A daemon that cannot live is started ever more seldom, and the training says so once."""

from __future__ import annotations

import json
import logging
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ddpprobe
from ddpprobe.daemon import launch
from ddpprobe.daemon.launch import CHECK_SECONDS, STEADY_SECONDS, DaemonKeeper, last_words
from ddpprobe.daemon.node import DaemonOptions, NodeDaemon
from ddpprobe.rundir import paths, processes
from ddpprobe.rundir.paths import DirectoryLock, RunDir
from ddpprobe.rundir.tensor_pack import write as write_pack

from ..made_runs import NODE, Made


class Bench:
    """A keeper, its clock, and how often it has started a daemon."""

    def __init__(self, path: Path, *, told: bool = False, found: bool = False) -> None:
        self.run = RunDir(paths.make_dir(path))
        paths.make_dir(self.log.parent)
        self.now, self.starts = 0.0, list[float]()
        self.keeper = DaemonKeeper(
            self.run, NODE, self.start, told=told, found=found, clock=lambda: self.now
        )

    @property
    def log(self) -> Path:
        return self.run.daemon_file(NODE, "log")

    def start(self) -> None:
        self.starts.append(self.now)

    def wait(self, seconds: float) -> None:
        """Look every half second, as often as sampled steps may end."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            self.keeper.look()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "run")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize("last", [False, True])
def test_a_daemon_of_the_attempt_before_that_has_ended_is_followed_by_one_at_once(
    tmp_path: Path, last: bool
) -> None:
    bench = Bench(tmp_path / "run", found=True)
    lock = DirectoryLock(bench.run.daemon_file(NODE, "lock"))
    assert lock.acquire()
    bench.wait(1)
    lock.release()
    bench.now += 0 if last else CHECK_SECONDS
    bench.keeper.look(last=last)
    assert len(bench.starts) == 1


def test_a_daemon_that_crashes_at_its_start_is_started_ever_more_seldom(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.log.write_text("Traceback\nValueError: \x1b[2Jbroken\n")
    bench.wait(3 * 60)
    assert len(bench.starts) <= 6
    (text,) = said(caplog)
    assert "soon after each start" in text
    assert "ValueError: ?[2Jbroken" in text
    assert str(bench.log) in text
    bench.wait(24 * 3600)
    assert len(bench.starts) < 160
    assert len(said(caplog)) == 1
    gaps = [b - a for a, b in zip(bench.starts, bench.starts[1:], strict=False)]
    assert gaps == sorted(gaps)


def test_one_that_lived_is_started_at_once_and_then_counts_anew(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    lock = DirectoryLock(bench.run.daemon_file(NODE, "lock"))
    for _ in range(10):
        assert lock.acquire()
        bench.wait(120)
        lock.release()
        before = len(bench.starts)
        bench.wait(CHECK_SECONDS)
        assert len(bench.starts) == before + 1
    assert said(caplog) == []


def test_the_last_look_does_not_wait_for_its_time(bench: Bench) -> None:
    lock = DirectoryLock(bench.run.daemon_file(NODE, "lock"))
    assert lock.acquire()
    bench.wait(60)
    bench.keeper.look(last=True)
    assert bench.starts == []  # it lives
    lock.release()
    bench.keeper.look()
    assert bench.starts == []
    bench.keeper.look(last=True)
    assert bench.starts == [bench.now]


def test_the_last_look_leaves_a_daemon_the_time_to_start(bench: Bench) -> None:
    bench.keeper.look(last=True)
    bench.now += CHECK_SECONDS - 1
    bench.keeper.look(last=True)
    assert bench.starts == []
    bench.now += 1
    bench.keeper.look(last=True)
    bench.now += CHECK_SECONDS - 1
    bench.keeper.look(last=True)  # nor is what it has started itself started twice
    assert bench.starts == [CHECK_SECONDS]


def test_what_a_daemon_wants_the_training_to_know_is_said_once_and_printable(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    lock = DirectoryLock(bench.run.daemon_file(NODE, "lock"))
    assert lock.acquire()
    place = bench.run.daemon_file(NODE, "json")
    for senseless in ({"notices": ["open"]}, {"notices": {"listen": 7, "else": "a"}}, {"pid": 1}):
        paths.write_json(place, senseless)
        bench.wait(20)
    assert said(caplog) == []
    paths.write_json(place, {"notices": {"listen": "open\x1b[2J", "push": "x" * 5000}})
    bench.wait(60)
    paths.write_json(place, {"notices": {"listen": "open elsewhere"}})
    bench.wait(60)
    lock.release()
    assert said(caplog) == ["open?[2J", "x" * 600]


@pytest.mark.parametrize(
    "word",
    [
        "MemoryError",
        "sh: error while loading shared libraries: Cannot allocate memory",
        "Original error was: libscipy_openblas64_.so: failed to map segment from shared object",
        "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.",
        "RuntimeError: can't start new thread",
    ],
)
def test_memory_that_ran_out_is_said_at_the_first_death(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512 << 20, -1))
    bench.log.write_text(f"Traceback\n{word}\n")
    bench.wait(600)
    (text,) = said(caplog)
    assert "ran out of memory (RLIMIT_AS, `ulimit -v`, is 512 MiB here)" in text


def test_without_a_limit_of_memory_a_thread_that_cannot_start_may_have_other_reasons(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, -1))
    bench.log.write_text("RuntimeError: can't start new thread\n")
    bench.wait(600)
    (text,) = said(caplog)
    assert text.endswith("ends with: RuntimeError: can't start new thread")


def test_a_start_that_is_refused_is_said_once_an_outage(
    bench: Bench, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError(11, "no process to be had")

    bench.keeper._restart = refuse
    bench.wait(600)
    (text,) = said(caplog)  # and not that it ends soon after each start: it had none
    assert "cannot be started anew" in text
    silent = DaemonKeeper(bench.run, NODE, refuse, told=True, clock=lambda: 1e6)
    caplog.clear()
    silent._next = 0.0
    silent.look()
    assert said(caplog) == []


def test_a_daemon_that_is_slow_to_start_is_neither_started_twice_nor_said_to_end(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    words = ["--dir", str(bench.run.path), "--node", NODE, "--wait", "120"]
    slow = subprocess.Popen([sys.executable, "-c", "input()", *words], stdin=subprocess.PIPE)
    try:
        bench.wait(STEADY_SECONDS)
        assert (bench.starts, said(caplog)) == ([], [])
        bench.wait(2 * CHECK_SECONDS)  # it does not start: another one may
        assert len(bench.starts) == 1
    finally:
        slow.kill()
        slow.communicate()


def test_a_daemon_that_ended_as_it_started_is_started_anew_at_the_next_look(bench: Bench) -> None:
    words = ["--dir", str(bench.run.path), "--node", "node_0007"]  # another node's does not count
    other = subprocess.Popen([sys.executable, "-c", "input()", *words], stdin=subprocess.PIPE)
    try:
        bench.wait(CHECK_SECONDS)
        assert len(bench.starts) == 1
    finally:
        other.kill()
        other.communicate()


def test_a_deleted_run_directory_is_said_once_and_not_made_again(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(bench.run.path)
    bench.wait(600)
    assert bench.starts == []
    (text,) = said(caplog)
    assert f"the run directory {bench.run.path} is gone" in text
    header = {"attempt": 0, "step": 7, "rank": 0, "world_size": 1}
    with pytest.raises(FileNotFoundError):
        write_pack(bench.run.pack(0, NODE, 0, 7), header, [])
    with pytest.raises(FileNotFoundError):
        launch.start_daemon(bench.run, NODE)
    assert not bench.run.path.exists()


def test_a_daemon_whose_run_directory_is_deleted_ends_and_does_not_make_it_again(
    tmp_path: Path,
) -> None:
    run = Made(tmp_path / "run", ranks=1).whole(6).close(cleanly=False)
    paths.make_dir(run.daemon_file(NODE, "lock").parent)
    daemon = NodeDaemon(DaemonOptions(run, NODE, "127.0.0.1:0", linger=1e6, wait=1e6))

    def look(_: object, real: Callable[[], None] = daemon._announce) -> None:
        real()
        shutil.rmtree(run.path)  # while it is at work

    daemon._announce = partial(look, None)  # type: ignore[method-assign]
    daemon.serve()
    assert not run.path.exists()


def test_a_daemon_whose_run_directory_is_another_runs_now_leaves_that_alone(tmp_path: Path) -> None:
    """A crash, `rm -r`, and the next try at the same place, while the daemon serves the crash."""
    run = Made(tmp_path / "run", ranks=1).whole(6).close(cleanly=False)
    paths.make_dir(run.daemon_file(NODE, "lock").parent)
    daemon = NodeDaemon(DaemonOptions(run, NODE, "127.0.0.1:0", linger=1e6, wait=1e6))

    def look(_: object, real: Callable[[], None] = daemon._announce) -> None:
        real()
        shutil.rmtree(run.path)
        Made(run.path, ranks=1).whole(3).close(cleanly=False)
        paths.make_dir(run.daemon_file(NODE, "json").parent)
        run.daemon_file(NODE, "json").write_text("{}")

    daemon._announce = partial(look, None)  # type: ignore[method-assign]
    assert not daemon.serve()
    assert run.daemon_file(NODE, "json").read_text() == "{}"
    assert not run.store.exists()
    assert len(list(ddpprobe.open(run.path).records())) == 3


@pytest.mark.parametrize("listen", ["203.0.113.7:0", "no.such.host.invalid:0"])
def test_an_address_of_no_machine_is_told_and_the_daemon_is_served_here(
    tmp_path: Path, listen: str
) -> None:
    """The gather of the other nodes, which has an address of its own, rests on the same server."""
    run = Made(tmp_path / "run", ranks=1).whole(6).close(cleanly=False)
    paths.make_dir(run.daemon_file(NODE, "lock").parent)
    options = DaemonOptions(run, NODE, listen, wait=1e6, gather_listen="127.0.0.1:0")
    daemon, said = NodeDaemon(options), list[dict[str, Any]]()

    def look(real: Callable[[], None] = daemon._announce) -> None:
        real()
        said.append(json.loads(run.daemon_file(NODE, "json").read_bytes()))
        daemon.stop()

    daemon._announce = look  # type: ignore[method-assign]
    daemon.serve()
    (told,) = said
    assert told["listen"].startswith("127.0.0.1:")
    assert told["gather"].startswith("127.0.0.1:")
    (why,) = re.findall(
        rf"cannot be served at {re.escape(listen)} \((.+)\), so it is at", told["notices"]["listen"]
    )
    assert why
    assert told["notices"]["listen"].endswith("in DDPPROBE_LISTEN")


def test_the_last_words_of_a_log_follow_no_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("word")
    (tmp_path / "log").symlink_to(tmp_path / "secret")
    assert last_words(tmp_path / "log") == "nothing"
    assert last_words(tmp_path / "none") == "nothing"


def link(path: Path, target: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
    return path


@pytest.mark.parametrize(
    ("own", "namespace", "first", "trouble"),
    [
        ("1", "pid:[4026531836]", True, ""),
        ("1", "pid:[4026533000]", False, ""),
        ("1", "pid:[4026533000]", True, "process 1 of this PID namespace"),
        ("7", "pid:[4026533000]", True, "/proc is of another PID namespace"),
    ],
)
def test_a_pid_namespace_that_ends_with_the_job_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: str,
    namespace: str,
    first: bool,
    trouble: str,
) -> None:
    monkeypatch.setattr(processes.os, "getpid", lambda: 1)  # type: ignore[attr-defined]
    monkeypatch.setattr(processes, "_PROC", link(tmp_path / "self", own))
    monkeypatch.setattr(processes, "_NAMESPACE", link(tmp_path / "ns", namespace))
    monkeypatch.setattr(processes, "_is_of_job", lambda _: first)
    found = processes.namespace_trouble()
    assert found.startswith(trouble)
    assert bool(found) == bool(trouble)
