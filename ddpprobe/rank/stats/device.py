"""The reduction of a tensor that is not on the CPU; the host neither waits nor learns anything.

On an NVIDIA GPU with Triton installed it is one kernel that reads the tensor once; elsewhere
torch's own operators, which go over it some ten times and are the reference.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddpprobe.rank import torch_private
from ddpprobe.rank.stats.dense import FLOATS, lies_on
from ddpprobe.rundir.fuse import Fuse

GPU_BLOCK = 1 << 23  # elements that operators take at a time: 96 MiB of scratch (12 bytes each)
_PER_PROCESSOR = 4  # programs of 256 threads and 64 registers each that a multiprocessor holds
_AMPERE = (8, 0)  # the first with bfloat16

if TYPE_CHECKING:
    from ddpprobe.rank.stats.triton_rows import Scratch

_fuse = Fuse("the Triton kernel of the statistics, whose work torch's operators do from now on,")


def reduce_device(flat: Tensor, repeats: int, out: Tensor) -> None:
    """Write a row (see `stats.rows`) in stream order, without a host-device synchronisation.

    Args:
        flat: [n], contiguous, floating.
        repeats: how often each element counts.
        out: float64 [9], contiguous; on another device than `flat` the row is copied there.
    """
    if out.device != flat.device:
        row = torch.empty_like(out, device=flat.device)
        reduce_device(flat, repeats, row)
        out.copy_(row, non_blocking=True)
    # A subclass may have no memory of its own to read.
    elif not (flat.is_cuda and type(flat) is Tensor and _in_one_pass(flat, repeats, out)):
        reduce_by_operators(flat, repeats, out)


def reduce_as_it_lies(tensor: Tensor, rows: Tensor, index: int) -> bool:
    """Write the row of a plain tensor on a CUDA device, of which the kernel is told the address.

    What torch asks before it gives a view, and Triton before a launch, takes the host longer than
    both together.

    Args:
        tensor: of any kind.
        rows: float64 [any, 9], contiguous.
        index: of the row.

    Returns:
        False: it takes another way.
    """
    return rows.is_cuda and bool(_at_address(tensor, rows, index))


@_fuse.guard
def _at_address(tensor: Tensor, rows: Tensor, index: int) -> bool:
    device = rows.device
    kernels, dtype = _kernels(device), tensor.dtype
    if (
        kernels is None
        or dtype not in FLOATS
        or not lies_on(tensor, device)
        or torch.cuda.current_device() != device.index
    ):
        return False
    stream = torch_private.raw_stream(device.index)
    out = rows.data_ptr() + rows.stride(0) * index * rows.element_size()
    made: bool = kernels.reduce_at(
        tensor.data_ptr(), tensor.numel(), dtype, out, _scratch(device, stream), stream,
        device.index,
    )  # fmt: skip
    return made


@_fuse.guard
def _in_one_pass(flat: Tensor, repeats: int, out: Tensor) -> bool:
    """Reduce by the kernel; False (None once it has failed): there is none for this tensor."""
    kernels = _kernels(flat.device)
    if kernels is None or flat.dtype not in FLOATS:
        return False
    with torch.cuda.device(flat.device):
        scratch = _scratch(flat.device, torch_private.raw_stream(flat.device.index))
        kernels.reduce_rows(flat, repeats, out, scratch)
    return True


@functools.cache
def has_kernels(device: torch.device) -> bool:
    """Whether Triton does the work there."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _AMPERE


@functools.cache
def most_programs(device: torch.device) -> int:
    """How many programs of the kernel a CUDA device runs at a time."""
    return _PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Context in which Triton launches on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _kernels(device: torch.device) -> ModuleType | None:
    """Import Triton, if it is there: it takes a second, so not before somebody needs it."""
    if not has_kernels(device):
        return None
    from ddpprobe.rank.stats import triton_rows  # noqa: PLC0415

    return triton_rows


@functools.cache
def _scratch(device: torch.device, stream: int) -> Scratch:  # noqa: ARG001  (a key)
    """Return the memory for parts of rows; streams run side by side, so each has its own."""
    from ddpprobe.rank.stats.triton_rows import Scratch  # noqa: PLC0415

    return Scratch(device, most_programs(device))


def reduce_by_operators(flat: Tensor, repeats: int, out: Tensor) -> None:
    """Do the work of `reduce_device` with torch's operators, on any one device.

    A tensor of one block takes 22 of them, each further block 18.
    """
    blocks = flat.split(GPU_BLOCK) if flat.numel() else ()
    parts = [_row_of(block) for block in blocks]
    if not parts:
        out.zero_()
        out[5].fill_(torch.inf)
        out[6].fill_(-torch.inf)
        return
    row = parts[0] if len(parts) == 1 else _merged(torch.stack(parts))
    if repeats != 1:
        row[:4] *= repeats
        row[6:] *= repeats
    out[0].fill_(flat.numel() * repeats)
    out[1:].copy_(row)


def _row_of(block: Tensor) -> Tensor:
    """nan, pos_inf, neg_inf, zeros, min, max, sum, sum_sq of a non-empty block, float64 [8].

    What the finite elements alone count for is taken with others in the place of the rest. torch
    converts all that it adds up to float64 first, so never two such copies live at a time.
    """
    counts = [
        (block != block).sum(dtype=torch.float64),  # noqa: PLR0124  (NaN alone is not itself)
        (block == torch.inf).sum(dtype=torch.float64),
        (block == -torch.inf).sum(dtype=torch.float64),
        (block == 0).sum(dtype=torch.float64),
    ]
    low, high = _filled(block, torch.inf).amin(), _filled(block, -torch.inf).amax()
    kept = _filled(block, 0.0).double()
    return torch.stack((*counts, low, high, kept.sum(), torch.dot(kept, kept))).double()


def _filled(block: Tensor, value: float) -> Tensor:
    """Return `block` with `value` for whatever is not finite."""
    return torch.nan_to_num(block, nan=value, posinf=value, neginf=value)


def _merged(parts: Tensor) -> Tensor:
    """Merge float64 [blocks, 8] into [8]."""
    row = parts.sum(0)
    torch.amin(parts[:, 4], 0, out=row[4])
    torch.amax(parts[:, 5], 0, out=row[5])
    return row
