"""Regions of an array and the files that they lie in: what to read of which, and where it goes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from typing import Any

from numpy.typing import NDArray

from ddpprobe.store import decoding
from ddpprobe.store import format as fmt

Index = int | slice


class Shard:
    """The inner chunks of one file: of its bytes, or of an open one, which is closed at the end."""

    def __init__(self, source: bytes | int, parts: int) -> None:
        self._source = source
        size = len(source) if isinstance(source, bytes) else os.fstat(source).st_size
        tail = decoding.index_bytes(parts)
        try:
            self._index = decoding.index(self._read(max(size - tail, 0), tail), parts, size)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> None:
        """Nothing: it is open."""

    def __exit__(self, *_: object) -> None:
        self._close()

    def part(self, number: int) -> bytes:
        """Return one inner chunk as it is stored."""
        offset, length = self._index[number].tolist()
        return self._read(offset, length)

    def _read(self, offset: int, length: int) -> bytes:
        if isinstance(self._source, int):
            return os.pread(self._source, length, offset)
        return self._source[offset : offset + length]

    def _close(self) -> None:
        if isinstance(self._source, int):
            os.close(self._source)


def decode(column: fmt.Column, data: bytes, grid: Sequence[int]) -> NDArray[Any]:
    """Return the content of a file that is one chunk."""
    if column.dtype == "string":
        return decoding.strings(data, prod(grid)).reshape(grid)
    return decoding.numbers(data, column.dtype, grid)


def span(at: Index, size: int) -> tuple[int, int]:
    """Return the positions [first, end) that an index or a slice without a step selects."""
    first, end, _ = slice(at, at + 1).indices(size) if isinstance(at, int) else at.indices(size)
    return first, max(first, end)


def place(
    out: NDArray[Any], where: Sequence[tuple[int, int]], at: Sequence[int], part: NDArray[Any]
) -> None:
    """Copy into `out`, the region `where`, what it shares with a part that begins at `at`."""
    spans = [(max(a, o), min(b, o + n)) for (a, b), o, n in zip(where, at, part.shape, strict=True)]
    target = tuple(slice(a - w, b - w) for (a, b), (w, _) in zip(spans, where, strict=True))
    out[target] = part[tuple(slice(a - o, b - o) for (a, b), o in zip(spans, at, strict=True))]
