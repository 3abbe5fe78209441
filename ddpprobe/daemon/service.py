"""One service of a user on a machine, which starts the node daemons of all of that user's runs.

Training asks for a daemon at a Unix socket (`service_request.py`), so that the daemon is the
service's child and not the job's. Each run keeps a daemon, a port and a ddpprobe of its own: what
goes wrong in one harms no other, and the jobs need not have the same environment. A daemon that was
killed is started again, which brings into the store what it left, also where no rank lives any more
to ask for it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ddpprobe.daemon.launch import pidfd_of
from ddpprobe.daemon.service_request import (
    ANSWER_SECONDS,
    MAX_BYTES,
    BadRequestError,
    DaemonRequest,
    decode,
    peer_of,
)
from ddpprobe.rundir import paths
from ddpprobe.rundir.paths import DirectoryLock

LOOK_SECONDS = 1.0  # between looks at which daemons have ended
RESTARTS = 3  # of one that is killed again and again, a pause before each
PAUSE_SECONDS = 5.0  # before the first one, doubled before each further one

logger = logging.getLogger("ddpprobe")


@dataclass(slots=True)
class _Daemon:
    """A daemon that was asked for; `due`: monotonic seconds when it is started again."""

    request: DaemonRequest
    process: subprocess.Popen[bytes] | None
    restarts: int = 0
    due: float = 0.0


@final
class DaemonService:
    """Takes requests until `stop`; the daemons that it started live on after it.

    Args:
        path: of the Unix socket; its directory is made, for this user alone.
        clock: monotonic seconds.

    Raises:
        OSError: the directory is somebody else's, or the path too long for a socket.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._daemons: list[_Daemon] = []
        self._stopped = False
        paths.make_dir(path.parent)
        there = path.parent.lstat()
        if there.st_uid != os.geteuid() or there.st_mode & 0o022:
            raise PermissionError(f"{path.parent} is not this user's alone: remove it")
        self._lock = DirectoryLock(path.with_suffix(".lock"))
        self._listener: socket.socket | None = None

    def open(self) -> bool:
        """Listen; False if another service of this user does already."""
        if not self._lock.acquire():
            return False
        self._path.unlink(missing_ok=True)  # a killed predecessor's
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.bind(str(self._path))
        self._path.chmod(paths.FILE_MODE)
        self._listener.listen(64)
        logger.info("ddpprobe: training on this machine finds this service at %s", self._path)
        return True

    def stop(self) -> None:
        """Take no more requests; safe in a signal handler."""
        self._stopped = True

    def serve(self) -> None:
        """Answer and look after the daemons until `stop`, then take the socket away."""
        assert self._listener is not None, "open() comes first"  # noqa: S101
        try:
            while not self._stopped:
                ready, _, _ = select.select([self._listener], [], [], LOOK_SECONDS)
                if ready:
                    self._answer()
                self.look()
        finally:
            self._path.unlink(missing_ok=True)
            self._listener.close()
            for daemon in self._daemons:
                if daemon.process is not None and daemon.process.poll() is None:
                    daemon.process.returncode = 0  # it lives on, and is to be no warning
            self._lock.release()

    def _answer(self) -> None:
        assert self._listener is not None  # noqa: S101
        with contextlib.suppress(OSError):  # who asked is gone, or says nothing
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(ANSWER_SECONDS)
                asker = peer_of(connection)
                if asker is not None:
                    connection.sendall(self._reply(_read(connection), asker))

    def _reply(self, data: bytes, asker: int) -> bytes:
        try:
            request = decode(data)
            daemon = _Daemon(request, _start(request, asker))
        except (BadRequestError, OSError) as error:
            logger.warning("ddpprobe: a job starts its daemon itself: %s", error)
            return b'{"started": false}'
        logger.info("ddpprobe: %s", " ".join(request.command))
        self._daemons.append(daemon)
        return b'{"started": true}'

    def look(self) -> None:
        """Reap the daemons that have ended; start those again that were killed."""
        now = self._clock()
        for daemon in self._daemons:
            if daemon.process is not None and daemon.process.poll() is not None:
                self._ended(daemon, daemon.process.returncode, now)
            elif daemon.process is None and now >= daemon.due:
                self._start_again(daemon, now)
        self._daemons = [d for d in self._daemons if d.process is not None or d.due]

    def _ended(self, daemon: _Daemon, code: int, now: float) -> None:
        daemon.process, daemon.due = None, 0.0
        if code >= 0:  # it has done its work, or has said in its log why it cannot
            return
        if daemon.restarts == RESTARTS:
            logger.error("ddpprobe: killed too often, see %s", daemon.request.log)
            return
        daemon.due = now + PAUSE_SECONDS * 2**daemon.restarts
        daemon.restarts += 1

    def _start_again(self, daemon: _Daemon, now: float) -> None:
        try:
            daemon.process, daemon.due = _start(daemon.request), 0.0
        except OSError as error:
            logger.warning("ddpprobe: a daemon cannot be started again: %s", error)
            self._ended(daemon, -1, now)


def _read(connection: socket.socket) -> bytes:
    """Return what comes up to the end, or the beginning of what is too much."""
    data = b""
    while len(data) <= MAX_BYTES and (more := connection.recv(1 << 16)):
        data += more
    return data


def _start(request: DaemonRequest, asker: int | None = None) -> subprocess.Popen[bytes]:
    """Start it, with a pidfd of who asks for it, and waits meanwhile."""
    out = paths.open_own(Path(request.log), os.O_WRONLY | os.O_APPEND)
    try:
        with pidfd_of(asker) as (words, fds):
            return subprocess.Popen(  # noqa: S603  (of this user, who may start anything)
                [*request.command, *words],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd="/",
                env=dict(request.environment),
                close_fds=True,
                pass_fds=fds,
                start_new_session=True,
            )
    finally:
        os.close(out)
