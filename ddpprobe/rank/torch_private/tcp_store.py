"""A connection to the job's TCPStore on which nothing waits without an end.

The timeouts of torch's stores hold for keys that do not come, not for a host that does not answer:
`check`, `get` and `wait(timeout)` on the store of a stopped process never returned (measured,
2.13). The socket itself can be given a timeout; torch then raises "Socket Timeout". Its number is
told only by the store's `repr`.
"""

from __future__ import annotations

import os
import re
import socket
import struct
from datetime import timedelta

from torch import distributed as dist
from torch._C._distributed_c10d import Store

_CONNECT = timedelta(seconds=30)


def bounded(store: object, seconds: float) -> Store | None:
    """Connect to the TCPStore below `store` anew; each answer is awaited for `seconds` at most.

    The operations raise RuntimeError (torch's DistError is one) when the time is up or the host is
    gone; the connection is of no use after that.

    Degradation: None, also for stores that are no TCPStore; a budget can then not be agreed on by
    several nodes.

    Raises:
        RuntimeError: the host does not answer now.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]  # not in its __all__
        return None
    line: Store = dist.TCPStore(  # type: ignore[attr-defined]
        store.host, store.port, is_master=False, wait_for_workers=False, timeout=_CONNECT
    )
    found = re.search(r"\bfd=(\d+)", repr(line))
    if found is None or not _limit(int(found[1]), store.port, seconds):
        return None
    return line


def _limit(fd: int, port: int, seconds: float) -> bool:
    """Set the timeout of a socket; False if it is not the one that was looked for."""
    value = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    try:
        with socket.socket(fileno=os.dup(fd)) as held:
            if held.getpeername()[1] != port:
                return False
            held.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)
    except OSError:
        return False
    return True


def self_test() -> dict[str, bool]:
    """Whether a store that answers is reached, with a limit on its socket."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    line = bounded(dist.PrefixStore("p", store), 1.0)  # type: ignore[attr-defined]
    if line is None:
        return {"bounded_store": False}
    store.set("told", "1")
    return {"bounded_store": line.get("told") == b"1"}
