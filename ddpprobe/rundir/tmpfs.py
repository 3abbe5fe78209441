"""A directory in memory beside the run directory: what training writes without waiting for a disk.

A file system in memory (`/dev/shm`) outlives a killed process and is seen by every other one of the
machine, so what a rank stores there is told as soon as it is stored. It is gone with the machine:
daemons and ranks carry it into the run directory, where a small file, the pointer, names it.
Everybody who reads here looks there as well: see `heartbeat` and `spool`.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from ddpprobe.rundir import paths, safe_read

ROOT = Path("/dev/shm")  # noqa: S108  (names in it are random, directories 0700)
POINTER = "memory"  # in a node's directory of heartbeats: the name of its directory in memory
ORIGIN = "origin"  # in that: the path of the pointer
SHARED = (ORIGIN, "pace", "orders")  # what belongs to no rank alone
SETTLED_SECONDS = 3600.0  # after the start of a run that is another one's daemon looks at it
LEAST_ROOM = 8 << 20  # free bytes below which a small machine's memory is left to others
_NAME = re.compile(r"ddpprobe-[0-9a-f]{16}\.\d{3,}\.node_\d{4,}")


@dataclass(frozen=True, slots=True)
class Tmpfs:
    """The file system in memory that a process sees.

    Attributes:
        identity: the same for all processes of a machine that see the same one; "": none.
        refused: why nothing can be written to it; "": it can.
    """

    identity: str
    refused: str = ""


def look() -> Tmpfs:
    """Find out whether there is memory to write to, by making something there; never raises."""
    try:
        device = ROOT.stat().st_dev
        if not _is_tmpfs(device):
            return Tmpfs("", f"{ROOT} is no tmpfs")
        if free(ROOT) < LEAST_ROOM:
            return Tmpfs("", f"{ROOT} has only {free(ROOT) >> 20} MiB left")
        Path(tempfile.mkdtemp(prefix="ddpprobe-", dir=ROOT)).rmdir()
    except OSError as error:
        return Tmpfs("", str(error))
    return Tmpfs(_number(device))


def token() -> str:
    """Return what makes the names of an attempt's directories in memory unlike all others."""
    return os.urandom(8).hex()


def make(own: Path, unique: str) -> Path:
    """Make the directory in memory of one attempt on one machine, or find that of another rank.

    Args:
        own: the node's directory of heartbeats, in the run directory; it is made, and the pointer
            in it.
        unique: what `token` gave rank 0.

    Raises:
        OSError: it cannot be made, or is another user's.
    """
    name = f"ddpprobe-{unique}.{own.parent.name}.{own.name}"
    place = ROOT / name
    with contextlib.suppress(FileExistsError):
        place.mkdir(mode=paths.DIR_MODE)
    if place.is_symlink() or place.stat().st_uid != os.geteuid():
        raise OSError(f"{place} is another user's")
    pointer = own / POINTER
    try:
        paths.make_dir(own)
        for path, text in ((pointer, name), (place / ORIGIN, str(pointer.absolute()))):
            if not path.exists():
                paths.replace_file(path, [text.encode()])
    except OSError:
        with contextlib.suppress(OSError):  # another rank's files are in it
            place.rmdir()
        raise
    return place


def beside(own: Path) -> Path | None:
    """Return the directory in memory that a node's directory of heartbeats points to, if any.

    On another machine than the rank's, after a restart of it, and after an orderly end there is
    none, nor beside a copy of the run: what is in memory goes on, and a copy does not.
    """
    place = _pointed_at(own)
    return None if place is None or _is_of_another(place, own) else place


def is_copied(own: Path) -> bool:
    """Whether a node's directory of heartbeats is a copy of one that has memory."""
    place = _pointed_at(own)
    return place is not None and _is_of_another(place, own)


def read(place: Path | None, name: str) -> bytes | None:
    """Return the content of a file in the directory in memory, `beside`; None if there is none."""
    if place is None:
        return None
    try:
        return safe_read.read_regular(ROOT, f"{place.name}/{name}")
    except OSError:
        return None


def free(path: Path) -> int:
    """Return the bytes that a file system has left for us.

    Raises:
        OSError: there is none at `path`.
    """
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def leave(own: Path, place: Path) -> None:
    """Take the directory and its pointer away, if no rank's files are in it any more."""
    try:
        if set(os.listdir(place)) - set(SHARED):
            return
        shutil.rmtree(place)
    except FileNotFoundError:  # another rank was as late as we
        pass
    (own / POINTER).unlink(missing_ok=True)


def origins() -> dict[Path, Path]:
    """Return this user's directories in memory whose ranks have ended, and where they belong.

    That is the node's directory of heartbeats, which may be gone. Directories younger than an hour
    are left out: their ranks may be about to begin, also in a container or a mount namespace that
    shares the memory and whose run directory is not seen from here.
    """
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(ROOT):
            own = _origin(ROOT / name) if _NAME.fullmatch(name) else None
            if own is not None:
                found[ROOT / name] = own
    return found


def _pointed_at(own: Path) -> Path | None:
    try:
        name = safe_read.read_regular(own, POINTER, most=256).decode()
    except (OSError, ValueError):
        return None
    place = ROOT / name
    return place if _NAME.fullmatch(name) and place.is_dir() and not place.is_symlink() else None


def _is_of_another(place: Path, own: Path) -> bool:
    """Whether the pointer that the directory in memory names is there, and not that in `own`.

    That of a run which was moved is not there, nor one that another mount namespace sees elsewhere.
    """
    try:
        named = safe_read.read_regular(place, ORIGIN, most=4096).decode()
        return not Path(named).samefile(own / POINTER)
    except (OSError, ValueError):
        return False


def _is_tmpfs(device: int) -> bool:
    mounts = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    return any(
        line.split()[2:3] == [_number(device)] and line.partition(" - ")[2].startswith("tmpfs ")
        for line in mounts
    )


def _number(device: int) -> str:
    return f"{os.major(device)}:{os.minor(device)}"


def _origin(place: Path) -> Path | None:
    try:
        status = place.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            return None
        # Before all that opens files: each start of a rank looks at every run of the host.
        if time.time() - status.st_mtime <= SETTLED_SECONDS:
            return None
        pointer = Path(safe_read.read_regular(place, ORIGIN, most=4096).decode())
        lives = any(map(paths.is_locked, place.glob("rank_*")))
    except (OSError, ValueError):  # one that is being made just now
        return None
    return None if lives else pointer.parent
