"""SIGKILL at each system call of a writer: of the store's, and of a rank's journal.

A child stops itself before it writes, strace takes hold of it and kills it at the N-th call of one
sort, for N = 1, 2, ... until it gets to its end. Then the run must open, hold what was acknowledged
and nothing else, and be whole after the next fold.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from ddpprobe.reader.run import open_run
from ddpprobe.reader.verify.verify import verify
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store import commit
from ddpprobe.store.writer import REST_SECONDS, StoreWriter
from tests.made_runs import NODE, Made, key, record

STEPS = 20
# What changes a file or a directory, and openat, between which anything may have been read.
OF_STORE = ("openat", "write", "writev", "renameat", "fdatasync", "fsync", "mkdir", "chmod",
            "ftruncate", "unlink", "close", "flock")  # fmt: skip
OF_JOURNAL = ("openat", "write", "pwrite64", "mkdir", "close")
MOST = 20_000  # calls of one sort, more than any of these children makes

Act = Callable[[Path], None]


def killed(act: Act, run: Path, call: str, number: int) -> bool:
    """Let a child act on the run, killed at the `number`-th call; False if it got to its end."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.kill(os.getpid(), signal.SIGSTOP)
            act(run)
            code = 0
        finally:
            os._exit(code)
    os.waitpid(child, os.WUNTRACED)
    inject = f"inject={call}:signal=SIGKILL:when={number}"
    command = ["strace", "-o", "/dev/null", "-e", f"trace={call}", "-e", inject, "-p", str(child)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stderr
        assert "attached" in tracer.stderr.readline(), "strace cannot attach"
        os.kill(child, signal.SIGCONT)
        _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status):
        assert os.WEXITSTATUS(status) == 0, f"the child failed with {os.WEXITSTATUS(status)}"
        return False
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    return True


def fold(run: Path, *, durable: bool = True) -> None:
    """Do what the daemon does with the journals, to the end."""
    now = [0.0]
    with mock.patch.object(commit, "LINES", 2):  # every manifest is written anew, too
        folder = StoreWriter(RunDir(run), NODE, block=8, durable=durable, clock=lambda: now[0])
        folder.fold()
        now[0] += REST_SECONDS
        folder.fold()  # what fills no block, from the open segments too
        folder.seal()
        folder.close()


def train(run: Path) -> None:
    """Write what a rank writes, and say after each record that it is there."""
    said = os.open(run / "acknowledged", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    journal = JournalWriter(RunDir(run).rank_journal(0, NODE, 0), {"rank": 0}, segment_frames=8)
    for step in range(STEPS):
        if journal.append_record(record(0, step)):
            os.write(said, f"{step}\n".encode())
    journal.close()


def problems(run: Path, acknowledged: set[int], *, whole: bool) -> Iterator[str]:
    """Read a run whose writer was killed, fold it, read it again."""
    for state in ("killed", "folded"):
        if state == "folded":
            fold(run, durable=False)
        opened = open_run(run)
        found = {r.step: key(r) for r in opened.records(0)}
        if [s for s, made in found.items() if made != key(record(0, s))]:
            yield f"{state}: wrong values"
        if not acknowledged <= found.keys():
            yield f"{state}: lost steps {sorted(acknowledged - found.keys())}"
        if whole and found.keys() != acknowledged:
            yield f"{state}: rows that never were {sorted(found.keys() - acknowledged)}"
        report = verify(opened)
        if report.damage or opened.lost:
            yield f"{state}: {(report.damage or opened.lost)[0]}"
        if state == "folded" and any("not finished" in note for note in report.notes):
            yield f"{state}: {report.notes}"


def _loop(
    name: str, model: Path, scratch: Path, act: Act, calls: tuple[str, ...], every: int
) -> tuple[Counter[str], list[str]]:
    done, found = Counter[str](), []
    for call in calls:
        for number in range(1, MOST, every):
            run = scratch / "killed"
            shutil.copytree(model, run)
            was_killed = killed(act, run, call, number)
            said = run / "acknowledged"
            # A line that was torn off acknowledges nothing.
            lines = said.read_text().split("\n")[:-1] if said.exists() else []
            steps = set(map(int, lines)) if act is train else set(range(STEPS))
            said.unlink(missing_ok=True)
            for text in problems(run, steps, whole=act is fold):
                found.append(f"{name}: {call} {number}: {text}")
                print(found[-1], file=sys.stderr, flush=True)
            shutil.rmtree(run)
            if not was_killed:
                break
            done[f"{name}: {call}"] += 1
    return done, found


def kill_everywhere(scratch: Path, every: int) -> tuple[Counter[str], list[str]]:
    """Kill both writers at every (or every so manieth) call; return how often, and problems."""
    empty, written = scratch / "empty", scratch / "written"
    Made(empty, ranks=1)
    made = Made(written, ranks=1).whole(STEPS)
    made.close()
    done, found = _loop("journal", empty, scratch, train, OF_JOURNAL, every)
    more, worse = _loop("store", written, scratch, fold, OF_STORE, every)
    return done + more, found + worse
