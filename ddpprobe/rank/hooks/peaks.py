"""The largest magnitudes of a step, kept on the devices where they were found, told a step later.

They are one number per phase, micro-batch and device: what is NaN or infinite stays so in a
maximum. When a micro-batch ends they are copied out without anybody waiting, and told once the step
is over and every device's have arrived.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, final

import torch
from torch import Tensor

from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.lanes import Arrival
from ddpprobe.rank.torch_private import functorch

PHASES = 3  # the forward, the backward, and the gradients that the backward adds to
# Micro-batches on their way, 24 bytes each. A host that is further ahead of its device is rare:
# torch's own queue is full before.
AHEAD = 1024


class _Part(NamedTuple):
    """What was kept in a micro-batch: where it lies in each cell's host memory, and the copies."""

    micro: int
    place: int
    copies: list[tuple[_Cell, Arrival | None]]


@final
class Peaks:
    """The peaks of the step under way, and those of ended steps that have not arrived.

    Args:
        judge: called with each step that has arrived, (micro-batch, its largest magnitude by phase,
            0 where nothing was kept) in their order, and whether a GradScaler skipped it.

    Attributes:
        lost: steps of which not all peaks were sent, because too many are on their way.
    """

    def __init__(self, judge: Callable[[int, list[tuple[int, list[float]]], bool], None]) -> None:
        self.lost = 0
        self._judge = judge
        self._cells: dict[torch.device, _Cell] = {}
        self._sent = self._told = 0
        self._full = False
        self._parts: list[_Part] = []  # of the step under way
        self._under_way: deque[tuple[int, bool, list[_Part]]] = deque()

    def keep(self, phase: int, peak: Tensor) -> None:
        """Take a magnitude, floating [], on its device."""
        cell = self._cells.get(peak.device)
        if cell is None:
            with functorch.outside():  # where the forward may be
                cell = self._cells[peak.device] = _Cell(peak.device)
        cell.used = True
        torch.maximum(cell.of[phase], peak, out=cell.of[phase])  # NaN wins

    def end_micro(self, micro: int) -> None:
        """Send what was kept since the last call on its way: that of this micro-batch."""
        used = [cell for cell in self._cells.values() if cell.used]
        if used and self._sent - self._told == AHEAD:
            self._full = True
            for cell in used:
                cell.forget()
        elif used:
            place = self._sent % AHEAD
            self._sent += 1
            self._parts.append(_Part(micro, place, [(cell, cell.send(place)) for cell in used]))

    def end_step(self, step: int, micro: int, *, skipped: bool = False) -> None:
        """Do so for the last micro-batch of a step, and start the next step."""
        self.end_micro(micro)
        self.lost += self._full
        self._full = False
        if self._parts:
            self._under_way.append((step, skipped, self._parts))
            self._parts = []

    def poll(self, *, wait: bool = False) -> None:
        """Tell what has arrived; waits only if told to."""
        while self._under_way:
            step, skipped, parts = self._under_way[0]
            for _, arrival in (copy for part in parts for copy in part.copies):
                if arrival is None:
                    continue
                if wait:
                    arrival.synchronize()
                elif not arrival.query():
                    return
            self._under_way.popleft()
            self._told += len(parts)
            self._judge(step, [(part.micro, _largest_of(part)) for part in parts], skipped)


@final
class _Cell:
    """The peaks of one device, and host memory for those on their way."""

    __slots__ = ("_lane", "_peaks", "host", "of", "used")

    def __init__(self, device: torch.device) -> None:
        # As wide as the widest dtype: the largest float64 must not look like an infinity.
        self._peaks = torch.zeros(PHASES, dtype=torch.float64, device=device)
        self.of = self._peaks.unbind()
        self._lane = lanes.lane_of(device)
        self.host = self._lane.room((AHEAD, PHASES), torch.float64)
        self.used = False

    def send(self, place: int) -> Arrival | None:
        arrival = self._lane.post(self._peaks, self.host[place])
        self.forget()
        return arrival

    def forget(self) -> None:
        self._peaks.zero_()
        self.used = False


def _largest_of(part: _Part) -> list[float]:
    """Return, by phase, the largest of all devices."""
    found = [cell.host[part.place].tolist() for cell, _ in part.copies]
    return [_largest(peaks) for peaks in zip(*found, strict=True)]


def _largest(peaks: tuple[float, ...]) -> float:
    """Return the largest; NaN wins, which max() does not let it."""
    return math.nan if any(math.isnan(peak) for peak in peaks) else max(peaks)
