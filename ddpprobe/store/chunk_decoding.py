"""Bytes of one chunk to an array, and nothing more than that: what the format's codecs undo.

Reading goes without Zarr: its import alone takes longer than an answer may, it calls into its event
loop once a chunk, and it takes a hostile frame's word for how large it becomes. Here every length
that a frame claims is compared with what the chunk must have, before anything is allocated for it.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from math import prod
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc, zstd
from numpy.typing import NDArray

from ddpprobe.store import format as fmt

CRC_BYTES = 4
SMALL_BYTES, REMEMBERED = 4096, 32  # a chunk that compresses so well, and how many of those
_BLOSC = struct.Struct("<BBBBIII")  # versions, flags, item size, then bytes: raw, of a block, here
NEVER = (1 << 64) - 1  # offset and length, in a shard's index, of what was not written
_LZ4, _COPIED = 1, 2  # which compressor (the three upper bits of the flags); stored as it is
_ZSTD_MAGIC = 0xFD2FB528


def numbers(data: bytes, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Undo `bytes, blosc(lz4), crc32c`; the array is not to be written to.

    Raises:
        ValueError: it is damaged, or not a chunk of this shape.
    """
    decode = _remembered if len(data) <= SMALL_BYTES else _numbers
    return decode(data, dtype, tuple(shape))


def _numbers(data: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    body, kind = checked(data), np.dtype(fmt.NUMPY[dtype])
    if len(body) < _BLOSC.size:
        raise ValueError("a blosc frame without a header")
    _, _, flags, _, raw, _, here = _BLOSC.unpack_from(body)
    wanted = prod(shape) * kind.itemsize
    if raw != wanted or here != len(body) or not (flags >> 5 == _LZ4 or flags & _COPIED):
        raise ValueError(f"a blosc frame of {raw} bytes where {wanted} of lz4 are due")
    out = np.empty(shape, kind)
    if wanted:
        blosc.decompress(body, out)
    out.flags.writeable = False
    return out


# Most counts are the same in block after block (no NaN, all observed), and so are their bytes.
_remembered = functools.lru_cache(REMEMBERED)(_numbers)


def strings(data: bytes, count: int) -> NDArray[Any]:
    """Undo `vlen-utf8, zstd, crc32c`: an object array of `count` strings, not to be written to.

    Raises:
        ValueError: as `numbers`.
    """
    return (_remembered_strings if len(data) <= SMALL_BYTES else _strings)(data, count)


def _strings(data: bytes, count: int) -> NDArray[Any]:
    body = checked(data)
    size = _content_size(body)
    if not 4 + 4 * count <= size <= fmt.MAX_CHUNK_BYTES:
        raise ValueError(f"{count} strings in {size} bytes")
    text: bytes = zstd.decompress(body)
    if int.from_bytes(text[:4], "little") != count or len(text) != size:
        raise ValueError(f"not {count} strings")
    out = np.full(count, "", object)
    used, at, i = len(text.rstrip(b"\0")), 4, 0
    while at < used:  # what is left then are empty ones, as a chunk is filled up with
        length = int.from_bytes(text[at : at + 4], "little")
        at += 4 + length
        out[i : i + 1] = text[at - length : at].decode()
        i += 1
    if at + 4 * (count - i) != size:
        raise ValueError("strings that do not end where their chunk does")
    out.flags.writeable = False
    return out


# The names of all sites are the same on each of a thousand ranks.
_remembered_strings = functools.lru_cache(REMEMBERED)(_strings)


def checked(data: bytes) -> bytes:
    """Return what stands before the crc32c at the end.

    Raises:
        ValueError: it does not fit.
    """
    body = data[:-CRC_BYTES]
    if len(data) < CRC_BYTES or google_crc32c.value(body) != _little(data[-CRC_BYTES:]):
        raise ValueError("checksum mismatch")
    return body


def index_bytes(parts: int) -> int:
    """Length of the index at the end of a Zarr shard of so many inner chunks."""
    return 16 * parts + CRC_BYTES


def index(data: bytes, parts: int, size: int) -> NDArray[np.uint64]:
    """Return (offset, length) [parts, 2] of every inner chunk of a shard that is `size` bytes long.

    Both are `NEVER` for one that was not written: it lay beyond the array's shape then.

    Raises:
        ValueError: it is damaged, or leads out of the shard.
    """
    table = np.frombuffer(checked(data), "<u8").reshape(-1, 2)
    if len(table) != parts or size < len(data):
        raise ValueError(f"not an index of {parts} inner chunks")
    written = table[(table != NEVER).any(axis=1)]
    if (written > size).any() or (written.sum(axis=1) > size - len(data)).any():
        raise ValueError("an inner chunk out of the shard")
    return table


def _content_size(frame: bytes) -> int:
    """Return what a zstd frame says that it becomes; -1 if it does not say."""
    if len(frame) < 6 or _little(frame[:4]) != _ZSTD_MAGIC:
        raise ValueError("not a zstd frame")
    flags = frame[4]
    single = flags >> 5 & 1
    at = 5 + (not single) + (0, 1, 2, 4)[flags & 3]
    width = (single, 2, 4, 8)[flags >> 6]
    if not width:
        return -1
    return _little(frame[at : at + width]) + (256 if width == 2 else 0)


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")
