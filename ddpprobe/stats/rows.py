"""One row of statistics per tensor, on the tensor's device, without a host-device synchronisation.

A row is float64 [9]: numel, nan, pos_inf, neg_inf, zeros, min, max, sum, sum_sq; the last four over
the finite elements. Counts are integers below 2**53 and so exact in float64; they become int64 when
the rows leave the device.
"""

from __future__ import annotations

import contextlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpprobe.records import COUNTS, VALUES, Counts, Values, empty_rows
from ddpprobe.stats.cpu import reduce_cpu
from ddpprobe.stats.dense import Unsupported, dense

ROW = ("numel", "nan", "pos_inf", "neg_inf", "zeros", "min", "max", "sum", "sum_sq")
WIDTH = len(ROW)
NONFINITE = slice(1, 4)  # columns nan, pos_inf, neg_inf
EMPTY = (0.0, 0.0, 0.0, 0.0, 0.0, float("inf"), float("-inf"), 0.0, 0.0)
GPU_BLOCK = 1 << 24  # elements converted to float64 at a time: 128 MiB of scratch at most

__all__ = ["EMPTY", "NONFINITE", "ROW", "WIDTH", "Unsupported", "reduce", "split_rows"]


def reduce(tensor: Tensor, out: Tensor) -> None:
    """Write the row of `tensor` (any shape, layout, dtype) to `out`, float64 [9] on its device.

    Raises:
        Unsupported: this kind of tensor has no statistics (meta, quantized, ...).
    """
    with torch.no_grad(), _full_precision(out.device.type):
        flat, repeats = dense(tensor)
        if flat.device.type == "cpu":
            row = reduce_cpu(flat) if flat.numel() else EMPTY
            if repeats > 1:
                row = _repeat(row, repeats)
            out.copy_(torch.tensor(row, dtype=torch.float64, device="cpu"))
        else:
            _reduce_device(flat, repeats, out)


def _full_precision(device: str) -> contextlib.AbstractContextManager[object]:
    """Switch the user's autocast off for our own arithmetic (building the context costs 8 us)."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _repeat(row: tuple[float, ...], times: int) -> tuple[float, ...]:
    """Row of a tensor whose every element stands `times` times (broadcast, stride 0)."""
    return (*(v * times for v in row[:5]), *row[5:7], *(v * times for v in row[7:]))


def _reduce_device(flat: Tensor, repeats: int, out: Tensor) -> None:
    out.zero_()
    out[5].fill_(torch.inf)
    out[6].fill_(-torch.inf)
    for block in flat.split(GPU_BLOCK) if flat.numel() else ():
        x = block.double()
        finite = torch.isfinite(x)
        kept = torch.where(finite, x, 0.0)
        sums = torch.stack(
            (
                torch.isnan(x).sum(dtype=torch.float64),
                (x == torch.inf).sum(dtype=torch.float64),
                (x == -torch.inf).sum(dtype=torch.float64),
                (x == 0).sum(dtype=torch.float64),
                kept.sum(),
                torch.dot(kept, kept),
            )
        )
        out[0] += x.numel() * repeats
        out[1:5] += sums[:4] * repeats
        out[7:] += sums[4:] * repeats
        out[5] = torch.minimum(out[5], torch.where(finite, x, torch.inf).amin())
        out[6] = torch.maximum(out[6], torch.where(finite, x, -torch.inf).amax())


def split_rows(
    rows: NDArray[np.float64], slots: NDArray[np.int64], sites: int
) -> tuple[Counts, Values]:
    """Merge rows [calls, 9] of one step into counts and values, one row per site.

    Args:
        rows: float64 [calls, 9], in execution order.
        slots: int64 [calls], the site of each row.
        sites: number of sites.
    """
    counts, values = empty_rows(sites)
    numeric = rows[:, :5].astype(np.int64)
    for column in range(5):
        np.add.at(counts[:, column], slots, numeric[:, column])
    np.add.at(counts[:, COUNTS.index("observed")], slots, 1)
    np.minimum.at(values[:, 0], slots, rows[:, 5])
    np.maximum.at(values[:, 1], slots, rows[:, 6])
    for column in range(2, len(VALUES)):
        np.add.at(values[:, column], slots, rows[:, 5 + column])
    return counts, values
