"""Prometheus and Alertmanager as local servers, for `up` and `export --serve`."""

from __future__ import annotations

import shutil
from pathlib import Path

from ddpprobe.cli.local_server import LocalServer, url_of
from ddpprobe.errors import RunError

LISTEN = "127.0.0.1:9090"  # where Prometheus listens by itself
ALERTMANAGER_PORT = 9093  # and Alertmanager
PORTS_TRIED = 100  # Debian's packages start servers of their own at the first
ALERTMANAGERS = ("alertmanager", "prometheus-alertmanager")  # as released; Debian's name
NO_PROMETHEUS = (
    "Prometheus is not on the PATH: install it (Debian: apt-get install prometheus), or start one "
    "elsewhere"
)
NO_ALERTMANAGER = (
    "Alertmanager is not on the PATH, so alerts reach nobody: install it (Debian: apt-get install "
    "prometheus-alertmanager), or name one with --alertmanager URL"
)


def is_there() -> bool:
    """Return whether a Prometheus can be started."""
    return shutil.which("prometheus") is not None


def alertmanager_is_there() -> bool:
    """Return whether an Alertmanager can be started."""
    return any(map(shutil.which, ALERTMANAGERS))


def prometheus(
    config: Path, data: Path, listen: str, log: Path, flags: tuple[str, ...] = (),
    lock: int | None = None,
) -> LocalServer:  # fmt: skip
    """Return a Prometheus that starts.

    Args:
        config: its configuration file.
        data: directory of its database.
        listen: HOST:PORT, free.
        log: file for what it says.
        flags: further ones.
        lock: see `LocalServer`.

    Raises:
        RunError: it is not there.
    """
    program = shutil.which("prometheus")
    if program is None:
        raise RunError(NO_PROMETHEUS)
    command = [
        program, f"--config.file={config}", f"--storage.tsdb.path={data}",
        f"--web.listen-address={listen}", *flags,
    ]  # fmt: skip
    return LocalServer("Prometheus", command, url_of(listen), log, lock)


def alertmanager(
    config: Path, data: Path, listen: str, log: Path, url: str, lock: int
) -> LocalServer:
    """Return an Alertmanager that starts.

    Args:
        config: its configuration file.
        data: directory of its silences, and of what it has notified of.
        listen: HOST:PORT, free.
        log: file for what it says.
        url: by which it is reached from elsewhere, for links.
        lock: see `LocalServer`.

    Raises:
        RunError: it is not there.
    """
    program = next(filter(None, map(shutil.which, ALERTMANAGERS)), None)
    if program is None:
        raise RunError(NO_ALERTMANAGER)
    command = [
        program, f"--config.file={config}", f"--storage.path={data}",
        f"--web.listen-address={listen}", f"--web.external-url={url}",
        "--cluster.listen-address=",  # alone, it would wait for others before it notifies
        "--data.maintenance-interval=1m",  # what a power failure can cost of silences
    ]  # fmt: skip
    return LocalServer("Alertmanager", command, url_of(listen), log, lock)
