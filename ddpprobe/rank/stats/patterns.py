"""Elements of one tensor counted by sign and exponent, on its device, without a host sync.

The top nine bits of a float32 are its sign and its exponent: 512 patterns, from which
`records.histogram.fold` makes the bins once they are on the host. There the loss scale is known,
by which gradients are too large, and a power of two moves exponents without an error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddpprobe.rank.stats.dense import dense, readable
from ddpprobe.rank.stats.native import pattern_kernels
from ddpprobe.records.histogram import PATTERNS

BLOCK = 1 << 18  # elements taken at a time on the CPU: 4 MiB of scratch
GPU_BLOCK = 1 << 22  # the same elsewhere: 64 MiB of scratch (16 bytes each)
# Tables on a GPU, joined at the end: most elements share a few exponents, and those who add to one
# number at a time wait for each other.
_LANES = 64
_MANTISSA, _EXPONENTS = 23, 0x1FF
_DOUBLE_MANTISSA, _DOUBLE_EXPONENTS, _REBIAS = 52, 0x7FF, 1023 - 127


def count_patterns(tensor: Tensor, out: Tensor) -> None:
    """Write how many elements have which sign and exponent; zeros are left out.

    Args:
        tensor: any shape, layout and dtype that `stats.rows.reduce` takes.
        out: float64 [PATTERNS], contiguous, on the device of `tensor`.

    Raises:
        Unsupported: this kind of tensor has no statistics.
    """
    with torch.no_grad():
        flat, repeats = dense(tensor)
        kernel = pattern_kernels.get(flat.dtype)
        if kernel is not None and out.is_cpu and readable(flat):
            kernel(flat.data_ptr(), flat.numel(), repeats, out.data_ptr())
            return
        out.zero_()
        for block in flat.split(BLOCK if out.is_cpu else GPU_BLOCK) if flat.numel() else ():
            index = _patterns(block)
            out += (_counted(index) if index.is_cpu else _counted_in_lanes(index))[:PATTERNS]
        if repeats != 1:
            out *= repeats


def _patterns(block: Tensor) -> Tensor:
    """Return the pattern of each element, int64 [n]; `PATTERNS` for a zero."""
    if block.dtype == torch.float64:
        bits = block.view(torch.int64)
        exponent = (bits >> _DOUBLE_MANTISSA) & _DOUBLE_EXPONENTS
        # What a float32 cannot hold goes to its largest and smallest exponent; 255 is no number.
        near = (exponent - _REBIAS).clamp(0, PATTERNS // 2 - 2)
        near = torch.where(exponent == _DOUBLE_EXPONENTS, PATTERNS // 2 - 1, near)
        index = near + (bits < 0) * (PATTERNS // 2)
    else:
        bits = block.float().view(torch.int32)
        index = ((bits >> _MANTISSA) & _EXPONENTS).long()
    return torch.where(block == 0, PATTERNS, index)


def _counted(index: Tensor) -> Tensor:
    return torch.bincount(index, minlength=PATTERNS + 1)


def _counted_in_lanes(index: Tensor) -> Tensor:
    """Count without `bincount`, which asks a GPU for the largest index and waits for the answer."""
    width = PATTERNS + 1
    lane = torch.arange(len(index), device=index.device) % _LANES
    counts = torch.zeros(_LANES * width, dtype=torch.int64, device=index.device)
    one = torch.ones((), dtype=torch.int64, device=index.device)
    counts.scatter_add_(0, lane * width + index, one.expand_as(index))
    return counts.view(_LANES, width).sum(0)
