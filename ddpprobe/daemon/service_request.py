"""Asking this user's service on this machine (`service.py`) to start a node daemon.

A process that the service starts belongs to it, and not to the job: it is in no cgroup that a
launcher empties when the job is over. The service must see the same files and processes as the job
does, so whoever is in another container, or has a /tmp of its own, is not served by it.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ddpprobe.rundir import paths, safe_read

SERVICE_VARIABLE = "DDPPROBE_SERVICE"
MAX_BYTES = 1 << 20  # of a request: a command line and an environment
ANSWER_SECONDS = 2.0  # training waits for it, once; a service that is stopped is done without
_NAMESPACES = ("mnt", "pid")
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class BadRequestError(Exception):
    """What came is no request of ours; the text is for the one who asked."""


@dataclass(frozen=True, slots=True)
class DaemonRequest:
    """A node daemon to be started.

    Attributes:
        command: its words, the first of which is the interpreter of the training.
        environment: all of it, a token included.
        log: file to which its output is appended, absolute.
        namespaces: of who asks, see `namespaces`.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: str
    namespaces: tuple[str, ...]


def socket_path() -> Path | None:
    """Return where the service listens: $DDPPROBE_SERVICE, or this user's directory in /tmp.

    None if the variable is empty: then nobody is asked.
    """
    given = os.environ.get(SERVICE_VARIABLE)
    if given is None:
        return paths.own_sd_dir().parent / "service.sock"
    return Path(given).absolute() if given else None


def namespaces() -> tuple[str, ...]:
    """Return which files and processes this process sees, as the kernel names these views."""
    return tuple(str(Path(f"/proc/self/ns/{name}").readlink()) for name in _NAMESPACES)


def peer_of(connection: socket.socket) -> int | None:
    """Return the number of the process on the other side; None if it is not this user's."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return int(pid) if uid == os.geteuid() else None


def ask(command: Sequence[str], environment: Mapping[str, str], log: Path) -> bool:
    """Ask the service to start a daemon; return whether it did. Raises nothing.

    Args:
        command: see `DaemonRequest`, as the others.
        environment: is shown to a process of this user only.
        log: is there.
    """
    path = socket_path()
    if path is None:
        return False
    try:
        request = DaemonRequest(tuple(command), environment, str(log), namespaces())
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(str(path))
            if peer_of(connection) is None:  # /tmp is everybody's
                return False
            connection.sendall(json.dumps(asdict(request)).encode())
            connection.shutdown(socket.SHUT_WR)
            answer = safe_read.parse(connection.recv(4096))
    except (OSError, ValueError):  # there is none, as on most machines
        return False
    return isinstance(answer, dict) and answer.get("started") is True


def decode(data: bytes) -> DaemonRequest:
    """Return the request of these bytes.

    Raises:
        BadRequestError: it is none, or comes from where files and processes are others.
    """
    try:
        found: Any = safe_read.parse(data)
        names, values = found["environment"].keys(), found["environment"].values()
        request = DaemonRequest(
            command=_texts(found["command"]),
            environment=dict(zip(names, _texts(values), strict=True)),
            log=_texts([found["log"]])[0],
            namespaces=_texts(found["namespaces"]),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadRequestError(f"expected a request for a daemon, got {data[:80]!r}") from error
    if request.namespaces != namespaces():
        raise BadRequestError("the job is in a container, or has a /tmp of its own")
    if not request.command or not Path(request.log).is_absolute():
        raise BadRequestError("expected a command, and the absolute path of its log")
    return request


def _texts(values: Any) -> tuple[str, ...]:  # noqa: ANN401  (any JSON)
    out = tuple(values)
    if isinstance(values, str) or not all(isinstance(v, str) for v in out):
        raise TypeError("expected a list of texts")
    return out
