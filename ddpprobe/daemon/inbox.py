"""What the other nodes pushed, on disk before it is acknowledged and until it has been merged."""

from __future__ import annotations

import shutil
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpprobe import codec
from ddpprobe.codec import FrameError, Tables
from ddpprobe.daemon.requests import Request
from ddpprobe.daemon.tail import MALFORMED
from ddpprobe.journal import JournalTail, JournalWriter, segments_of
from ddpprobe.orders import Order, encode
from ddpprobe.records import StepRecord

WAITING_RECORDS = 4096  # far more than the loop leaves lying between two looks
SEGMENT_FRAMES = 64  # small: a segment is deleted when its last step has been merged


@dataclass(frozen=True, slots=True)
class Ended:
    """Another node says that these of its ranks will deliver nothing more."""

    attempt: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Asking:
    """Another node has the orders up to number `last`, and asks for the others."""

    attempt: int
    last: int


Delivery = StepRecord | Ended | Request


class Inbox:
    """Takes pushed blocks on the server's thread, hands them out on the daemon's.

    A block is appended to `directory/<attempt>` before `take` returns, so that a head killed
    afterwards finds it again: what was acknowledged is not lost.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.dropped = 0
        self._lock = threading.Lock()
        self._waiting: deque[Delivery] = deque()
        self._writers: dict[int, JournalWriter] = {}
        self._tops: dict[int, dict[int, int]] = {}  # attempt -> segment -> highest step
        self._orders: dict[int, list[tuple[int, bytes]]] = {}  # by attempt: number, frame
        for path in sorted(directory.glob("[0-9]*")):
            self._read_back(int(path.name), path)

    def announce(self, attempt: int, orders: Iterable[Order]) -> None:
        """Let the other nodes have orders, each of them behind its next question."""
        with self._lock:
            told = self._orders.setdefault(attempt, [])
            told += [(order.number, encode(order)) for order in orders]

    def take(self, block: bytes) -> bytes:
        """Keep one pushed block: tables, RECORD and LIFE; return the orders that it asks for.

        Raises:
            ValueError: it is not such a block; nothing of it is kept.
        """
        deliveries, answer = decode_block(block), b""
        with self._lock:
            for delivery in deliveries:
                if isinstance(delivery, Asking):
                    told = self._orders.get(delivery.attempt, [])
                    answer = b"".join(frame for number, frame in told if number > delivery.last)
                    continue
                self._write(delivery)
                self._waiting.append(delivery)
            while len(self._waiting) > WAITING_RECORDS:
                self._waiting.popleft()
                self.dropped += 1
        return answer

    def collect(self, attempt: int) -> list[Delivery]:
        """Return what arrived for `attempt` since the last call; later attempts' stays here."""
        with self._lock:
            mine = [d for d in self._waiting if d.attempt == attempt]
            self._waiting = deque(d for d in self._waiting if d.attempt > attempt)
        return mine

    def prune(self, attempt: int, merged: int) -> None:
        """Delete what is not needed any more: segments with no step above `merged`."""
        with self._lock:
            tops = self._tops.get(attempt, {})
            newest = max(tops, default=-1)
            for segment in [s for s, top in tops.items() if top <= merged and s != newest]:
                self._path(attempt).joinpath(f"{segment:08d}.wal").unlink(missing_ok=True)
                del tops[segment]

    def discard(self, attempt: int) -> None:
        """Delete everything of an attempt that has been merged to its end."""
        with self._lock:
            if attempt in self._writers:
                self._writers.pop(attempt).close()
            self._tops.pop(attempt, None)
            self._orders.pop(attempt, None)
            shutil.rmtree(self._path(attempt), ignore_errors=True)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for writer in self._writers.values():
                writer.close()
            self._writers.clear()

    def _path(self, attempt: int) -> Path:
        return self.directory / f"{attempt:03d}"

    def _write(self, delivery: Delivery) -> None:
        attempt, step = delivery.attempt, -1
        if attempt not in self._writers:
            segments = segments_of(self._path(attempt))
            self._writers[attempt] = JournalWriter(
                self._path(attempt),
                {"role": "inbox", "attempt": attempt},
                SEGMENT_FRAMES,
                segments[-1] + 1 if segments else 0,
            )
        writer = self._writers[attempt]
        if isinstance(delivery, StepRecord):
            step = delivery.step
            writer.append_record(delivery)
        elif isinstance(delivery, Request):
            writer.append_json(codec.LIFE, delivery.event())
        else:
            event = {"event": "ended", "attempt": attempt, "ranks": delivery.ranks}
            writer.append_json(codec.LIFE, event)
        tops = self._tops.setdefault(attempt, {})
        tops[writer.segment] = max(step, tops.get(writer.segment, -1))

    def _read_back(self, attempt: int, path: Path) -> None:
        tail = JournalTail(path)
        tops = self._tops.setdefault(attempt, {})
        for frame in tail.poll():
            delivery = _decode(frame, tail.tables)
            if delivery is not None and not isinstance(delivery, Asking):
                self._waiting.append(delivery)
            step = delivery.step if isinstance(delivery, StepRecord) else -1
            tops[tail.segment] = max(step, tops.get(tail.segment, -1))
        tail.close()


def decode_block(block: bytes) -> list[Delivery | Asking]:
    """Decode a pushed block.

    Raises:
        ValueError: something in it is not what a node daemon pushes.
    """
    tables = Tables()
    out: list[Delivery | Asking] = []
    try:
        for frame in codec.iter_frames(block):
            if tables.take(frame):
                continue
            if (delivery := _decode(frame, tables)) is not None:
                out.append(delivery)
    except FrameError:
        raise
    except MALFORMED as error:
        msg = f"a frame of the block makes no sense: {type(error).__name__}: {error}"
        raise ValueError(msg) from error
    return out


def _decode(frame: codec.Frame, tables: Tables) -> Delivery | Asking | None:
    if frame.type == codec.RECORD:
        return codec.decode_record(frame.payload, tables)
    if frame.type == codec.LIFE:
        event: Mapping[str, Any] = frame.json()
        match event.get("event"):
            case "ended":
                return Ended(int(event["attempt"]), tuple(int(r) for r in event["ranks"]))
            case "trigger":
                return Request.of_node(event)
            case "orders":
                return Asking(int(event["attempt"]), int(event["last"]))
    return None
