"""The memory of a process that nobody else's doings change."""

from __future__ import annotations

import os
from pathlib import Path


def anonymous(pid: int | None = None) -> float:
    """Return the anonymous memory of a process in MiB: heaps, stacks, buffers; no file's pages.

    Resident and unique set sizes count the pages of libtorch differently when another process maps
    them, too.
    """
    for line in Path(f"/proc/{pid or os.getpid()}/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1024
    msg = "the kernel does not tell anonymous memory in smaps_rollup"
    raise OSError(msg)
