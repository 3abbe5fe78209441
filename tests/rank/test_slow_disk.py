"""Training never waits for a disk: not while every write stands still, and not to end."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.rank import disk_thread
from ddpprobe.rundir import heartbeat, spool, tmpfs
from ddpprobe.rundir.journal import JournalTail, segments_of
from ddpprobe.rundir.orders import Order, OrderBoard
from ddpprobe.rundir.paths import RunDir
from ddpprobe.rundir.spool import SpooledJournal
from tests import forked_script

Call = Callable[..., tuple[int, str, str]]
NODE = "node_0000"
CALLS = (
    "open", "pread", "pwrite", "write", "writev", "ftruncate", "fsync", "fdatasync", "rename",
    "replace", "unlink", "stat", "lstat", "listdir", "scandir", "mkdir", "posix_fallocate",
)  # fmt: skip


class Disk:
    """Every call that reaches files below `root`: the training thread's are told, others wait."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.works = threading.Event()
        self.works.set()
        self.blocked = threading.Event()
        self.touched: list[str] = []
        self._root, self._thread = str(root), threading.get_ident()
        self._inside = threading.local()
        for name in CALLS:
            patch.setattr(os, name, self._slowed(name, getattr(os, name)))

    def _slowed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        readlink = os.readlink

        def slowed(*args: Any, **kwargs: Any) -> Any:
            if not self.works.is_set() and not getattr(self._inside, "on", False):
                self._inside.on = True
                try:
                    at = args[0] if args else ""
                    where = readlink(f"/proc/self/fd/{at}") if isinstance(at, int) else str(at)
                except OSError:
                    where = ""
                finally:
                    self._inside.on = False
                if where.startswith(self._root):
                    self._wait(f"{name} {where}")
            return call(*args, **kwargs)

        return slowed

    def _wait(self, what: str) -> None:
        if threading.get_ident() == self._thread:
            self.touched.append(what)
            return
        self.blocked.set()
        self.works.wait()


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(tmp_path / "run", monkeypatch)
    yield made
    made.works.set()


def trained(steps: int, bad: int = -1) -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def train() -> None:
        for step in range(steps):
            x = torch.full((2, 4), float("nan") if step == bad else 1.0)
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    train.model = model  # type: ignore[attr-defined]
    return train


def test_steps_go_on_while_the_disk_stands_still_and_nothing_is_lost(
    tmp_path: Path, disk: Disk
) -> None:
    """Sampled steps, full tensors, an alarm, an order, a pause: none of them waits."""
    train = trained(30, bad=20)
    run = RunDir(tmp_path / "run")
    probe = ddpprobe.install(train.model, run_dir=run.path, every=2, capture="0", daemon="none")
    board = OrderBoard(run.orders(0, NODE))
    board.post(Order(0, "capture", 5, 6))
    disk.works.clear()
    train()
    with probe.pause("an evaluation"):
        pass
    probe.trigger("by hand")
    assert disk.blocked.wait(60), "the disk thread never came to the disk"
    assert disk.touched == []
    beat = heartbeat.read(run.heartbeat(0, NODE, 0))
    disk.works.set()
    probe.close()
    assert beat is not None
    assert beat.steps == 30
    opened = ddpprobe.open(run.path)
    steps = [record.step for record in opened.records(rank=0) if record.sampled]
    assert {*range(0, 30, 2), 5} <= set(steps)
    assert {capture.step for capture in opened.captures()} >= {*range(0, 30, 2), 5}
    assert opened.lost == []
    assert run.orders(0, NODE).exists()


def test_the_end_of_a_run_waits_two_seconds_for_a_dead_disk_and_says_what_is_left(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the disk did not take is in memory, and whoever comes next brings it in."""
    monkeypatch.setattr(disk_thread, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(disk_thread.DiskThread.close, "__defaults__", (0.2,))
    run = RunDir(tmp_path / "run")
    train = trained(10)
    probe = ddpprobe.install(train.model, run_dir=run.path, every=1, daemon="none")
    place = tmpfs.beside(run.heartbeat(0, NODE, 0).parent)
    assert place is not None
    disk.works.clear()
    train()
    with caplog.at_level(logging.WARNING, "ddpprobe"):
        probe.close()
    assert disk.touched == []
    assert "the disk does not take" in caplog.text
    assert place.is_dir()
    disk.works.set()
    (thread,) = [t for t in threading.enumerate() if t.name == "ddpprobe disk"] or [None]
    if thread is not None:
        thread.join(60)
    spool.settle_all(run, NODE)
    assert not place.exists()
    assert len([r for r in ddpprobe.open(run.path).records(rank=0) if r.sampled]) == 10


def journal_in(tmp_path: Path, room: int = 1 << 20) -> tuple[SpooledJournal, Path]:
    target = tmp_path / "journal"
    return SpooledJournal(tmp_path / "memory", target, {"rank": 0}, room), target


def frames(directory: Path) -> list[int]:
    tail = JournalTail(directory)
    found = [int(f.json()["n"]) for f in tail.poll() if "n" in f.json()]
    tail.close()
    assert tail.damage == {}
    return found


def test_a_disk_that_is_too_slow_costs_frames_that_are_counted(tmp_path: Path) -> None:
    journal, target = journal_in(tmp_path, room=1000)
    kept = [n for n in range(100) if journal.append_json(3, {"n": n})]
    assert 0 < len(kept) < 100
    assert journal.dropped == {spool.SLOW: 100 - len(kept)}
    assert journal.carry()
    assert journal.append_json(3, {"n": 100})
    journal.close()
    assert journal.finish()
    assert frames(target) == [*kept, 100]
    assert segments_of(tmp_path / "memory") == []


def test_what_is_carried_in_pieces_is_what_was_written(tmp_path: Path) -> None:
    journal, target = journal_in(tmp_path, room=4000)
    for n in range(300):
        journal.append_json(3, {"n": n})
        if n % 7 == 0:
            assert journal.carry()
    assert len(segments_of(target)) > 2
    assert len(segments_of(tmp_path / "memory")) <= 2, "memory is given back"
    journal.close()
    assert journal.finish()
    assert frames(target) == list(range(300))


def test_a_disk_that_refuses_is_asked_again_and_gets_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, target = journal_in(tmp_path)
    monkeypatch.setattr(spool, "BACK_OFF_SECONDS", 0.0)
    pwrite, full = os.pwrite, [True]

    def refusing(fd: int, data: bytes, at: int) -> int:
        if full[0] and os.readlink(f"/proc/self/fd/{fd}").startswith(str(target)):
            raise OSError(28, "No space left on device")
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", refusing)
    for n in range(5):
        journal.append_json(3, {"n": n})
        assert not journal.carry()
    assert journal.carrier.refused == "ENOSPC"
    assert journal.dropped == {}
    full[0] = False
    journal.close()
    assert journal.finish()
    assert frames(target) == list(range(5))


UNTOLD = """
import os, resource, signal, sys
import torch
from torch import nn
import ddpprobe
from ddpprobe.rank import record_files
record_files.RecordFiles._wake = lambda self: None  # nobody tells the disk thread of frames
record_files.RecordFiles.start = lambda self, *chores: None
model = nn.Linear(4, 1)
probe = ddpprobe.install(model, run_dir=sys.argv[1], every=1, daemon="none")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

def train():
    model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
"""
KILLED = f"""{UNTOLD}
for _ in range(12):
    train()
os.kill(os.getpid(), signal.SIGKILL)
"""
LIMITED = f"""{UNTOLD}
for step in range(60):
    if step == 20:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, resource.RLIM_INFINITY))
    train()
probe.close()
"""


def killed(path: Path, script: str) -> tuple[RunDir, Path]:
    """Run a script that kills itself; return its run and what it has left in memory."""
    run = RunDir(path)
    done = forked_script.run(path.parent, script, run.path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    place = tmpfs.beside(run.heartbeat(0, NODE, 0).parent)
    assert place is not None
    return run, place


def test_where_a_process_may_write_no_larger_file_it_says_what_waits_and_what_is_lost(
    tmp_path: Path,
) -> None:
    """Its limit holds for files in memory, too, and not for the daemon that brings them."""
    run = RunDir(tmp_path / "run")
    done = forked_script.run(tmp_path, LIMITED, run.path)
    assert done.returncode == 0, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "does not take" in line]
    assert "(EFBIG: a limit of this process, see ulimit -f). They are in the memory of" in said
    assert "more found no room there, and are lost. The node's daemon brings them to the" in said
    assert "only if none is at work there: ddpprobe daemon --dir" in said
    place = tmpfs.beside(run.heartbeat(0, NODE, 0).parent)
    assert place is not None
    command = [sys.executable, "-m", "ddpprobe.daemon", "--dir", str(run.path), "--wait", "0"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    assert not place.exists()
    (rank,) = ddpprobe.open(run.path).completeness().shares
    assert 3 < rank.held < rank.sampled == 60


@pytest.mark.parametrize("who", ["a daemon", "the next attempt"])
def test_what_a_killed_rank_had_in_memory_is_brought_in(tmp_path: Path, who: str) -> None:
    """Its disk thread had carried nothing but the head of its journal."""
    run, place = killed(tmp_path / "run", KILLED)
    beat = heartbeat.read(run.heartbeat(0, NODE, 0))
    assert beat is not None
    assert beat.steps == 12
    if who == "a daemon":
        command = [sys.executable, "-m", "ddpprobe.daemon", "--dir", str(run.path), "--wait", "0"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    else:
        probe = ddpprobe.install(nn.Linear(2, 2), run_dir=run.path, daemon="none")
        probe.close()
    assert not place.exists()
    opened = ddpprobe.open(run.path)
    found = [r.step for r in opened.records(rank=0) if r.sampled and r.attempt == 0]
    assert found == list(range(12))
    assert opened.lost == []
    after = heartbeat.read(run.heartbeat(0, NODE, 0))
    assert after == beat


def test_without_memory_it_writes_into_the_run_directory_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tmpfs, "ROOT", tmp_path / "missing")
    run, train = RunDir(tmp_path / "run"), trained(4)
    threads = threading.active_count()
    with caplog.at_level(logging.WARNING, "ddpprobe"):
        probe = ddpprobe.install(train.model, run_dir=run.path, every=1, daemon="none")
        train()
    assert threading.active_count() == threads
    beat = heartbeat.read(run.heartbeat(0, NODE, 0))
    probe.close()
    assert beat is not None
    assert beat.steps == 4
    assert caplog.text.count("no memory to write to") == 1
    assert len([r for r in ddpprobe.open(run.path).records(rank=0) if r.sampled]) == 4


def test_memory_that_is_full_costs_frames_that_are_counted_as_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal, target = journal_in(tmp_path)
    monkeypatch.setattr("ddpprobe.rundir.journal.BACK_OFF_SECONDS", 0.0)
    pwrite, full = os.pwrite, [True]

    def refusing(fd: int, data: bytes, at: int) -> int:
        if full[0] and os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path / "memory")):
            raise OSError(28, "No space left on device")
        return pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", refusing)
    assert not journal.append_json(3, {"n": 0})
    full[0] = False
    assert journal.append_json(3, {"n": 1})
    assert journal.dropped == {"memory: ENOSPC": 1}
    journal.close()
    assert journal.finish()
    assert frames(target) == [1]


def test_a_cleaner_of_memory_costs_a_run_neither_records_nor_beats(
    tmp_path: Path, poll: Callable[..., object]
) -> None:
    """An epilog script, or logind's RemoveIPC, deletes a user's files there while they are used."""
    run, train = RunDir(tmp_path / "run"), trained(300)
    path = run.heartbeat(0, NODE, 0)
    probe = ddpprobe.install(train.model, run_dir=run.path, every=1, daemon="none")
    train()
    place = tmpfs.beside(path.parent)
    assert place is not None
    shutil.rmtree(place)
    train()
    poll(lambda: (beat := heartbeat.read(path)) is not None and beat.steps == 600, 60)
    probe.close()
    assert not place.exists()
    opened = ddpprobe.open(run.path)
    assert [r.step for r in opened.records(rank=0) if r.sampled] == list(range(600))
    assert opened.lost == []
    ended = heartbeat.read(path)
    assert ended is not None
    assert (ended.steps, ended.state) == (600, "closed")


def test_a_deleted_run_leaves_nothing_in_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, train = RunDir(tmp_path / "run"), trained(4)
    probe = ddpprobe.install(train.model, run_dir=run.path, every=1, daemon="none")
    place = tmpfs.beside(run.heartbeat(0, NODE, 0).parent)
    assert place is not None
    train()
    shutil.rmtree(run.path)
    train()
    probe.close()
    assert not place.exists()
    assert not run.path.exists()
    assert "brings them" not in caplog.text


LOST = """
import os, signal, sys, time
from pathlib import Path
import psutil, torch
from torch import nn
import ddpprobe
from ddpprobe.rundir import heartbeat, safe_read
from ddpprobe.rundir.paths import RunDir
run = RunDir(Path(sys.argv[1]))
model = nn.Linear(4, 1)
probe = ddpprobe.install(model, run_dir=run.path, every=1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(12):
    model(torch.ones(2, 4)).sum().backward(); optimizer.step(); optimizer.zero_grad()
late = time.monotonic() + 60
def copied():
    beat = heartbeat.read_bytes(run.heartbeat(0, "node_0000", 0).read_bytes())
    return beat is not None and beat.steps == 12 and run.daemon_file("node_0000", "json").exists()
while not copied() and time.monotonic() < late:
    time.sleep(0.01)
os.kill(safe_read.parse(run.daemon_file("node_0000", "json").read_bytes())["pid"], signal.SIGKILL)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_lost_machine_is_told_by_the_run_directory_alone(tmp_path: Path, call: Call) -> None:
    """Rank and daemon are killed, then the memory is gone with the machine: one verdict."""
    run, place = killed(tmp_path / "run", LOST)
    before = call("anomalies", run.path, "--json")
    shutil.rmtree(place)
    assert call("anomalies", run.path, "--json") == before
    assert before[0] == 1
    end = json.loads(before[1])["end"]
    assert (end["state"], end["ranks"], end["step"]) == ("vanished", [], 11)


def test_without_a_thread_it_writes_into_the_run_directory_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    run, train = RunDir(tmp_path / "run"), trained(4)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        probe = ddpprobe.install(train.model, run_dir=run.path, every=1, daemon="none")
        train()
        probe.close()
    assert caplog.text.count("no memory to write to (can't start new thread)") == 1
    assert len([r for r in ddpprobe.open(run.path).records(rank=0) if r.sampled]) == 4


def test_what_is_asked_before_its_start_begins_the_only_disk_thread() -> None:
    made, threads, done = disk_thread.DiskThread(), threading.active_count(), threading.Event()
    made.do(lambda: None)
    made.start(done.set)
    assert done.wait(60)
    assert threading.active_count() == threads + 1
    assert made.close(60)
    assert threading.active_count() == threads


def test_a_disk_that_takes_no_beat_for_long_takes_the_journal_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More refusals than the fuse allows errors: the thread goes on all the same."""
    refused, many = [0], threading.Event()

    def refuse(*_: object) -> None:
        refused[0] += 1
        if refused[0] > 2 * disk_thread.ERRORS_ALLOWED:
            many.set()
        raise OSError(5, "Input/output error")

    run, train = RunDir(tmp_path / "run"), trained(4)
    with monkeypatch.context() as patched:
        patched.setattr(disk_thread, "CHORE_SECONDS", 0.001)
        patched.setattr(heartbeat, "carry", refuse)
        probe = ddpprobe.install(train.model, run_dir=run.path, every=1, daemon="none")
        assert many.wait(60)
    train()
    probe.close()
    assert len([r for r in ddpprobe.open(run.path).records(rank=0) if r.sampled]) == 4


def test_a_fork_finds_no_thread_of_ours_and_the_parent_goes_on(tmp_path: Path) -> None:
    run, train = RunDir(tmp_path / "run"), trained(6)
    threads = threading.active_count()
    probe = ddpprobe.install(train.model, run_dir=run.path, every=1, daemon="none")
    train()
    child = os.fork()
    if child == 0:
        probe.close()
        os._exit(threading.active_count() - 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert threading.active_count() == threads, "it rests until there is something to do"
    train()
    probe.close()
    assert threading.active_count() == threads
    steps = [r.step for r in ddpprobe.open(run.path).records(rank=0) if r.sampled]
    assert steps == list(range(12))
