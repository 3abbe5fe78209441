"""The process of `up` in its directory: one at a time, known by a lock, and how to end it.

The servers that it starts hold the same lock, so that it is free when all of them are gone, however
they went; what a file says of a process is believed only as long as the lock is held.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from ddpprobe.cli.local_server import STOP_SECONDS
from ddpprobe.errors import RunError
from ddpprobe.rundir import paths, processes

LOCK = ".ddpprobe-up.lock"
STATE = ".ddpprobe-up.state.json"
LOG = "up.log"  # what a detached one has to say
_LOOK_SECONDS = 0.05
_END_SECONDS = 3 * STOP_SECONDS  # two servers one after the other, and some


class StackProcess:
    """This process as the one of a directory; a context manager.

    Args:
        directory: of the stack; it is there.

    Raises:
        RunError: another one runs there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._who = {
            "pid": os.getpid(), "pid_start": processes.own_start(),
            "host": socket.gethostname(), "since": time.time(),
        }  # fmt: skip
        self.lock = _locked(directory)

    def __enter__(self) -> Self:
        self.publish({})
        return self

    def __exit__(self, *_: object) -> None:
        (self._directory / STATE).unlink(missing_ok=True)
        os.close(self.lock)

    def publish(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Say for others what runs here; return it, with who runs it."""
        state = {**facts, **self._who}
        paths.write_json(self._directory / STATE, state)
        return state


def running(directory: Path) -> dict[str, Any] | None:
    """Return what runs in a directory: {} if that is not known (any more), None for nothing."""
    if not paths.is_locked(directory / LOCK):
        return None
    try:
        state = json.loads((directory / STATE).read_bytes())
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) and _lives(state) else {}


def stop(directory: Path) -> bool:
    """End what runs in a directory; return whether anything did.

    Raises:
        RunError: it runs on another machine, or does not end.
    """
    deadline, found, told = time.monotonic() + _END_SECONDS, False, set()
    while (state := running(directory)) is not None:
        found = True
        if state and state["host"] != socket.gethostname():
            raise RunError(f"it runs on {state['host']}: stop it there")
        if state and state["pid"] not in told:
            told.add(state["pid"])
            with contextlib.suppress(ProcessLookupError):
                os.kill(state["pid"], signal.SIGTERM)
        if time.monotonic() > deadline:
            raise RunError(f"what runs in {directory} does not end within {_END_SECONDS:.0f} s")
        time.sleep(_LOOK_SECONDS)
    return found


def detach(directory: Path, words: Sequence[str]) -> dict[str, Any]:
    """Start `ddpprobe up` in a session of its own; return what it says once all servers are ready.

    Args:
        directory: of the stack; it is there, with the options to go by.
        words: further words of its command line.

    Raises:
        RunError: it ends before that.
    """
    log = directory / LOG
    said = paths.open_own(log, os.O_WRONLY | os.O_TRUNC)
    try:
        process = subprocess.Popen(  # noqa: S603  (our own interpreter and module)
            [sys.executable, "-P", "-m", "ddpprobe", "up", str(directory), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=said,
            start_new_session=True,
        )
    finally:
        os.close(said)
    try:
        while process.poll() is None:
            state = running(directory) or {}
            if state.get("pid") == process.pid and "url" in state:
                return state
            time.sleep(_LOOK_SECONDS)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    lines = log.read_text(errors="replace").strip().splitlines() or ["it ended without a word"]
    raise RunError(lines[-1].removeprefix("ddpprobe: "))


def _locked(directory: Path) -> int:
    """Return a descriptor that holds the lock; one that is being given up is waited for."""
    fd = paths.open_own(directory / LOCK, os.O_RDWR)
    deadline = time.monotonic() + STOP_SECONDS
    state: dict[str, Any] | None = None
    try:
        while not state and time.monotonic() < deadline:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            state = running(directory)
            time.sleep(_LOOK_SECONDS)
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    who = f" (process {state['pid']} on {state['host']})" if state else ""
    raise RunError(f"it runs in {directory} already{who}: ddpprobe up --stop ends it")


def _lives(state: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote this is still there; on another machine: presumably."""
    if state.get("host") != socket.gethostname():
        return True
    pid, start = state.get("pid"), state.get("pid_start")
    return type(pid) is int and processes.is_process(pid, start)
