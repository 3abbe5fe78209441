"""What histograms of named sites are made of: a row of counts per call, on the tensor's device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpprobe.rank.hooks.lanes import Arrival
from ddpprobe.rank.hooks.row_buffer import RowBuffer
from ddpprobe.rank.stats.dense import Unsupported
from ddpprobe.rank.stats.patterns import count_patterns
from ddpprobe.records.histogram import PATTERNS
from ddpprobe.records.step import Site

MOST_SITES = 128  # of a rank that have a histogram: those that come first
MOST_CALLS = 4096  # of a step; 16 MiB on the device. A site that has more has no histogram then
_FIRST_CAPACITY = 32
_TOO_MANY_SITES = f"histogram: a rank has at most {MOST_SITES}"
_TOO_MANY_CALLS = f"histogram: a step has at most {MOST_CALLS} calls with one"


class PendingBins(NamedTuple):
    """Counts of one device on their way to the host.

    Attributes:
        rows: int64 [calls], which row of the step each belongs to.
        counts: float64 [calls, PATTERNS].
        arrival: None: they are there.
    """

    rows: NDArray[np.int64]
    counts: Tensor
    arrival: Arrival | None


@final
class BinRows:
    """The counts of a step under way, beside its rows.

    Args:
        named: whether a module or parameter of this FQN has histograms.

    Attributes:
        left_out: tensors of this step that should have been counted and were not, by reason.
    """

    def __init__(self, named: Callable[[str], bool]) -> None:
        self._named = named
        self.left_out: Counter[str] = Counter()
        self._number: dict[int, int] = {}  # by slot; 0: it has no histogram
        self._buffers: dict[torch.device, RowBuffer] = {}
        self._rows: dict[torch.device, list[int]] = {}

    def begin(self) -> None:
        """Forget the last step; the buffers stay."""
        self.left_out.clear()
        for device, buffer in self._buffers.items():
            buffer.begin()
            self._rows[device] = []

    def add(self, slot: int, site: Site, index: int, tensor: Tensor) -> None:
        """Count the elements of a tensor of row `index`, if its site has a histogram."""
        number = self._number.get(slot)
        if number is None:
            count = sum(map(bool, self._number.values()))
            number = self._number[slot] = count + 1 if self._named(site.fqn) else 0
        if not number:
            return
        if number > MOST_SITES:
            self.left_out[_TOO_MANY_SITES] += 1
            return
        device = tensor.device
        if device not in self._buffers:
            self._buffers[device] = RowBuffer(device, PATTERNS, _FIRST_CAPACITY)
            self._rows[device] = []
        buffer, rows = self._buffers[device], self._rows[device]
        if len(rows) >= MOST_CALLS:
            self.left_out[_TOO_MANY_CALLS] += 1
            return
        buffer.reach(len(rows))
        try:
            count_patterns(tensor, buffer.rows[len(rows)])
        except Unsupported:
            return  # its row has said so
        rows.append(index)

    def fetch(self) -> tuple[PendingBins, ...]:
        """Start the copy of this step from each device."""
        return tuple(
            PendingBins(np.array(rows, np.int64), *self._buffers[device].to_host(len(rows)))
            for device, rows in self._rows.items()
            if rows
        )
