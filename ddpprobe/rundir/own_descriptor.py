"""A descriptor that is kept for long, and touched only as long as it is what was opened.

A script that turns itself into a daemon closes all descriptors (`os.closerange`), and opens files
of its own, which get the same numbers. To write to one of these, or to close it, would do harm.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import final

logger = logging.getLogger("ddpprobe")


@final
class OwnDescriptor:
    """Owns a descriptor.

    Args:
        number: of the descriptor, just opened.
    """

    __slots__ = ("_file", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self._file = _file_of(number)

    def is_ours(self) -> bool:
        """Whether it still is what was opened: one system call, half a microsecond."""
        if self.number < 0:
            return False
        if _file_of(self.number) == self._file:
            return True
        _say_lost()
        self.number = -1
        return False

    def close(self) -> None:
        """Close it, if it is ours and open."""
        if self.is_ours():
            number, self.number = self.number, -1
            os.close(number)


def _file_of(number: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(number)
    except OSError:  # nobody's, by now
        return None
    return found.st_dev, found.st_ino


@functools.cache
def _say_lost() -> None:
    logger.warning(
        "ddpprobe: descriptors of the probe were closed by something else in this process, as "
        "os.closerange() does. The probe touches none that has its number now; what it held by "
        "them (that this process lives, that the run is taken) is no longer told. install() after "
        "the descriptors are closed keeps all of it."
    )
