"""Sending a node's merged records to the head: bounded, in one thread, and in nobody's way."""

from __future__ import annotations

import contextlib
import http.client
import logging
import ssl
import sys
import threading
import time
import urllib.parse
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ddpprobe.daemon.web_config import WebConfig, WebConfigFile
from ddpprobe.records.events import Asking, Message, to_json
from ddpprobe.records.step import StepRecord
from ddpprobe.rundir import framing, safe_read
from ddpprobe.rundir.framing import NameTable
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.orders import Order, decode_all
from ddpprobe.rundir.validate import MALFORMED

QUEUE_BYTES = 64 << 20
BODY_BYTES = 8 << 20
ANSWER_BYTES = 32 << 20  # all the orders that an attempt can have
TIMEOUT_SECONDS = 5.0
ASK_SECONDS = 1.0  # between two questions for orders, if there is nothing to push
KEPT_OUT_SECONDS = 3.0  # before it is told that the head does not let this node in
# First, longest. A head that comes back waits 5 s for a step's records: ours must be there by then.
BACK_OFF_SECONDS = (0.2, 1.0)
ACCEPTED = (200, 202, 204)
# The head understands the request and does not want it, or (409) a part of it: sending it again
# changes nothing.
HOPELESS = (400, 409, 413)
PARTLY = 409
UNAUTHORIZED = 401
SENT = 4096  # items at once
MAX_REASON = 200  # characters of the head's reason that go into the log

logger = logging.getLogger("ddpprobe")


@dataclass(frozen=True, slots=True)
class _Item:
    type: int
    payload: bytes
    at: tuple[int, int]  # attempt, step
    tables: Sequence[NameTable] = ()


class Pusher:
    """Posts records to the head's `/gather`, oldest first, each until it is acknowledged.

    Every post asks for the head's orders, which come in the answer.

    While the head does not answer, up to 64 MiB are kept; beyond it the oldest are dropped and
    counted in `dropped`. `acknowledged` is (attempt, step) of the newest record the head took.

    Args:
        url: `http://host:port` of the head's daemon, or `https://host:port`.
        token: returns the secret that proves who this is, sent as a bearer token; asked for each
            connection, since a restarted job agrees on new ones.
        node: name of this node.
        web: of this daemon; whose signature the head's certificate must have, and this one's own
            certificate. None: those that the machine trusts, and none.

    Attributes:
        listen: where this daemon serves its metrics, which the head tells Prometheus; "" as long as
            that is not known.
        not_let_in: why the head has not let this node in for a while, by its certificate or token,
            which somebody has to mend; "" as soon as it does.

    Raises:
        ValueError: the URL is none.
    """

    def __init__(
        self, url: str, token: Callable[[], str], node: str, web: WebConfigFile | None = None
    ) -> None:
        self._address, self._web = _parse(url), web
        self.dropped: Counter[str] = Counter()
        self.acknowledged = (-1, -1)
        self._token, self._bearer = token, ""
        self._node = node
        self.listen = self.not_let_in = ""
        self._kept_out_since: float | None = None  # monotonic
        self._answered = False
        self._refusals: set[int] = set()  # statuses of which the log knows
        self._queue: deque[_Item] = deque()
        self._bytes = 0
        self._sending: list[_Item] = []
        self._changed = threading.Condition()
        self._asks: tuple[int, int] | None = None  # attempt, number of the newest order here
        self._heard: deque[Order] = deque()
        self._closing = self._leaving = False
        self._deadline = float("inf")
        self._warned: set[int] = set()  # what was said of the outage that lasts
        self._before = 0  # dropped when the head took something last
        self._connection: http.client.HTTPConnection | None = None
        self.fuse = Fuse("push")
        run = self.fuse.guard(self._run)
        self._thread = threading.Thread(target=run, name="ddpprobe-push", daemon=True)
        self._thread.start()

    def push(self, record: StepRecord) -> None:
        """Queue a merged record; never waits."""
        payload = framing.encode_record(record)
        at = (record.attempt, record.step)
        self._put(_Item(framing.RECORD, payload, at, framing.tables_of(record)))

    def say(self, message: Message) -> None:
        """Queue a message, sent after the records queued before it."""
        self._put(_item(message))

    def ask(self, attempt: int, last: int) -> list[Order]:
        """Go on to ask for orders after number `last`; return those that came."""
        with self._changed:
            self._asks = (attempt, last)
            heard, self._heard = self._heard, deque()
        return list(heard)

    def ask_no_more(self) -> None:
        """The attempt is over: only what is queued is still sent."""
        with self._changed:
            self._asks = None

    def redirect(self, url: str) -> None:
        """Push to another address from the next connection on; what is queued goes there.

        Raises:
            ValueError: the URL is none.
        """
        self._address = _parse(url)

    @property
    def pending(self) -> int:
        """Items not acknowledged yet."""
        return len(self._queue) + len(self._sending)

    def close(self, seconds: float) -> None:
        """Send what is queued for at most so long, then stop; what is left counts as dropped."""
        with self._changed:
            self._closing = True
            self._deadline = time.monotonic() + seconds
            self._changed.notify_all()
        self._thread.join(seconds + TIMEOUT_SECONDS)
        with self._changed:
            self.dropped["push_unsent"] += len(self._queue)
            self._queue.clear()
            self._bytes = 0

    def _put(self, item: _Item) -> None:
        with self._changed:
            self._queue.append(item)
            self._bytes += len(item.payload)
            self._trim()
            self._changed.notify_all()

    def _trim(self) -> None:
        while self._bytes > QUEUE_BYTES and len(self._queue) > 1:
            self._bytes -= len(self._queue.popleft().payload)
            self.dropped["push_overflow"] += 1

    def _run(self) -> None:
        pause = BACK_OFF_SECONDS[0]
        while self._next_batch():
            status, refused = self._post(b"".join(_frames([*self._sending, *self._question()])))
            if self._settle(status, refused):
                pause = BACK_OFF_SECONDS[0]
            elif not self._rest(pause):
                break
            else:
                pause = min(2 * pause, BACK_OFF_SECONDS[1])
        if self.listen:  # it is not to be scraped any more; whether the head hears it is no matter
            self.listen, self._leaving = "", True
            self._post(b"")
        self._disconnect()

    def _next_batch(self) -> bool:
        """Wait for something to send, or to ask, and take it; False when closing, all sent."""
        with self._changed:
            while not (self._queue or self._closing):
                if not self._changed.wait(ASK_SECONDS) and self._asks is not None:
                    return True
            size = 0
            while self._queue and size < BODY_BYTES and len(self._sending) < SENT:
                item = self._queue.popleft()
                size += len(item.payload)
                self._sending.append(item)
            self._bytes -= size
            return bool(self._sending)

    def _question(self) -> list[_Item]:
        if self._asks is None:
            return []
        return [_item(Asking(*self._asks))]

    def _settle(self, status: int, refused: int) -> bool:
        """Account for what was sent, or put it back; whether the head has answered for it.

        Args:
            status: 0 without an answer.
            refused: items that the head will never take.
        """
        with self._changed:
            batch, self._sending = self._sending, []
            if status in HOPELESS:
                self.dropped["push_refused"] += min(refused, len(batch))
            elif status not in ACCEPTED:
                self._queue.extendleft(reversed(batch))
                self._bytes += sum(len(item.payload) for item in batch)
                self._trim()
                return False
            self.acknowledged = max([self.acknowledged, *(item.at for item in batch)])
            return True

    def _rest(self, seconds: float) -> bool:
        """Wait before the next try; False if the time to close has run out."""
        with self._changed:
            if self._closing:
                seconds = BACK_OFF_SECONDS[0]
                self._changed.wait(seconds)
            else:
                self._changed.wait_for(lambda: self._closing, seconds)
            return time.monotonic() < self._deadline

    def _post(self, body: bytes) -> tuple[int, int]:
        """Return the HTTP status, 0 without an answer, and how many items were refused for good."""
        if self._connection is None:
            self._bearer = self._token()
        headers = {
            "Authorization": f"Bearer {self._bearer}",
            "Content-Type": "application/octet-stream",
            "Ddpprobe-Node": self._node,
            **({"Ddpprobe-Listen": self.listen} if self.listen else {}),
        }
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.request("POST", "/gather", body, headers)
            answer = self._connection.getresponse()
            told = answer.read(ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            self._disconnect()
            what = f"does not answer ({type(error).__name__}: {error})"
            if self._is_about_tls(error):
                self._keep_out(what)
            self._warn(0, what)
            return 0, 0
        self._disconnect()  # the head does so as well: a connection that idles is nobody's to trust
        self._answered = True
        if answer.status == UNAUTHORIZED:
            self._keep_out(f"answers {answer.status} {answer.reason}")
        else:
            self.not_let_in, self._kept_out_since = "", None
        if answer.status in HOPELESS:
            return answer.status, self._refused(answer.status, told)
        if answer.status not in ACCEPTED:
            self._warn(answer.status, f"answers {answer.status} {answer.reason}")
        else:
            self._note_recovery()
            with self._changed:
                self._heard.extend(decode_all(told))
        return answer.status, 0

    def _connect(self) -> http.client.HTTPConnection:
        tls, host, port = self._address
        if not tls:
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
        config = self._web.now if self._web is not None else WebConfig()
        return http.client.HTTPSConnection(
            host, port, timeout=TIMEOUT_SECONDS, context=config.client_context()
        )

    def _is_about_tls(self, error: Exception) -> bool:
        """Return whether a certificate is the cause.

        A server that does not like a client's certificate may only hang up: with TLS 1.3 the client
        has sent its request before it can hear why.
        """
        if isinstance(error, ssl.SSLError):
            return True
        hung_up = isinstance(error, ConnectionResetError | BrokenPipeError)
        return self._address[0] and hung_up and not self._answered

    def _keep_out(self, what: str) -> None:
        # A job that was started again has new secrets, of which the head may hear a moment later.
        now = time.monotonic()
        self._kept_out_since = self._kept_out_since or now
        if now - self._kept_out_since < KEPT_OUT_SECONDS:
            return
        where = f"{self._address[1]}:{self._address[2]}"
        see = "DDPPROBE_TOKEN is the same on both, or on neither"
        if self._address[0]:
            see = "DDPPROBE_WEB_CONFIG and the certificates it names are right on both"
            if self._answered:
                see += ", and DDPPROBE_TOKEN is the same, if there is one"
        self.not_let_in = (
            f"ddpprobe: the head at {where} {what}: its view of the job lacks this node; see that "
            f"{see}"
        )

    def _refused(self, status: int, told: bytes) -> int:
        """Return how many items the head refuses, all if it does not say; log why, once."""
        count, reason = sys.maxsize, told.decode(errors="replace").strip()
        if status == PARTLY:
            with contextlib.suppress(*MALFORMED):
                said = safe_read.parse(told)
                count, reason = max(int(said["refused"]), 0), str(said["reason"])
        if status not in self._refusals:
            self._refusals.add(status)
            logger.warning(
                "ddpprobe: the head at %s:%s refuses what this node pushes (%d: %s); it is dropped "
                "and counted, this is said once", *self._address[1:], status,
                reason.encode("unicode_escape").decode()[:MAX_REASON],
            )  # fmt: skip
        return count

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _warn(self, status: int, what: str) -> None:
        """Say once an outage what is wrong."""
        if status not in self._warned and not self._leaving:
            self._warned.add(status)
            where = f"{self._address[1]}:{self._address[2]}"
            logger.warning("ddpprobe: the head at %s %s; records are kept and resent", where, what)

    def _note_recovery(self) -> None:
        """Say once that an outage is over, and what it took."""
        total = self.dropped.total()
        lost, self._before = total - self._before, total
        if not self._warned or self._leaving:
            return
        self._warned.clear()
        took = f"{lost} records were dropped meanwhile" if lost else "nothing was dropped"
        where = f"{self._address[1]}:{self._address[2]}"
        logger.warning("ddpprobe: the head at %s answers again; %s", where, took)


def _parse(url: str) -> tuple[bool, str, int]:
    """Return whether it speaks TLS, the host, and the port."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        msg = f"cannot push to {url!r}: write http://HOST:PORT, as in http://10.0.0.1:13378"
        raise ValueError(msg)
    tls = parts.scheme == "https"
    return tls, parts.hostname, parts.port or (443 if tls else 80)


def _item(message: Message) -> _Item:
    return _Item(framing.LIFE, framing.encode_json(to_json(message)), (-1, -1))


def _frames(batch: Sequence[_Item]) -> Iterator[bytes]:
    """Yield the frames of one body, which can be read without any other."""
    tables = {(t.type, t.id): t for item in batch for t in item.tables}
    frames = [(table.type, table.payload) for table in tables.values()]
    frames += [(item.type, item.payload) for item in batch]
    for seq, (type_, payload) in enumerate(frames):
        yield framing.encode_frame(type_, seq, payload)
