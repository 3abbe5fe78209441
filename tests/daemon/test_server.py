"""What the daemon's HTTP server promises to scrapers, pushers, and whoever means it harm."""

from __future__ import annotations

import contextlib
import functools
import gzip
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from ddpprobe.daemon import connections, server
from ddpprobe.daemon.blocks import Refusal
from ddpprobe.daemon.server import Server, wants_openmetrics
from ddpprobe.daemon.variables import parse_address
from ddpprobe.rundir.roster import Roster, Shared, digest

from ..waiting import PATIENCE, deadline

TEXT, OPENMETRICS = b"ddpprobe_paused 0.0\n", b"ddpprobe_paused 0.0\n# EOF\n"
PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
TOKEN = "s3cret"
DOOR = Shared(TOKEN)
NODE = "node_0001"
RIGHT = {"Authorization": f"Bearer {TOKEN}", "Ddpprobe-Node": NODE}


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Poll a condition; return whether it held before the deadline."""
    late = deadline(seconds)
    while not condition():
        if time.monotonic() > late:
            return False
        time.sleep(0.02)
    return True


@contextlib.contextmanager
def serving(**kwargs: str) -> Iterator[tuple[Server, str]]:
    made = Server("127.0.0.1:0", **kwargs)
    address = made.start()
    made.publish(TEXT, OPENMETRICS)
    try:
        yield made, address
    finally:
        made.stop()


@pytest.fixture
def running() -> Iterator[tuple[Server, str]]:
    with serving() as pair:
        yield pair


def ask(
    address: str,
    path: str,
    method: str = "GET",
    headers: dict[str, str] | None = None,
    body: bytes | None = None,
) -> tuple[http.client.HTTPResponse, bytes]:
    host, port = parse_address(address)
    connection = http.client.HTTPConnection(host, port, timeout=10 * PATIENCE)
    try:
        connection.request(method, path, body=body, headers=headers or {})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def dial(address: str) -> socket.socket:
    return socket.create_connection(parse_address(address), timeout=15 * PATIENCE)


@pytest.mark.parametrize(
    ("accept", "body", "kind"),
    [
        ("", TEXT, "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", TEXT, "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=0.0.4", TEXT, "text/plain; version=0.0.4; charset=utf-8"),
        (
            PROMETHEUS_ACCEPT,
            OPENMETRICS,
            "application/openmetrics-text; version=1.0.0; charset=utf-8",
        ),
    ],
)
def test_metrics_come_in_the_format_asked_for(
    running: tuple[Server, str], accept: str, body: bytes, kind: str
) -> None:
    response, got = ask(running[1], "/metrics", headers={"Accept": accept})
    assert (response.status, got) == (200, body)
    assert response.headers["content-type"] == kind


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("application/openmetrics-text; version=1.0.0; q=0.2, text/plain; q=0.5", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;version=2.0.0", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;q=nan", False),
        (";;;,,q=", False),
    ],
)
def test_openmetrics_is_chosen_by_weight_and_version(accept: str, wanted: bool) -> None:
    assert wants_openmetrics(accept) is wanted


def test_gzip_is_sent_only_to_who_takes_it(running: tuple[Server, str]) -> None:
    response, body = ask(running[1], "/metrics", headers={"Accept-Encoding": "br, gzip"})
    assert response.headers["content-encoding"] == "gzip"
    assert gzip.decompress(body) == TEXT
    for refused in ("identity", "gzip;q=0"):
        response, body = ask(running[1], "/metrics", headers={"Accept-Encoding": refused})
        assert (response.headers["content-encoding"], body) == (None, TEXT)


def test_a_publish_replaces_the_body_and_none_yet_is_503() -> None:
    made = Server("127.0.0.1:0")
    address = made.start()
    try:
        assert ask(address, "/metrics")[0].status == 503
        made.publish(b"a 1\n", b"# EOF\n")
        assert ask(address, "/metrics")[1] == b"a 1\n"
        made.publish(b"a 2\n", b"# EOF\n")
        assert ask(address, "/metrics")[1] == b"a 2\n"
    finally:
        made.stop()


def test_the_other_pages(running: tuple[Server, str]) -> None:
    _, address = running
    assert ask(address, "/healthz")[1] == b"ok\n"
    assert b"/metrics" in ask(address, "/")[1]
    response, body = ask(address, "/sd")
    assert response.headers["content-type"] == "application/json"
    assert json.loads(body) == [{"targets": [address], "labels": {}}]


def test_the_head_lists_every_node_of_the_run(running: tuple[Server, str]) -> None:
    made, address = running
    made.set_run("gpt-a1b2c3")
    made.set_gather_handler(lambda *_: b"", DOOR)

    def push(node: str, listen: str | None) -> list[str]:
        said = {} if listen is None else {"Ddpprobe-Listen": listen}
        headers = RIGHT | {"Ddpprobe-Node": node} | said
        assert ask(address, "/gather", "POST", headers, b"")[0].status == 204
        (group,) = json.loads(ask(address, "/sd")[1])
        assert group["labels"] == {"run": "gpt-a1b2c3", "__param_run": "gpt-a1b2c3"}
        return list(group["targets"])

    assert push("node_0001", "10.0.0.2:13377") == [address, "10.0.0.2:13377"]
    assert push("node_0002", "0.0.0.0:13378")[1:] == ["10.0.0.2:13377", "127.0.0.1:13378"]
    assert push("node_0001", "no address")[1:] == ["127.0.0.1:13378"]
    assert push("node_0002", None) == [address]
    push("node_0001", "10.0.0.2:13377")
    made.set_gather_handler(lambda *_: b"", DOOR)  # of the next attempt
    assert json.loads(ask(address, "/sd")[1])[0]["targets"] == [address]


def test_metrics_of_another_run_are_not_served(running: tuple[Server, str]) -> None:
    """Prometheus may ask at a port that was another run's until a moment ago."""
    made, address = running
    assert ask(address, "/metrics?run=gpt-a1b2c3")[1] == TEXT  # which run it is is not known yet
    made.set_run("gpt-a1b2c3")
    assert ask(address, "/metrics?run=gpt-a1b2c3")[1] == TEXT
    response, body = ask(address, "/metrics?run=bert%2D0")
    assert (response.status, body) == (404, b"the run here is gpt-a1b2c3\n")
    for other in ("/metrics", "/metrics?run=", "/metrics?of=bert"):
        assert ask(address, other)[1] == TEXT


def test_who_is_not_admitted_names_no_target(running: tuple[Server, str]) -> None:
    made, address = running

    def refuse(*_: object) -> bytes:
        raise Refusal(400, "no")

    listen = {"Ddpprobe-Listen": "10.0.0.2:13377"}
    made.set_gather_handler(refuse, DOOR)
    assert ask(address, "/gather", "POST", RIGHT | listen, b"")[0].status == 400
    wrong = {"Authorization": "Bearer wrong", "Ddpprobe-Node": NODE}
    assert ask(address, "/gather", "POST", wrong | listen, b"")[0].status == 401
    assert json.loads(ask(address, "/sd")[1])[0]["targets"] == [address]


@pytest.mark.parametrize(
    ("listen", "client", "target"),
    [
        ("0.0.0.0:13377", "10.0.0.2", "10.0.0.2:13377"),
        ("[::]:13377", "fd00::2", "[fd00::2]:13377"),
        ("10.9.0.2:13377", "10.0.0.2", "10.9.0.2:13377"),
        ("127.0.0.1:13377", "10.0.0.2", None),  # of use on its own machine only
        ("127.0.0.1:13377", "127.0.0.1", "127.0.0.1:13377"),
        ("metadata.internal:80", "10.0.0.2", None),
        ("10.0.0.2", "10.0.0.2", None),
    ],
)
def test_a_node_is_listed_where_it_can_be_reached(
    listen: str, client: str, target: str | None
) -> None:
    assert server.target_of(listen, client) == target


def test_head_has_the_length_and_no_body(running: tuple[Server, str]) -> None:
    response, body = ask(running[1], "/metrics", "HEAD")
    assert (response.status, body) == (200, b"")
    assert response.headers["content-length"] == str(len(TEXT))


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"),
    [
        ("POST", "/metrics", {}, b"x", 405),
        ("DELETE", "/healthz", {}, None, 405),
        ("GET", "/nothing", {}, None, 404),
        ("GET", "/../metrics", {}, None, 404),
        ("GET", "/metrics", {}, b"a body", 400),
        ("GET", "/metrics", {"Transfer-Encoding": "chunked"}, b"0\r\n\r\n", 400),
        ("POST", "/gather", {}, b"x", 404),
    ],
)
def test_what_is_not_offered_is_refused(
    running: tuple[Server, str],
    method: str,
    path: str,
    headers: dict[str, str],
    body: bytes | None,
    status: int,
) -> None:
    response, answer = ask(running[1], path, method, headers, body)
    assert response.status == status
    assert b"Traceback" not in answer


def test_a_push_needs_the_token_and_arrives_whole(running: tuple[Server, str]) -> None:
    made, address = running
    got: list[tuple[str, bytes]] = []
    made.set_gather_handler(lambda *push: got.append(push), DOOR)
    block = os.urandom(3 * 2**20)
    assert ask(address, "/gather", "POST", RIGHT, block)[0].status == 204
    assert got == [(NODE, block)]
    wrong = [{}, *({"Authorization": f"Bearer {w}"} for w in ("s3cre", "\xfc", TOKEN))]
    for headers in (*wrong, {"Ddpprobe-Node": NODE}, {**RIGHT, "Authorization": TOKEN}):
        assert ask(address, "/gather", "POST", headers, b"x")[0].status == 401
    assert ask(address, "/gather", "GET", RIGHT)[0].status == 405
    assert got == [(NODE, block)]


def test_a_node_with_a_secret_of_its_own_pushes_as_itself_only(
    running: tuple[Server, str],
) -> None:
    made, address = running
    got: list[str] = []
    roster = Roster(0, {NODE: frozenset({1})}, {NODE: digest("mine"), "node_0002": digest("other")})
    made.set_gather_handler(lambda node, _: got.append(node), roster)
    for secret, node, status in (("mine", NODE, 204), ("mine", "node_0002", 401), ("mine", "", 401),
                                 ("other", NODE, 401), (digest("mine"), NODE, 401)):  # fmt: skip
        headers = {"Authorization": f"Bearer {secret}", "Ddpprobe-Node": node}
        assert ask(address, "/gather", "POST", headers, b"x")[0].status == status
    assert got == [NODE]


@pytest.mark.parametrize("status", [400, 409, 413, 503])
def test_a_refusal_is_answered_with_its_status_and_reason_and_the_server_lives(
    running: tuple[Server, str], status: int
) -> None:
    made, address = running

    def refuse(node: str, body: bytes) -> None:
        raise Refusal(status, f"{len(body)} bytes of {node}")

    made.set_gather_handler(refuse, DOOR)
    response, answer = ask(address, "/gather", "POST", RIGHT, b"junk")
    assert (response.status, answer) == (status, b"4 bytes of node_0001\n")
    assert ask(address, "/healthz")[0].status == 200


def test_a_body_above_the_cap_is_413_announced_or_not(
    running: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, address = running
    got: list[bytes] = []
    made.set_gather_handler(lambda _, body: got.append(body), DOOR)
    monkeypatch.setattr(server, "MAX_BODY", 1000)
    right = "".join(f"{name}: {value}\r\n" for name, value in RIGHT.items())
    auth = f"POST /gather HTTP/1.1\r\nHost: x\r\n{right}"
    announced = f"{auth}Content-Length: 1001\r\n\r\n".encode()
    chunked = f"{auth}Transfer-Encoding: chunked\r\n\r\n".encode() + b"3e9\r\n" + b"x" * 1001
    for request in (announced, chunked):
        with dial(address) as sock:
            sock.sendall(request)
            assert sock.recv(100).startswith(b"HTTP/1.1 413")
    assert got == []


def test_a_refused_large_body_leaves_no_task_behind(running: tuple[Server, str]) -> None:
    made, address = running
    made.set_gather_handler(lambda *_: None, DOOR)
    with dial(address) as sock:
        head = b"POST /gather HTTP/1.1\r\nHost: x\r\nContent-Length: 50000000\r\n\r\n"
        sock.sendall(head)
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                sock.sendall(b"x" * 65536)
    assert made._loop is not None
    assert until(lambda: not made._loop.connections)  # type: ignore[union-attr]


def test_the_gather_listener_answers_only_the_gather() -> None:
    with serving(gather_listen="127.0.0.1:0") as (made, address):
        got: list[bytes] = []
        made.set_gather_handler(lambda _, body: got.append(body), DOOR)
        right = RIGHT
        assert made.gather_address is not None
        assert made.gather_address != address
        assert ask(made.gather_address, "/gather", "POST", right, b"x")[0].status == 204
        assert ask(made.gather_address, "/healthz")[0].status == 200
        for path in ("/metrics", "/sd", "/"):
            assert ask(made.gather_address, path)[0].status == 404
        assert ask(address, "/gather", "POST", right, b"x")[0].status == 404
        assert got == [b"x"]


def test_a_taken_port_means_the_next_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = Server(f"127.0.0.1:{port}")
        try:
            bound = parse_address(made.start())[1]
            assert port < bound <= port + 100
        finally:
            made.stop()


def test_no_free_port_says_which_were_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "PORT_TRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"no free port from {port} to {port} at 127.0.0.1"):
            Server(f"127.0.0.1:{port}").start()


@pytest.mark.parametrize(("listen", "warned"), [("0.0.0.0:0", 1), ("127.0.0.1:0", 0)])
def test_a_warning_says_once_that_other_machines_can_read_the_metrics(
    listen: str, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    made = Server(listen, "127.0.0.1:0")
    address = made.start()
    try:
        told = [r.getMessage() for r in caplog.records if r.name == "ddpprobe.http"]
    finally:
        made.stop()
    assert len(told) == warned
    assert all(address in line and "DDPPROBE_LISTEN" in line for line in told)


def test_ipv6_is_written_in_brackets() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    made = Server("[::1]:0")
    try:
        address = made.start()
    except OSError:
        pytest.skip("no IPv6 loopback here")
    try:
        assert address.startswith("[::1]:")
        assert json.loads(ask(address, "/sd")[1])[0]["targets"] == [address]
    finally:
        made.stop()


@pytest.mark.parametrize("bad", ["", "13377", ":13377", "host", "::1:80", "h:65536", "h:-1", "h:²"])
def test_a_wrong_address_is_explained(bad: str) -> None:
    with pytest.raises(ValueError, match=r"write HOST:PORT, as in 127\.0\.0\.1:13377"):
        Server(bad)


def test_nothing_is_left_after_stop() -> None:
    threads, fds = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with serving(gather_listen="127.0.0.1:0") as (made, address):
        assert ask(address, "/metrics")[0].status == 200
        held = dial(address)
        made.stop()
        made.stop()
        with held:
            assert held.recv(1) == b""
        assert not made.alive
        with pytest.raises(ConnectionRefusedError):
            dial(address)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) == fds


@contextlib.contextmanager
def half_open(address: str) -> Iterator[None]:
    """Hold 300 connections whose requests never come to an end."""
    with contextlib.ExitStack() as stack:
        for sock in [stack.enter_context(dial(address)) for _ in range(300)]:
            with contextlib.suppress(ConnectionError):  # those that lost their place
                sock.sendall(b"GET /metrics HTTP/1.1\r\nHos")
        yield


def test_300_half_open_requests_do_not_stop_a_scrape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 3600)  # no time frees a place
    with serving() as (made, address):
        before = threading.active_count()
        with half_open(address):
            assert ask(address, "/metrics")[1] == TEXT
            assert threading.active_count() == before
            assert made._loop is not None
            assert 0 < len(made._loop.connections) <= connections.MAX_CONNECTIONS


def test_300_half_open_requests_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.5)
    with serving() as (made, address), half_open(address):
        assert made._loop is not None
        assert until(lambda: not made._loop.connections)  # type: ignore[union-attr]


def test_a_drip_of_bytes_is_closed(
    running: tuple[Server, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_SECONDS", 0.5)
    with serving() as (_, address), dial(address) as sock:
        sock.settimeout(0.1)
        sock.sendall(b"GET /metrics HTTP/1.1\r\n")

        def closed() -> bool:
            try:
                sock.sendall(b"x")
                return sock.recv(10) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        assert until(closed)


def test_a_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALL_SECONDS", 0.3)
    short = functools.partial(connections.GuardedLoop, stall_seconds=0.3)
    monkeypatch.setattr(server, "GuardedLoop", short)
    with serving() as (made, address):
        made.publish(os.urandom(32 * 2**20), OPENMETRICS)
        with dial(address) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(15) == b"HTTP/1.1 200 \r\n"[:15]
            assert made._loop is not None
            assert until(lambda: not made._loop.connections)  # type: ignore[union-attr]
        made.publish(TEXT, OPENMETRICS)
        assert ask(address, "/metrics")[1] == TEXT


class _Fake:
    """A connection as the loop sees it, without a socket."""

    def __init__(self, loop: connections.GuardedLoop) -> None:
        self.loop = loop

    def abort(self) -> None:
        self.loop.release(self)  # type: ignore[arg-type]


def test_who_floods_pays_and_loopback_keeps_its_place() -> None:
    loop = connections.GuardedLoop(limit=4)
    try:
        scraper = _Fake(loop)
        loop.admit(scraper, "127.0.0.1")  # type: ignore[arg-type]
        flood = [_Fake(loop) for _ in range(10)]
        for fake in flood:
            loop.admit(fake, "10.0.0.9")  # type: ignore[arg-type]
        assert list(loop.connections) == [scraper, *flood[-3:]]
        for i in range(10):  # many peers with one connection each
            loop.admit(_Fake(loop), f"10.0.1.{i}")  # type: ignore[arg-type]
        assert scraper in loop.connections
        assert len(loop.connections) == 4
    finally:
        loop.close()


@pytest.mark.parametrize(
    ("address", "is_it"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("::ffff:127.0.0.2", True),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_loopback_is_recognised(address: str, is_it: bool) -> None:
    assert connections.is_loopback(address) is is_it
