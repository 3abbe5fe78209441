"""An event loop that protects its servers from clients that hold on to connections.

The HTTP library closes a connection that is idle or never completes a request. It neither counts
connections nor gives up on a client that does not read its answer, and it answers whatever else a
client has sent after its request, in whichever protocol that asks for. This loop sees to that, one
layer below: a connection is for one request of HTTP/1.1.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any

MAX_CONNECTIONS = 128
HEAD_BYTES = 16 << 10  # of a request; the library refuses what is longer
BEHIND_BYTES = 1 << 20  # that a client may send after a request, unread
_END = re.compile(rb"\n\r?\n")
# A client that offers another protocol (some do by default) is answered in the one it speaks.
_OFFERS = re.compile(rb"\n(?:upgrade|http2-settings):[^\n]*(?=\n)", re.IGNORECASE)
STALL_SECONDS = 10.0  # Prometheus's own scrape timeout
HANDSHAKE_SECONDS = 5.0  # for TLS: until then nobody knows who holds the connection


class GuardedLoop(asyncio.SelectorEventLoop):
    """A selector loop whose servers hold at most `limit` connections.

    A newcomer is always let in. Once the places are taken, the peer that holds most of them loses
    its oldest connection: who floods pays, a scraper with one connection does not. The last
    connection from loopback goes only if all the others are loopback's too. With `tls` its servers
    speak TLS; a connection is counted when its handshake is done.
    """

    def __init__(
        self, limit: int = MAX_CONNECTIONS, stall_seconds: float = STALL_SECONDS,
        tls: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._tls = {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_SECONDS} if tls else {}
        self.limit = limit
        self.stall_seconds = stall_seconds
        self.connections: dict[_Watched, str] = {}  # in order of arrival, with the peer's address

    async def create_server(  # type: ignore[override]  # passes on what it does not look at
        self, protocol_factory: Callable[[], asyncio.Protocol], *args: Any, **kwargs: Any
    ) -> asyncio.Server:
        """Start a server, as the base class does, with every connection watched."""
        return await super().create_server(
            lambda: _Watched(self, protocol_factory()), *args, **{**kwargs, **self._tls}
        )

    def admit(self, connection: _Watched, peer: str) -> None:
        """Count a new connection in, at another's cost if all places are taken."""
        if len(self.connections) >= self.limit:
            held = Counter(self.connections.values())

            def greed(other: _Watched) -> tuple[int, bool]:
                address = self.connections[other]
                return held[address], not is_loopback(address)

            max(self.connections, key=greed).abort()  # the first, so the oldest, of the greediest
        self.connections[connection] = peer

    def release(self, connection: _Watched) -> None:
        """Count a connection out."""
        self.connections.pop(connection, None)

    def abort_all(self) -> None:
        """Drop every connection now."""
        for connection in list(self.connections):
            connection.abort()


class _Watched(asyncio.Protocol):
    """Stands before another protocol; aborts when the client does not take its answer."""

    def __init__(self, loop: GuardedLoop, inner: asyncio.Protocol) -> None:
        self._loop = loop
        self._inner = inner
        self._transport: asyncio.Transport | None = None
        self._check: asyncio.TimerHandle | None = None
        self._unsent = False
        self._request = OneRequest()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        address = transport.get_extra_info("peername")
        self._loop.admit(self, address[0] if isinstance(address, tuple) else "local")
        self._check = self._loop.call_later(self._loop.stall_seconds, self._look)
        self._inner.connection_made(_WhileOpen(transport))  # type: ignore[arg-type]  # is all it asks for

    def _look(self) -> None:
        """Abort if bytes were waiting at two looks in a row; closing alone would wait for them."""
        assert self._transport is not None
        waiting = self._transport.get_write_buffer_size() > 0
        if waiting and self._unsent:
            self.abort()
            return
        self._unsent = waiting
        self._check = self._loop.call_later(self._loop.stall_seconds, self._look)

    def abort(self) -> None:
        """Drop the connection without sending what is left."""
        self._loop.release(self)
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._check is not None:
            self._check.cancel()
        self._loop.release(self)
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        passed = self._request.take(data)
        if passed is None:
            self.abort()
        elif passed:
            self._inner.data_received(passed)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()


class _WhileOpen:
    """Stands before a transport; what is written to one that is lost goes nowhere.

    asyncio would warn of each such write, and a client that leaves early costs many of them.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class OneRequest:
    """Lets the bytes of one request through, and nothing that a client sends after it."""

    def __init__(self) -> None:
        self._head: bytearray | None = bytearray()  # None: it has been passed on
        self._has_body = False
        self._behind = 0

    def take(self, data: bytes) -> bytes | None:
        """Return what of it to pass on; None: the client is to be dropped."""
        if self._head is None:
            if self._has_body:
                return data
            self._behind += len(data)
            return b"" if self._behind <= BEHIND_BYTES else None
        # Looked at once more: the three bytes before may be the beginning of the end.
        start = max(len(self._head) - 3, 0)
        self._head += data
        end = _END.search(self._head, start)
        if end is None and len(self._head) <= HEAD_BYTES:
            return b""
        head, self._head = bytes(self._head), None
        if head.startswith(b"PRI "):
            return None
        if end is None:
            return head
        first, rest = head[: end.end()], head[end.end() :]
        self._has_body = first.startswith(b"POST ")
        return _OFFERS.sub(b"", first) + (rest if self._has_body else b"")


def is_loopback(address: str) -> bool:
    """Return whether an address as the socket gives it is of this machine."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
