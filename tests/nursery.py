"""Daemons, and plain processes in the place of ranks, forked from one that has their imports.

To start Python and import what a daemon needs takes 0.6 s of CPU time, more than all that most of
these daemons do. A forked one runs the same `__main__`, and ends as an interpreter ends. It has the
nursery's environment and command line in /proc: what is about those, or about how a process
starts, or starts in another namespace, is for `subprocess`.

Run as a script it is the nursery itself, with the number of its socket as the only argument.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

_IMPORTED = (
    "ddpprobe.daemon.node", "ddpprobe.daemon.server", "ddpprobe.metrics.render",
    "ddpprobe.store.writer", "ddpprobe.store.overview_file", "ddpprobe.rundir.heartbeat",
    "ddpprobe.rundir.journal", "ddpprobe.daemon.launch", "argparse", "encodings.idna", "numpy.ma",
    "psutil",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_LARGEST = 1 << 17  # bytes of one message: an environment


class Child:
    """What `subprocess.Popen` has of a process as far as the tests ask; a zombie until polled."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._nursery = nursery

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises `subprocess.TimeoutExpired`."""
        late = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if late is not None and time.monotonic() > late:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to what has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process to fork from; it ends with this one, and everything it has forked with it."""

    def __init__(self) -> None:
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._alone = threading.Lock()
        atexit.register(self._close)

    def start(
        self, words: Sequence[str], env: Mapping[str, str], out: int = 1, err: int = 2
    ) -> Child:
        """Fork `python WORDS`: `-m MODULE ARGUMENT ...` or `SCRIPT ARGUMENT ...`.

        Args:
            words: the command line behind `python`.
            env: the whole environment.
            out, err: descriptors of its standard output and standard error.
        """
        return Child(self, int(self.ask({"words": [*words], "env": {**env}}, [out, err])))

    def ask(self, order: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        """Send an order, return the answer."""
        with self._alone:
            socket.send_fds(self._door, [json.dumps(order).encode()], descriptors)
            return json.loads(self._door.recv(_LARGEST))

    def _close(self) -> None:
        self._door.close()
        self._process.wait()


@functools.cache
def nursery() -> Nursery:
    """Return the nursery of this process."""
    return Nursery()


def _be_nursery(door: socket.socket) -> list[str]:
    """Fork and reap as ordered, until nobody orders any more. Returns in a child: what to run."""
    children: set[int] = set()
    while True:
        data, descriptors, _, _ = socket.recv_fds(door, _LARGEST, 2)
        if not data:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            os._exit(0)
        order = json.loads(data)
        if "poll" in order:
            pid, status = os.waitpid(order["poll"], os.WNOHANG)
            children.discard(pid)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            # A thread would be none in the child, and leave its locks as they were.
            assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
            answer = os.fork()
            if answer == 0:
                door.close()
                _move(order["env"], descriptors)
                return order["words"]
            children.add(answer)
            for descriptor in descriptors:
                os.close(descriptor)
        door.send(json.dumps(answer).encode())


def _move(env: Mapping[str, str], descriptors: Sequence[int]) -> None:
    """Take on the environment and the output of a new process."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    for number, descriptor in enumerate(descriptors, 1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    gc.freeze()  # what is collected and searched in it is what it has made


def _run(words: list[str]) -> None:
    """Be `python WORDS`."""
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and with them this
    for name in _IMPORTED:
        importlib.import_module(name)
    _run(_be_nursery(socket.socket(fileno=int(sys.argv[1]))))
