"""Which daemons a Prometheus is to scrape: a small file of each, where Prometheus looks for them.

The files are those of its `file_sd_configs`. A daemon that serves at a loopback address is of use
on its own machine only, so its file lies in a directory of that machine's name; all others lie
directly in the directory that machines may share.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import re
import stat
import time
from pathlib import Path
from typing import final

from ddpprobe.rundir import paths, safe_read

KEEP_SECONDS = 60.0  # between two signs of life
RECENT_SECONDS = 2 * KEEP_SECONDS  # a killed daemon's last one, if it was killed just now
# Without one for so long a file is of a daemon that is gone for good. Until then its target is
# scraped in vain, which is how a machine is missed.
STALE_SECONDS = 3600.0
MAX_BYTES = 4096
RUN_PARAMETER = "run"  # of the URL of `/metrics`: whose metrics are asked for
_OURS = re.compile(r"ddpprobe-.+\.json", re.DOTALL)
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_LONGEST = 100  # characters of a name in the name of a file

logger = logging.getLogger("ddpprobe")


def patterns(directory: Path) -> list[str]:
    """Return the `files` of `file_sd_configs` that name the daemons to be scraped from here."""
    return [f"{directory}/*.json", f"{directory}/{_file_part(_hostname())}/*.json"]


def address_for_others(listen: str) -> tuple[str, bool]:
    """Return at which HOST:PORT a daemon is scraped, and whether from its own machine only.

    Args:
        listen: to what it is bound. If that is every address of the machine, its name is announced.
    """
    host, _, port = listen.rpartition(":")
    bound = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    if bound.is_unspecified:
        return f"{_hostname()}:{port}", False
    return listen, bound.is_loopback


def labels_of(run: str | None, scheme: str) -> dict[str, str]:
    """Return the labels of a target; None: which run it is is not known yet.

    Its run is asked for in the URL as well. After the end of a run its port may be another's, whose
    daemon refuses what is not its own: a job that was killed with its daemon is missed all the same
    when the next one has its port.
    """
    labels = {"run": run, f"__param_{RUN_PARAMETER}": run} if run is not None else {}
    return labels | ({"__scheme__": scheme} if scheme != "http" else {})


def prune(directory: Path) -> None:
    """Delete what daemons have left that are gone for good; raises nothing."""
    oldest = time.time() - STALE_SECONDS
    for path in _files(directory):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < oldest:
                path.unlink()


def withdraw(directory: Path, run: str, node: str) -> None:
    """Delete what a killed daemon of this machine left of a node that has ended; raises nothing.

    For who has the lock of that node, so that no daemon of it lives.

    Args:
        directory: see `TargetFile`.
        run: its label, as there.
        node: name of the node.
    """
    for path in _places(directory, run, node):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def was_left_just_now(directory: Path, run: str, node: str) -> bool:
    """Whether a daemon of this machine, that told Prometheus of a node, was killed minutes ago.

    For who has the lock of that node. Arguments as for `withdraw`.
    """
    since = time.time() - RECENT_SECONDS
    for path in _places(directory, run, node):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime > since:
                return True
    return False


@final
class TargetFile:
    """The file of one daemon, from `keep` to `remove`; neither raises what a disk can refuse.

    Args:
        directory: see `paths.sd_dir`.
        run: label that tells the run from all others.
        node: name of the node.
        listen: the address to which the daemon is bound, its port known.
        scheme: "http" or "https".
    """

    def __init__(
        self, directory: Path, run: str, node: str, listen: str, scheme: str = "http"
    ) -> None:
        self._directory = directory
        target, local = address_for_others(listen)
        name = _name(run, node)
        self.path = directory / _file_part(_hostname()) / name if local else directory / name
        group = {"targets": [target], "labels": labels_of(run, scheme)}
        self._text = json.dumps([group], indent=1) + "\n"
        self._next = 0.0
        self._refused = self._is_announced = False

    def keep(self, now: float) -> None:
        """Make the file, or give a sign of life, if it is time.

        Args:
            now: monotonic seconds.
        """
        if now < self._next:
            return
        self._next = now + KEEP_SECONDS
        try:
            self._keep()
        except OSError as error:
            if not self._refused:
                self._refused = True
                logger.warning("ddpprobe: Prometheus is not told of this daemon: %s", error)

    def remove(self) -> None:
        """Delete the file."""
        if self._is_announced:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)

    def _keep(self) -> None:
        if not self._is_announced:
            _make(self._directory)
            self.path.parent.mkdir(exist_ok=True)
            prune(self._directory)
        elif self._is_there():
            os.utime(self.path, follow_symlinks=False)
            return
        # Readable as the umask says: a Prometheus of the whole cluster is another user.
        with paths.replacing(self.path, mode=0o666) as fd:
            paths.write_all(fd, [self._text.encode()])
        self._is_announced = True

    def _is_there(self) -> bool:
        try:
            found = safe_read.read_regular(self.path.parent, self.path.name, MAX_BYTES)
        except OSError:
            return False
        return found == self._text.encode()


def _make(directory: Path) -> None:
    """Make the directory; that by default lies where everybody may write.

    Raises:
        OSError: it cannot be made, or is another user's.
    """
    if directory != paths.own_sd_dir():
        directory.mkdir(parents=True, exist_ok=True)
        return
    for path in (directory.parent, directory):
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=paths.DIR_MODE)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(f"{path} is no directory of this user's")


def _files(directory: Path) -> list[Path]:
    """Return the files of daemons that are seen from here; not what others put beside them."""
    found = []
    for place in (directory, directory / _file_part(_hostname())):
        with contextlib.suppress(OSError):
            found += [place / name for name in os.listdir(place) if _OURS.fullmatch(name)]
    return found


def _places(directory: Path, run: str, node: str) -> tuple[Path, Path]:
    name = _name(run, node)
    return directory / name, directory / _file_part(_hostname()) / name


def _name(run: str, node: str) -> str:
    return f"ddpprobe-{_file_part(run)}.{node}.{_file_part(_hostname())}.json"


def _hostname() -> str:
    return os.uname().nodename


def _file_part(text: str) -> str:
    """Return a name as a part of a file's; the end of it tells runs apart."""
    return _UNSAFE.sub("_", text)[-_LONGEST:]
