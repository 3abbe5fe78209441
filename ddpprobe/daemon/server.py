"""Serves `/metrics` from bytes made beforehand, and takes what other nodes push at `/gather`.

One thread with its own event loop. A scrape never renders anything, so it costs the same whoever
asks and how often; what a hostile or broken client can hold is bounded (see `connections`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import gzip
import ipaddress
import json
import logging
import socket
import threading
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import hypercorn.asyncio
import hypercorn.config

from ddpprobe.daemon.blocks import Refusal
from ddpprobe.daemon.connections import GuardedLoop, is_loopback
from ddpprobe.daemon.variables import parse_address
from ddpprobe.daemon.web_config import ReloadingContext, WebConfigFile
from ddpprobe.metrics.render import OPENMETRICS_CONTENT_TYPE, TEXT_CONTENT_TYPE
from ddpprobe.rundir.roster import Door
from ddpprobe.rundir.targets import RUN_PARAMETER, labels_of

PORT_TRIES = 101  # the port itself and the next hundred: one job each
MAX_BODY = 64 * 2**20  # of one push; a sampled step of 70 B parameters on 8 ranks is about 1 MiB
KEEP_ALIVE_SECONDS = 5  # also closes a connection that never completes its request
BODY_SECONDS = 30.0  # for one push to arrive whole
NODE_HEADER = "ddpprobe-node"  # who pushes
LISTEN_HEADER = "ddpprobe-listen"  # and where it serves its own metrics; absent when it goes
# Bytes of an answer that are handed on at once: so much waits for a client that does not read.
PIECE = 1 << 16
SHUTDOWN_SECONDS = 1.0  # for answers under way when the server stops

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
logger = logging.getLogger("ddpprobe.http")
# The library says "http" of each listener: TLS is spoken below it.
_http_errors = logger.getChild("errors")
_http_errors.setLevel(logging.WARNING)

_OPEN = (
    "ddpprobe: /metrics is served at %s to whoever reaches that port, %s; it names modules and "
    "hosts. DDPPROBE_LISTEN=ADDRESS:PORT binds it to one network, DDPPROBE_WEB_CONFIG=FILE asks "
    "for certificates or passwords"
)

_NOSNIFF = (b"x-content-type-options", b"nosniff")
_LANDING = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>ddpprobe</title>
<h1>ddpprobe node daemon</h1><ul>
<li><a href="/metrics">/metrics</a> for Prometheus (text or OpenMetrics, by Accept)
<li><a href="/sd">/sd</a> the run's targets as http_sd JSON
<li><a href="/healthz">/healthz</a> answers while the daemon lives
</ul>
"""


class _Body:
    """One body of `/metrics`; `squeezed` is made (gzip level 1) when it is first asked for."""

    def __init__(self, plain: bytes) -> None:
        self.plain = plain

    @functools.cached_property
    def squeezed(self) -> bytes:
        return gzip.compress(self.plain, compresslevel=1, mtime=0)


@dataclass(frozen=True, slots=True)
class Answer:
    """One HTTP answer; `headers` beside type, length and the fixed ones."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    headers: tuple[tuple[bytes, bytes], ...] = ()


class Server:
    """The HTTP server of a daemon.

    Args:
        listen: "127.0.0.1:13377", "[::1]:13377"; the next free port up is taken if it is in use.
        gather_listen: where other nodes push to, if not at `listen`; only `/gather` and `/healthz`
            answer there, and `/gather` nowhere else. Port 0 takes any.
        web: TLS, passwords and headers, at both; None: plain HTTP, nobody is asked.

    Attributes:
        scheme: "https" where it speaks TLS, else "http".
        warning: what keeps nobody out of `/metrics`, which other machines reach; "" if all is well.
    """

    def __init__(
        self, listen: str, gather_listen: str | None = None, web: WebConfigFile | None = None
    ) -> None:
        self._web = web
        self.scheme = "https" if web is not None and web.now.context is not None else "http"
        self._listen = parse_address(listen)
        self._gather_listen = parse_address(gather_listen) if gather_listen else None
        self._gather_port: int | None = None
        self._pages: dict[bool, _Body] = {}  # by whether it is OpenMetrics
        self._handler: Callable[[str, bytes], bytes] | None = None
        self._door: Door | None = None
        self._label = ""
        self._nodes: dict[str, str] = {}  # where the nodes that push serve their metrics
        self._checker = ThreadPoolExecutor(1, "ddpprobe-password")
        self._loop: GuardedLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self.gather_address: str | None = None
        self.warning = ""

    def start(self) -> str:
        """Bind, serve in a thread of its own, and return the address that was bound.

        Raises OSError if no port from the one wanted to a hundred above it is free. Logs a warning
        if `/metrics` can be reached from other machines, as anybody there may read it.
        """
        if self._thread is not None:
            msg = "this server has been started already: make another Server"
            raise RuntimeError(msg)
        sockets = [_bind(*self._listen)]
        address = format_address(sockets[0])
        if self._gather_listen is not None:
            try:
                # Another port than that of /metrics: the port tells a request's listener.
                sockets.append(_bind(*self._gather_listen, avoid=sockets[0].getsockname()[1]))
            except OSError:
                sockets[0].close()
                raise
            self.gather_address = format_address(sockets[1])
            self._gather_port = sockets[1].getsockname()[1]
        if not is_loopback(sockets[0].getsockname()[0]) and (open_ := self._open_doors()):
            self.warning = _OPEN % (address, open_)
            logger.warning("%s", self.warning)
        tls = ReloadingContext(self._web) if self._web and self.scheme == "https" else None
        self._loop = GuardedLoop(tls=tls)
        self._stopping = asyncio.Event()
        binds = [f"fd://{sock.detach()}" for sock in sockets]
        self._thread = threading.Thread(
            target=self._run, args=(binds,), name="ddpprobe-http", daemon=True
        )
        self._thread.start()
        for served in filter(None, (address, self.gather_address)):
            logger.info("serving %s://%s", self.scheme, served)
        return address

    def _open_doors(self) -> str:
        """Say what keeps nobody out; "" if something does."""
        config = self._web.now if self._web is not None else None
        clear = "" if self.scheme == "https" else "in the clear"
        asked = config is not None and (
            config.users or (config.context is not None and config.context.verify_mode)
        )
        return " and ".join(filter(None, (clear, "" if asked else "without a password")))

    def publish(self, text: bytes, openmetrics: bytes) -> None:
        """Replace what `/metrics` answers; from any thread, in one step."""
        self._pages = {False: _Body(text), True: _Body(openmetrics)}

    def set_run(self, label: str) -> None:
        """Say at `/sd` which run it is, see `metrics.labels.run_label`."""
        self._label = label

    def set_gather_handler(self, handler: Callable[[str, bytes], bytes], door: Door) -> None:
        """Answer every `POST /gather` that the door admits by what `handler` makes of it.

        Args:
            handler: is given the node's name and the body, on the server's thread; `Refusal` says
                what to answer to the sender.
            door: admits a node that proves who it is.
        """
        self._nodes = {}  # another attempt may have others
        self._door = door
        self._handler = handler

    @property
    def alive(self) -> bool:
        """Whether the server's thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Stop serving; afterwards thread, sockets and connections are gone. Harmless twice."""
        if self._thread is None or self._loop is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: the thread ended before
            self._loop.call_soon_threadsafe(self._end)
        self._thread.join(10 * SHUTDOWN_SECONDS)
        self._checker.shutdown(wait=False)
        if self._thread.is_alive():
            msg = f"the HTTP server did not stop within {10 * SHUTDOWN_SECONDS:.0f} s"
            raise TimeoutError(msg)

    def _end(self) -> None:
        assert self._loop is not None
        assert self._stopping is not None
        self._stopping.set()
        # A client that does not read must not hold up the end.
        self._loop.call_later(SHUTDOWN_SECONDS, self._loop.abort_all)

    def _run(self, binds: list[str]) -> None:
        assert self._loop is not None
        assert self._stopping is not None
        config = hypercorn.config.Config()
        config.bind = binds
        config.keep_alive_timeout = KEEP_ALIVE_SECONDS
        config.keep_alive_max_requests = 0  # an answer closes its connection
        config.include_server_header = False
        config.errorlog = _http_errors
        # With a bounded queue the library waits for ever on a body that was refused unread.
        config.max_app_queue_size = 0
        app: Any = self._app
        serving = hypercorn.asyncio.serve(
            app, config, shutdown_trigger=self._stopping.wait, mode="asgi"
        )
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # type: ignore[arg-type, return-value]
            runner.run(serving)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
        else:
            answer = await self._answer(scope, receive)
            fixed = self._web.now.headers if self._web is not None else ()
            await _respond(receive, send, answer, fixed)

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        path, method = scope["path"], scope["method"]
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        at_gather = self._gather_port is not None and scope["server"][1] == self._gather_port
        if path == "/gather" and (at_gather or self._gather_port is None) and self._handler:
            return await self._gather(method, headers, scope, receive)
        if self._web is not None and self._web.now.users and not await self._knows(headers):
            realm = (b"www-authenticate", b'Basic realm="ddpprobe"')
            return _refusal(401, b"wrong or no name and password\n", realm)
        pages = {"/healthz": lambda: Answer(200, b"ok\n")}
        if not at_gather:
            pages |= {
                "/metrics": lambda: self._metrics(headers, scope),
                "/sd": lambda: self._service_discovery(scope),
                "/": lambda: Answer(200, _LANDING, "text/html; charset=utf-8"),
            }
        if path not in pages:
            return Answer(404, b"not found: try /metrics or /healthz\n")
        if method not in ("GET", "HEAD"):
            return Answer(405, b"only GET and HEAD\n", headers=((b"allow", b"GET, HEAD"),))
        if headers.get("content-length", "0") != "0" or "transfer-encoding" in headers:
            return _refusal(400, b"a request body makes no sense here\n")
        return pages[path]()

    async def _knows(self, headers: Mapping[str, str]) -> bool:
        """Whether a request has a user's name and password.

        To check one takes 50 ms, so a thread of its own does: nobody else's answer waits for it.
        """
        scheme, _, value = headers.get("authorization", "").partition(" ")
        try:
            said = base64.b64decode(value, validate=True).decode()
        except ValueError:
            return False
        name, colon, password = said.partition(":")
        if scheme.lower() != "basic" or not colon or self._web is None or self._loop is None:
            return False
        check = self._web.admits
        return await self._loop.run_in_executor(self._checker, check, name, password)

    def _metrics(self, headers: Mapping[str, str], scope: Scope) -> Answer:
        asked = urllib.parse.parse_qs(scope["query_string"].decode("latin-1")).get(RUN_PARAMETER)
        if asked and self._label and asked[-1] != self._label:
            return Answer(404, f"the run here is {self._label}\n".encode(errors="replace"))
        pages = self._pages
        if not pages:
            return Answer(503, b"nothing collected yet\n", headers=((b"retry-after", b"5"),))
        om = wants_openmetrics(headers.get("accept", ""))
        squeezed = _qualities(headers.get("accept-encoding", "")).get("gzip", 0.0) > 0
        extra: tuple[tuple[bytes, bytes], ...] = ((b"vary", b"Accept, Accept-Encoding"),)
        extra += ((b"content-encoding", b"gzip"),) if squeezed else ()
        body = pages[om]
        kind = OPENMETRICS_CONTENT_TYPE if om else TEXT_CONTENT_TYPE
        return Answer(200, body.squeezed if squeezed else body.plain, kind, extra)

    def _service_discovery(self, scope: Scope) -> Answer:
        """Return the run's targets for Prometheus's http_sd, this one at the address asked."""
        targets = [join_address(*scope["server"][:2]), *sorted(self._nodes.values())]
        labels = labels_of(self._label or None, self.scheme)
        body = json.dumps([{"targets": targets, "labels": labels}]).encode()
        return Answer(200, body, "application/json")

    def _note_target(self, node: str, listen: str | None, scope: Scope) -> None:
        """Remember where a node that pushes serves its metrics; without an address it goes."""
        target = target_of(listen, scope["client"][0]) if listen and scope["client"] else None
        if target is None:
            self._nodes.pop(node, None)
        else:
            self._nodes[node] = target

    async def _gather(
        self, method: str, headers: Mapping[str, str], scope: Scope, receive: Receive
    ) -> Answer:
        assert self._handler is not None
        if method != "POST":
            return Answer(405, b"only POST\n", headers=((b"allow", b"POST"),))
        scheme, _, secret = headers.get("authorization", "").partition(" ")
        node = headers.get(NODE_HEADER, "")
        if scheme != "Bearer" or self._door is None or not self._door.admits(node, secret):
            return _refusal(401, b"wrong or no token\n", (b"www-authenticate", b"Bearer"))
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > MAX_BODY:
            return _refusal(413, b"body above 64 MiB\n")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read_body(receive)
        except TimeoutError:
            return _refusal(408, b"the body did not arrive in time\n")
        if body is None:
            return _refusal(413, b"body above 64 MiB\n")
        try:
            told = self._handler(node, body)
        except Refusal as refusal:
            return Answer(refusal.status, refusal.reason.encode(errors="replace") + b"\n")
        self._note_target(node, headers.get(LISTEN_HEADER), scope)
        return Answer(200, told, "application/octet-stream") if told else Answer(204, b"")


def format_address(sock: socket.socket) -> str:
    """Return the address a socket is bound to as "host:port" or "[v6]:port"."""
    return join_address(*sock.getsockname()[:2])


def join_address(host: str, port: int) -> str:
    """Return "host:port" or "[v6]:port"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def target_of(listen: str, client: str) -> str | None:
    """Return HOST:PORT at which a node's daemon is scraped from elsewhere; None if it is not.

    Args:
        listen: to what it says that it is bound. Of every address of its machine that one is taken
            from which it pushes; a loopback address is of use only if it pushes from one.
        client: the address from which it pushes.
    """
    try:
        host, port = parse_address(listen)
        bound, source = ipaddress.ip_address(host), ipaddress.ip_address(client)
    except ValueError:  # a name would have Prometheus ask whomever it leads to
        return None
    if bound.is_unspecified:
        return join_address(client, port)
    return join_address(host, port) if source.is_loopback or not bound.is_loopback else None


def _bind(host: str, port: int, avoid: int = 0) -> socket.socket:
    """Return a listening socket at the first free port; it is never shared with another process."""
    family, _, _, _, _ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    last = OSError(f"no port left above {port}")
    for candidate in [0] * 2 if port == 0 else range(port, min(port + PORT_TRIES, 65536)):
        try:
            # Listens at once: whoever connects before the loop runs waits in the backlog.
            sock = socket.create_server((host, candidate), family=family, backlog=128)
        except OSError as error:
            last = error
            continue
        if sock.getsockname()[1] != avoid:
            return sock
        sock.close()
    msg = f"no free port from {port} to {port + PORT_TRIES - 1} at {host}: {last}"
    raise OSError(last.errno, msg)


def _qualities(header: str) -> dict[str, float]:
    """Return what an Accept header lists, with the best weight of each entry (0: refused)."""
    found: dict[str, float] = {}
    for entry in header.split(","):
        name, *parameters = (part.strip().lower() for part in entry.split(";"))
        quality = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                digits = value.strip().replace(".", "", 1)
                quality = float(value) if digits.isascii() and digits.isdecimal() else 0.0
        found[name] = max(found.get(name, 0.0), quality)
    return found


def wants_openmetrics(accept: str) -> bool:
    """Return whether OpenMetrics 1.0 is asked for, and not less than plain text is."""
    known = [e for e in accept.split(",") if "version=2" not in e.replace(" ", "")]
    weights = _qualities(",".join(known))
    wanted = weights.get("application/openmetrics-text", 0.0)
    return wanted > 0 and wanted >= weights.get("text/plain", 0.0)


def _refusal(status: int, body: bytes, *headers: tuple[bytes, bytes]) -> Answer:
    """Return an answer to a request whose body is not read."""
    return Answer(status, body, headers=headers)


async def _read_body(receive: Receive) -> bytes | None:
    """Return the whole body; None if it is too large or the client went away."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message["body"]
        if len(body) > MAX_BODY:
            return None
        if not message.get("more_body", False):
            return bytes(body)


async def _respond(
    receive: Receive, send: Send, answer: Answer, fixed: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """Send an answer piece by piece, as fast as it is read, to a client that is there."""
    headers = [
        (b"content-type", answer.content_type.encode()),
        *(fixed if b"x-content-type-options" in dict(fixed) else (_NOSNIFF, *fixed)),
        *answer.headers,
    ]
    if answer.status != 204:
        headers.append((b"content-length", str(len(answer.body)).encode()))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        for at in range(0, max(len(answer.body), 1), PIECE):
            if gone.done():
                return
            piece, more = answer.body[at : at + PIECE], at + PIECE < len(answer.body)
            await send({"type": "http.response.body", "body": piece, "more_body": more})
    finally:
        gone.cancel()


async def _disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
