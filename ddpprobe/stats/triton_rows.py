"""The row of a tensor on a GPU: one Triton kernel that reads it once, one that merges its parts.

A program takes every n-th tile and adds its elements up in float32, each thread for itself until
`_CHUNK` tiles are in; then the threads' sums are added up in float64. A chunk whose sum of squares
is not finite (it holds NaN or infinity, or overflowed) or may have underflowed is read again in
float64. What a program has found is a row, and the second kernel merges the rows in their order.
So one kind of GPU gives a tensor the same bits every time, and the host waits for nothing.

Only imported where Triton is, when the first tensor on a GPU is reduced.
"""

from __future__ import annotations

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


def reduce_rows(flat: Tensor, repeats: int, out: Tensor, scratch: Tensor) -> None:
    """Write the row of a tensor that is on the current CUDA device.

    Args:
        flat: [n], contiguous; float64, float32, float16 or bfloat16.
        repeats: how often each element counts.
        out: float64 [9], contiguous.
        scratch: float64 [programs, 9], contiguous: as many programs as the device runs at a time.
            Nobody else's until the kernels have run.
    """
    each = _LOAD // flat.element_size()
    tiles = -(-flat.numel() // (each * _THREADS.value * _DEPTH.value))
    programs = 1 if tiles <= _ALONE else min(tiles, len(scratch))
    rows = out if programs == 1 else scratch
    # Triton 3.9 warns where nobody says whether products and sums may be fused.
    _reduce[(programs,)](
        flat, rows, flat.numel(), repeats, programs, each=each,
        num_warps=_WARPS, maxnreg=_REGISTERS, enable_fp_fusion=True,
    )  # fmt: skip
    if programs > 1:
        block = triton.next_power_of_2(len(scratch))
        _merge[(1,)](rows, out, programs, block=block, enable_fp_fusion=True)


@triton.jit(do_not_specialize=["rows", "n", "repeats", "programs"])
def _reduce(x, rows, n: tl.int64, repeats: tl.int64, programs, each: tl.constexpr):
    """Write a row for each program, of its share of x [n]."""
    size: tl.constexpr = each * _THREADS * _DEPTH
    program = tl.program_id(0)
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
    row = rows + program * _WIDTH
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
