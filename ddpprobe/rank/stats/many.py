"""Many tensors of one GPU by a few launches: what the kernels must know of them, in a table.

A launch costs the host more than the numbers of a small tensor cost the device. Reduced gradients
and checksums are taken of many tensors at once, so these are put into a table of addresses and
lengths, which a kernel reads. It goes to the device from pinned memory, so that the host does not
wait, and only if it has changed: of a training whose allocator gives gradients the same places
again, nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpprobe.rank import torch_private
from ddpprobe.rank.stats.checksum import factors
from ddpprobe.rank.stats.dense import FLOATS
from ddpprobe.rank.stats.device import has_kernels, most_programs, on
from ddpprobe.rundir.fuse import Fuse

ITEMS = 1 << 16  # programs of a launch, and rows of scratch: 4.5 MiB
_VECTOR, _WORD = 16, 8  # bytes that a kernel reads at once, if addresses are multiples of them

_fuse = Fuse("the Triton kernels of many tensors, which are taken one by one from now on,")


class KernelEntry(NamedTuple):
    """One tensor: where it lies, two numbers for the kernel, its row, its kind of launch."""

    address: int
    size: int
    factor: int
    row: int
    kind: int


class _Launch(NamedTuple):
    """Tensors of one kind, as slices of `KernelTable.entries` and `KernelTable.owners`."""

    kind: int
    entries: slice
    owners: slice
    merges: bool


@final
class KernelTable:
    """What a kernel must know of many tensors; on their device, and sent there when it changes.

    Attributes:
        entries: int64 [tensors, 6]: address, size, factor, programs, number of the first of these
            within its launch, and row.
        owners: int32 [programs of all launches]: which tensor of its launch a program is for.
        sent: how often something was sent to the device.
    """

    def __init__(self) -> None:
        self.entries = self.owners = torch.empty(0)
        self.sent = 0
        self._told = np.empty((0, len(KernelEntry._fields)), np.int64)
        self._place: object = None
        self._order: NDArray[np.intp] = np.empty(0, np.intp)
        self._rest = np.empty((0, 5), np.int64)  # the columns of entries but the first
        self._launches: list[_Launch] = []

    def lay(
        self,
        tensors: Sequence[KernelEntry],
        programs: Callable[[int, int], int],
        device: torch.device,
    ) -> list[_Launch]:
        """Describe `tensors` on `device`; `programs` of (size, kind) says how many share one."""
        entries = np.array(tensors, np.int64).reshape(-1, len(KernelEntry._fields))
        place = device, torch_private.raw_stream(device.index) if device.type == "cuda" else 0
        moved = place != self._place  # another stream might read before all has arrived
        if moved or not np.array_equal(entries[:, 1:], self._told[:, 1:]):
            owners = self._arrange(entries, programs)
            self.owners = self._send(owners, device)
            moved = True
        if moved or not np.array_equal(entries[:, 0], self._told[:, 0]):
            addresses = entries[self._order, :1]
            self.entries = self._send(np.concatenate((addresses, self._rest), 1), device)
        self._told, self._place = entries, place
        return self._launches

    def _arrange(
        self, entries: NDArray[np.int64], programs: Callable[[int, int], int]
    ) -> NDArray[np.int32]:
        """Put tensors of one kind into launches of at most ITEMS programs."""
        self._order = np.argsort(entries[:, 4], kind="stable")
        entries = entries[self._order]
        counts = np.array([programs(size, kind) for size, kind in entries[:, [1, 4]].tolist()], int)
        self._launches, owners = [], []
        firsts = np.zeros(len(entries), np.int64)
        start = items = sent = 0
        kinds = entries[:, 4].tolist()
        for index, count in enumerate([*counts.tolist(), 0]):
            last = index == len(entries)
            if index > start and (last or kinds[index] != kinds[start] or items + count > ITEMS):
                part = slice(start, index)
                merges = bool(counts[part].max() > 1)
                self._launches.append(
                    _Launch(kinds[start], part, slice(sent, sent + items), merges)
                )
                owners.append(np.repeat(np.arange(index - start, dtype=np.int32), counts[part]))
                start, sent, items = index, sent + items, 0
            if not last:
                firsts[index] = items
                items += count
        columns = entries[:, 1], entries[:, 2], counts, firsts, entries[:, 3]
        self._rest = np.stack(columns, 1).astype(np.int64)
        return np.concatenate(owners) if owners else np.empty(0, np.int32)

    def _send(self, numbers: NDArray[np.int64] | NDArray[np.int32], device: torch.device) -> Tensor:
        self.sent += 1
        host = torch.from_numpy(numbers)
        if device.type == "cuda":
            # Torch does not give this memory to anybody before it has been copied.
            host = host.pin_memory()
        return host.to(device, non_blocking=True, copy=True)


def reduce_many(
    tensors: Sequence[tuple[Tensor, int, int]], rows: Tensor, table: KernelTable
) -> bool:
    """Write the rows of many tensors; False (None once it has failed): one by one, please.

    Args:
        tensors: (elements, repeats, index of the row), each plain, contiguous and floating.
        rows: float64 [any, 9], contiguous, on the CUDA device of all the tensors.
        table: remembers what it has said of them.
    """
    return bool(_reduce(tensors, rows, table))


def checksum_many(tensors: Sequence[tuple[Tensor, int]], rows: Tensor, table: KernelTable) -> bool:
    """Write the checksums of many tensors; False: one by one, please.

    Args:
        tensors: (tensor, index of the row), each plain and contiguous.
        rows: int64 [any, 9], contiguous, on the CUDA device of all the tensors; a checksum goes to
            the first column.
        table: remembers what it has said of them.
    """
    return bool(_checksum(tensors, rows, table))


@_fuse.guard
def _reduce(tensors: Sequence[tuple[Tensor, int, int]], rows: Tensor, table: KernelTable) -> bool:
    if not has_kernels(rows.device):
        return False
    from ddpprobe.rank.stats import triton_rows  # noqa: PLC0415

    told = [
        KernelEntry(
            address := tensor.data_ptr(), tensor.numel(), repeats, row,
            2 * FLOATS.index(tensor.dtype) + (address % _VECTOR == 0),
        )
        for tensor, repeats, row in tensors
    ]  # fmt: skip
    most = most_programs(rows.device)

    def programs(numel: int, kind: int) -> int:
        return triton_rows.programs_of(numel, FLOATS[kind // 2].itemsize, most)

    with on(rows.device):
        launches = table.lay(told, programs, rows.device)
        scratch = _scratch(launches, rows, rows.shape[1])
        for launch in launches:
            triton_rows.reduce_many(
                table.entries[launch.entries], table.owners[launch.owners], rows, scratch,
                FLOATS[launch.kind // 2], aligned=launch.kind % 2 == 1, merges=launch.merges,
            )  # fmt: skip
    return True


@_fuse.guard
def _checksum(tensors: Sequence[tuple[Tensor, int]], rows: Tensor, table: KernelTable) -> bool:
    if not has_kernels(rows.device):
        return False
    from ddpprobe.rank.stats import triton_words  # noqa: PLC0415

    told = [
        KernelEntry(
            address := tensor.data_ptr(), tensor.nbytes, tensor.numel(), row, address % _WORD == 0
        )
        for tensor, row in tensors
    ]
    most = most_programs(rows.device)
    with on(rows.device):
        share = lambda size, _: triton_words.programs_of(size, most)  # noqa: E731
        launches = table.lay(told, share, rows.device)
        scratch = _scratch(launches, rows, 1)
        for launch in launches:
            triton_words.add_many(
                table.entries[launch.entries], table.owners[launch.owners], factors(rows.device),
                rows, scratch, aligned=launch.kind == 1, most=most,
            )  # fmt: skip
    return True


def _scratch(launches: Sequence[_Launch], rows: Tensor, width: int) -> Tensor:
    """Memory for parts of rows, for one launch after the other."""
    items = max((launch.owners.stop - launch.owners.start for launch in launches), default=0)
    return torch.empty((items, width), dtype=rows.dtype, device=rows.device)
