"""Frames: records and small JSON objects as checksummed bytes, for the journal and for the wire.

A frame is a fixed header, then the payload::

    magic 4s | type u16 | reserved u16 | length u32 | crc32 u32 | seq i64

`crc32` (zlib) covers type, length, seq and payload, so a torn, flipped or shifted frame is never
taken for data. No pickle anywhere.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ddpprobe.records import COUNTS, VALUES, Anomaly, Digests, FirstBad, Site, StepRecord

MAGIC = b"dpp1"
HEADER = struct.Struct("<4sHHIIq")
MAX_PAYLOAD = 256 << 20  # a longer length is corruption, not a record: never allocate for it

META, SITES, RECORD, ANOMALY, SAMPLE, LIFE = range(1, 7)
"""META: who writes (JSON). SITES: a site table (JSON). RECORD: a `StepRecord` (binary, refers to a
table). ANOMALY: an `Anomaly` (JSON). SAMPLE: host and process readings (JSON). LIFE: something that
happened to a rank or to the daemon: `{"event": "closed" | "death" | ...}` (JSON)."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One decoded frame: its type, its sequence number in the stream, and the payload's bytes."""

    type: int
    seq: int
    payload: bytes

    def json(self) -> dict[str, Any]:
        """Return the payload of a JSON frame.

        Raises:
            ValueError: it is not a JSON object.
        """
        value = json.loads(self.payload)
        if not isinstance(value, dict):
            msg = f"frame {self.seq} holds {type(value).__name__}, expected a JSON object"
            raise ValueError(msg)  # noqa: TRY004  (bad data, not a programming error)
        return value


class FrameError(ValueError):
    """Bytes that are not a whole, intact frame; `torn` if the stream may simply end here."""

    def __init__(self, message: str, *, torn: bool) -> None:
        super().__init__(message)
        self.torn = torn


def encode_frame(type_: int, seq: int, payload: bytes) -> bytes:
    """Return header and payload as one block of bytes."""
    crc = zlib.crc32(payload, zlib.crc32(struct.pack("<HIq", type_, len(payload), seq)))
    return HEADER.pack(MAGIC, type_, 0, len(payload), crc, seq) + payload


def decode_frame(data: bytes | memoryview, offset: int = 0) -> tuple[Frame, int]:
    """Return the frame that starts at `offset`, and the offset behind it.

    Raises:
        FrameError: the bytes end too early (`torn`) or are damaged.
    """
    if len(data) - offset < HEADER.size:
        raise FrameError("the stream ends inside a header", torn=True)
    magic, type_, reserved, length, crc, seq = HEADER.unpack_from(data, offset)
    if magic != MAGIC or reserved or length > MAX_PAYLOAD:
        raise FrameError(f"no frame at byte {offset}", torn=False)
    end = offset + HEADER.size + length
    if len(data) < end:
        raise FrameError("the stream ends inside a payload", torn=True)
    payload = bytes(data[offset + HEADER.size : end])
    if crc != zlib.crc32(payload, zlib.crc32(struct.pack("<HIq", type_, length, seq))):
        raise FrameError(f"checksum mismatch at byte {offset}", torn=False)
    return Frame(type_, seq, payload), end


def iter_frames(data: bytes) -> Iterator[Frame]:
    """Yield the frames of a complete block of bytes.

    Raises:
        FrameError: anything in it is not an intact frame.
    """
    offset = 0
    while offset < len(data):
        frame, offset = decode_frame(data, offset)
        yield frame


def encode_json(value: Mapping[str, Any]) -> bytes:
    """Encode a JSON payload; NaN and Infinity are written as Python's json does."""
    return json.dumps(value, separators=(",", ":"), default=_plain).encode()


def sites_id(sites: tuple[Site, ...]) -> int:
    """Return the identity of a site table: the crc32 of its encoding."""
    return zlib.crc32(_sites_json(sites))


def encode_sites(sites: tuple[Site, ...]) -> bytes:
    """Encode a site table as the payload of a SITES frame."""
    return _sites_json(sites)


def decode_sites(payload: bytes) -> tuple[Site, ...]:
    """Decode the payload of a SITES frame."""
    return tuple(
        Site(str(f), str(k), str(leaf), str(p), bool(m), str(d))
        for f, k, leaf, p, m, d in json.loads(payload)
    )


def encode_record(record: StepRecord, table: int | None = None) -> bytes:
    """Encode a record as the payload of a RECORD frame; `table` is its sites' `sites_id`."""
    head = encode_json(
        {
            "table": sites_id(record.sites) if table is None else table,
            "n": len(record.sites),
            "attempt": record.attempt,
            "step": record.step,
            "ranks": record.ranks,
            "wall_time_ns": record.wall_time_ns,
            "sampled": record.sampled,
            "scalars": record.scalars,
            "first_bad": asdict(record.first_bad) if record.first_bad else None,
            "skipped": record.skipped,
            "partial": record.partial,
            "missing": record.missing,
            "digests": plain_digests(record.digests),
        }
    )
    counts = np.ascontiguousarray(record.counts, "<i8").tobytes()
    values = np.ascontiguousarray(record.values, "<f8").tobytes()
    return b"".join((struct.pack("<I", len(head)), head, counts, values))


def decode_record(payload: bytes, tables: Mapping[int, tuple[Site, ...]]) -> StepRecord:
    """Decode a RECORD payload; `tables` maps `sites_id` to the tables seen in this stream.

    Raises:
        ValueError: the payload is malformed, or its site table was not seen.
    """
    (size,) = struct.unpack_from("<I", payload)
    head = json.loads(payload[4 : 4 + size])
    n = int(head["n"])
    if n and head["table"] not in tables:
        msg = f"record of step {head['step']} refers to an unknown site table {head['table']}"
        raise ValueError(msg)
    at = 4 + size
    split = at + n * len(COUNTS) * 8
    counts = np.frombuffer(payload[at:split], "<i8").reshape(n, len(COUNTS))
    values = np.frombuffer(payload[split:], "<f8").reshape(n, len(VALUES))
    return StepRecord(
        attempt=int(head["attempt"]),
        step=int(head["step"]),
        ranks=tuple(head["ranks"]),
        wall_time_ns=int(head["wall_time_ns"]),
        sampled=bool(head["sampled"]),
        sites=tables[head["table"]] if n else (),
        counts=counts,
        values=values,
        scalars={int(r): dict(s) for r, s in head["scalars"].items()},
        first_bad=FirstBad(**head["first_bad"]) if head["first_bad"] else None,
        skipped=bool(head["skipped"]),
        partial=bool(head["partial"]),
        missing=tuple(head["missing"]),
        digests=read_digests(head.get("digests", ())),
    )


def plain_digests(digests: Digests) -> list[Any]:
    """Return checksums as JSON can hold them; the sets of ranks are hexadecimal bit masks."""
    return [
        (fqn, shard, [(checksum, f"{ranks:x}") for checksum, ranks in held.items()])
        for (fqn, shard), held in digests.items()
    ]


def read_digests(plain: Iterable[Any]) -> Digests:
    """Undo `plain_digests`."""
    return {
        (str(fqn), str(shard)): {int(checksum): int(ranks, 16) for checksum, ranks in held}
        for fqn, shard, held in plain
    }


def encode_anomaly(anomaly: Anomaly) -> bytes:
    """Encode an anomaly as the payload of an ANOMALY frame."""
    return encode_json(asdict(anomaly))


def decode_anomaly(payload: bytes) -> Anomaly:
    """Decode the payload of an ANOMALY frame."""
    return Anomaly(**json.loads(payload))


def _sites_json(sites: tuple[Site, ...]) -> bytes:
    rows = [(s.fqn, s.kind, s.leaf, s.placement, s.primary, s.dtype) for s in sites]
    return json.dumps(rows, separators=(",", ":")).encode()


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    msg = f"cannot encode {type(value).__name__} as JSON"
    raise TypeError(msg)
