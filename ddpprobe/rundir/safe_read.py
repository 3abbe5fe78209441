"""Reading what lies in a run directory, and nothing that lies outside of it.

A run may come from a stranger. So no symbolic link is followed on the way down, nothing but regular
files is opened (a FIFO would wait for its writer, a device may do anything), and neither a file nor
what is made of its JSON is larger than a reader's memory allows.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
import time
from pathlib import Path
from typing import Any

STORE = "run.zarr"
MANIFESTS = "manifest"
# No chunk, journal segment or log is as long; what claims to be is not read into memory.
MAX_FILE_BYTES = 128 << 20
MAX_JSON_BYTES = 8 << 20  # Python makes up to 20 times as much of it
MAX_DIGITS = 20  # and the sign, of a whole number of 64 bits
SETTLED_NS = 2 * 10**9
MAX_LISTINGS = 64
_listings: dict[tuple[int, int], tuple[int, list[tuple[str, bool]]]] = {}
_MANY_DIGITS = re.compile(f"[0-9]{{{MAX_DIGITS}}}")


def open_regular(root: Path, key: str) -> int:
    """Open a regular file below `root` for reading, following no symbolic link on the way.

    Where `root` is the run's store or lies in it, the way begins at the run directory.

    Raises:
        OSError: it is missing, or something else than a regular file.
        ValueError: the key leads out of `root`.
    """
    name, fd = _descend(root, key)
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(name, flags, dir_fd=fd)
    finally:
        os.close(fd)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"{key} is not a regular file")
    return descriptor


def read_regular(root: Path, key: str, most: int = MAX_FILE_BYTES) -> bytes:
    """Read such a file.

    Raises:
        OSError: as `open_regular`, or it holds more than `most` bytes.
        ValueError: as `open_regular`.
    """
    with os.fdopen(open_regular(root, key), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"{size} bytes, where at most {most} are expected")
        return file.read(most)


def directories(root: Path, key: str) -> list[str]:
    """Return the names of the directories in a directory below `root`, ascending.

    Links are none; [] if it is missing, or itself reached by a link only.
    """
    return sorted(name for name, is_directory in _entries(root, key) if is_directory)


def names(root: Path, key: str) -> list[str]:
    """Return the names of everything in a directory below `root`, ascending; [] as above."""
    return sorted(name for name, _ in _entries(root, key))


def parse(data: bytes | str, most: int = MAX_JSON_BYTES, *, finite: bool = False) -> Any:  # noqa: ANN401  (any JSON value)
    """Return a JSON value, of at most `most` bytes.

    Args:
        data: UTF-8.
        most: bytes.
        finite: whether NaN and infinities are refused, also in the shape of 1e999.

    Raises:
        ValueError: it is none, or one that is too long or too deep to be taken apart, or has a
            whole number of more than 64 bits, which no array and no float holds.
    """
    if len(data) > most:
        raise ValueError(f"{len(data)} bytes of JSON, at most {most} are read")
    text = data if isinstance(data, str) else data.decode()
    # A function of ours for each number takes five times as long: only where there is a need.
    wide = _whole if _MANY_DIGITS.search(text) else None
    strict: dict[str, Any] = {"parse_constant": _finite, "parse_float": _finite} if finite else {}
    try:
        return json.loads(text, parse_int=wide, **strict)
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:20]} where a finite number is expected")
    return number


def _entries(root: Path, key: str) -> list[tuple[str, bool]]:
    try:
        _, fd = _descend(root, f"{key}/*")
    except OSError:
        return []
    try:
        return _listed(fd)
    finally:
        os.close(fd)


def _listed(fd: int) -> list[tuple[str, bool]]:
    """Return what is in an open directory, and whether it is a directory.

    A verb asks for the same few directories many times, and a stranger may fill them: one that has
    not changed for a while is listed once. Within that while its time may not tell of a change. It
    is the time of the inode's change, which nobody sets: a copy has the other one of its original.
    """
    before = os.fstat(fd)
    place, changed = (before.st_dev, before.st_ino), before.st_ctime_ns
    known = _listings.get(place)
    if known is not None and known[0] == changed:
        return known[1]
    with os.scandir(fd) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    _listings.pop(place, None)
    if time.time_ns() - changed > SETTLED_NS:
        _listings[place] = changed, found
        if len(_listings) > MAX_LISTINGS:
            del _listings[next(iter(_listings))]
    return found


def _descend(root: Path, key: str) -> tuple[str, int]:
    """Open the directory that holds `key`; return the last part of the key, and it."""
    *parts, last = key.split("/")
    if any(p in {"", ".", ".."} or "\x00" in p for p in (*parts, last)):
        raise ValueError(f"{key!r} is not a path inside the run")
    if STORE in root.parts:
        at = len(root.parts) - 1 - root.parts[::-1].index(STORE)
        parts, root = [*root.parts[at:], *parts], Path(*root.parts[:at])
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
    fd = os.open(root, flags)
    try:
        for part in parts:
            inner = os.open(part, flags | os.O_NOFOLLOW, dir_fd=fd)
            os.close(fd)
            fd = inner
    except BaseException:
        os.close(fd)
        raise
    return last, fd
