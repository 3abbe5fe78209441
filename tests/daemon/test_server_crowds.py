"""A crowd of clients that ask much and read nothing: the scraper is answered, memory is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator

import pytest

from ddpprobe.daemon import connections, server
from ddpprobe.daemon.bounded_log import BoundedLog
from ddpprobe.daemon.connections import GuardedLoop

from ..waiting import PATIENCE
from .test_server import DOOR, NODE, RIGHT, TEXT, ask, dial, serving, until

CLIENTS, REQUESTS = 100, 200
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = 4 << 20


class Counted(server.Server):
    """A server that counts the requests that it looks at."""

    asked = 0

    async def _answer(self, *args: object) -> server.Answer:
        self.asked += 1
        return await super()._answer(*args)  # type: ignore[arg-type]


@pytest.fixture
def counted() -> Iterator[tuple[Counted, str]]:
    made = Counted("127.0.0.1:0")
    address = made.start()
    try:
        yield made, address
    finally:
        made.stop()


def said(sock: socket.socket) -> bytes:
    """Return everything that comes until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while data := sock.recv(1 << 16):
            found += data
    return found


@pytest.mark.parametrize("leaves", [True, False])
def test_a_crowd_that_pipelines_is_answered_once_each_and_a_scrape_completes(
    counted: tuple[Counted, str], caplog: pytest.LogCaptureFixture, leaves: bool
) -> None:
    made, address = counted
    made.publish(os.urandom(BODY), TEXT)
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(dial(address)) for _ in range(CLIENTS)]
        for sock in crowd:
            with contextlib.suppress(ConnectionError):
                sock.sendall(GET * REQUESTS)
            if leaves:
                sock.close()
        for _ in range(3):
            accept = {"Accept": "application/openmetrics-text"}
            assert ask(address, "/metrics", headers=accept)[1] == TEXT
        assert made._loop is not None
        assert made.asked <= CLIENTS + 3
        held = [c._transport for c in list(made._loop.connections)]
        waiting = sum(t.get_write_buffer_size() for t in held if t is not None)
        assert waiting < CLIENTS * (1 << 18)  # and not of all of them the whole body
    assert until(lambda: not made._loop.connections)  # type: ignore[union-attr]
    assert made.asked <= CLIENTS + 3
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_what_is_written_to_a_client_that_left_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()
        for _ in range(100):
            writer.write(b"x")
        done.set()

    async def serve() -> None:
        listening = await asyncio.start_server(answer, "127.0.0.1", 0)
        with contextlib.closing(socket.create_connection(listening.sockets[0].getsockname())):
            await asyncio.wait_for(done.wait(), PATIENCE)
        listening.close()

    loop, done = GuardedLoop(), asyncio.Event()
    with contextlib.closing(loop):
        loop.run_until_complete(serve())
    assert caplog.records == []


@pytest.mark.parametrize("path", ["/metrics", "/healthz", "/nothing", "/gather"])
def test_every_answer_closes_its_connection(path: str) -> None:
    with serving() as (made, address):
        made.set_gather_handler(lambda *_: b"", DOOR)
        method = "POST" if path == "/gather" else "GET"
        response, _ = ask(address, path, method, headers=RIGHT, body=b"x" * (path == "/gather"))
        assert response.headers.get_all("connection") == ["close"]
        with dial(address) as sock:
            head = f"Host: x\r\nAuthorization: {RIGHT['Authorization']}\r\nDdpprobe-Node: {NODE}"
            request = f"{method} {path} HTTP/1.1\r\n{head}\r\nContent-Length: 0\r\n\r\n".encode()
            sock.sendall(request + request)
            assert said(sock).count(b"HTTP/1.1") == 1


@pytest.mark.parametrize(
    "upgrade",
    [
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
        b"Connection: Upgrade\r\nUPGRADE: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZQ==\r\n",
    ],
)
def test_there_is_no_other_protocol_to_go_over_to(upgrade: bytes) -> None:
    with serving() as (_, address), dial(address) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n")
        answer = said(sock)
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(TEXT)


def test_http_2_by_prior_knowledge_is_closed() -> None:
    with serving() as (_, address), dial(address) as sock:
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0")
        assert not said(sock).startswith(b"\0")
        assert ask(address, "/metrics")[1] == TEXT


def test_a_head_may_come_in_pieces_and_one_without_end_is_refused() -> None:
    with serving() as (_, address):
        with dial(address) as sock:
            for at in range(0, len(GET), 5):
                sock.sendall(GET[at : at + 5])
            assert said(sock).endswith(TEXT)
        with dial(address) as sock:
            with contextlib.suppress(ConnectionError):
                sock.sendall(b"GET / HTTP/1.1\r\nx: " + b"y" * (4 * connections.HEAD_BYTES))
            assert b"200" not in said(sock)


def test_who_goes_on_sending_behind_a_request_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving() as (made, address):
        made.publish(os.urandom(BODY), TEXT)
        with dial(address) as sock, pytest.raises(ConnectionError):
            sock.sendall(GET)
            while True:
                sock.sendall(b"x" * (1 << 16))
        assert ask(address, "/healthz")[0].status == 200


def test_a_message_that_repeats_itself_is_logged_so_often_and_no_more(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = 0.0
    quiet = BoundedLog(most=3, seconds=10.0, clock=lambda: now)

    def count(logger: str, text: str, times: int) -> int:
        record = logging.LogRecord(logger, logging.WARNING, "f", 1, text, (), None)
        return sum(bool(quiet.filter(record)) for _ in range(times))

    assert count("asyncio", "socket.send() raised exception.", 10_000) == 3
    assert count("ddpprobe", "another", 2) == 2
    now = 11.0
    last = logging.LogRecord("asyncio", 30, "f", 1, "socket.send() raised exception.", (), None)
    assert quiet.filter(last)
    assert "9997" in last.getMessage()
    assert count("asyncio", "socket.send() raised exception.", 10) == 2
    assert [count("x", f"message {i}", 1) for i in range(5000)] == [1] * 5000
    assert len(quiet._seen) <= 1000
