"""Regions of an array and the files that they lie in: what to read of which, and where it goes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import StoreDamaged
from ddpprobe.records.step import COUNTS, VALUES
from ddpprobe.store import chunk_decoding
from ddpprobe.store import format as fmt

MAX_READ_BYTES = 256 << 20  # of one array at a time: a reader of more takes it in pieces
_SITE_BYTES = 8 * max(len(COUNTS), len(VALUES))  # of a row, in the larger of the two arrays

Index = int | slice


class InnerChunk(NamedTuple):
    """One inner chunk: its number in its shard, and where in the array it begins."""

    number: int
    origin: tuple[int, ...]


class Shard:
    """The inner chunks of one file: of its bytes, or of an open one, which is closed at the end."""

    def __init__(self, source: bytes | int, parts: int) -> None:
        self._source = source
        size = len(source) if isinstance(source, bytes) else os.fstat(source).st_size
        tail = chunk_decoding.index_bytes(parts)
        try:
            self._index = chunk_decoding.index(self._read(max(size - tail, 0), tail), parts, size)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        """Return itself: it is open."""
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def has(self, number: int) -> bool:
        """Return whether an inner chunk was written."""
        return bool((self._index[number] != chunk_decoding.NEVER).any())

    def part(self, number: int) -> bytes:
        """Return one inner chunk, which was written, as it is stored."""
        offset, length = self._index[number].tolist()
        return self._read(offset, length)

    def _read(self, offset: int, length: int) -> bytes:
        if isinstance(self._source, int):
            return os.pread(self._source, length, offset)
        return self._source[offset : offset + length]

    def _close(self) -> None:
        if isinstance(self._source, int):
            os.close(self._source)


def empty(column: fmt.ArraySpec, shape: Sequence[int]) -> NDArray[Any]:
    """Return a region of nothing but fill values.

    Raises:
        StoreDamaged: it is more than is read at once.
    """
    if prod(shape) * fmt.ITEM_BYTES[column.dtype] > MAX_READ_BYTES:
        raise StoreDamaged(f"{shape} elements are more than is read at once")
    fill = np.nan if column.fill == "NaN" else column.fill
    return np.full(shape, fill, fmt.NUMPY.get(column.dtype, object))


def cuts(start: int, stop: int, block: int, sites: int) -> Iterator[tuple[int, int]]:
    """Cut rows [start, stop) into blocks, and these where so many sites are too much at once."""
    rows = block
    while rows > 1 and rows * sites * _SITE_BYTES > MAX_READ_BYTES:
        rows = -(-rows // 2)
    for a in range(start, stop, block):
        for b in range(a, min(a + block, stop), rows):
            yield b, min(b + rows, a + block, stop)


def widths(
    column: fmt.ArraySpec, sizes: Mapping[str, int], chunks: Mapping[str, int]
) -> list[tuple[slice, ...]]:
    """Cut the second dimension, at chunks, into what one read of a block of rows can hold.

    Args:
        column: which array; one of one dimension is not cut.
        sizes: length of every dimension.
        chunks: chunk of every dimension of the array.
    """
    if len(column.dims) < 2:
        return [()]
    rows, second, *rest = column.dims
    one = chunks[rows] * fmt.ITEM_BYTES[column.dtype] * prod(sizes[d] for d in rest)
    width = max(MAX_READ_BYTES // max(one * chunks[second], 1), 1) * chunks[second]
    return [(slice(a, a + width),) for a in range(0, sizes.get(second, 0), width)]


def decode(column: fmt.ArraySpec, data: bytes, grid: Sequence[int]) -> NDArray[Any]:
    """Return the content of a file that is one chunk."""
    if column.dtype == "string":
        return chunk_decoding.strings(data, prod(grid)).reshape(grid)
    return chunk_decoding.numbers(data, column.dtype, grid)


def parts_within(
    grid: Sequence[int], origin: Sequence[int], where: Sequence[tuple[int, int]],
    only: Sequence[int] | None,
) -> list[InnerChunk]:  # fmt: skip
    """Return the inner chunks of a shard that begins at `origin` that the region `where` touches.

    Args:
        grid: shape of the shard (step, site, statistic).
        origin: where in the array it begins.
        where: the region [first, end) of each dimension.
        only: of the last dimension, these; None: those of the region.
    """
    shape = fmt.part_of(grid)
    parts = [n // m for n, m in zip(grid, shape, strict=True)]
    spans: list[Sequence[int]] = [
        range(max(a - o, 0) // m, -(-min(b - o, n) // m))
        for (a, b), o, m, n in zip(where, origin, shape, grid, strict=True)
    ]
    if only is not None:
        spans[-1] = only
    return [
        InnerChunk(
            (at[0] * parts[1] + at[1]) * parts[2] + at[2],
            tuple(o + i * m for o, i, m in zip(origin, at, shape, strict=True)),
        )
        for at in product(*spans)
    ]


def covers(
    where: Sequence[tuple[int, int]], origin: Sequence[int], grid: Sequence[int],
    shape: Sequence[int],
) -> bool:  # fmt: skip
    """Return whether a region has all that a file, beginning at `origin`, has of each of its rows.

    Args:
        where: the region [first, end) of each dimension.
        origin: where in the array the file begins.
        grid: shape of the file.
        shape: of the array, beyond which the file holds nothing.
    """
    beyond = zip(where[1:], origin[1:], grid[1:], shape[1:], strict=True)
    return all(a <= o and b >= min(o + n, size) for (a, b), o, n, size in beyond)


def span(at: Index, size: int) -> tuple[int, int]:
    """Return the positions [first, end) that an index or a slice without a step selects."""
    first, end, _ = slice(at, at + 1).indices(size) if isinstance(at, int) else at.indices(size)
    return first, max(first, end)


def place(
    out: NDArray[Any], where: Sequence[tuple[int, int]], at: Sequence[int], part: NDArray[Any]
) -> NDArray[Any]:
    """Copy into `out`, the region `where`, what it shares with a part that begins at `at`.

    Returns:
        What was copied.
    """
    spans = [(max(a, o), min(b, o + n)) for (a, b), o, n in zip(where, at, part.shape, strict=True)]
    target = tuple(slice(a - w, b - w) for (a, b), (w, _) in zip(spans, where, strict=True))
    copied = part[tuple(slice(a - o, b - o) for (a, b), o in zip(spans, at, strict=True))]
    out[target] = copied
    return copied
