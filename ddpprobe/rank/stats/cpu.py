"""The CPU reduction without the compiled kernels: NumPy on blocks that stay in cache.

Why this shape, measured on one core at 1 M float32 elements in cache: torch's `aminmax` reads
25 GB/s and its `count_nonzero` 16; NumPy's `minimum`, `maximum` and `vecdot` read 80 each, the
count of `x == 0` 53; the five passes together 14.5, against 6 of the same in torch.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 1 << 17  # elements: 512 KiB of float32, inside the second-level cache
ROW = 1024  # elements added up in float32 before they join the float64 sum: error < 1e-6 of sum|x|
SMALL = 1 << 12  # below this, converting to float64 costs less than being clever
# Squares of float32 numbers outside this range over- or underflow when added up in float32.
SAFE_LOW, SAFE_HIGH = 1e-13, 1e15
_ONES, _ONES64 = np.ones(ROW, np.float32), np.ones(SMALL)
# The same dot product of each two rows; vecdot, twice as fast, came with NumPy 2.
_dots = getattr(np, "vecdot", None) or functools.partial(np.einsum, "...i,...i->...")

Numbers = NDArray[np.float32] | NDArray[np.float64]


def reduce_cpu(flat: Tensor) -> tuple[float, ...]:
    """Return the row (see `stats.rows`) of a non-empty 1-D floating tensor on the CPU."""
    numel = flat.numel()
    wide = flat.dtype == torch.float64
    if numel <= SMALL:
        if not wide:  # no square of such a number is beyond float64
            return _small(flat.double().numpy())
        with np.errstate(over="ignore"):
            return _small(flat.numpy())
    blocks = [_block((b if wide else b.float()).numpy()) for b in flat.split(BLOCK)]
    if len(blocks) == 1:
        return (float(numel), *blocks[0])
    columns = list(zip(*blocks, strict=True))
    return (
        float(numel),
        *(sum(column) for column in columns[:4]),
        min(columns[4]),
        max(columns[5]),
        math.fsum(columns[6]),
        math.fsum(columns[7]),
    )


def _small(x: NDArray[np.float64]) -> tuple[float, ...]:
    """Return the row of at most SMALL elements by the calls that cost the least (0.2 to 0.5 us)."""
    square = float(x.dot(x))
    if not math.isfinite(square):
        return weigh(x, np.ones(len(x)))
    zeros = float(len(x) - np.count_nonzero(x))
    low, high = x.item(x.argmin()), x.item(x.argmax())
    return (float(len(x)), 0.0, 0.0, 0.0, zeros, low, high, float(x.dot(_ONES64[: len(x)])), square)


def _block(x: Numbers) -> tuple[float, ...]:
    """nan, pos_inf, neg_inf, zeros, min, max, sum, sum_sq of float32 or float64 [n], n > 0."""
    # One NaN makes both NaN, an infinity shows in one of them.
    low, high = float(np.minimum.reduce(x)), float(np.maximum.reduce(x))
    if not (math.isfinite(low) and math.isfinite(high)):
        return weigh(x.astype(np.float64), np.ones(len(x)))[1:]
    zeros = float(np.count_nonzero(x == 0))
    largest = max(-low, high)
    if x.dtype == np.float64 or not SAFE_LOW < largest < SAFE_HIGH:
        total, square = _exact(x.astype(np.float64, copy=False))
    else:
        whole = len(x) // ROW * ROW
        rows = x[:whole].reshape(-1, ROW)
        total = float(np.add.reduce(_dots(rows, _ONES), dtype=np.float64))
        square = float(np.add.reduce(_dots(rows, rows), dtype=np.float64))
        if whole < len(x):
            rest = _exact(x[whole:].astype(np.float64))
            total, square = total + rest[0], square + rest[1]
    return (0.0, 0.0, 0.0, zeros, low, high, total, square)


def _exact(x: NDArray[np.float64]) -> tuple[float, float]:
    """Sum and sum of squares in float64; infinite where they are beyond it."""
    with np.errstate(over="ignore"):
        return float(np.add.reduce(x)), float(np.add.reduce(x * x))


def weigh(x: NDArray[np.float64], times: NDArray[np.float64]) -> tuple[float, ...]:
    """Return the row of `x`, of which each element stands `times` times; both float64 [n]."""
    finite = np.isfinite(x)
    kept, often = x[finite], times[finite]
    with np.errstate(over="ignore"):
        return (
            float(times.sum()),
            float(times[np.isnan(x)].sum()),
            float(times[x == np.inf].sum()),
            float(times[x == -np.inf].sum()),
            float(times[x == 0].sum()),
            float(kept.min(initial=np.inf)),
            float(kept.max(initial=-np.inf)),
            float((kept * often).sum()),
            float((kept * kept * often).sum()),
        )
