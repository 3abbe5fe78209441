"""A region of an array to the bytes of the chunks that it touches: what Zarr's codecs do.

Zarr encodes in memory, and here in the calling thread: each call into its own event loop, and from
there into a thread for every codec, takes longer than a chunk does. Nor is it asked twice for the
same: most columns of one commit are those of another rank, or nothing but fill values.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.core.buffer import Buffer, default_buffer_prototype
from zarr.storage import MemoryStore, StorePath

from ddpprobe.store import format as fmt

# Bytes that a region which is remembered is told by, and how many of those: 1 MiB at most.
SMALL_BYTES, REMEMBERED = 8192, 128
_NAME = "array"  # in the store in memory: what an array is called changes no chunk of it


class _Loop(asyncio.SelectorEventLoop):
    """Runs at once what is meant for another thread."""

    def run_in_executor(
        self, executor: object, func: Callable[..., Any], *args: object
    ) -> asyncio.Future[Any]:
        """Call it; what it raises is raised where the result is awaited, which is here."""
        future = self.create_future()
        future.set_result(func(*args))
        return future


def encode_region(
    document: fmt.Document, start: Sequence[int], data: NDArray[Any], held: Sequence[bytes | None]
) -> tuple[bytes, ...]:
    """Return the chunks that a region touches, in the order of `format.chunk_keys`.

    Args:
        document: metadata of the array, whose shape has room for the region.
        start: index of the region's first element.
        data: what to write there.
        held: what these chunks hold so far; None is a chunk that is new.
    """
    array = json.dumps({**document, "attributes": {}, "dimension_names": None})
    begin, chunks = tuple(start), tuple(held)
    size = data.nbytes + sum(map(len, filter(None, held)))
    if size <= SMALL_BYTES and data.dtype == object:
        texts = tuple(data.tolist())
        if size + sum(map(len, texts)) <= SMALL_BYTES:
            return _remembered(array, begin, data.shape, None, texts, chunks)
    elif size <= SMALL_BYTES:
        return _remembered(array, begin, data.shape, data.dtype.str, data.tobytes(), chunks)
    return _encoded(array, begin, data, chunks)


@functools.lru_cache(REMEMBERED)
def _remembered(
    array: str, start: tuple[int, ...], shape: tuple[int, ...], dtype: str | None,
    content: bytes | tuple[str, ...], held: tuple[bytes | None, ...],
) -> tuple[bytes, ...]:  # fmt: skip
    if isinstance(content, bytes):
        data: NDArray[Any] = np.frombuffer(content, dtype)
    else:
        data = np.array(content, object)
    return _encoded(array, start, data.reshape(shape), held)


def _encoded(
    array: str, start: tuple[int, ...], data: NDArray[Any], held: tuple[bytes | None, ...]
) -> tuple[bytes, ...]:
    document = json.loads(array)
    keys = fmt.chunk_keys(_NAME, fmt.grid_of(document), start, data.shape)
    buffer = default_buffer_prototype().buffer
    memory: dict[str, Buffer] = {
        key: buffer.from_bytes(chunk)
        for key, chunk in zip(keys, held, strict=True)
        if chunk is not None
    }
    opened = zarr.AsyncArray(document, StorePath(MemoryStore(memory), _NAME))
    # A chunk of nothing but fill values is written as well: absent must mean lost.
    whole = opened.with_config({"write_empty_chunks": True})
    region = tuple(slice(a, a + n) for a, n in zip(start, data.shape, strict=True))
    with contextlib.closing(_Loop()) as loop:
        loop.run_until_complete(whole.setitem(region, data))
    return tuple(memory[key].to_bytes() for key in keys)
