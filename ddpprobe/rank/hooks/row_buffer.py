"""The rows of a step that are made on one device, from where they reach the host in one copy."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.lanes import Arrival
from ddpprobe.rank.stats import rows as stats
from ddpprobe.rank.torch_private import functorch

_FIRST_CAPACITY = 1024


@final
class RowBuffer:
    """Rows on a device, each at the place that it has among all rows of the step.

    Args:
        device: where they are.
        width: of a row.
        capacity: how many there is room for at first.

    Attributes:
        rows: float64 [capacity, width]; what nobody wrote in this step is arbitrary.
        device: where they are.
        capacity: how many there is room for.
        near: the host can read them at once.
    """

    __slots__ = ("_copied", "_lane", "capacity", "device", "near", "rows")

    def __init__(
        self, device: torch.device, width: int = stats.WIDTH, capacity: int = _FIRST_CAPACITY
    ) -> None:
        shape = capacity, width
        with functorch.outside():  # where the first forward may be
            self.rows = torch.zeros(shape, dtype=torch.float64, device=device)
        self.capacity, self.device = len(self.rows), self.rows.device
        self.near = lanes.is_near(self.device)
        self._lane = None if self.near else lanes.lane_of(self.device)
        self._copied: Arrival | None = None

    def reach(self, index: int) -> None:
        """Grow until there is a row of this index."""
        while index >= self.capacity:
            with functorch.outside():
                self.rows = torch.cat((self.rows, torch.zeros_like(self.rows)))
            self.capacity = len(self.rows)

    def reduce(self, tensor: Tensor, index: int) -> bool:
        """Write the row of a tensor on this device; returns whether the host sees it is bad.

        Raises:
            Unsupported: this kind of tensor has no statistics.
        """
        if self.near:
            return stats.reduce_into(tensor, self.rows, index)
        stats.reduce_far_into(tensor, self.rows, index)
        return False

    def begin(self) -> None:
        """Let the rows of the last step be overwritten; the device waits, by now for nothing."""
        if self._copied is not None and self._lane is not None:
            self._lane.follow(self._copied)
            self._copied = None

    def await_device(self, until: float) -> bool:
        """Wait until the device has done its work; False: it has not, at `until`."""
        return self._lane is None or lanes.arrives(self._lane.mark(), until)

    def to_host(self, count: int) -> tuple[Tensor, Arrival | None]:
        """Start the copy of the first `count` rows; None: it is there."""
        rows = self.rows[:count]
        if self._lane is None:
            return rows.clone(), None
        host = self._lane.room(rows.shape, rows.dtype)
        self._lane.fence()
        self._copied = self._lane.send(rows, host)
        return host, self._copied
