"""Ranks see how other ranks of their node end, and say so before anything can happen to them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddpprobe.rank import peer_watcher
from ddpprobe.rank.peer_watcher import (
    BROKEN_SECONDS,
    CAUGHT_SECONDS,
    PeerWatcher,
    Process,
    patience,
)
from ddpprobe.records.events import ClosedEvent, PeerExitEvent
from ddpprobe.records.fate import RaisedError
from ddpprobe.rundir import pidfds, processes

from ..kernel import TELLS_THE_REAPED

OWN_RANK = 3
SCRIPT = "import sys; sys.exit(int(sys.stdin.readline() or 9))"  # its code is what it is told


class Peers:
    """Processes in the place of other ranks, and what is said of them."""

    def __init__(self) -> None:
        self.said: list[PeerExitEvent] = []
        self.started: list[subprocess.Popen[bytes]] = []
        self.watcher = PeerWatcher(OWN_RANK, self.said.append)  # type: ignore[arg-type]  # of one kind

    def start(self, ranks: int) -> dict[int, Process]:
        """Start processes; return them by rank."""
        found = {}
        for rank in range(ranks):
            command = [sys.executable, "-S", "-c", SCRIPT]
            process = subprocess.Popen(command, stdin=subprocess.PIPE)
            self.started.append(process)
            started = psutil.Process(process.pid).create_time()
            found[rank] = replace(Process.own(), pid=process.pid, started=started)
        return found

    def watch(self, ranks: int) -> None:
        """Start processes and watch them."""
        self.watcher.start(self.start(ranks))

    def end(self, rank: int, code: int) -> None:
        """End one by an exit code."""
        self.started[rank].communicate(f"{code}\n".encode())

    def close(self) -> None:
        """Leave nothing behind."""
        self.watcher.close()
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    yield made
    made.close()


def open_files() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def places(said: list[PeerExitEvent]) -> list[tuple[int, str, tuple[int, ...]]]:
    return [(event.rank, event.how, event.alive) for event in said]


def test_how_each_peer_ended_is_said_and_who_was_alive_then(
    peers: Peers, poll: Callable[..., object]
) -> None:
    peers.watch(3)
    peers.started[1].kill()
    poll(lambda: len(peers.said) == 1)
    peers.end(2, 7)
    poll(lambda: len(peers.said) == 2)
    peers.end(0, 0)
    poll(lambda: len(peers.said) == 3)
    assert places(peers.said) == [
        (1, "SIGKILL", (0, 2, 3)), (2, "exit:7", (0, 3)), (0, "exit:0", (3,)),
    ]  # fmt: skip
    times = [event.time_ns for event in peers.said]
    assert times == sorted(times)


def test_of_peers_that_are_seen_dead_together_none_is_said_to_have_outlived_the_other(
    peers: Peers, poll: Callable[..., object]
) -> None:
    peers.watch(3)
    peers.watcher.rest()
    peers.started[0].kill()
    peers.started[1].kill()
    for process in peers.started[:2]:
        process.wait()
    peers.watcher.go_on()
    poll(lambda: len(peers.said) == 2)
    how = "SIGKILL" if TELLS_THE_REAPED else "unknown"
    assert sorted(places(peers.said)) == [(0, how, (2, 3)), (1, how, (2, 3))]


def test_nobody_is_watched_in_the_place_of_a_rank_that_is_not_seen_from_here(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_files(), threading.active_count()
    peers.start(1)
    (process,) = peers.start(1).values()
    files = open_files()
    elsewhere = replace(process, namespace=1)
    another = replace(process, started=(process.started or 0.0) - 60.0)  # its number was used again
    peers.watcher.start({0: elsewhere, 1: another, 2: replace(process, pid=1 << 22)})
    assert (open_files(), threading.active_count()) == (files, before[1])
    monkeypatch.setattr(pidfds, "open_pidfd", lambda _: None)  # of an old kernel
    peers.watcher.start({0: process})
    assert (open_files(), threading.active_count()) == (files, before[1])
    peers.watcher.close(60.0)  # there is nobody to wait for
    assert (open_files(), threading.active_count()) == (files, before[1])


def test_only_who_still_has_its_number_is_watched(
    peers: Peers, poll: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = peers.start(2)
    own = found[1].pid, found[1].started
    monkeypatch.setattr(processes, "is_process", lambda *asked: asked == own)
    peers.watcher.start(found)
    peers.end(0, 5)
    peers.end(1, 7)
    poll(lambda: peers.said)
    assert [(event.rank, event.how) for event in peers.said] == [(1, "exit:7")]


def test_where_the_namespace_is_hidden_nobody_is_watched(
    peers: Peers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(peer_watcher, "_NAMESPACE", tmp_path / "hidden")
    assert Process.own().namespace == 0
    found = peers.start(1)
    before = open_files(), threading.active_count()
    peers.watcher.start(found)
    assert (open_files(), threading.active_count()) == before


@pytest.mark.parametrize(
    ("error", "where", "name"),
    [(OSError, pidfds, "open_pidfd"), (RuntimeError, threading.Thread, "start")],
)
def test_where_no_thread_or_descriptor_is_to_be_had_none_is_left(
    error: type[Exception], where: object, name: str, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = peers.start(2)
    before = open_files()
    given = iter([pidfds.open_pidfd(found[0].pid)]) if where is pidfds else iter(())

    def refuse(*_: object) -> int:
        try:
            return next(given)
        except StopIteration:
            raise error from None

    monkeypatch.setattr(where, name, refuse)
    with pytest.raises(error):
        peers.watcher.start(found)
    assert open_files() == before


def test_closing_leaves_no_thread_and_no_descriptor(
    peers: Peers, poll: Callable[..., object]
) -> None:
    found = peers.start(2)
    before = open_files(), threading.active_count()
    for dead in (False, True):
        peers.watcher.start({0: found[0]} if dead else found)
        peers.watcher.go_on()  # as after a fork of which it has not heard before
        assert threading.active_count() == before[1] + 1
        (thread,) = [t for t in threading.enumerate() if t.name == "ddpprobe peers"]
        assert thread.daemon  # no script waits for it
        assert not any(
            map(os.get_inheritable, [peers.watcher._wake.number, *peers.watcher._watched])
        )
        if dead:
            peers.started[0].kill()
            poll(lambda: peers.said)
        for _ in range(2):
            peers.watcher.close()
            assert (open_files(), threading.active_count()) == before


def test_a_thread_that_cannot_write_is_not_waited_for_and_keeps_its_descriptors(
    peers: Peers, poll: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_watcher, "JOIN_SECONDS", 0.01)
    saying, disk = threading.Event(), threading.Event()

    def say(_: object) -> None:
        saying.set()
        disk.wait()

    watcher = PeerWatcher(OWN_RANK, say)
    watcher.start(peers.start(2))
    (thread,) = [t for t in threading.enumerate() if t.name == "ddpprobe peers"]
    peers.started[0].kill()
    assert saying.wait(60.0)
    held = [watcher._wake.number, *watcher._watched]
    watcher.close()
    assert thread.is_alive()
    assert all(map(is_open, held))
    disk.set()
    poll(lambda: not thread.is_alive())
    watcher.close()
    assert not any(map(is_open, held))


def test_who_closes_can_wait_for_a_death_that_is_about_to_come(peers: Peers) -> None:
    peers.watch(2)
    threading.Timer(0.2, peers.started[1].kill).start()
    peers.watcher.close(60.0)
    assert places(peers.said) == [(1, "SIGKILL", (0, 3))]


def test_who_closes_without_a_word_waits_for_nobody(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers.watch(1)
    monkeypatch.setattr(peers.watcher._seen, "wait", lambda _: pytest.fail("it has waited"))
    peers.watcher.close()
    assert peers.said == []


def test_a_process_knows_itself() -> None:
    own = Process.own()
    assert (own.pid, own.started) == (os.getpid(), processes.own_start())
    assert own.namespace == Path("/proc/self/ns/pid").stat().st_ino


def test_who_waits_for_a_death_that_does_not_come_goes_on(peers: Peers) -> None:
    peers.watch(1)
    peers.watcher.close(0.01)
    assert peers.said == []


GONE = RaisedError("RuntimeError", "[gloo] Connection closed by peer", collective=True)


@pytest.mark.parametrize(
    ("said", "midway", "seconds"),
    [
        ({}, False, 0.0),
        ({}, True, 0.0),
        ({"at_exit": True}, False, 0.0),
        ({"at_exit": True}, True, CAUGHT_SECONDS),
        ({"at_exit": True, "asked": True}, True, 0.0),
        ({"error": GONE}, True, BROKEN_SECONDS),
        ({"error": GONE}, False, BROKEN_SECONDS),
        ({"error": replace(GONE, message="[gloo] Timed out waiting 10ms")}, True, 0.0),
        ({"error": RaisedError("ValueError", "bad batch")}, True, 0.0),
    ],
)
def test_only_who_may_have_lost_a_peer_waits_for_a_death(
    said: dict[str, Any], midway: bool, seconds: float
) -> None:
    assert patience(ClosedEvent(**said), midway=midway) == seconds


def test_the_thread_is_not_there_while_the_process_forks_and_a_child_leaves_the_parent_s_watch(
    peers: Peers, poll: Callable[..., object]
) -> None:
    peers.watch(2)
    peers.watcher.rest()
    assert "ddpprobe peers" not in {thread.name for thread in threading.enumerate()}
    held = list(peers.watcher._watched)
    child = os.fork()
    if child == 0:
        peers.watcher.abandon()
        os._exit(sum(not is_open(fd) for fd in held))
    peers.watcher.go_on()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2  # a descriptor of each peer
    peers.started[0].kill()
    poll(lambda: peers.said)
    assert places(peers.said) == [(0, "SIGKILL", (1, 3))]
