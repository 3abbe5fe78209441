"""A Prometheus of our own in the foreground, for `export --serve` and `up`; Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Self

READY_SECONDS = 60.0  # to open a database; of a large one the index is read
STOP_SECONDS = 20.0  # to write down what is in memory
NO_PROMETHEUS = (
    "Prometheus is not on the PATH: install it (Debian: apt-get install prometheus), or start one "
    "elsewhere"
)


def is_there() -> bool:
    """Return whether a Prometheus can be started."""
    return shutil.which("prometheus") is not None


def address_of(listen: str) -> tuple[str, int]:
    """Split HOST:PORT.

    Raises:
        RunError: it is none.
    """
    from ddpprobe.daemon.server import parse_address  # noqa: PLC0415
    from ddpprobe.replay.run import RunError  # noqa: PLC0415

    try:
        return parse_address(listen)
    except ValueError as error:
        raise RunError(str(error)) from error


def free_address(listen: str, tries: int = 1) -> str:
    """Return HOST:PORT at the first free port of `tries`, from the one given up.

    Raises:
        RunError: all of them are taken.
    """
    from ddpprobe.daemon.server import join_address  # noqa: PLC0415
    from ddpprobe.replay.run import RunError  # noqa: PLC0415

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


class LocalPrometheus:
    """A Prometheus process; a context manager that leaves none behind.

    Args:
        config: its configuration file.
        data: directory of its database.
        listen: HOST:PORT, free.
        log: file for what it says.
        flags: further ones.

    Raises:
        RunError: it is not there, or ends before it is ready.
    """

    def __init__(
        self, config: Path, data: Path, listen: str, log: Path, flags: tuple[str, ...] = ()
    ) -> None:
        from ddpprobe.replay.run import RunError  # noqa: PLC0415

        program = shutil.which("prometheus")
        if program is None:
            raise RunError(NO_PROMETHEUS)
        self.url = f"http://{listen}"
        self._log = log
        command = [
            program, f"--config.file={config}", f"--storage.tsdb.path={data}",
            f"--web.listen-address={listen}", *flags,
        ]  # fmt: skip
        with log.open("wb") as said:
            # Ctrl-C on a terminal reaches the whole process group; it is ours to pass on.
            self._process = subprocess.Popen(  # noqa: S603  (no shell, own arguments)
                command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True
            )

    def __enter__(self) -> Self:
        deadline = time.monotonic() + READY_SECONDS
        try:
            while not self._ready():
                self._check(late=time.monotonic() > deadline)
                time.sleep(0.1)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def wait(self) -> None:
        """Wait until Ctrl-C, or SIGTERM.

        Raises:
            RunError: it ended by itself.
        """
        with contextlib.suppress(KeyboardInterrupt):
            self._process.wait()
            self._check(late=False)

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:  # noqa: S310  (http)
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _check(self, *, late: bool) -> None:
        from ddpprobe.replay.run import RunError  # noqa: PLC0415

        code = self._process.poll()
        if code is None and not late:
            return
        lines = self._log.read_text(errors="replace").strip().splitlines() or ["no word"]
        how = f"ended with {code}" if code is not None else f"is not ready in {READY_SECONDS:.0f} s"
        raise RunError(f"Prometheus {how}: {lines[-1]}")


@contextlib.contextmanager
def ends_with_sigterm() -> Iterator[None]:
    """Let SIGTERM end what is inside as Ctrl-C does, so that it cleans up behind itself."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
