"""How a rank died is known although its parent reaps it at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from ddpprobe.daemon.__main__ import parser
from ddpprobe.daemon.liveness import Exit, ProcessWatcher
from ddpprobe.rundir.pidfds import UNKNOWN, describe, how_it_ended
from ddpprobe.rundir.processes import is_process

from ..kernel import TELLS_THE_REAPED

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
Poll = Callable[..., object]


@pytest.fixture
def watcher() -> Iterator[ProcessWatcher]:
    watcher = ProcessWatcher()
    yield watcher
    watcher.close()


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start processes; those left over are killed and reaped."""
    started: list[subprocess.Popen[bytes]] = []

    def one(*command: str) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(command or SLEEP))
        return started[-1]

    yield one
    for process in started:
        process.kill()
        process.wait()


def created(pid: int) -> float:
    return psutil.Process(pid).create_time()


def collect(watcher: ProcessWatcher, count: int, poll: Poll) -> list[Exit]:
    found: list[Exit] = []
    poll(lambda: found.extend(watcher.exits()) or len(found) >= count)
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM])
def test_the_signal_is_named_while_the_zombie_waits(watcher, start, poll, number) -> None:
    process = start()
    assert watcher.watch((0, 3), process.pid, created(process.pid))
    before = time.time_ns()
    process.send_signal(number)
    (gone,) = collect(watcher, 1, poll)
    assert (gone.key, gone.how) == ((0, 3), number.name)
    assert before <= gone.time_ns <= time.time_ns()


def test_who_is_reaped_before_a_look_is_known_behind_it(watcher, start) -> None:
    """However late the thread that waits gets its turn."""
    processes = [start() for _ in range(30)]
    for number, process in enumerate(processes):
        watcher.watch((0, number), process.pid, created(process.pid))
    for number, process in enumerate(processes):
        process.kill()
        process.wait()
        watcher.look()
        assert [(gone.key, gone.how) for gone in watcher.exits()] == [((0, number), "SIGKILL")]


def test_a_look_that_nobody_takes_any_more_is_over(watcher) -> None:
    watcher._stopped = True  # as after a failure of its thread
    os.eventfd_write(watcher._wake, 1)
    watcher._thread.join()
    watcher.look()
    assert watcher.exits() == []


@pytest.mark.parametrize("code", [0, 1, 17])
def test_the_exit_code_is_told(watcher, start, poll, code) -> None:
    script = f"import sys; sys.stdin.read(); sys.exit({code})"
    with subprocess.Popen([sys.executable, "-S", "-c", script], stdin=subprocess.PIPE) as process:
        watcher.watch((0, 0), process.pid, created(process.pid))
        process.communicate()
        (gone,) = collect(watcher, 1, poll)
    assert gone.how == f"exit:{code}"


def test_the_signal_is_known_although_the_parent_reaps_like_torchrun(watcher, start, poll) -> None:
    """A parent that looks every 0.1 s, twenty times."""
    stop = threading.Event()
    processes = [start() for _ in range(20)]

    def reap() -> None:
        while not stop.wait(0.1):
            for process in processes:
                process.poll()

    parent = threading.Thread(target=reap)
    parent.start()
    try:
        for number, process in enumerate(processes):
            watcher.watch((0, number), process.pid, created(process.pid))
        for process in processes:
            process.kill()
        exits = collect(watcher, len(processes), poll)
    finally:
        stop.set()
        parent.join()
    assert [e.how for e in exits] == ["SIGKILL"] * 20


@pytest.mark.skipif(not TELLS_THE_REAPED, reason="PIDFD_INFO_EXIT needs Linux 6.15")
def test_the_signal_is_known_although_the_zombie_is_gone(start) -> None:
    process = start()
    fd = os.pidfd_open(process.pid)
    process.kill()
    process.wait()
    try:
        assert how_it_ended(process.pid, fd) == "SIGKILL"
    finally:
        os.close(fd)


def test_a_process_that_was_gone_before_is_reported_as_unknown(watcher, start, poll) -> None:
    process = start()
    began = created(process.pid)
    process.kill()
    process.wait()
    assert not watcher.watch((1, 2), process.pid, began)
    assert collect(watcher, 1, poll) == [Exit((1, 2), UNKNOWN, 0)]


def test_a_zombie_is_still_asked_how_it_died(watcher, start, poll) -> None:
    process = start()
    began = created(process.pid)
    process.kill()
    poll(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    watcher.watch((0, 0), process.pid, began)
    assert [e.how for e in collect(watcher, 1, poll)] == ["SIGKILL"]


def test_a_reused_pid_is_not_taken_for_the_rank(watcher, start, poll) -> None:
    process = start()
    assert not is_process(process.pid, created(process.pid) - 60)
    assert not watcher.watch((0, 0), process.pid, created(process.pid) - 60)
    assert [e.how for e in collect(watcher, 1, poll)] == [UNKNOWN]


def test_who_was_alive_behind_a_death_has_a_greater_order(start, poll) -> None:
    """The second death comes when the first one was taken up, the others after that, together."""
    watcher = ProcessWatcher()
    processes = [start() for _ in range(4)]
    for number, process in enumerate(processes):
        watcher.watch((0, number), process.pid, created(process.pid))
    found: list[Exit] = []
    for process in processes[:2]:
        process.kill()
        found += collect(watcher, 1, poll)
    for process in processes[2:]:
        process.terminate()
    found += collect(watcher, 2, poll)
    watcher.close()
    first, second, *together = (e.order for e in sorted(found, key=lambda e: e.key))
    assert first < second < min(together)


def test_without_pidfds_the_death_is_noticed_all_the_same(start, poll, monkeypatch) -> None:
    def refuse(_: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    watcher = ProcessWatcher()
    process = start()
    assert watcher.watch((0, 0), process.pid, created(process.pid))
    process.kill()
    process.wait()
    assert [e.how for e in collect(watcher, 1, poll)] == [UNKNOWN]
    watcher.close()


@pytest.mark.skipif(not TELLS_THE_REAPED, reason="PIDFD_INFO_EXIT needs Linux 6.15")
def test_of_a_given_pidfd_the_end_is_known_though_it_was_reaped_before_the_watch(
    start, poll
) -> None:
    process, other = start(), start()
    began = created(process.pid)
    watcher = ProcessWatcher((process.pid, os.pidfd_open(process.pid)))
    process.kill()
    process.wait()
    assert watcher.watch((0, 1), other.pid, created(other.pid))
    assert watcher.watch((0, 0), process.pid, began)
    (told,) = collect(watcher, 1, poll)
    assert (told.key, told.how) == ((0, 0), "SIGKILL")
    assert told.time_ns > 0
    watcher.close()


def test_a_given_pidfd_is_of_the_process_that_it_is_of_and_no_other(start, poll) -> None:
    process, gone = start(), start()
    began = created(gone.pid)
    watcher = ProcessWatcher((process.pid, os.pidfd_open(process.pid)))
    gone.kill()
    gone.wait()
    assert not watcher.watch((0, 1), gone.pid, began)
    assert watcher.watch((0, 0), process.pid, created(process.pid))
    assert collect(watcher, 1, poll) == [Exit((0, 1), UNKNOWN, 0)]
    watcher.close()


@pytest.mark.parametrize("given", [False, True])
def test_closing_leaves_no_thread_and_no_descriptor(start, given: bool) -> None:
    before = set(os.listdir("/proc/self/fd")), threading.active_count()
    process = start()
    watcher = ProcessWatcher((process.pid, os.pidfd_open(process.pid)) if given else None)
    watcher.watch((0, 0), process.pid, created(process.pid))
    watcher.close()
    unused = ProcessWatcher((process.pid, os.pidfd_open(process.pid)) if given else None)
    unused.close()
    assert (set(os.listdir("/proc/self/fd")), threading.active_count()) == before


def test_statuses_in_words() -> None:
    assert [describe(s) for s in (None, 0, 256, 9, 9 | 0x80)] == [
        UNKNOWN, "exit:0", "exit:1", "SIGKILL", "SIGKILL",
    ]  # fmt: skip


def test_a_daemon_whose_pidfd_was_closed_on_the_way_does_without(tmp_path) -> None:
    given = [f"{os.getpid()}:{number}" for number in ("999999", "none", "")]
    for text in (*given, "none"):
        told = parser().parse_args(["--dir", str(tmp_path), "--pidfd", text])
        assert told.pidfd is None
    fd = os.pidfd_open(os.getpid())
    told = parser().parse_args(["--dir", str(tmp_path), "--pidfd", f"{os.getpid()}:{fd}"])
    assert told.pidfd == (os.getpid(), fd)
    os.close(fd)
