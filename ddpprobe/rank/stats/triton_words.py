"""The checksums of many tensors on a GPU, in two launches; the same bits as `stats.checksum`.

Words are multiplied and added modulo 2**64, where the order of additions does not matter: each
program adds up the words of its blocks, and one more per tensor adds up the programs. A tensor is
so many bytes here, of whatever dtype; what is missing of its last word is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_ROW = tl.constexpr(1 << 16)  # words that share a table of factors, as in `stats.checksum`
_BLOCK = tl.constexpr(1 << 10)  # words at a time, all in one such row
_COLUMNS = tl.constexpr(6)  # of a table: address, size, factor, programs, first item, row
_WIDTH = tl.constexpr(9)  # of a row of `out`
_BLOCKS = 4  # of a program at least


def programs_of(size: int, most: int) -> int:
    """Return how many programs share a tensor of `size` bytes, 1 to `most`."""
    shares: int = -(-size // (8 * _BLOCK.value * _BLOCKS))
    return max(1, min(shares, most))


def add_many(
    table: Tensor, owners: Tensor, factors: tuple[Tensor, Tensor], out: Tensor, scratch: Tensor, *,
    aligned: bool, most: int,
) -> None:  # fmt: skip
    """Write the checksums of many tensors that are on the current CUDA device.

    Args:
        table: int64 [tensors, 6], contiguous: address, bytes, elements, programs, number of the
            first of them, and row of each tensor.
        owners: int32 [programs], contiguous: which tensor each program is for.
        factors: of the words within a row, and of the rows, int64 [65536] each.
        out: int64 [any, 9], contiguous; a checksum goes to the first column.
        scratch: int64 [programs], contiguous. Nobody else's until the kernels have run.
        aligned: all addresses are multiples of 8.
        most: programs of one tensor, the same for all tensors of a device.
    """
    _add[(len(owners),)](table, owners, *factors, scratch, aligned=aligned, num_warps=4)
    block = triton.next_power_of_2(most)
    _total[(len(table),)](table, scratch, out, block=block, num_warps=1)


@triton.jit(do_not_specialize=["table", "owners", "within", "between", "scratch"])
def _add(table, owners, within, between, scratch, aligned: tl.constexpr):
    """Add up the words of each program's blocks."""
    item = tl.program_id(0)
    entry = table + tl.load(owners + item) * _COLUMNS
    address = tl.load(entry)
    size = tl.load(entry + 1)
    programs = tl.load(entry + 3)
    program = item - tl.load(entry + 4)
    blocks = (size + 8 * _BLOCK - 1) // (8 * _BLOCK)
    lanes = tl.arange(0, _BLOCK)
    total = tl.zeros([_BLOCK], tl.int64)
    for block in range(program, blocks, programs):
        start = block * _BLOCK
        at = start + lanes
        if aligned:
            whole = size // 8
            words = address.to(tl.pointer_type(tl.int64))
            word = tl.load(words + at, mask=at < whole, other=0)
            if start + _BLOCK > whole:
                word += _by_bytes(address, at, size, at >= whole)
        else:
            word = _by_bytes(address, at, size, at >= 0)
        factor = tl.load(between + start // _ROW % _ROW)
        total += word * tl.load(within + start % _ROW + lanes) * factor
    tl.store(scratch + item, tl.sum(total, 0))


@triton.jit
def _by_bytes(address, at, size, chosen):
    """Words put together of the bytes that are there, lowest first; 0 where not `chosen`."""
    data = address.to(tl.pointer_type(tl.uint8))
    word = tl.zeros([_BLOCK], tl.int64)
    for byte in tl.static_range(8):
        place = at * 8 + byte
        value = tl.load(data + place, mask=chosen & (place < size), other=0)
        word += value.to(tl.int64) << (8 * byte)
    return word


@triton.jit(do_not_specialize=["table", "scratch", "out"])
def _total(table, scratch, out, block: tl.constexpr):
    """Add up what the programs of each tensor have left in scratch, and its length."""
    entry = table + tl.program_id(0) * _COLUMNS
    programs = tl.load(entry + 3)
    at = tl.arange(0, block)
    parts = tl.load(scratch + tl.load(entry + 4) + at, mask=at < programs, other=0)
    tl.store(out + tl.load(entry + 5) * _WIDTH, tl.sum(parts, 0) + tl.load(entry + 2))
