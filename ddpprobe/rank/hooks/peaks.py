"""The largest magnitudes of a step, kept on the devices where they were found, told a step later.

They are one number per phase and device: what is NaN or infinite stays so in a maximum. When the
step ends they are copied out without anybody waiting, and told once every device's have arrived.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.lanes import Arrival
from ddpprobe.rank.torch_private import functorch

PHASES = 3  # the forward, the backward, and the gradients that the backward adds to
# Steps on their way. A host further ahead of its device is rare: torch's own queue is full before.
AHEAD = 64


@final
class Peaks:
    """The peaks of the step under way, and those of ended steps that have not arrived.

    Args:
        judge: called with each step that has arrived, its largest magnitude by phase (0 where
            nothing was kept), and whether a GradScaler skipped it.

    Attributes:
        lost: steps whose peaks were not sent, because too many are on their way.
    """

    def __init__(self, judge: Callable[[int, list[float], bool], None]) -> None:
        self.lost = 0
        self._judge = judge
        self._cells: dict[torch.device, _Cell] = {}
        self._sent = 0
        self._under_way: deque[tuple[int, bool, int, list[tuple[_Cell, Arrival | None]]]] = deque()

    def keep(self, phase: int, peak: Tensor) -> None:
        """Take a magnitude, floating [], on its device."""
        cell = self._cells.get(peak.device)
        if cell is None:
            with functorch.outside():  # where the forward may be
                cell = self._cells[peak.device] = _Cell(peak.device)
        cell.used = True
        torch.maximum(cell.of[phase], peak, out=cell.of[phase])  # NaN wins

    def end_step(self, step: int, *, skipped: bool = False) -> None:
        """Send what was kept on its way, and start the next step's."""
        if not self._cells:
            return
        used = [cell for cell in self._cells.values() if cell.used]
        if used and len(self._under_way) == AHEAD:
            self.lost += 1
            for cell in used:
                cell.forget()
        elif used:
            place = self._sent % AHEAD
            self._sent += 1
            copies = [(cell, cell.send(place)) for cell in used]
            self._under_way.append((step, skipped, place, copies))

    def poll(self, *, wait: bool = False) -> None:
        """Tell what has arrived; waits only if told to."""
        while self._under_way:
            step, skipped, place, copies = self._under_way[0]
            for _, arrival in copies:
                if arrival is None:
                    continue
                if wait:
                    arrival.synchronize()
                elif not arrival.query():
                    return
            self._under_way.popleft()
            found = [cell.host[place].tolist() for cell, _ in copies]
            self._judge(step, [_largest(peaks) for peaks in zip(*found, strict=True)], skipped)


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


def _largest(peaks: tuple[float, ...]) -> float:
    """Return the largest; NaN wins, which max() does not let it."""
    return math.nan if any(math.isnan(peak) for peak in peaks) else max(peaks)
