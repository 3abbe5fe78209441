"""Decoding what a node pushes: tables, records, and three kinds of events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ddpprobe import codec
from ddpprobe.codec import Frame, Tables
from ddpprobe.daemon.requests import Request
from ddpprobe.hearsay import MALFORMED
from ddpprobe.records import StepRecord

MAX_FRAMES = 1 << 14  # four times what a pusher sends at once, with two tables for each record
MAX_EVENT_BYTES = 1 << 20  # the ranks of the largest job


class Refusal(ValueError):
    """A push that is not taken: the HTTP status of the answer, and why, in its body.

    400, 413: nothing of it is taken, nor ever will be. 409: the rest of it is taken. 503: nothing
    of it is taken yet.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


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


def decode(block: bytes) -> list[Delivery | Asking]:
    """Decode a pushed block.

    Raises:
        Refusal: something in it is not what a node daemon pushes.
    """
    tables = Tables()
    try:
        frames = list(islice(codec.iter_frames(block), MAX_FRAMES + 1))
        out = [_decode(frame, tables) for frame in frames if not tables.take(frame)]
    except MALFORMED as error:
        msg = f"a frame of the block makes no sense: {type(error).__name__}: {error!s:.200}"
        raise Refusal(400, msg) from error
    if len(frames) > MAX_FRAMES:
        raise Refusal(413, f"more than {MAX_FRAMES} frames")
    return out


def _decode(frame: Frame, tables: Tables) -> Delivery | Asking:
    if frame.type == codec.RECORD:
        return codec.decode_record(frame.payload, tables)
    if frame.type != codec.LIFE or len(frame.payload) > MAX_EVENT_BYTES:
        raise ValueError(f"no node pushes a frame of type {frame.type}, or one that long")
    event: Mapping[str, Any] = frame.json()
    match event.get("event"):
        case "ended":
            return Ended(whole(event["attempt"]), tuple(whole(rank) for rank in event["ranks"]))
        case "trigger":
            numbers = {name: whole(event[name]) for name in ("attempt", "step")}
            return Request.of_node({**event, **numbers})
        case "orders":
            return Asking(whole(event["attempt"]), whole(event["last"]))
    raise ValueError(f"no node says {event.get('event')!r:.100}")


def whole(said: object) -> int:
    """Return a whole number of a size that a step or a rank may have.

    Raises:
        ValueError: it is none.
    """
    if type(said) is not int or not -1 <= said < 2**63:
        raise ValueError(f"{said!r:.100} is no number of a step, rank, attempt or order")
    return said
