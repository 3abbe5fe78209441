"""Histogram and near-zero count of one tensor beside its row, on its device, exactly mergeable.

A wide row is float64 [HEAD + bins]: the row of `stats.rows`, then near_zero (elements with
|x| <= eps), below and above (finite elements outside a fixed range), exponent, and the counts of
the bins. Without a fixed range the bins divide [-2**exponent, 2**exponent) evenly, where
2**exponent is the smallest power of two above every magnitude: two such histograms merge by adding
up neighbouring bins of the finer one, which gives the very counts of the coarser range.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddpprobe.rank.stats import rows
from ddpprobe.rank.stats.cpu import weigh
from ddpprobe.rank.stats.dense import dense, readable
from ddpprobe.rank.stats.native import TABLES, wide_kernels

NEAR_ZERO, BELOW, ABOVE, EXPONENT = range(rows.WIDTH, rows.WIDTH + 4)
HEAD = rows.WIDTH + 4
LOWEST = -1000.0  # exponent of a tensor that holds nothing but zeros
BLOCK = 1 << 15  # elements converted to float64 at a time on the CPU
GPU_BLOCK = 1 << 21  # the same elsewhere: 68 MiB of scratch (34 bytes each)
FEW = 1 << 16  # from this many 16-bit elements on, counting their patterns is faster
PATTERN_BLOCK = 1 << 20  # elements counted at a time, in 4 MiB as int32
_SIXTEEN_BIT = (torch.bfloat16, torch.float16)


def measure(tensor: Tensor, bins: int, limits: tuple[float, float] | None, eps: float) -> Tensor:
    """Return the wide row of `tensor`, float64 [HEAD + bins] on its device; no host sync there.

    Args:
        tensor: any shape, layout, dtype that `stats.rows.reduce` takes.
        bins: number of bins; 0: no histogram. Without `limits` a power of two from 4 up.
        limits: fixed range of the bins; None: the symmetric range that fits (see above).
        eps: largest magnitude that counts as near zero, in the tensor's unit.

    Raises:
        Unsupported: this kind of tensor has no statistics.
    """
    with torch.no_grad():
        flat, repeats = dense(tensor)
        wide = torch.zeros(HEAD + bins, dtype=torch.float64, device=flat.device)
        if flat.dtype in wide_kernels and readable(flat):
            _measure_compiled(flat, repeats, wide, limits, eps)
        elif flat.dtype in _SIXTEEN_BIT and flat.numel() >= FEW and readable(flat):
            values, times = _patterns(flat)
            row = weigh(values.numpy(), times.double().mul_(repeats).numpy())
            wide[: rows.WIDTH] = torch.tensor(row, dtype=torch.float64, device="cpu")
            _fit(wide)
            _count(values, times * repeats, wide, limits, eps)
        else:
            rows.reduce(tensor, wide[: rows.WIDTH])
            _fit(wide)
            times = torch.full((), repeats, device=flat.device)
            for block in flat.split(BLOCK if flat.is_cpu else GPU_BLOCK):
                if block.numel():
                    _count(block.double(), times, wide, limits, eps)
        return wide


def _measure_compiled(
    flat: Tensor, repeats: int, wide: Tensor, limits: tuple[float, float] | None, eps: float
) -> None:
    bins = len(wide) - HEAD
    counts = torch.zeros(TABLES * (bins + 3), dtype=torch.int64, device="cpu")
    low, high = (0.0, 1.0) if limits is None else limits
    wide_kernels[flat.dtype](
        flat.data_ptr(), flat.numel(), repeats,
        bins, limits is not None, low, high, eps,
        counts.data_ptr(), wide.data_ptr(),
    )  # fmt: skip


def _patterns(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers that stand in a 16-bit tensor, float64 [k], and how often, int64 [k].

    At most 65536 patterns, so that all else is done with them instead of with the elements.
    """
    counts = torch.zeros(1 << 16, dtype=torch.int64, device="cpu")
    for block in flat.view(torch.uint16).split(PATTERN_BLOCK):
        counts += torch.bincount(block.int(), minlength=1 << 16)
    found = counts.nonzero().view(-1)
    return found.to(torch.uint16).view(flat.dtype).double(), counts[found]


def _fit(wide: Tensor) -> None:
    peak = torch.maximum(-wide[5], wide[6])
    fits = torch.frexp(peak).exponent.to(torch.float64).clamp(min=LOWEST)
    wide[EXPONENT] = torch.where(torch.isfinite(peak) & (peak > 0), fits, LOWEST)


def _count(
    x: Tensor, times: Tensor, wide: Tensor, limits: tuple[float, float] | None, eps: float
) -> None:
    """Add `x`, float64 [n], of which each element stands `times` times, int64 [n] or []."""
    wide[NEAR_ZERO] += ((x.abs() <= eps) * times).sum()
    bins = len(wide) - HEAD
    if not bins:
        return
    finite = torch.isfinite(x)
    inside = finite
    if limits is None:
        # Scaling by powers of two is exact, so that no element lands beside its bin.
        index = torch.ldexp(x, -wide[EXPONENT]).mul(bins // 2).floor() + bins // 2
    else:
        low, high = limits
        wide[BELOW] += ((finite & (x < low)) * times).sum()
        wide[ABOVE] += ((finite & (x > high)) * times).sum()
        inside = finite & (x >= low) & (x <= high)
        index = ((x - low) * (bins / (high - low))).floor()
    # What does not count goes to a bin of its own after the last: no shape depends on the data.
    slot = torch.where(inside, index.nan_to_num(0.0).clamp(0, bins - 1), bins).long()
    counts = torch.zeros(bins + 1, dtype=torch.int64, device=x.device)
    counts.scatter_add_(0, slot, times.expand_as(slot))
    wide[HEAD:] += counts[:bins]


def empty(bins: int) -> Tensor:
    """Return the identity of `merge`, float64 [HEAD + bins] on the CPU."""
    out = torch.zeros(HEAD + bins, dtype=torch.float64, device="cpu")
    out[: rows.WIDTH] = torch.tensor(rows.EMPTY, dtype=torch.float64, device="cpu")
    out[EXPONENT] = LOWEST
    return out


def merge(a: Tensor, b: Tensor, *, fixed: bool) -> Tensor:
    """Merge wide rows [..., HEAD + bins] of equal shape, pair by pair, on their device.

    Args:
        a: one row or a block of them.
        b: the same.
        fixed: whether the bins have a fixed range (else they are brought to the wider one).
    """
    out = a + b
    for column, extreme in rows.EXTREMES:
        out[..., column] = extreme(a[..., column], b[..., column])
    out[..., EXPONENT] = torch.maximum(a[..., EXPONENT], b[..., EXPONENT])
    if not fixed and a.shape[-1] > HEAD:
        out[..., HEAD:] = _widened(a, out[..., EXPONENT]) + _widened(b, out[..., EXPONENT])
    return out


def _widened(wide: Tensor, exponent: Tensor) -> Tensor:
    """Return the bins of `wide` over the range 2**exponent, which contains theirs."""
    counts = wide[..., HEAD:]
    bins = counts.shape[-1]
    centres = torch.arange(bins, dtype=torch.float64, device=wide.device) + (0.5 - bins / 2)
    shift = (wide[..., EXPONENT] - exponent).unsqueeze(-1).clamp(min=LOWEST)
    index = (torch.ldexp(centres, shift).floor() + bins / 2).long()
    return torch.zeros_like(counts).scatter_add_(-1, index.expand_as(counts), counts)


def edges(wide: Tensor, limits: tuple[float, float] | None) -> Tensor:
    """Return the borders of the bins of one wide row, float64 [bins + 1], ascending."""
    bins = len(wide) - HEAD
    if limits is None:
        high = 2.0 ** float(wide[EXPONENT])
        limits = (-high, high)
    return torch.linspace(*limits, bins + 1, dtype=torch.float64, device="cpu")
