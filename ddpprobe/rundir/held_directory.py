"""A run directory that somebody may delete, and make anew, while a process works in it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import final


@final
class HeldDirectory:
    """A directory as it is when this is made; its path may lead to another one later.

    While it is held its inode number is given to no other, so the two numbers tell them apart.

    Args:
        path: of the directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd: int | None = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:  # it is not there yet
            self._fd = None

    def is_there(self) -> bool:
        """Whether the path leads to it still, or, if it was not there, to any directory."""
        if self._fd is None:
            return self._path.is_dir()
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._fd))
        except OSError:
            return False

    def close(self) -> None:
        """Hold it no more."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
