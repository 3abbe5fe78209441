"""The row of a tensor on a GPU, by a Triton kernel that reads it once.

A program takes every n-th tile and adds its elements up in float32, each thread for itself until
`_CHUNK` tiles are in; then the threads' sums are added up in float64. A chunk whose sum of squares
is not finite (it holds NaN or infinity, or overflowed) or may have underflowed is read again in
float64. What a program has found is a row, and the program that ends last merges the rows in their
order. So one kind of GPU gives a tensor the same bits every time, and the host waits for nothing.

Triton spends more on a launch than the device on a small tensor: it looks at each argument, and for
the kernel that was compiled for such ones. So what it has compiled is kept here, and launched.

Many tensors take two launches together: every program looks its tensor up in a table, and does for
it what it would do if the tensor were alone, to the bit.

Only imported where Triton is, when a model on a GPU is installed or its first tensor is reduced.
"""

from __future__ import annotations

from typing import Any, final

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 8
_THREADS = tl.constexpr(_WARPS * 32)
_LOAD = tl.constexpr(16)  # bytes that a thread reads at once
_REGISTERS = 64  # of a thread: so that 4 programs fit a multiprocessor
_DEPTH = tl.constexpr(4)  # reads under way at a time
_CHUNK = tl.constexpr(8)  # tiles added up in float32: error < 1e-6 of sum|x|
_LOW = tl.constexpr(1e-15)  # squares of smaller numbers than this underflow in float32
_WIDTH = tl.constexpr(9)  # of a row (see `stats.rows`)
_ALONE = 4  # tiles that one program takes, up to 64 KiB: nothing to merge
_MOST = tl.constexpr(1024)  # programs of a tensor, whose rows one of them merges
_COLUMNS = tl.constexpr(6)  # of a table: address, size, factor, programs, first item, row
# By dtype, whether the first element lies at a multiple of _LOAD, and device: what Triton made.
_compiled: dict[tuple[torch.dtype, bool, int | None], Any] = {}
_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def programs_of(numel: int, size: int, most: int) -> int:
    """Return how many programs, up to `most`, share `numel` elements of `size` bytes."""
    tiles = -(-numel // (_LOAD.value // size * _THREADS.value * _DEPTH.value))
    return 1 if tiles <= _ALONE else min(tiles, most, _MOST.value)


@final
class Scratch:
    """Memory for what the programs of one tensor after the other find; for one stream.

    Args:
        device: where it is.
        programs: of a tensor at most: as many as the device runs at a time.
    """

    __slots__ = ("place", "programs", "rows", "ticket")

    def __init__(self, device: torch.device, programs: int) -> None:
        self.programs = programs
        self.rows = torch.empty((programs, _WIDTH.value), dtype=torch.float64, device=device)
        self.ticket = torch.zeros(1, dtype=torch.int32, device=device)  # how many have ended
        self.place = self.rows.data_ptr(), self.ticket.data_ptr()


def reduce_rows(flat: Tensor, repeats: int, out: Tensor, scratch: Scratch) -> None:
    """Write the row of a tensor that is on the current CUDA device; compile what that needs.

    Args:
        flat: [n], contiguous; float64, float32, float16 or bfloat16.
        repeats: how often each element counts.
        out: float64 [9], contiguous.
        scratch: nobody else's until the kernel has run.
    """
    programs = programs_of(flat.numel(), flat.element_size(), scratch.programs)
    # Triton 3.9 warns where nobody says whether products and sums may be fused.
    kernel = _reduce[(programs,)](
        flat, out, scratch.rows, scratch.ticket, flat.numel(), repeats, programs,
        num_warps=_WARPS, maxnreg=_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
    _compiled[flat.dtype, flat.data_ptr() % _LOAD.value == 0, flat.device.index] = kernel


def reduce_at(
    address: int, numel: int, dtype: torch.dtype, out: int, scratch: Scratch, stream: int,
    device: int,
) -> bool:  # fmt: skip
    """Do as `reduce_rows` does of elements that lie at an address; False: compile it first.

    Args:
        address: of the first element.
        numel: how many there are, one after the other.
        dtype: one of those of `reduce_rows`.
        out: address of the row.
        scratch: nobody else's until the kernel has run.
        stream: in which it runs, of the current CUDA device.
        device: the index of that.
    """
    kernel = _compiled.get((dtype, address % _LOAD.value == 0, device))
    if kernel is None:
        return False
    programs = programs_of(numel, dtype.itemsize, scratch.programs)
    kernel[programs, 1, 1](address, out, *scratch.place, numel, 1, programs, stream=stream)
    return True


def reduce_many(
    table: Tensor, owners: Tensor, rows: Tensor, scratch: Tensor, dtype: torch.dtype, *,
    aligned: bool, merges: bool,
) -> None:  # fmt: skip
    """Write the rows of many tensors of one dtype that are on the current CUDA device.

    Args:
        table: int64 [tensors, 6], contiguous: address, elements, repeats, programs, number of the
            first of them, and row of each tensor.
        owners: int32 [programs], contiguous: which tensor each program is for.
        rows: float64 [any, 9], contiguous.
        scratch: float64 [programs, 9], contiguous. Nobody else's until the kernels have run.
        dtype: of the tensors.
        aligned: all addresses are multiples of 16, as `reduce_rows` sees by itself.
        merges: some tensor has several programs; else the second launch is left out.
    """
    _reduce_many[(len(owners),)](
        table, owners, rows, scratch,
        kind=_DTYPES[dtype], aligned=aligned,
        num_warps=_WARPS, maxnreg=_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
    if merges:  # as many warps as in `_reduce`, for the same order of additions
        _merge_many[(len(table),)](table, scratch, rows, num_warps=_WARPS, enable_fp_fusion=True)


@triton.jit(do_not_specialize=["out", "rows", "ticket", "n", "repeats", "programs"])
def _reduce(x, out, rows, ticket, n: tl.int64, repeats: tl.int64, programs):
    """Write the row of x [n] to out [9]; rows [programs, 9] are of the programs' shares.

    `ticket` is 0 before and afterwards.
    """
    program = tl.program_id(0)
    row = tl.where(programs == 1, out, rows + program * _WIDTH)
    _share(x, row, n, repeats, program, programs)
    if programs > 1:  # noqa: SIM102  (`and` would take a ticket of whoever is alone)
        # Who ends last sees what all others have written before they took their tickets.
        if tl.atomic_add(ticket, 1, sem="acq_rel") == programs - 1:
            _join(rows, out, programs)
            tl.store(ticket, 0)


@triton.jit(do_not_specialize=["table", "owners", "rows", "scratch"])
def _reduce_many(table, owners, rows, scratch, kind: tl.constexpr, aligned: tl.constexpr):
    """Write a row for each program, of its share of the tensor it is for."""
    item = tl.program_id(0)
    entry = table + tl.load(owners + item) * _COLUMNS
    x = tl.load(entry).to(tl.pointer_type(kind))
    if aligned:
        x = tl.multiple_of(x, 16)
    programs = tl.load(entry + 3).to(tl.int32)
    program = item - tl.load(entry + 4).to(tl.int32)
    alone = rows + tl.load(entry + 5) * _WIDTH
    row = tl.where(programs == 1, alone, scratch + tl.cast(item, tl.int64) * _WIDTH)
    _share(x, row, tl.load(entry + 1), tl.load(entry + 2), program, programs)


@triton.jit
def _share(x, row, n, repeats, program, programs):
    """Write the row of one program's share of x [n]."""
    each: tl.constexpr = _LOAD * 8 // x.dtype.element_ty.primitive_bitwidth
    size: tl.constexpr = each * _THREADS * _DEPTH
    whole = (n // size).to(tl.int32)
    tiles = ((n + size - 1) // size).to(tl.int32)
    nan = tl.full([], 0.0, tl.float64)
    pos, neg, zeros, total, square = nan, nan, nan, nan, nan
    low, high = nan + float("inf"), nan - float("inf")
    for first in range(program, tiles, programs * _CHUNK):
        behind = tl.minimum(first + programs * _CHUNK, tiles)
        z, lo, hi, s, q = _quick(x, first, tl.minimum(behind, whole), programs, each)
        peak = tl.maximum(-lo, hi)
        good = (q < float("inf")) & ((peak == 0.0) | (peak > _LOW))
        if good:
            zeros, total, square = zeros + z, total + s, square + q
            low, high = tl.minimum(low, lo), tl.maximum(high, hi)
        ragged = (whole < behind) & ((whole - first) % programs == 0)
        again = tl.where(good, tl.where(ragged, whole, behind), first)
        if again < behind:
            a, b, c, z, lo, hi, s, q = _careful(x, n, again, behind, programs, each)
            nan, pos, neg, zeros = nan + a, pos + b, neg + c, zeros + z
            low, high = tl.minimum(low, lo), tl.maximum(high, hi)
            total, square = total + s, square + q
    times = repeats.to(tl.float64)
    tl.store(row, tl.where(program == 0, n, 0).to(tl.float64) * times)
    tl.store(row + 1, nan * times)
    tl.store(row + 2, pos * times)
    tl.store(row + 3, neg * times)
    tl.store(row + 4, zeros * times)
    tl.store(row + 5, low)
    tl.store(row + 6, high)
    tl.store(row + 7, total * times)
    tl.store(row + 8, square * times)


@triton.jit
def _quick(x, first, behind, step, each: tl.constexpr):
    """zeros, min, max, sum, sum_sq (float64) of whole tiles, as if every element were finite."""
    size: tl.constexpr = each * _THREADS * _DEPTH
    wide: tl.constexpr = x.dtype.element_ty == tl.float64
    kind: tl.constexpr = tl.float64 if wide else tl.float32
    deep = tl.arange(0, _DEPTH)[:, None, None] * (each * _THREADS)
    at = deep + tl.arange(0, _THREADS)[None, :, None] * each + tl.arange(0, each)[None, None, :]
    zeros = tl.zeros([_THREADS], tl.float32)
    total = tl.zeros([_THREADS], kind)
    square = total
    low, high = total + float("inf"), total - float("inf")
    for tile in range(first, behind, step):
        v = tl.load(x + tl.cast(tile, tl.int64) * size + at).to(kind)
        zeros += tl.sum(tl.sum((v == 0.0).to(tl.float32), 2), 0)
        low = tl.minimum(low, tl.min(tl.min(v, 2), 0))
        high = tl.maximum(high, tl.max(tl.max(v, 2), 0))
        total += tl.sum(tl.sum(v, 2), 0)
        square += tl.sum(tl.sum(v * v, 2), 0)
    return (
        tl.sum(zeros.to(tl.float64), 0),
        tl.min(low, 0).to(tl.float64),
        tl.max(high, 0).to(tl.float64),
        tl.sum(total.to(tl.float64), 0),
        tl.sum(square.to(tl.float64), 0),
    )


@triton.jit
def _careful(x, n, first, behind, step, each: tl.constexpr):
    """nan, pos_inf, neg_inf, zeros, min, max, sum, sum_sq (float64) of tiles of any elements."""
    size: tl.constexpr = each * _THREADS * _DEPTH
    at = tl.arange(0, _THREADS)[:, None] * each + tl.arange(0, each)[None, :]
    nan = tl.zeros([_THREADS], tl.int32)
    pos, neg, zeros = nan, nan, nan
    total = tl.zeros([_THREADS], tl.float64)
    square = total
    low, high = total + float("inf"), total - float("inf")
    # One loop with a count that the compiler does not know: unrolled, it would take all registers.
    for count in range(tl.cdiv(behind - first, step) * _DEPTH):
        part = tl.cast(count, tl.int64)
        tile = first + part // _DEPTH * step
        start = tile * size + part % _DEPTH * (each * _THREADS)
        inside = start + at < n
        v = tl.load(x + start + at, mask=inside, other=0.0).to(tl.float64)
        finite = inside & (tl.abs(v) < float("inf"))
        kept = tl.where(finite, v, 0.0)
        nan += tl.sum((v != v).to(tl.int32), 1)
        pos += tl.sum((v == float("inf")).to(tl.int32), 1)
        neg += tl.sum((v == -float("inf")).to(tl.int32), 1)
        zeros += tl.sum((inside & (v == 0.0)).to(tl.int32), 1)
        low = tl.minimum(low, tl.min(tl.where(finite, v, float("inf")), 1))
        high = tl.maximum(high, tl.max(tl.where(finite, v, -float("inf")), 1))
        total += tl.sum(kept, 1)
        square += tl.sum(kept * kept, 1)
    return (
        tl.sum(nan, 0).to(tl.float64),
        tl.sum(pos, 0).to(tl.float64),
        tl.sum(neg, 0).to(tl.float64),
        tl.sum(zeros, 0).to(tl.float64),
        tl.min(low, 0),
        tl.max(high, 0),
        tl.sum(total, 0),
        tl.sum(square, 0),
    )


@triton.jit(do_not_specialize=["table", "scratch", "rows"])
def _merge_many(table, scratch, rows):
    """Merge, for each tensor in the table, what its programs have left in scratch."""
    entry = table + tl.program_id(0) * _COLUMNS
    programs = tl.load(entry + 3).to(tl.int32)
    if programs > 1:
        parts = scratch + tl.load(entry + 4) * _WIDTH
        _join(parts, rows + tl.load(entry + 5) * _WIDTH, programs)


@triton.jit
def _join(rows, out, programs):
    """Merge rows [programs, 9] into out [9]; the first cache may not have what others wrote."""
    at = tl.arange(0, _MOST)
    there = at < programs
    for column in tl.static_range(_WIDTH):
        parts = rows + at * _WIDTH + column
        if column == 5:
            merged = tl.min(tl.load(parts, there, float("inf"), cache_modifier=".cg"), 0)
        elif column == 6:
            merged = tl.max(tl.load(parts, there, -float("inf"), cache_modifier=".cg"), 0)
        else:
            merged = tl.sum(tl.load(parts, there, 0.0, cache_modifier=".cg"), 0)
        tl.store(out + column, merged)
