"""The row of a tensor on a GPU: one Triton kernel that reads it once, one that merges its parts.

A program takes every n-th tile and adds its elements up in float32, each thread for itself until
`_CHUNK` tiles are in; then the threads' sums are added up in float64. A chunk whose sum of squares
is not finite (it holds NaN or infinity, or overflowed) or may have underflowed is read again in
float64. What a program has found is a row, and the second kernel merges the rows in their order.
So one kind of GPU gives a tensor the same bits every time, and the host waits for nothing.

Many tensors take two launches together: every program looks its tensor up in a table, and does for
it what it would do if the tensor were alone, to the bit.

Only imported where Triton is, when a model on a GPU is installed or its first tensor is reduced.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WARPS = 8
_THREADS = tl.constexpr(_WARPS * 32)
_LOAD = 16  # bytes that a thread reads at once
_REGISTERS = 64  # of a thread: so that 4 programs fit a multiprocessor
_DEPTH = tl.constexpr(4)  # reads under way at a time
_CHUNK = tl.constexpr(8)  # tiles added up in float32: error < 1e-6 of sum|x|
_LOW = tl.constexpr(1e-15)  # squares of smaller numbers than this underflow in float32
_WIDTH = tl.constexpr(9)  # of a row (see `stats.rows`)
_ALONE = 4  # tiles that one program takes, up to 64 KiB: nothing to merge, one launch less
_COLUMNS = tl.constexpr(6)  # of a table: address, size, factor, programs, first item, row
_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
}


def programs_of(numel: int, size: int, most: int) -> int:
    """Return how many programs share a tensor of `numel` elements of `size` bytes, 1 to `most`."""
    tiles = -(-numel // (_LOAD // size * _THREADS.value * _DEPTH.value))
    return 1 if tiles <= _ALONE else min(tiles, most)


def reduce_rows(flat: Tensor, repeats: int, out: Tensor, scratch: Tensor) -> None:
    """Write the row of a tensor that is on the current CUDA device.

    Args:
        flat: [n], contiguous; float64, float32, float16 or bfloat16.
        repeats: how often each element counts.
        out: float64 [9], contiguous.
        scratch: float64 [programs, 9], contiguous: as many programs as the device runs at a time.
            Nobody else's until the kernels have run.
    """
    programs = programs_of(flat.numel(), flat.element_size(), len(scratch))
    rows = out if programs == 1 else scratch
    # Triton 3.9 warns where nobody says whether products and sums may be fused.
    _reduce[(programs,)](
        flat, rows, flat.numel(), repeats, programs, each=_LOAD // flat.element_size(),
        num_warps=_WARPS, maxnreg=_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
    if programs > 1:
        block = triton.next_power_of_2(len(scratch))
        _merge[(1,)](rows, out, programs, block=block, enable_fp_fusion=True)


def reduce_many(
    table: Tensor, owners: Tensor, rows: Tensor, scratch: Tensor, dtype: torch.dtype, *,
    aligned: bool, most: int, merges: bool,
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
        most: programs of one tensor, the same for all tensors of a device.
        merges: some tensor has several programs; else the second launch is left out.
    """
    _reduce_many[(len(owners),)](
        table, owners, rows, scratch,
        kind=_DTYPES[dtype], aligned=aligned, each=_LOAD // dtype.itemsize,
        num_warps=_WARPS, maxnreg=_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
    if merges:
        block = triton.next_power_of_2(most)
        _merge_many[(len(table),)](table, scratch, rows, block=block, enable_fp_fusion=True)


@triton.jit(do_not_specialize=["rows", "n", "repeats", "programs"])
def _reduce(x, rows, n: tl.int64, repeats: tl.int64, programs, each: tl.constexpr):
    """Write a row for each program, of its share of x [n]."""
    program = tl.program_id(0)
    _share(x, rows + program * _WIDTH, n, repeats, program, programs, each)


@triton.jit(do_not_specialize=["table", "owners", "rows", "scratch"])
def _reduce_many(
    table, owners, rows, scratch, kind: tl.constexpr, aligned: tl.constexpr, each: tl.constexpr
):
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
    _share(x, row, tl.load(entry + 1), tl.load(entry + 2), program, programs, each)


@triton.jit
def _share(x, row, n, repeats, program, programs, each: tl.constexpr):
    """Write the row of one program's share of x [n]."""
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


@triton.jit(do_not_specialize=["rows", "out", "programs"])
def _merge(rows, out, programs, block: tl.constexpr):
    """Merge rows [programs, 9] into out [9]."""
    _join(rows, out, programs, block)


@triton.jit(do_not_specialize=["table", "scratch", "rows"])
def _merge_many(table, scratch, rows, block: tl.constexpr):
    """Merge, for each tensor in the table, what its programs have left in scratch."""
    entry = table + tl.program_id(0) * _COLUMNS
    programs = tl.load(entry + 3).to(tl.int32)
    if programs > 1:
        parts = scratch + tl.load(entry + 4) * _WIDTH
        _join(parts, rows + tl.load(entry + 5) * _WIDTH, programs, block)


@triton.jit
def _join(rows, out, programs, block: tl.constexpr):
    at = tl.arange(0, block)
    for column in tl.static_range(_WIDTH):
        parts = rows + at * _WIDTH + column
        if column == 5:
            merged = tl.min(tl.load(parts, mask=at < programs, other=float("inf")), 0)
        elif column == 6:
            merged = tl.max(tl.load(parts, mask=at < programs, other=-float("inf")), 0)
        else:
            merged = tl.sum(tl.load(parts, mask=at < programs, other=0.0), 0)
        tl.store(out + column, merged)
