"""A small file that is overwritten in place: some bytes of fixed length, and their checksum.

On a disk it is one `pwrite`, which survives its writer and cannot hurt it: a mapped file would
raise SIGBUS in the training process if the disk were full. In memory (`tmpfs`) the pages are there
before they are mapped, and a mapped slot file is stored without a system call. It has two halves,
of which the older is overwritten: a writer that is killed in between leaves the other one whole.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import final

from ddpprobe.rundir import paths
from ddpprobe.rundir.own_descriptor import OwnDescriptor

_CHECK = 4  # bytes of the crc32
# A map closes a descriptor of its own, a copy, which may be somebody else's where ours is.
_lost: list[mmap.mmap] = []
_COUNT = struct.Struct("<Q")  # writes so far: which half is the newer one


@final
class SlotFile:
    """Nothing of it raises after construction.

    Args:
        path: of the file; its directory is made.
        size: of what is written, in bytes.
        clean: wipe what a predecessor wrote.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, size: int, *, clean: bool) -> None:
        paths.make_dir(path.parent)
        self._file = OwnDescriptor(paths.open_own(path, os.O_RDWR | (os.O_TRUNC if clean else 0)))
        self._size = size
        os.posix_fallocate(self._file.number, 0, size + _CHECK)

    def write(self, body: bytes) -> bool:
        """Replace what the file says; False if the disk refuses."""
        data = checked(body)
        try:
            return self._file.is_ours() and os.pwrite(self._file.number, data, 0) == len(data)
        except OSError:
            return False

    def read(self) -> bytes | None:
        """Return what the file says, None if that is not whole."""
        try:
            return whole(os.pread(self._file.number, self._size + _CHECK, 0), self._size)
        except OSError:
            return None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@final
class MappedSlotFile:
    """The same in mapped memory; locked (`flock`) for as long as its writer lives.

    Args:
        path: of the file, on a file system in memory; a new one.
        size: of what is written, in bytes.

    Attributes:
        said: what was written last; b"" before that.

    Raises:
        OSError: it cannot be made, or there is no memory for it.
    """

    def __init__(self, path: Path, size: int) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        made = path.with_name(f".{path.name}")  # who finds `path` finds it locked: it is not dead
        fd = os.open(made, flags, paths.FILE_MODE)
        self._file = OwnDescriptor(fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._half = _COUNT.size + size + _CHECK
            os.posix_fallocate(fd, 0, 2 * self._half)
            self._map: mmap.mmap | None = mmap.mmap(fd, 2 * self._half)
            made.rename(path)
        except OSError:
            self._file.close()
            raise
        self._count = 0
        self.said = b""

    def write(self, body: bytes) -> bool:
        """Replace what it says; False after `close`."""
        if self._map is None:
            return False
        self._count += 1
        at = self._half * (self._count & 1)
        self._map[at : at + self._half] = checked(_COUNT.pack(self._count) + body)
        self.said = body
        return True

    def close(self) -> None:
        """Let go of the file, which stays; its lock with it, unless a forked child has it too."""
        if self._map is not None:
            if self._file.is_ours():
                self._map.close()
            else:
                _lost.append(self._map)
            self._map = None
            self._file.close()


def checked(body: bytes) -> bytes:
    """Return what is written of `body`: the bytes and their checksum."""
    return body + zlib.crc32(body).to_bytes(_CHECK, "little")


def newest(data: bytes, size: int) -> bytes | None:
    """Return the newer whole half of a mapped file, `size` bytes; None: nothing was written."""
    half = _COUNT.size + size + _CHECK
    if len(data) != 2 * half:
        return None
    found = [whole(data[at : at + half], half - _CHECK) for at in (0, half)]
    said = [part for part in found if part is not None and any(part[: _COUNT.size])]
    return max(said, key=_count)[_COUNT.size :] if said else None


def _count(half: bytes) -> int:
    number: int = _COUNT.unpack_from(half)[0]
    return number


def whole(data: bytes, size: int) -> bytes | None:
    """Return the `size` bytes in the contents of such a file; None: torn, or another file."""
    body, check = data[:-_CHECK], data[-_CHECK:]
    return (
        body if len(body) == size and zlib.crc32(body).to_bytes(_CHECK, "little") == check else None
    )
