"""Daemons, and plain processes in the place of ranks, forked from one that has their imports.

To start Python and import what a daemon needs takes 1.2 s of CPU time, and the process that writes
the overview at its end another half: more than all that most of these daemons do. A forked one runs
the same `__main__`, and ends as an interpreter ends. It has the nursery's environment in /proc:
what is about that, or about how a process starts, is for `subprocess`. Another nursery has other
imports, such as torch, which takes three seconds: `forked_script` is for scripts that train.

The daemon that a forked rank starts comes from here as well (`fork_daemons`): as from the shell of
`start_daemon` it is nobody's child, in a session of its own, at home in `/`, and has inherited
nothing but its log and a pidfd of who starts it.

Run as a script it is the nursery itself: its arguments are the numbers of its two sockets, room for
the command lines of daemons, and what it imports.
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
import secrets
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Self

_IMPORTED = (
    "ddpprobe.daemon.node", "ddpprobe.daemon.server", "ddpprobe.metrics.render",
    "ddpprobe.store.writer", "ddpprobe.store.overview_file", "ddpprobe.store.retention",
    "ddpprobe.store.overview_writer", "ddpprobe.rundir.heartbeat", "ddpprobe.rundir.journal",
    "ddpprobe.daemon.launch", "ddpprobe.reader.run", "argparse", "encodings.idna", "numpy.ma",
    "psutil",
)  # fmt: skip
_WITHOUT_PANDAS = ("pyarrow", "pyarrow.parquet")  # as the writer of the overview imports them
_NO_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}  # of pyarrow's allocator
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_NETWORK = 0x40000000  # <linux/sched.h>
_LARGEST = 1 << 17  # bytes of one message: an environment
_ROOM = "-" * 4096  # for the command lines of others, in the place of its own
_STANDARD = (1, 2, 0)  # which descriptors are given: the input is not always
_IN_BACKGROUND = ["/bin/sh", "-c", '"$@" &', "sh", sys.executable, "-P"]  # as `start_daemon` does


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
        if self.poll() is None:
            # Without asking again and again: on a busy machine that takes longer than the process.
            ended = os.pidfd_open(self.pid)
            try:
                asked = select.poll()
                asked.register(ended, select.POLLIN)
                asked.poll(None if timeout is None else 1000 * timeout)
            finally:
                os.close(ended)
            if self.poll() is None:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return int(self.returncode or 0)

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
    """The process to fork from; it ends with this one, and its children with it.

    Args:
        modules: what it imports.

    Attributes:
        bell: where any process of this user asks for a daemon (`fork_daemons`).
    """

    def __init__(self, *modules: str) -> None:
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.bell = f"\0ddpprobe-nursery-{os.getpid()}-{secrets.token_hex(8)}"
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as bell:
            bell.bind(self.bell)
            bell.listen(64)
            theirs_and_bell = [theirs.fileno(), bell.fileno()]
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, *map(str, theirs_and_bell), _ROOM, *modules],
                env={**os.environ, **_NO_THREAD}, stdin=subprocess.DEVNULL,
                pass_fds=theirs_and_bell,
            )  # fmt: skip
        self._alone = threading.Lock()
        atexit.register(self._close)

    def start(
        self, words: Sequence[str], env: Mapping[str, str], out: int = 1, err: int = 2,
        stdin: int | None = None, network: str | None = None,
    ) -> Child:  # fmt: skip
        """Fork `python WORDS`: `-m MODULE ARGUMENT ...` or `SCRIPT ARGUMENT ...`.

        Args:
            words: the command line after `python`.
            env: the whole environment.
            out, err: descriptors of its standard output and standard error.
            stdin: of its standard input; None: it is empty.
            network: a name of `ip netns` to be in, which needs root.
        """
        given = [out, err] if stdin is None else [out, err, stdin]
        order = {"words": [*words], "env": {**env}, "network": network}
        return Child(self, int(self.ask(order, given)))

    def ask(self, order: Mapping[str, Any], descriptors: Sequence[int] = ()) -> Any:
        """Send an order, return the answer."""
        with self._alone:
            socket.send_fds(self._door, [json.dumps(order).encode()], descriptors)
            return json.loads(self._door.recv(_LARGEST))

    def _close(self) -> None:
        self._door.close()
        self._process.wait()


@functools.cache
def nursery(*modules: str) -> Nursery:
    """Return the nursery of this process that has imported these: none is what a daemon imports."""
    return Nursery(*(modules or _IMPORTED))


def fork_daemons(bell: str) -> None:
    """Have the daemons that this process and its children start forked, where this bell rings."""
    from ddpprobe.daemon import launch

    launch.subprocess = _Instead(run=_Starting(bell))  # type: ignore[assignment]


class _Instead(ModuleType):
    """A module, but for some of its names."""

    def __init__(self, **names: Any) -> None:
        super().__init__("subprocess")
        self.__dict__.update(names)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


class _Starting:
    """`subprocess.run`; what it would have a shell start in the background is forked."""

    def __init__(self, bell: str) -> None:
        self._bell = bell

    def __call__(self, command: Sequence[str], *, check: bool, **how: Any) -> Any:
        words = [*command]
        if words[: len(_IN_BACKGROUND)] != _IN_BACKGROUND:  # a broken interpreter, say
            return subprocess.run(words, check=check, **how)
        order = {"daemon": words[len(_IN_BACKGROUND) :], "env": how["env"]}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.connect(self._bell)
            given = [how["stdout"], *how["pass_fds"]]
            socket.send_fds(door, [json.dumps(order).encode()], given)
            assert door.recv(_LARGEST), "the nursery has failed"
        return subprocess.CompletedProcess(words, 0)


def be_called(*words: str) -> None:
    """Put a command line, as far as there is room, in the place of the one that /proc shows."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b") ")[2].split()
    start, end = (int(field) for field in fields[45:47])  # arg_start, arg_end: proc(5)
    line = b"".join(word.encode() + b"\0" for word in words)[: end - start - 1]
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, line, len(line))


def _be_nursery(door: socket.socket, bell: socket.socket) -> Callable[[], None]:
    """Fork and reap as ordered, until nobody orders any more. Returns in a child: what it does."""
    children: set[int] = set()
    while True:
        if bell in select.select([door, bell], [], [])[0]:
            if (words := _answer(bell)) is not None:
                door.close()
                return lambda: _run(words)
            continue
        data, descriptors, _, _ = socket.recv_fds(door, _LARGEST, len(_STANDARD))
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
            answer = _fork()
            if answer == 0:
                door.close()
                bell.close()
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _enter(order["network"])
                _move(order["env"], descriptors)
                return lambda: _run(order["words"])
            children.add(answer)
            for descriptor in descriptors:
                os.close(descriptor)
        door.send(json.dumps(answer).encode())


def _fork() -> int:
    # A thread would be none in the child, and leave its locks as they were.
    assert len(os.listdir("/proc/self/task")) == 1, "an import has started a thread"
    return os.fork()


def _answer(bell: socket.socket) -> list[str] | None:
    """Fork a daemon for whoever rings; return its command line in it, None in the nursery."""
    caller, _ = bell.accept()
    with caller:
        who = struct.unpack("3i", caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        data, descriptors, _, _ = socket.recv_fds(caller, _LARGEST, 2)
        if who[1] == os.getuid() and data:
            order = json.loads(data)
            if (between := _fork()) == 0:
                os.setsid()
                if os.fork():
                    os._exit(0)  # so that init adopts and reaps it
                caller.close()
                bell.close()
                os.chdir("/")
                # SIGINT is ignored by now, and a shell lets what it starts so ignore this too.
                signal.signal(signal.SIGQUIT, signal.SIG_IGN)
                words: list[str] = order["daemon"]
                out, *pidfd = descriptors
                if pidfd:  # which has another number here
                    words[-1] = f"{words[-1].partition(':')[0]}:{pidfd[0]}"
                be_called(sys.executable, "-P", *words)
                _move(order["env"], [out, os.dup(out)])
                return words
            os.waitpid(between, 0)
            caller.send(b"started")
        for descriptor in descriptors:
            os.close(descriptor)
    return None


def _enter(network: str | None) -> None:
    if network is not None:
        with open(f"/run/netns/{network}", "rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NETWORK):
                raise OSError(ctypes.get_errno(), f"no way into the network {network}")


def _move(env: Mapping[str, str], descriptors: Sequence[int]) -> None:
    """Take on the environment and the output of a new process."""
    os.environ.clear()
    os.environ.update(env)
    for number, descriptor in zip(_STANDARD, descriptors, strict=False):
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


class _ForkedWriter:
    """The `subprocess.Popen` of the daemon's overview, forked from the daemon itself.

    A daemon has threads: their locks may be held for good in the child, which takes none of them.
    """

    def __init__(self, command: Sequence[str], *, stdin: Any, **_: Any) -> None:
        said, saying = os.pipe()
        self._code: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12, of the threads
            self._pid = os.fork()
        if self._pid == 0:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(stdin.fileno(), 0)
            os.dup2(saying, 2)
            self._be([*command])
        os.close(saying)
        self.stderr = os.fdopen(said)

    def _be(self, command: list[str]) -> None:
        from ddpprobe.store import overview_writer

        code = 1
        try:
            assert command[:3] == [sys.executable, "-m", overview_writer.__name__], command
            sys.argv, sys.stdin = command[2:], os.fdopen(0)
            overview_writer.main()
            code = 0
        except BaseException:  # noqa: BLE001  (whatever it is, Python prints it)
            traceback.print_exc()
        finally:
            os._exit(code)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code; raises `subprocess.TimeoutExpired`."""
        late = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            pid, status = os.waitpid(self._pid, 0 if late is None else os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif late is not None and time.monotonic() > late:
                raise subprocess.TimeoutExpired(f"process {self._pid}", timeout or 0.0)
            else:
                time.sleep(0.01)
        return self._code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stderr.close()
        self.wait()


def main(door: int, bell: int, modules: Sequence[str]) -> None:
    """Be the nursery, and in a child what was ordered."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the tests, and with them this
    for name in modules:
        importlib.import_module(name)
    if "ddpprobe.store.overview_writer" in modules:
        from ddpprobe.daemon import overview_job
        from ddpprobe.store.overview_writer import _WithoutPandas

        sys.meta_path.insert(0, _WithoutPandas())
        with contextlib.suppress(ModuleNotFoundError):  # where a framework is tested
            for name in _WITHOUT_PANDAS:
                importlib.import_module(name)
        sys.meta_path.pop(0)
        overview_job.subprocess = _Instead(Popen=_ForkedWriter)  # type: ignore[assignment]
    _be_nursery(socket.socket(fileno=door), socket.socket(fileno=bell))()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[4:])
