"""A pack: the full tensors that one rank kept of one step, in one file.

::

    raw bytes of the first tensor, of the second, ...   each begins at a multiple of 64
    index                                               JSON: header, layouts, tensors
    footer                                              32 bytes, see `_FOOTER`

Written under a temporary name and renamed, so a pack is there whole or not at all. Every tensor has
its crc32, and so has the index. Whoever reads one trusts nothing in it: sizes are bounded before
anything is allocated, and no byte is handed out unchecked. It is read with `pread`, not mapped: a
mapped file that somebody cuts short would kill its reader.

The header is JSON::

    attempt, step, rank, world_size, wall_time_ns
    reason      "capture", "nonfinite", or what an order said
    dropped     bytes that were not kept, because of the bound on a step
    left_out    {why: tensors} of kinds that have no plain bytes (sparse, quantized, ...)
    indices     [{"micro": 0, "samples": [7, 3]}, ...] as the script logged them, or null
    scaler      the GradScaler's scale at the backward, or null
    modules     {fqn: {"class": "pkg.Cls", "training": true, "state": {...}, "calls": [...]}}

`state` is {name inside the module: FQN under which the tensor is kept}: a parameter that several
captured modules share, or that contain one another, is kept once. A call of a module is::

    micro, call        which micro-batch, and which call of the module in it
    args, kwargs       {"tensor": leaf} | {"value": JSON scalar} | {"float": "nan", "inf", "-inf"}
                       | {"list": [...]} | {"tuple": [...]} | {"dict": {...}} | {"opaque": class}
    autocast           {device: dtype} of the devices it was on for, such as {"cuda": "bfloat16"}
    rng                "before" or "after" the call: of when the state kept is
    inputs_changed     by the call, in place: kept is what was before it; null: what was behind it

A `layout` says how the rank's part lies in the whole:

- `{"kind": "dtensor", ranks, mesh, shape, axes}` (`shard_spec.ShardSpec`): over a mesh of ranks. An
  activation may lie over several meshes, one per part of the batch: these are joined along dim 0.
- `{"kind": "flat", "start", "stop", "shape"}`: elements [start, stop) of the flattened parameter.
- `{"kind": "batch", "dim", "ranks"}`: the ranks' parts are joined along `dim` in rank order.
- `{"kind": "replicated"}`: the whole. `{"kind": "local"}`: this rank's own, joined with nothing.

Of parameters, gradients and buffers that several ranks hold alike, the first of them keeps it,
unless the reason is "nonfinite", which one rank alone may have: it keeps all it holds. Activations
are kept by every rank.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from pathlib import Path
from typing import Any, Final, Self, final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import PackDamaged
from ddpprobe.rundir import paths, safe_read

KINDS: Final = ("input", "output", "grad_output", "param", "grad", "buffer", "rng")
FIRST_BAD: Final = "nonfinite"  # the reason of a pack that a rank kept for its first bad module
LAYOUTS: Final = ("dtensor", "flat", "batch", "replicated", "local")
# Bytes per element, by torch's names without "torch.". What is not here is not captured.
ITEM_SIZES: Final[Mapping[str, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "complex32": 4, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1,
    "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1, "bool": 1,
}  # fmt: skip
ALIGNMENT = 64
MAX_INDEX = 16 << 20  # of JSON: some 50,000 tensors; Python makes at most 20 times as much of it
MAX_DIMS = 64  # torch's own limit

_MAGIC = b"DDPPACK1"
_FOOTER = struct.Struct("<8sQQII")  # magic, offset and length of the index, its crc32, zero
_COUNTS = ("attempt", "step", "rank", "world_size")
_MORE_COUNTS = ("dropped", "wall_time_ns")  # which need not be there
_READ_BYTES = 8 << 20

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, order=True)
class TensorKey:
    """Which tensor of a captured step.

    Attributes:
        module: FQN of the captured module.
        fqn: of the module for `input`, `output` and `grad_output`; of the parameter or buffer,
            without wrapper prefixes, for `param`, `grad` and `buffer`; "" for `rng`.
        kind: one of `KINDS`.
        leaf: path in a structured input or output: "" for a bare tensor, "0", "mask", "0.x"; the
            device's kind ("cpu", "cuda") for `rng`.
        micro: index of the micro-batch in the step.
        call: which call of the module in the micro-batch, from 0.
        dtype: torch's name without "torch.", a key of `ITEM_SIZES`.
    """

    module: str
    fqn: str
    kind: str
    leaf: str
    micro: int
    call: int
    dtype: str


@final
@dataclass(frozen=True, slots=True)
class PackedTensor(TensorKey):
    """One rank's part of a tensor, in a pack.

    Attributes:
        shape: of this rank's part; its elements lie in C order, little-endian.
        layout: JSON: `{"kind": one of LAYOUTS, ...}`, how the part lies in the whole.
        offset, bytes, crc: where the bytes lie in the file, and their crc32; told by `write`.
    """

    shape: tuple[int, ...]
    layout: Mapping[str, Any]
    offset: int = 0
    bytes: int = 0
    crc: int = 0

    @property
    def key(self) -> TensorKey:
        """Which tensor it is a part of."""
        return TensorKey(
            self.module, self.fqn, self.kind, self.leaf, self.micro, self.call, self.dtype
        )

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes, less the layout."""
        return {name: getattr(self, name) for name in _NAMES if name != "layout"}

    @classmethod
    def from_json(cls, row: object, layouts: Sequence[object]) -> Self:
        """Return the tensor that an index tells of; its `layout` is a place among `layouts`.

        Raises:
            PackDamaged: a field is missing or absurd.
        """
        if not isinstance(row, dict) or set(row) != _NAMES.keys():
            raise PackDamaged("a tensor of the index has other fields than a pack's")
        shape, at = row["shape"], row["layout"]
        if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_count, shape)):
            raise PackDamaged("a tensor of the index has no shape")
        if not _is_count(at) or at >= len(layouts):
            raise PackDamaged("a tensor of the index has no layout")
        tensor = cls(**{**row, "shape": tuple(shape), "layout": layouts[at]})
        texts = tensor.module, tensor.fqn, tensor.kind, tensor.leaf, tensor.dtype
        numbers = tensor.micro, tensor.call, tensor.offset, tensor.bytes, tensor.crc
        if not (all(isinstance(t, str) for t in texts) and all(map(_is_count, numbers))):
            raise PackDamaged("a tensor of the index has a field of the wrong type")
        if tensor.kind not in KINDS or tensor.dtype not in ITEM_SIZES:
            raise PackDamaged(f"a tensor of the index is of kind {tensor.kind!r}, {tensor.dtype!r}")
        if prod(shape) * ITEM_SIZES[tensor.dtype] != tensor.bytes:
            raise PackDamaged(f"a tensor of the index has {tensor.bytes} bytes for {shape}")
        return tensor


_NAMES = dict.fromkeys(field.name for field in fields(PackedTensor))


def write(
    path: Path,
    header: Mapping[str, Any],
    tensors: Sequence[tuple[PackedTensor, Bytes]],
    crc32: Callable[[memoryview], int] = zlib.crc32,
) -> int:
    """Write a pack; return its size in bytes. The bytes are neither joined nor copied on the way.

    It is not forced to the disk: if the machine dies with its writer, the checksums tell.

    Args:
        path: its directory is made. What is there is replaced.
        header: JSON: attempt, step, rank, world_size, and what else the reader may know.
        tensors: each with its bytes, uint8 [n], contiguous; offset, bytes and crc are filled in.
        crc32: gives what zlib's gives, perhaps sooner: ranks have `stats.crc32`, which is not for
            processes without torch.

    Raises:
        OSError: the disk refuses; nothing is left behind.
        PackDamaged: a tensor is not what it says, or the index is larger than readers accept.
    """
    placed, parts, position = [], [], 0
    for tensor, raw in tensors:
        if raw.nbytes != prod(tensor.shape) * ITEM_SIZES.get(tensor.dtype, -1):
            raise PackDamaged(f"{tensor.fqn}: {raw.nbytes} bytes for {tensor.dtype} {tensor.shape}")
        placed.append(replace(tensor, offset=position, bytes=raw.nbytes, crc=crc32(raw.data)))
        padding = bytes(-raw.nbytes % ALIGNMENT)
        parts += [raw.data, memoryview(padding)]
        position += raw.nbytes + len(padding)
    layouts: dict[str, int] = {}  # many tensors have one, and it may name a thousand ranks
    rows = [
        {**t.to_json(), "layout": layouts.setdefault(_dumps(t.layout), len(layouts))}
        for t in placed
    ]
    told = {"header": header, "layouts": [json.loads(one) for one in layouts], "tensors": rows}
    index = _dumps(told).encode()
    if len(index) > MAX_INDEX:
        raise PackDamaged(f"the index of {len(placed)} tensors has {len(index)} bytes")
    footer = _FOOTER.pack(_MAGIC, position, len(index), zlib.crc32(index), 0)
    parts += [memoryview(index), memoryview(footer)]
    paths.replace_file(path, parts)
    return position + len(index) + len(footer)


@final
@dataclass(frozen=True, slots=True)
class Pack:
    """A pack that somebody wrote. No file stays open between its calls.

    Attributes:
        path: of the file.
        header: JSON; attempt, step, rank and world_size are there and are counts, `modules` is a
            mapping; the rest is as it was found.
        tensors: what is in it, in the order of their offsets.
        bytes: size of the file.
    """

    path: Path
    header: Mapping[str, Any]
    tensors: tuple[PackedTensor, ...]
    bytes: int

    @classmethod
    def open(cls, path: Path) -> Pack:
        """Read and check the index.

        Raises:
            PackDamaged: it is no whole pack.
            OSError: there is none, or the disk cannot read it.
        """
        fd = _open(path)
        try:
            size = os.fstat(fd).st_size
            index, end = _index(fd, size)
        finally:
            os.close(fd)
        header, tensors = _parsed(index)
        position = 0
        for tensor in tensors:
            if tensor.offset < position or tensor.offset % ALIGNMENT:
                raise PackDamaged("the tensors of the index lie in one another")
            position = tensor.offset + tensor.bytes
        if position > end:
            raise PackDamaged("a tensor of the index lies beyond the end of the data")
        return cls(path, header, tensors, size)

    def raw(self, i: int) -> Bytes:
        """Return the bytes of `tensors[i]`, uint8 [bytes], after a look at their checksum.

        Raises:
            PackDamaged: they are not what was written.
            OSError: the disk cannot read them.
        """
        try:
            found = np.empty(self.tensors[i].bytes, np.uint8)
        except MemoryError:
            raise PackDamaged(f"{self.path}: {self.tensors[i].bytes} bytes do not fit") from None
        self._look(i, found)
        return found

    def check(self, i: int) -> None:
        """Look at the bytes of `tensors[i]`, however many, in little memory. Raises as `raw`."""
        self._look(i, np.empty(min(_READ_BYTES, self.tensors[i].bytes), np.uint8))

    def _look(self, i: int, into: Bytes) -> None:
        """Read a tensor piece by piece, in a buffer of its size or of one piece."""
        tensor, crc = self.tensors[i], 0
        fd = _open(self.path)
        try:
            if os.fstat(fd).st_size != self.bytes:
                raise PackDamaged(f"{self.path}: another file lies there now")
            for at in range(0, tensor.bytes, _READ_BYTES):
                low = at if into.nbytes == tensor.bytes else 0
                piece = into[low : low + min(_READ_BYTES, tensor.bytes - at)]
                _read(fd, piece.data, tensor.offset + at)
                crc = zlib.crc32(piece.data, crc)
        finally:
            os.close(fd)
        if crc != tensor.crc:
            raise PackDamaged(
                f"{self.path}: the {tensor.kind} {tensor.fqn!r} is damaged: its checksum differs"
            )


def _open(path: Path) -> int:
    """Open a file that is really one: no link, and no pipe that would let us wait for ever."""
    if path.is_symlink():
        raise PackDamaged(f"{path}: a link, not a file")
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PackDamaged(f"{path}: not a regular file")
    return fd


def _index(fd: int, size: int) -> tuple[bytearray, int]:
    """Return the index and where the data before it ends."""
    if size < _FOOTER.size:
        raise PackDamaged(f"{size} bytes are no pack")
    footer = bytearray(_FOOTER.size)
    _read(fd, memoryview(footer), size - _FOOTER.size)
    magic, offset, length, crc, zero = _FOOTER.unpack(footer)
    if magic != _MAGIC or zero:
        raise PackDamaged("no pack ends like this: cut short, or of another kind")
    if length > MAX_INDEX or offset + length + _FOOTER.size != size:
        raise PackDamaged("the footer does not fit the size of the file")
    index = bytearray(length)
    _read(fd, memoryview(index), offset)
    if zlib.crc32(index) != crc:
        raise PackDamaged("the index is damaged: its checksum differs")
    return index, offset


def _read(fd: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < into.nbytes:
        got = os.preadv(fd, [into[done:]], offset + done)
        if not got:
            raise PackDamaged("the file ends too early")
        done += got


def _parsed(index: bytearray) -> tuple[dict[str, Any], tuple[PackedTensor, ...]]:
    try:
        told = safe_read.parse(bytes(index), MAX_INDEX, finite=True)
    except ValueError as error:
        raise PackDamaged(f"the index is no JSON of ours: {error}") from error
    if not isinstance(told, dict):
        raise PackDamaged("the index is no mapping")
    header, layouts, tensors = (told.get(name) for name in ("header", "layouts", "tensors"))
    if not isinstance(layouts, list) or not isinstance(tensors, list):
        raise PackDamaged("the index has no tensors, or no layouts")
    if not all(isinstance(one, dict) and one.get("kind") in LAYOUTS for one in layouts):
        raise PackDamaged("the index has a layout of no known kind")
    return header_of(header), tuple(PackedTensor.from_json(one, layouts) for one in tensors)


def header_of(header: object) -> dict[str, Any]:
    """Return the header of a pack, also from the store. Raises PackDamaged if it is none."""
    if not isinstance(header, dict) or not all(_is_count(header.get(name)) for name in _COUNTS):
        raise PackDamaged(f"the header does not tell {', '.join(_COUNTS)}")
    if not all(_is_count(header.get(name, 0)) for name in _MORE_COUNTS):
        raise PackDamaged(f"the header's {' or '.join(_MORE_COUNTS)} is no count")
    if not isinstance(header.setdefault("modules", {}), dict):
        raise PackDamaged("the header's modules are no mapping")
    return header


def _dumps(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63
