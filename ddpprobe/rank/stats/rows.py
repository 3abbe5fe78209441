"""One row of statistics per tensor, on the tensor's device, without a host-device synchronisation.

A row is float64 [9]: the columns of `records.step.COLUMNS` that are of elements, in their order.
Counts are integers below 2**53 and so exact in float64; they become int64 when the rows leave the
device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpprobe.rank.stats.cpu import reduce_cpu
from ddpprobe.rank.stats.dense import FLOATS, Unsupported, dense, local, readable
from ddpprobe.rank.stats.device import reduce_as_it_lies, reduce_device
from ddpprobe.rank.stats.many import KernelTable, reduce_many
from ddpprobe.rank.stats.native import row_kernels
from ddpprobe.rank.stats.sparse import reduce_coalesced
from ddpprobe.records.step import (
    COLUMNS,
    NONFINITE,
    OBSERVED,
    TENSORS,
    Counts,
    Values,
    empty_rows,
)

_COLUMNS = [column for column in COLUMNS if column.unit != TENSORS]
_COUNTED = sum(column.dtype == "int64" for column in _COLUMNS)  # they come first
ROW = tuple(column.name for column in _COLUMNS)
WIDTH = len(ROW)
EMPTY = tuple(float(column.identity) for column in _COLUMNS)
_TORCH: dict[np.ufunc, Callable[[Tensor, Tensor], Tensor]] = {
    np.minimum: torch.minimum,
    np.maximum: torch.maximum,
}
# The columns that do not add up, and torch's operator for the merge of each.
EXTREMES = [(i, _TORCH[c.merge]) for i, c in enumerate(_COLUMNS) if c.merge is not np.add]
_ROW_BYTES = WIDTH * 8
Nonfinite = tuple[int, int, int, int]  # NaN, +Inf, -Inf, elements

__all__ = [
    "EMPTY", "EXTREMES", "NONFINITE", "ROW", "WIDTH",
    "KernelTable", "Nonfinite", "Unsupported", "nonfinite_of", "reduce", "reduce_all", "reduce_far",
    "reduce_far_into", "reduce_into", "split_rows",
]  # fmt: skip


def reduce(tensor: Tensor, out: Tensor) -> None:
    """Write the row of `tensor` (any shape, layout, dtype) to `out`, float64 [9], contiguous.

    Raises:
        Unsupported: this kind of tensor has no statistics (meta, quantized, ...).
    """
    kernel = row_kernels.get(tensor.dtype)
    if kernel is not None and out.is_cpu and readable(tensor):
        kernel(tensor.data_ptr(), tensor.numel(), 1, out.data_ptr())
    else:
        _reduce_any(tensor, out)


def reduce_into(tensor: Tensor, rows: Tensor, index: int) -> bool:
    """Do as `reduce` does for `rows[index]` of float64 [n, 9], contiguous.

    Returns whether the host can see a NaN or an infinity in it.

    On the CPU without making that view, which costs a third of the reduction of a small tensor.
    """
    kernel = row_kernels.get(tensor.dtype)
    if kernel is not None and rows.is_cpu and readable(tensor):
        return kernel(tensor.data_ptr(), tensor.numel(), 1, rows.data_ptr() + index * _ROW_BYTES)
    _reduce_any(tensor, rows[index])
    return rows.is_cpu and bool(rows[index, NONFINITE].any())


def nonfinite_of(tensor: Tensor) -> Nonfinite:
    """Count what is not finite in a tensor that the host can read.

    Raises:
        Unsupported: this kind of tensor has no statistics.
    """
    row = torch.empty(WIDTH, dtype=torch.float64, device="cpu")
    reduce(tensor, row)
    numel, nan, pos_inf, neg_inf = (int(v) for v in row[:4].tolist())
    return nan, pos_inf, neg_inf, numel


def reduce_far(tensor: Tensor, out: Tensor) -> None:
    """Do as `reduce` does where both are on one device that the host does not look into.

    Raises:
        Unsupported: this kind of tensor has no statistics.
    """
    with torch.no_grad():
        repeated = tensor.layout == torch.sparse_coo and not tensor.is_coalesced()
        flat, repeats = (tensor, 1) if repeated else dense(tensor)
        with _full_precision(out.device.type):
            if repeated:
                reduce_coalesced(local(tensor), out)
            else:
                reduce_device(flat, repeats, out)


def reduce_far_into(tensor: Tensor, rows: Tensor, index: int) -> None:
    """Do as `reduce_far` does for `rows[index]` of float64 [n, 9], contiguous.

    Raises:
        Unsupported: this kind of tensor has no statistics.
    """
    if not reduce_as_it_lies(tensor, rows, index):
        reduce_far(tensor, rows[index])


def reduce_all(
    tensors: Sequence[tuple[Tensor, int, int]], rows: Tensor, table: KernelTable
) -> None:
    """Write the rows of many tensors of one device that is not the CPU, by few launches if it can.

    Args:
        tensors: elements that lie one after the other, how often each counts, and the index of
            the row; all on the device of `rows`.
        rows: float64 [any, 9], contiguous.
        table: remembers what a kernel was told.
    """
    with torch.no_grad(), _full_precision(rows.device.type):
        if not reduce_many(tensors, rows, table):
            for flat, repeats, index in tensors:
                reduce_device(flat.detach().view(-1), repeats, rows[index])


def _reduce_any(tensor: Tensor, out: Tensor) -> None:
    if out.is_cpu and tensor.dtype in FLOATS and readable(tensor):
        out.numpy()[:] = _row(tensor.detach().view(-1), 1)
        return
    with torch.no_grad(), _full_precision(out.device.type):
        flat, repeats = dense(tensor)
        if not flat.is_cpu or type(flat) is not Tensor:  # what a subclass holds, it alone knows
            reduce_device(flat, repeats, out)
        elif out.is_cpu:
            kernel = row_kernels.get(flat.dtype)
            if kernel is not None and readable(flat):
                kernel(flat.data_ptr(), flat.numel(), repeats, out.data_ptr())
            else:
                out.numpy()[:] = _row(flat, repeats)
        else:
            out.copy_(torch.tensor(_row(flat, repeats), dtype=torch.float64, device="cpu"))


def _row(flat: Tensor, repeats: int) -> tuple[float, ...]:
    row = reduce_cpu(flat) if flat.numel() else EMPTY
    return row if repeats == 1 else _repeat(row, repeats)


def _full_precision(device: str) -> contextlib.AbstractContextManager[object]:
    """Switch the user's autocast off for our own arithmetic (building the context costs 8 us)."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return contextlib.nullcontext()


def _repeat(row: tuple[float, ...], times: int) -> tuple[float, ...]:
    """Row of a tensor whose every element stands `times` times (broadcast, stride 0)."""
    pairs = zip(row, _COLUMNS, strict=True)
    return tuple(v * times if column.merge is np.add else v for v, column in pairs)


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
    numeric = rows[:, :_COUNTED].astype(np.int64)
    np.add.at(counts[:, OBSERVED], slots, 1)
    for i, column in enumerate(_COLUMNS):
        if i < _COUNTED:
            column.merge.at(counts[:, i], slots, numeric[:, i])
        else:
            column.merge.at(values[:, i - _COUNTED], slots, rows[:, i])
    return counts, values
