"""From a device into ordinary memory, through a few pinned blocks, without anybody waiting.

Only pinned memory can be reached without waiting, and it is dear: it is gone for everybody else,
takes as long to get as to fill, and torch gives none of it back. So there is little of it. Tensors
cross in pieces; whenever the training calls, what has arrived is moved on and the next is sent.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import final

import torch
from torch import Tensor

from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.lanes import Arrival, Lane
from ddpprobe.rank.torch_private import functorch

BLOCK = 16 << 20  # bytes; a power of two: torch would round up to one
BLOCKS = 8
_ALIGNMENT = 64


@final
class StagedTensor:
    """A tensor on its way.

    Attributes:
        host: the copy, uint8 [bytes]; arbitrary until it is there.
        missing: bytes that have not arrived.
    """

    __slots__ = ("_lane", "host", "missing", "sent", "source")

    def __init__(self, source: Tensor, lane: Lane) -> None:
        self.source: Tensor | None = source
        self.host = torch.empty(source.numel(), dtype=torch.uint8, device="cpu")
        self.missing = source.numel()
        self.sent = 0
        self._lane = lane

    def send(self, host: Tensor) -> Arrival | None:
        """Send the next bytes, as many as `host` holds; with the last let go of the source."""
        if self.source is None:
            return None
        end = self.sent + len(host)
        arrival = self._lane.send(self.source[self.sent : end], host)
        self.sent = end
        if end == len(self.host):
            self.source = None
        return arrival


@final
class _Block:
    """Pinned memory, and what is in it: pieces of tensors, one after the other."""

    __slots__ = ("arrivals", "memory", "pieces", "used")

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.used = 0
        self.pieces: list[
            tuple[StagedTensor, int, int, int]
        ] = []  # where to, from where to where in here
        self.arrivals: list[Arrival] = []

    def load(self, trip: StagedTensor) -> None:
        size = min(len(trip.host) - trip.sent, len(self.memory) - self.used)
        start, end = self.used, self.used + size
        self.pieces.append((trip, trip.sent, start, end))
        arrival = trip.send(self.memory[start:end])
        if arrival is not None:
            self.arrivals.append(arrival)
        self.used = min(-(-end // _ALIGNMENT) * _ALIGNMENT, len(self.memory))

    def unload(self) -> None:
        for trip, at, start, end in self.pieces:
            trip.host[at : at + end - start].copy_(self.memory[start:end])
            trip.missing -= end - start
        self.pieces.clear()
        self.arrivals.clear()
        self.used = 0


@final
class Staging:
    """The way of all captured tensors of one rank."""

    def __init__(self) -> None:
        self._lanes: dict[torch.device, Lane] = {}
        self._blocks: deque[_Block] = deque()  # with something in them, the oldest first
        self._empty: list[_Block] = []
        self._made = 0
        self._waiting: deque[StagedTensor] = deque()  # of which not all was sent
        self._lock = threading.Lock()  # a backward has threads of its own, one for each device

    def put(self, tensor: Tensor) -> StagedTensor:
        """Send a tensor that nobody else has: it is let go when it has been sent."""
        with self._lock, functorch.outside():
            lane = self._lanes.get(tensor.device)
            if lane is None:
                lane = self._lanes[tensor.device] = lanes.lane_of(tensor.device)
            lane.fence()
            trip = StagedTensor(tensor.reshape(-1).view(torch.uint8), lane)
            if trip.missing:
                self._waiting.append(trip)
                self._move()
        return trip

    def pump(self, *, wait: bool = False) -> None:
        """Move on what has arrived, and send what there is room for; waits only if told to."""
        if not (self._blocks or self._waiting):
            return
        with self._lock, functorch.outside():
            self._move()
            while wait and self._blocks:
                for arrival in self._blocks[0].arrivals:
                    arrival.synchronize()
                self._move()

    def release(self) -> None:
        """Let go of the pinned memory. Nothing may be under way."""
        self._empty.clear()
        self._made = len(self._blocks)

    def _move(self) -> None:
        while self._blocks and all(arrival.query() for arrival in self._blocks[0].arrivals):
            block = self._blocks.popleft()
            block.unload()
            self._empty.append(block)
        while self._waiting:
            opened = self._open()
            if opened is None:
                return
            trip = self._waiting[0]
            opened.load(trip)
            if trip.source is None:
                self._waiting.popleft()

    def _open(self) -> _Block | None:
        """Return a block with room in it."""
        last = self._blocks[-1] if self._blocks else None
        if last is not None and last.used < len(last.memory):
            return last
        if not self._empty:
            if self._made == BLOCKS:
                return None
            self._made += 1
            room = next(iter(self._lanes.values())).room((BLOCK,), torch.uint8)
            self._empty.append(_Block(room))
        self._blocks.append(self._empty.pop())
        return self._blocks[-1]
