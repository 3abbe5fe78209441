"""The reduction of a tensor that is not on the CPU; the host neither waits nor learns anything.

On an NVIDIA GPU with Triton installed it is one kernel that reads the tensor once; elsewhere
torch's own operators, which go over it some ten times and are the reference.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

from ddpprobe.fuse import Fuse
from ddpprobe.stats.dense import FLOATS

GPU_BLOCK = 1 << 24  # elements converted to float64 at a time: 128 MiB of scratch at most
_PER_PROCESSOR = 4  # programs of 256 threads and 64 registers each that a multiprocessor holds
_AMPERE = (8, 0)  # the first with bfloat16

Kernel = Callable[[Tensor, int, Tensor, Tensor], None]

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


@_fuse.guard
def _in_one_pass(flat: Tensor, repeats: int, out: Tensor) -> bool:
    """Reduce by the kernel; False (None once it has failed): there is none for this tensor."""
    kernel = _kernel(flat.device)
    if kernel is None or flat.dtype not in FLOATS:
        return False
    with torch.cuda.device(flat.device):
        scratch = _scratch(flat.device, torch.cuda.current_stream().cuda_stream, len(out))
        kernel(flat, repeats, out, scratch)
    return True


@functools.cache
def _kernel(device: torch.device) -> Kernel | None:
    """Import Triton, if it is there: with the first tensor that needs it, as it takes a second."""
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return None
    if torch.cuda.get_device_capability(device) < _AMPERE:
        return None
    from ddpprobe.stats.triton_rows import reduce_rows  # noqa: PLC0415

    return reduce_rows


@functools.cache
def _scratch(device: torch.device, stream: int, width: int) -> Tensor:  # noqa: ARG001  (a key)
    """Return the memory for parts of rows; streams run side by side, so each has its own."""
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    shape = _PER_PROCESSOR * processors, width
    return torch.empty(shape, dtype=torch.float64, device=device)


def reduce_by_operators(flat: Tensor, repeats: int, out: Tensor) -> None:
    """Do the work of `reduce_device` with torch's operators, on any one device."""
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
