"""What makes a forked launch one on a host of its own: its network, and its disk."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

_NEW_MOUNTS, _NETWORK = 0x20000, 0x40000000  # <linux/sched.h>
_BIND, _PRIVATE = 0x1000, 0x4000 | 0x40000  # <linux/mount.h>: the second with all below it


@dataclass(frozen=True)
class Host:
    """Namespaces to enter, which needs root.

    Attributes:
        network: a name of `ip netns`.
        disk: a directory that this host alone sees in the place of another: (which, where).
    """

    network: str
    disk: tuple[Path, Path] | None = None

    def enter(self) -> None:
        """Be on it from now on; raises `OSError`. A process with one thread can."""
        network = os.open(f"/run/netns/{self.network}", os.O_RDONLY)
        _call("setns", network, _NETWORK)
        os.close(network)
        if self.disk is not None:
            which, where = map(os.fsencode, self.disk)
            _call("unshare", _NEW_MOUNTS)
            _call("mount", None, b"/", None, ctypes.c_ulong(_PRIVATE), None)
            _call("mount", which, where, None, ctypes.c_ulong(_BIND), None)


def _call(name: str, *arguments: object) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
