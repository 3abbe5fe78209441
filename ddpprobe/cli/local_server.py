"""A server of our own beside this process, such as a Prometheus: started, waited for, ended."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Self

from ddpprobe.daemon.variables import parse_address
from ddpprobe.errors import RunError

READY_SECONDS = 60.0  # to open a database; of a large one the index is read
STOP_SECONDS = 20.0  # to write down what is in memory
ANSWER_SECONDS = 5.0
LOOK_SECONDS = 0.5  # between looks at whether the servers live
# What a server is started through: the kernel ends it (SIGTERM, 15) if this process is killed
# (PR_SET_PDEATHSIG, 1, <linux/prctl.h>). Not by `preexec_fn`, which is unsafe beside threads.
_TIED = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.argv[1], sys.argv[1:])"
)
_EVERYWHERE = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  (to be replaced)


def address_of(listen: str, option: str = "") -> tuple[str, int]:
    """Split HOST:PORT.

    Args:
        listen: that.
        option: which gave it, for the message.

    Raises:
        RunError: it is none.
    """
    try:
        return parse_address(listen)
    except ValueError as error:
        raise RunError(f"{option}: {error}" if option else str(error)) from error


def free_address(listen: str, tries: int = 1) -> str:
    """Return HOST:PORT at the first free port of `tries`, from the one given up.

    Raises:
        RunError: all of them are taken.
    """
    from ddpprobe.daemon.server import join_address  # noqa: PLC0415  (as above)

    host, port = address_of(listen)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    for candidate in range(port, min(port + tries, 65536)):
        try:
            with socket.create_server((host, candidate), family=family) as free:
                found = free.getsockname()[1]  # port 0 is any
        except OSError:
            continue
        return join_address(host, found)
    raise RunError(f"something listens at {listen} already: choose another with --listen HOST:PORT")


def url_of(listen: str, everywhere: str | None = None) -> str:
    """Return the URL of what listens at HOST:PORT, without a slash at its end.

    Args:
        listen: HOST:PORT.
        everywhere: host to name for what listens at all addresses; None: this machine to itself.
    """
    from ddpprobe.daemon.server import join_address  # noqa: PLC0415  (as above)

    host, port = address_of(listen)
    if host in _EVERYWHERE:
        host = everywhere or _EVERYWHERE[host]
    return f"http://{join_address(host, port)}"


def get(url: str) -> bytes:
    """Return the body of a GET from a server on this machine: not through a proxy.

    Raises:
        OSError: nobody answers within 5 s, or with an error.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=ANSWER_SECONDS) as answer:
        return bytes(answer.read())


class LocalServer:
    """A server process; a context manager that leaves none behind, however this process ends.

    Args:
        name: as a person calls it.
        command: the program and its arguments.
        url: where it answers; `/-/ready` says whether it is ready.
        log: file for what it says.
        lock: descriptor of a locked file, which it keeps locked as long as it lives.

    Raises:
        RunError: it ends before it is ready.
    """

    def __init__(
        self, name: str, command: Sequence[str], url: str, log: Path, lock: int | None = None
    ) -> None:
        self.name, self.url, self._log = name, url, log
        with log.open("wb") as said:
            # Ctrl-C on a terminal reaches the whole process group; it is ours to pass on.
            self._process = subprocess.Popen(  # noqa: S603  (no shell, own arguments)
                [sys.executable, "-I", "-S", "-c", _TIED, *command],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=() if lock is None else (lock,),
            )

    def __enter__(self) -> Self:
        deadline = time.monotonic() + READY_SECONDS
        try:
            while not self._ready():
                self.check(late=time.monotonic() > deadline)
                time.sleep(0.1)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def check(self, *, late: bool = False) -> None:
        """Return if it runs.

        Args:
            late: it should be ready by now.

        Raises:
            RunError: it ended by itself, or is late.
        """
        code = self._process.poll()
        if code is None and not late:
            return
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["no word"]
        how = f"ended with {code}" if code is not None else f"is not ready in {READY_SECONDS:.0f} s"
        raise RunError(f"{self.name} {how}: {lines[-1]}")

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ready(self) -> bool:
        try:
            get(f"{self.url}/-/ready")
        except OSError:
            return False
        return True


def wait_for(*servers: LocalServer) -> None:
    """Wait until Ctrl-C, or SIGTERM.

    Raises:
        RunError: one of them ended by itself.
    """
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            for server in servers:
                server.check()
            time.sleep(LOOK_SECONDS)


@contextlib.contextmanager
def ends_with_sigterm() -> Iterator[None]:
    """Let SIGTERM end what is inside as Ctrl-C does, so that it cleans up after itself."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
