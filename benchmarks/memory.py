"""The memory of a process that nobody else's doings change."""

from __future__ import annotations

import os
from pathlib import Path


def anonymous(pid: int | None = None) -> float:
    """Return the anonymous memory of a process in MiB: heaps, stacks, buffers; no file's pages.

    Resident and unique set sizes count the pages of libtorch differently when another process maps
    them, too.
    """
    return _mib("smaps_rollup", "Anonymous", pid)


def peak() -> float:
    """Return the most resident memory that this process has had so far, in MiB.

    Not getrusage, whose peak is that of whoever forked this process, if that was larger.
    """
    return _mib("status", "VmHWM")


def _mib(file: str, name: str, pid: int | None = None) -> float:
    for line in Path(f"/proc/{pid or os.getpid()}/{file}").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    msg = f"the kernel does not tell {name} in {file}"
    raise OSError(msg)
