"""What is encoded here is what stock Zarr writes, also where it is not asked a second time."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zarr
from numpy.typing import NDArray
from zarr.core.buffer import default_buffer_prototype
from zarr.storage import MemoryStore

from ddpprobe.store import encoding
from ddpprobe.store import format as fmt
from ddpprobe.store.encoding import encode_region

SIZES = {dim: 4 for schema in fmt.SCHEMAS.values() for c in schema for dim in c.dims}
CHUNKS = {**dict.fromkeys(SIZES, 4), "step": 8}
COLUMNS = {f"{kind} {c.name}": c for kind, schema in fmt.SCHEMAS.items() for c in schema}


def region(column: fmt.ArraySpec, rows: int) -> NDArray[Any]:
    numbers = np.arange(rows * 4 ** (len(column.dims) - 1)).reshape(
        rows, *[4] * (len(column.dims) - 1)
    )
    if column.dtype == "string":
        return np.vectorize("ä{}".format, otypes=[object])(numbers)
    return numbers.astype(fmt.NUMPY[column.dtype])


def stock(column: fmt.ArraySpec, parts: list[tuple[int, NDArray[Any]]]) -> dict[str, bytes]:
    """Return the chunks that Zarr's own array writes."""
    memory: dict[str, Any] = {}
    for start, data in parts:
        document = fmt.array_document(column, {**SIZES, column.dims[0]: start + len(data)}, CHUNKS)
        text = json.dumps(document).encode()
        memory["a/zarr.json"] = default_buffer_prototype().buffer.from_bytes(text)
        array = zarr.open_array(MemoryStore(memory), path="a", mode="r+", zarr_format=3)
        array.with_config({"write_empty_chunks": True})[start : start + len(data)] = data
    return {k: v.to_bytes() for k, v in memory.items() if not k.endswith(".json")}


def ours(column: fmt.ArraySpec, parts: list[tuple[int, NDArray[Any]]]) -> dict[str, bytes]:
    chunks: dict[str, bytes] = {}
    for row, data in parts:
        document = fmt.array_document(column, {**SIZES, column.dims[0]: row + len(data)}, CHUNKS)
        start = (row, *[0] * (data.ndim - 1))
        keys = fmt.chunk_keys("a", fmt.grid_of(document), start, data.shape)
        new = encode_region(document, start, data, [chunks.get(key) for key in keys])
        chunks |= zip(keys, new, strict=True)
    return chunks


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return how often Zarr was asked so far; nothing is remembered before."""
    encoding._remembered.cache_clear()
    encode, calls = encoding._encoded, []

    def counted(*args: Any) -> tuple[bytes, ...]:
        calls.append(args)
        return encode(*args)

    monkeypatch.setattr(encoding, "_encoded", counted)
    return lambda: len(calls)


@pytest.mark.parametrize("column", COLUMNS.values(), ids=COLUMNS)
def test_what_is_appended_to_any_array_of_the_format_is_what_zarr_writes(
    column: fmt.ArraySpec, asked: Callable[[], int]
) -> None:
    """Into a new chunk, into one that holds something, and over the end of one into the next."""
    whole = region(column, 13)
    parts = [(0, whole[:3]), (3, whole[3:7]), (7, whole[7:])]
    written = stock(column, parts)
    assert ours(column, parts) == written
    assert asked() == 3
    assert ours(column, parts) == written
    assert asked() == 3


def test_only_the_same_into_the_same_chunk_of_the_same_kind_is_remembered(
    asked: Callable[[], int],
) -> None:
    columns = {c.name: c for c in fmt.SCHEMAS["rank"]}
    zeros = np.zeros(2, np.int64)
    for name, start, data in (
        ("first_bad_nan", 0, zeros),
        ("first_bad_nan", 1, zeros),  # elsewhere
        ("first_bad_nan", 0, zeros[:1]),  # of another shape
        ("first_bad_nan", 0, zeros + 1),  # other numbers
        ("values", 0, np.zeros((2, 4, 4))),  # the same bytes, as numbers of another type ...
        ("counts", 0, np.zeros((2, 4, 4), np.int64)),  # ... in another grid
        ("fqn", 0, np.array(["a,", "b"], object)),
        ("fqn", 0, np.array(["a", ",b"], object)),
    ):
        before = asked()
        parts = [(start, data)]
        assert ours(columns[name], parts) == stock(columns[name], parts), (name, start)
        assert asked() == before + 1, (name, start)
    assert ours(columns["first_bad_pos_inf"], [(0, zeros)]) == stock(
        columns["first_bad_nan"], [(0, zeros)]
    )
    assert asked() == before + 1  # of the last one: what an array is called is all the same


def test_what_is_large_is_not_kept(asked: Callable[[], int]) -> None:
    columns = {c.name: c for c in fmt.SCHEMAS["rank"]}
    many = np.arange(encoding.SMALL_BYTES // 8 + 1)
    long = np.array(["x" * encoding.SMALL_BYTES], object)
    for name, data in (("first_bad_nan", many), ("fqn", long)):
        for _ in range(2):
            assert ours(columns[name], [(0, data)]) == stock(columns[name], [(0, data)])
    assert asked() == 4
    assert encoding._remembered.cache_info().currsize == 0


def test_what_zarr_refuses_is_raised(asked: Callable[[], int]) -> None:
    column = next(c for c in fmt.SCHEMAS["rank"] if c.name == "first_bad_nan")
    document = fmt.array_document(column, {**SIZES, "step": 2}, CHUNKS)
    with pytest.raises(ValueError, match="checksum"):
        encode_region(document, (1,), np.zeros(1, np.int64), [b"no chunk of Zarr's"])
