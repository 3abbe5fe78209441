"""A 64-bit checksum of a tensor's bits, computed where the tensor lives.

Replicas that should be equal are compared by it. Each 64-bit word is multiplied by an odd constant
of its position and all are added up modulo 2**64 (multilinear hashing, Carter and Wegman 1979): an
odd factor is invertible, so one flipped bit always changes the sum, and words that change places
change it too.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ddpprobe.rank.stats.dense import local
from ddpprobe.rank.stats.native import word_kernels

_ROW = 1 << 16  # words that share a table of factors (512 KiB)
_CPU_WORDS, _GPU_WORDS = 1 << 16, 1 << 22  # words multiplied at a time: scratch of 0.5 and 32 MiB
_TABLES_SEED = 0x6464_7070  # any, but the same on all ranks


def checksum(tensor: Tensor, out: Tensor) -> None:
    """Write the checksum of `tensor`'s local part (any shape and dtype) to `out`, int64 []."""
    with torch.no_grad():
        words = _words(local(tensor))
        within, between = factors(words.device)
        out.fill_(tensor.numel())
        add = word_kernels.get(words.dtype)
        if add is not None and words.is_cpu and out.is_cpu:
            tables = within.data_ptr(), between.data_ptr()
            add(words.data_ptr(), words.numel(), *tables, out.data_ptr())
            return
        step = _CPU_WORDS if words.device.type == "cpu" else _GPU_WORDS
        for start in range(0, words.numel(), step):
            block = words[start : start + step]
            whole = block.numel() // _ROW * _ROW
            row = start // _ROW % _ROW
            if whole:
                sums = (block[:whole].view(-1, _ROW) * within).sum(1)
                out += (sums * between[row : row + len(sums)]).sum()
            rest = block[whole:]
            if rest.numel():
                factor = between[(row + whole // _ROW) % _ROW]
                out += (rest * within[: rest.numel()]).sum() * factor


def prepare(device: torch.device) -> None:
    """Bring the factors to a device, so that no sampled step has to."""
    factors(device)


def _words(tensor: Tensor) -> Tensor:
    """Return the bits as int64 [n]; a view of them where their place in memory allows it."""
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    data = tensor.contiguous().view(-1)
    if data.dtype == torch.bool:
        data = data.view(torch.uint8)
    if data.is_complex():
        data = torch.view_as_real(data).view(-1)
    per_word = 8 // data.element_size()
    whole = data.numel() // per_word * per_word
    if data.storage_offset() % per_word:
        data = data.clone()
    words = data[:whole].view(torch.int64)
    if whole < data.numel():
        tail = torch.zeros(per_word, dtype=data.dtype, device=data.device)
        tail[: data.numel() - whole] = data[whole:]
        words = torch.cat((words, tail.view(torch.int64)))
    return words


@functools.cache
def factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """Odd factors of the words within a row, and of the rows: int64 [65536] each."""
    generator = torch.Generator("cpu").manual_seed(_TABLES_SEED)
    bounds = torch.iinfo(torch.int64)
    draw = torch.randint(
        bounds.min, bounds.max, (2, _ROW), generator=generator, device="cpu", dtype=torch.int64
    )
    factors = draw | 1
    if device.type == "cuda":  # or the host would wait for its copy
        factors = factors.pin_memory()
    within, between = factors.to(device, non_blocking=True)
    return within, between
