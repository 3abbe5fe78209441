"""Frames: records and small JSON objects as checksummed bytes, for the journal and for the wire.

A frame is a fixed header, then the payload::

    magic 4s | type u16 | reserved u16 | length u32 | crc32 u32 | seq i64

`crc32` (zlib) covers type, length, seq and payload, so a torn, flipped or shifted frame is never
taken for data. No pickle anywhere.
"""

from __future__ import annotations

import functools
import json
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.events import Event
from ddpprobe.records.histogram import BINS, Bins, no_histograms
from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import (
    COUNTS,
    VALUES,
    Anomaly,
    Digests,
    Site,
    StepRecord,
)
from ddpprobe.rundir import safe_read, validate

MAGIC = b"dpp1"
HEADER = struct.Struct("<4sHHIIq")
MAX_PAYLOAD = 256 << 20  # a longer length is corruption, not a record: never allocate for it

META, SITES, RECORD, ANOMALY, SAMPLE, LIFE, PARAMETERS = range(1, 8)
"""META: who writes (JSON). SITES: a table of sites (JSON). PARAMETERS: a table of parameters and
shards (JSON). RECORD: a `StepRecord` (binary, refers to tables). ANOMALY: an `Anomaly` (JSON).
SAMPLE: host and process readings (JSON). LIFE: something that happened to a rank or to the daemon:
one of `records.events` (JSON)."""

MAX_MASK_BITS = 1 << 26  # of all sets of ranks in one record: 4096 sets of 16384 ranks
# Row of a checksum: which parameter of the table, the checksum, which group of ranks holds it.
_HELD = np.dtype([("parameter", "<u4"), ("checksum", "<i8"), ("group", "<u4")])
# Tables remembered, by who writes and by who reads: a writer has one or two of them, and those of a
# model that is never the same twice must not fill its memory; a reader has one per pipeline stage.
_WRITTEN, _READ = 4, 64


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
        value = safe_read.parse(self.payload)
        if not isinstance(value, dict):
            msg = f"frame {self.seq} holds {type(value).__name__}, expected a JSON object"
            raise ValueError(msg)  # noqa: TRY004  (bad data, not a programming error)
        return value

    def event(self) -> Event | None:
        """Return the event in a LIFE frame; None if only a newer version knows it.

        Raises:
            ValueError: it makes no sense.
        """
        return validate.event(self.json())


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
    """Return the frame that starts at `offset`, and the offset after it.

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


def length_at(data: bytes, offset: int) -> int:
    """Return how many bytes a frame would have that begins at `offset`."""
    end = offset + HEADER.size
    return HEADER.size if end > len(data) else int(HEADER.unpack_from(data, offset)[3])


def iter_frames(data: bytes) -> Iterator[Frame]:
    """Yield the frames of a complete block of bytes.

    Raises:
        FrameError: anything in it is not an intact frame.
    """
    offset = 0
    while offset < len(data):
        frame, offset = decode_frame(data, offset)
        yield frame


def encode_json(value: Mapping[str, Any] | Sequence[object]) -> bytes:
    """Encode a JSON payload; NaN and Infinity are written as Python's json does."""
    return json.dumps(value, separators=(",", ":"), default=_plain).encode()


@dataclass(frozen=True, slots=True)
class NameTable:
    """Names that many records share, as the payload of a frame of `type`; `id` is its crc32."""

    type: int
    id: int
    payload: bytes


class NameTables:
    """The tables seen so far in one stream of frames, which its records refer to."""

    def __init__(self) -> None:
        self._seen: dict[int, dict[int, Any]] = {SITES: {}, PARAMETERS: {}}

    def take(self, frame: Frame) -> bool:
        """Remember the table in a frame; False if it is a frame of another type.

        Raises:
            ValueError: its payload is malformed.
        """
        if frame.type not in self._seen:
            return False
        read = _read_sites if frame.type == SITES else _read_parameters
        try:
            self._seen[frame.type][zlib.crc32(frame.payload)] = read(frame.payload)
        except validate.WRONG as error:
            raise ValueError(f"not a table: {error}") from error
        return True

    def sites(self) -> Iterator[Site]:
        """Yield the sites of all tables."""
        for table in self._seen[SITES].values():
            yield from table

    def find(self, type_: int, id_: int | None, step: int) -> tuple[Any, ...]:
        """Return a table; () for None.

        Raises:
            ValueError: it was not seen.
        """
        if id_ is None:
            return ()
        if id_ not in self._seen[type_]:
            what = "site" if type_ == SITES else "parameter"
            msg = f"record of step {step} refers to an unknown {what} table {id_}"
            raise ValueError(msg)
        return self._seen[type_][id_]  # type: ignore[no-any-return]


def tables_of(record: StepRecord) -> list[NameTable]:
    """Return the tables that must stand before a record: of its sites, and of its checksums."""
    found = [_sites_table(record.sites)] if record.sites else []
    return [*found, _parameters_table(tuple(record.digests))] if record.digests else found


def encode_record(record: StepRecord) -> bytes:
    """Encode a record as the payload of a RECORD frame; it refers to `tables_of` it."""
    tables = {table.type: table.id for table in tables_of(record)}
    held, groups = _encode_digests(record.digests)
    histograms = encode_histograms(record)
    head = encode_json(
        {
            "sites": tables.get(SITES),
            "parameters": tables.get(PARAMETERS),
            "n": len(record.sites),
            "held": groups,
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
            **({"histograms": histograms} if histograms else {}),
        }
    )
    head += b" " * (-(len(head) + 4) % 8)  # so that a reader needs no copy of the rows
    counts = np.ascontiguousarray(record.counts, "<i8").tobytes()
    values = np.ascontiguousarray(record.values, "<f8").tobytes()
    return b"".join((struct.pack("<I", len(head)), head, counts, values, held))


def decode_record(payload: bytes, tables: NameTables) -> StepRecord:
    """Decode a RECORD payload; `tables` are those seen in this stream.

    Raises:
        ValueError: the payload is malformed, or a table of it was not seen.
    """
    try:
        return _decode_record(payload, tables)
    except validate.WRONG as error:
        raise ValueError(f"not a record: {type(error).__name__}: {error}") from error


def _decode_record(payload: bytes, tables: NameTables) -> StepRecord:
    (size,) = struct.unpack_from("<I", payload)
    head = safe_read.parse(payload[4 : 4 + size])
    n, step = int(head["n"]), validate.int64(head["step"])
    at = 4 + size
    split = at + n * len(COUNTS) * 8
    end = split + n * len(VALUES) * 8
    parameters = tables.find(PARAMETERS, head["parameters"], step)
    binned, bins = decode_histograms(head.get("histograms", ()), n)
    return StepRecord(
        attempt=validate.int64(head["attempt"]),
        step=step,
        ranks=tuple(map(validate.rank, head["ranks"])),
        wall_time_ns=validate.int64(head["wall_time_ns"]),
        sampled=bool(head["sampled"]),
        sites=tables.find(SITES, head["sites"], step),
        counts=np.frombuffer(payload, "<i8", n * len(COUNTS), at).reshape(n, len(COUNTS)),
        values=np.frombuffer(payload, "<f8", n * len(VALUES), split).reshape(n, len(VALUES)),
        scalars={validate.rank(int(r)): validate.numbers(s) for r, s in head["scalars"].items()},
        first_bad=validate.first_bad(head["first_bad"]) if head["first_bad"] else None,
        skipped=bool(head["skipped"]),
        partial=bool(head["partial"]),
        missing=tuple(map(validate.rank, head["missing"])),
        digests=_decode_digests(payload[end:], parameters, head["held"]),
        binned=binned,
        bins=bins,
    )


def encode_histograms(record: StepRecord) -> list[tuple[int, int, list[int]]]:
    """Return for each histogram its row, its first bin that is not empty, and the counts from it.

    A reader that knows no histograms passes over a key of the head, but not over more bytes.
    """
    out = []
    for row, counts in zip(record.binned.tolist(), record.bins, strict=True):
        filled = np.flatnonzero(counts)
        first, end = (int(filled[0]), int(filled[-1]) + 1) if filled.size else (0, 0)
        out.append((row, first, counts[first:end].tolist()))
    return out


def decode_histograms(plain: Iterable[Any], rows: int) -> tuple[NDArray[np.int64], Bins]:
    """Undo `encode_histograms`.

    Args:
        plain: as JSON gives it.
        rows: of the record.

    Raises:
        ValueError: it makes no sense.
    """
    given = list(plain)
    if not given:
        return no_histograms()
    binned = np.array([validate.int64(row) for row, _, _ in given], np.int64)
    bins = np.zeros((len(given), BINS), np.int64)
    if binned[0] < 0 or binned[-1] >= rows or (np.diff(binned) <= 0).any():
        raise ValueError(f"histograms of rows that a record of {rows} does not have")
    for (_, first, counts), out in zip(given, bins, strict=True):
        numbers = [validate.int64(count) for count in counts]
        if not 0 <= validate.int64(first) <= BINS - len(numbers) or any(n < 0 for n in numbers):
            raise ValueError(f"a histogram of other bins than the {BINS} there are")
        out[first : first + len(numbers)] = numbers
    return binned, bins


def _encode_digests(digests: Digests) -> tuple[bytes, list[tuple[int, str]]]:
    """Return rows (parameter, checksum, group), and the groups: sets of ranks that hold one.

    A set is (its lowest rank, bit mask from there on): of one rank it takes the same few bytes
    whichever rank that is. Almost always there is one group, of all.
    """
    groups: dict[int, int] = {}
    rows = [
        (parameter, checksum, groups.setdefault(ranks, len(groups)))
        for parameter, held in enumerate(digests.values())
        for checksum, ranks in held.items()
    ]
    named = [(low := (mask & -mask).bit_length() - 1, f"{mask >> low:x}") for mask in groups]
    return np.array(rows, _HELD).tobytes(), named


def _decode_digests(
    data: bytes, parameters: tuple[tuple[str, str], ...], groups: Iterable[tuple[int, str]]
) -> Digests:
    masks, bits = [], 0
    for low, mask in groups:
        if not 0 <= low < validate.MAX_RANKS:
            raise ValueError(
                f"a checksum of rank {low}: there are no more than {validate.MAX_RANKS}"
            )
        bits += low + 4 * len(mask)
        if bits > MAX_MASK_BITS:
            raise ValueError("sets of ranks that are too large to be kept")
        masks.append(int(mask, 16) << low)
    out: dict[tuple[str, str], dict[int, int]] = {key: {} for key in parameters}
    rows: list[tuple[int, int, int]] = np.frombuffer(data, _HELD).tolist()
    try:
        for parameter, checksum, group in rows:
            out[parameters[parameter]][checksum] = masks[group]
    except IndexError as error:
        msg = "a checksum of a parameter, or of ranks, that the record does not name"
        raise ValueError(msg) from error
    return out


def encode_anomaly(anomaly: Anomaly) -> bytes:
    """Encode an anomaly as the payload of an ANOMALY frame."""
    return encode_json(asdict(anomaly))


def decode_anomaly(payload: bytes) -> Anomaly:
    """Decode the payload of an ANOMALY frame."""
    return validate.anomaly(safe_read.parse(payload))


def _table(type_: int, rows: Sequence[Sequence[object]]) -> NameTable:
    payload = encode_json(rows)
    return NameTable(type_, zlib.crc32(payload), payload)


def _make_sites_table(sites: tuple[Site, ...]) -> NameTable:
    rows = [(s.fqn, s.kind, s.leaf, s.placement, s.primary, s.dtype) for s in sites]
    return _table(SITES, rows)


_sites_table = IdentityCache(_make_sites_table, _WRITTEN)


@functools.lru_cache(_WRITTEN)
def _parameters_table(keys: tuple[tuple[str, str], ...]) -> NameTable:
    return _table(PARAMETERS, keys)


# All ranks, and every segment of a journal, have the same few tables. That equal ones are one
# object is what lets the merge know them without comparing them.
@functools.lru_cache(_READ)
def _read_sites(payload: bytes) -> tuple[Site, ...]:
    return tuple(
        Site(str(f), str(k), str(leaf), str(p), bool(m), str(d))
        for f, k, leaf, p, m, d in safe_read.parse(payload)
    )


@functools.lru_cache(_READ)
def _read_parameters(payload: bytes) -> tuple[tuple[str, str], ...]:
    return tuple((str(fqn), str(shard)) for fqn, shard in safe_read.parse(payload))


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    msg = f"cannot encode {type(value).__name__} as JSON"
    raise TypeError(msg)
