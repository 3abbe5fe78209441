"""The head's word to all ranks: capture these steps in full, stop after one, tell the user's code.

The daemon of each node appends orders to one small file, the board, and to its copy in memory
(`tmpfs`), if the node's ranks have any; they look behind what they have read of the copy at the end
of each step. That is one `pread` of one byte (0.4 us), which waits for no disk. Unlike a slot file,
a board keeps two orders that came between two looks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from ddpprobe.records.events import ACTIONS
from ddpprobe.records.step import Anomaly
from ddpprobe.rundir import framing, paths, tmpfs, validate
from ddpprobe.rundir.framing import Frame, FrameError
from ddpprobe.rundir.own_descriptor import OwnDescriptor
from ddpprobe.rundir.validate import MALFORMED, int64

MAX_BYTES = 64 << 10  # of one order: the names of some hundred modules
MAX_STEPS = 1000  # that one order may span: more is a mistake that fills a disk
_CHUNK = framing.HEADER.size + MAX_BYTES


@final
@dataclass(frozen=True, slots=True)
class Order:
    """What all ranks are to do, at the same steps.

    Attributes:
        number: ascending within an attempt, from 0; no number is obeyed twice.
        action: "capture": keep full tensors in the steps [start, stop), and sample them all;
            "stop": raise `AnomalyStop` at the end of step `start`; "tell": call the user's function
            with the anomaly at the end of step `start`.
        start, stop: optimizer steps, `stop` not included.
        modules: FQNs without wrapper prefixes; those under suspicion.
        reason: for people, one line.
        anomaly: the verdict after it, if it was one.
        cause: identity of what is answered: the successor of a killed daemon, which sees everything
            again, answers nothing twice.

    Raises:
        ValueError: no such order makes sense.
    """

    number: int
    action: str
    start: int
    stop: int
    modules: tuple[str, ...] = ()
    reason: str = ""
    anomaly: Anomaly | None = None
    cause: str = ""

    def __post_init__(self) -> None:
        span = self.stop - self.start
        if self.action not in ACTIONS or min(self.number, self.start) < 0 or (
            not 1 <= span <= MAX_STEPS
        ):  # fmt: skip
            msg = (
                f"order {self.number} to {self.action!r} in the steps {self.start} to {self.stop} "
                f"makes no sense: it takes one of {ACTIONS}, numbers from 0, 1 to {MAX_STEPS} steps"
            )
            raise ValueError(msg)
        if self.action != "capture" and self.anomaly is None:
            msg = f"order {self.number} to {self.action} names no anomaly"
            raise ValueError(msg)


def encode(order: Order) -> bytes:
    """Return an order as one frame.

    Raises:
        ValueError: it is longer than `MAX_BYTES`.
    """
    payload = framing.encode_json(asdict(order))
    if len(payload) > MAX_BYTES:
        msg = f"order {order.number} takes {len(payload)} bytes, at most {MAX_BYTES}: name fewer"
        raise ValueError(msg)
    return framing.encode_frame(framing.LIFE, order.number, payload)


def decode_all(data: bytes) -> list[Order]:
    """Return the orders in a block of bytes; what is no order, or damaged, is left out."""
    return [order for order, _ in _orders(data)]


@final
class OrderBoard:
    """A node's board, as its daemon writes it; a disk that refuses is no error.

    Attributes:
        orders: everything on it, by number.
    """

    def __init__(self, path: Path) -> None:
        self.orders: dict[int, Order] = {}
        self._fd = self._copy = -1
        with contextlib.suppress(OSError):
            self._fd = _open(path)
            self.orders |= _numbered(self._fd)
        place = tmpfs.beside(path.parent)
        if place is not None:
            with contextlib.suppress(OSError):
                self._copy = _open(place / path.name)
                there = _numbered(self._copy)  # a killed predecessor may have come to the first
                for number in sorted(self.orders.keys() - there.keys()):
                    _append(self._copy, encode(self.orders[number]))

    @property
    def last(self) -> int:
        """Number of the newest order, -1 without any."""
        return max(self.orders, default=-1)

    def post(self, order: Order) -> bool:
        """Show an order to the ranks; one that hangs there already is left; False: disk refuses.

        Raises:
            ValueError: see `encode`.
        """
        if order.number <= self.last:
            return True
        data = encode(order)
        if not _append(self._fd, data):
            return False
        if self._copy >= 0 and not _append(self._copy, data):  # memory is full, too
            _take_back(self._fd, len(data))
            return False
        self.orders[order.number] = order
        return True

    def close(self) -> None:
        """Close the files."""
        for fd in (self._fd, self._copy):
            if fd >= 0:
                os.close(fd)
        self._fd = self._copy = -1


@final
class OrderReader:
    """A node's board, as one rank reads it.

    Raises:
        OSError: it cannot be opened. Afterwards nothing raises.
    """

    def __init__(self, path: Path) -> None:
        self._file = OwnDescriptor(_open(path))
        self._at = 0
        self._last = -1

    def look(self) -> Order | None:
        """Return the oldest order that was not returned before; None: there is none."""
        try:
            while os.pread(self._file.number, 1, self._at):
                order = self._next()
                if order is None:
                    return None
                if order.number > self._last:
                    self._last = order.number
                    return order
        except OSError:
            pass
        return None

    def _next(self) -> Order | None:
        data = os.pread(self._file.number, _CHUNK, self._at)
        for order, end in _orders(data):
            self._at += end
            return order
        if len(data) == _CHUNK:  # nothing of ours is so long: look for the next one
            at = data.find(framing.MAGIC, 1)
            self._at += at if at > 0 else _CHUNK - len(framing.MAGIC)
        return None  # torn: the rest may come

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _append(fd: int, data: bytes) -> bool:
    """Write an order after all others, and after what a killed predecessor left; whole or not."""
    try:
        end = os.fstat(fd).st_size
        if os.pwrite(fd, data, end) < len(data):
            os.ftruncate(fd, end)
            return False
    except OSError:
        return False
    return True


def _take_back(fd: int, size: int) -> None:
    with contextlib.suppress(OSError):
        os.ftruncate(fd, os.fstat(fd).st_size - size)


def _numbered(fd: int) -> dict[int, Order]:
    data = os.pread(fd, os.fstat(fd).st_size, 0)
    return {order.number: order for order, _ in _orders(data)}


def _open(path: Path) -> int:
    paths.make_inner(path.parent)
    return paths.open_own(path, os.O_RDWR)


def _orders(data: bytes) -> Iterator[tuple[Order, int]]:
    """Yield the orders in `data`, each with the offset after it; skips what is torn or damaged."""
    at = 0
    while at >= 0:
        try:
            frame, end = framing.decode_frame(data, at)
        except FrameError:
            at = data.find(framing.MAGIC, at + 1)
            continue
        at = end
        order = _order(frame)
        if order is not None:
            yield order, end


def _order(frame: Frame) -> Order | None:
    try:
        value = frame.json()
        anomaly = value["anomaly"]
        return Order(
            int64(value["number"]), str(value["action"]), int64(value["start"]),
            int64(value["stop"]),
            tuple(str(name) for name in value["modules"]), str(value["reason"]),
            None if anomaly is None else validate.anomaly(anomaly), str(value["cause"]),
        )  # fmt: skip
    except MALFORMED:  # of another version, or of nobody's making
        return None
