"""Compiling the Triton kernels where waiting is allowed: in `install`, not in a sampled forward.

Triton takes a second or two to be imported, and about as long for each kernel it has not in its
cache: one per dtype, and one more for tensors that do not begin at a multiple of 16 bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ddpprobe.rank.stats import native
from ddpprobe.rank.stats.dense import FLOATS
from ddpprobe.rank.stats.device import has_kernels, reduce_device
from ddpprobe.rank.stats.many import KernelTable, checksum_many, reduce_many
from ddpprobe.rank.stats.rows import WIDTH
from ddpprobe.rundir.fuse import Fuse

SECONDS = 60.0  # after which no other kernel is begun: what is missing is made when it is needed
_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)  # what autocast makes of any model
_BYTES = 1 << 17  # of a tensor that several programs share, which are merged


def compile_kernels(device: torch.device, parameters: Sequence[Tensor]) -> None:
    """Compile what the statistics of a model need, so that no step ever does.

    Args:
        device: where it computes.
        parameters: of it.
    """
    native.prepare()
    Fuse("compiling the Triton kernels").guard(warm_up)(
        dict.fromkeys((device, *(p.device for p in parameters))), {p.dtype for p in parameters}
    )


def warm_up(devices: Iterable[torch.device], dtypes: Iterable[torch.dtype]) -> None:
    """Have Triton compile what tensors of these dtypes need, on each CUDA device that has Triton.

    Launches kernels on a few zeros and waits for none of them.
    """
    deadline = time.monotonic() + SECONDS
    known = [dtype for dtype in FLOATS if dtype in set(dtypes)]
    wanted = [*known, *(dtype for dtype in _AUTOCAST if dtype not in known)]
    for device in devices:
        if has_kernels(device):
            _launch(device, wanted, deadline)


def _launch(device: torch.device, dtypes: Iterable[torch.dtype], deadline: float) -> None:
    row = torch.zeros((1, WIDTH), dtype=torch.float64, device=device)
    table = KernelTable()
    for dtype in dtypes:
        for flat in _alignments(torch.zeros(_BYTES // dtype.itemsize, dtype=dtype, device=device)):
            if time.monotonic() > deadline:
                return
            reduce_device(flat, 1, row[0])
            reduce_many([(flat, 1, 0)], row, table)
    for data in _alignments(torch.zeros(_BYTES, dtype=torch.uint8, device=device)):
        checksum_many([(data, 0)], row.view(torch.int64), table)


def _alignments(tensor: Tensor) -> tuple[Tensor, Tensor]:
    return tensor, tensor[1:]
