"""How much of a device's memory a captured step may take without taking it from the training.

The training's own next allocation fails outside of everything that we contain. What it will need
is not known, but it was seen: what it had at its largest, it will want again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple, final

import torch

_SHARE = 4  # of what could be had now, at most one part in so many: before the peak is known
_MARGIN = 32  # one part of the device in so many stays free: the allocator's own waste


class Memory(NamedTuple):
    """Bytes of one device, for this process.

    Attributes:
        total: of the device.
        free: that could still be allocated: free on the device, or kept unused by the allocator.
        used: allocated now.
        peak: allocated at most, so far.
    """

    total: int
    free: int
    used: int
    peak: int


def memory_of(device: torch.device) -> Memory:
    """Ask the driver and torch's allocator. No stream is waited for."""
    if device.type != "cuda":  # nobody tells
        return Memory(0, sys.maxsize, 0, 0)
    free, total = torch.cuda.mem_get_info(device)
    try:
        stats = torch.cuda.memory_stats(device)
    except RuntimeError:  # an allocator of the user's, which keeps no count
        stats = {}
    used = stats.get("allocated_bytes.all.current", 0)
    kept = stats.get("reserved_bytes.all.current", 0) - used
    return Memory(total, free + max(kept, 0), used, stats.get("allocated_bytes.all.peak", 0))


@final
class Headroom:
    """Says of each copy on a device whether there is memory for it.

    Args:
        look: asked once for each device and captured step: a call of the driver takes its time.
    """

    def __init__(self, look: Callable[[torch.device], Memory] = memory_of) -> None:
        self._look = look
        self._left: dict[torch.device, int] = {}  # in the step under way
        self._taken: dict[torch.device, int] = {}
        self._most: dict[torch.device, int] = {}  # that any step has taken
        self._peaks: dict[torch.device, int] = {}  # without what we had taken

    def begin(self) -> None:
        """A captured step begins."""
        for device, taken in self._taken.items():
            self._most[device] = max(taken, self._most.get(device, 0))
        self._left.clear()
        self._taken.clear()

    def take(self, device: torch.device, size: int) -> bool:
        """Whether `size` more bytes may be allocated in this step; then they count as taken."""
        left = self._left.get(device)
        if left is None:
            left = self._room(device)
        fits = size <= left
        self._left[device] = left - size if fits else left
        if fits:
            self._taken[device] = self._taken.get(device, 0) + size
        return fits

    def refused(self, device: torch.device) -> None:
        """The allocator had no memory all the same: nothing more in this step."""
        self._left[device] = 0

    def _room(self, device: torch.device) -> int:
        now = self._look(device)
        # Of the largest that was seen an unknown part was ours: at most what we took at most.
        peak = max(now.peak - self._most.get(device, 0), self._peaks.get(device, 0))
        self._peaks[device] = peak
        wanted = max(peak - now.used, 0)
        return max(min(now.free // _SHARE, now.free - wanted - now.total // _MARGIN), 0)
