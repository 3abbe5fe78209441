"""The way of a tensor from its device to the host, beside what the training does there.

Nothing in here makes the host wait, but `arrives`, `Arrival.synchronize` and the lane of a device
of a kind that this file does not know how to leave without waiting.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

END_SECONDS = 60.0  # at the end of a training: what a host may be ahead of its device
BROKEN_SECONDS = 5.0  # at one that did not come to its end
_POLL_SECONDS = 0.002


class Arrival(Protocol):
    """A copy on its way, as `torch.cuda.Event` tells of it."""

    def query(self) -> bool:
        """Whether it is there; never waits."""

    def synchronize(self) -> None:
        """Wait for it: only at the end of a run."""


class Lane(Protocol):
    """The way from one device to the host."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return host memory that `post` and `send` can reach without waiting."""

    def post(self, source: Tensor, host: Tensor) -> Arrival | None:
        """Copy among the work of the current stream: what it is given next may overwrite `source`.

        The device is busy with it, so this is for a few bytes. None: it is there.
        """

    def fence(self) -> None:
        """Let what is sent from now on come after what the current stream has been given."""

    def send(self, source: Tensor, host: Tensor) -> Arrival | None:
        """Copy beside the current stream what was there at a `fence` and will not change.

        None: it is there.
        """

    def follow(self, arrival: Arrival) -> None:
        """Let the device, not the host, wait with what the current stream is given from now on."""

    def mark(self) -> Arrival | None:
        """Return what arrives when the current stream has done all that it was given.

        None: it has, or nobody can ask. Raises what the device has failed with.
        """


@final
class CudaLane:
    """Copies into pinned memory, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Lane`."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu", pin_memory=True)

    def post(self, source: Tensor, host: Tensor) -> Arrival:
        """See `Lane`."""
        host.copy_(source, non_blocking=True)
        return self.mark()

    def fence(self) -> None:
        """See `Lane`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def send(self, source: Tensor, host: Tensor) -> Arrival:
        """See `Lane`."""
        with torch.cuda.stream(self._stream):
            host.copy_(source, non_blocking=True)
        source.record_stream(self._stream)
        arrival: Arrival = self._stream.record_event()
        return arrival

    def follow(self, arrival: Arrival) -> None:
        """See `Lane`."""
        if isinstance(arrival, torch.cuda.Event):
            torch.cuda.current_stream(self._device).wait_event(arrival)

    def mark(self) -> Arrival:
        """See `Lane`."""
        arrival: Arrival = torch.cuda.current_stream(self._device).record_event()
        return arrival


@final
class WaitingLane:
    """For every other device: the host waits for the copy."""

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """See `Lane`."""
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")

    def post(self, source: Tensor, host: Tensor) -> None:
        """See `Lane`."""
        host.copy_(source)

    def fence(self) -> None:
        """See `Lane`."""

    def send(self, source: Tensor, host: Tensor) -> None:
        """See `Lane`."""
        host.copy_(source)

    def follow(self, arrival: Arrival) -> None:
        """See `Lane`."""

    def mark(self) -> None:
        """See `Lane`."""


def arrives(arrival: Arrival | None, until: float) -> bool:
    """Wait for an arrival, but not beyond `until` of `time.monotonic`; False: it is not there.

    At the end of a run alone. What waits in a driver for a device hears no signal, and waits for
    ever where a collective waits for a rank that is gone.
    """
    while arrival is not None and not arrival.query():
        if time.monotonic() >= until:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def is_near(device: torch.device) -> bool:
    """Whether the host can read a tensor of this device as soon as it is there."""
    return device.type == "cpu"


def lane_of(device: torch.device) -> Lane:
    """Return a new lane from a device that is not near."""
    return CudaLane(device) if device.type == "cuda" else WaitingLane()
