"""A small file that is overwritten in place: some bytes of fixed length, and their checksum.

One `pwrite` of a hundred bytes costs about a microsecond, survives its writer, and cannot hurt it:
a mapped file would raise SIGBUS in the training process if the disk were full.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import final

from ddpprobe import layout

_CHECK = 4  # bytes of the crc32


@final
class Slate:
    """Nothing of it raises after construction.

    Args:
        path: of the file; its directory is made.
        size: of what is written, in bytes.
        clean: wipe what a predecessor wrote.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, path: Path, size: int, *, clean: bool) -> None:
        layout.make_dir(path.parent)
        self._fd = layout.open_own(path, os.O_RDWR | (os.O_TRUNC if clean else 0))
        self._size = size
        os.posix_fallocate(self._fd, 0, size + _CHECK)

    def write(self, body: bytes) -> bool:
        """Replace what the file says; False if the disk refuses."""
        data = body + zlib.crc32(body).to_bytes(_CHECK, "little")
        try:
            return os.pwrite(self._fd, data, 0) == len(data)
        except OSError:
            return False

    def read(self) -> bytes | None:
        """Return what the file says, None if that is not whole."""
        try:
            return whole(os.pread(self._fd, self._size + _CHECK, 0), self._size)
        except OSError:
            return None

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def whole(data: bytes, size: int) -> bytes | None:
    """Return the `size` bytes in the contents of such a file; None: torn, or another file."""
    body, check = data[:-_CHECK], data[-_CHECK:]
    return (
        body if len(body) == size and zlib.crc32(body).to_bytes(_CHECK, "little") == check else None
    )
