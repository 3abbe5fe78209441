"""Decoding what a node pushes: tables, records, and four kinds of events."""

from __future__ import annotations

from itertools import islice

from ddpprobe.daemon.requests import Request
from ddpprobe.records.events import Asking, Ended, Told, Wish
from ddpprobe.records.step import StepRecord
from ddpprobe.rundir import framing, validate
from ddpprobe.rundir.framing import Frame, NameTables
from ddpprobe.rundir.validate import MALFORMED

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


Delivery = StepRecord | Ended | Request | Told


def decode(block: bytes) -> list[Delivery | Asking]:
    """Decode a pushed block.

    Raises:
        Refusal: something in it is not what a node daemon pushes.
    """
    tables = NameTables()
    try:
        frames = list(islice(framing.iter_frames(block), MAX_FRAMES + 1))
        out = [_decode(frame, tables) for frame in frames if not tables.take(frame)]
    except MALFORMED as error:
        msg = f"a frame of the block makes no sense: {type(error).__name__}: {error!s:.200}"
        raise Refusal(400, msg) from error
    if len(frames) > MAX_FRAMES:
        raise Refusal(413, f"more than {MAX_FRAMES} frames")
    return out


def _decode(frame: Frame, tables: NameTables) -> Delivery | Asking:
    if frame.type == framing.RECORD:
        return framing.decode_record(frame.payload, tables)
    if frame.type != framing.LIFE or len(frame.payload) > MAX_EVENT_BYTES:
        raise ValueError(f"no node pushes a frame of type {frame.type}, or one that long")
    said = validate.message(frame.json())
    return Request.of_node(said) if isinstance(said, Wish) else said
