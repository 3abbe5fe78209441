"""Full copies of tensors on the host, taken without waiting for anything.

On the CPU a tensor is copied at once: it may be changed in place a moment later. On a GPU it is
copied on the device first, in the training's own order and as far as there is memory for it, and
from there on a stream of its own, so that the training's never waits for the bus.
"""

from __future__ import annotations

from collections import Counter
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpprobe.rank import torch_private
from ddpprobe.rank.capture.headroom import Headroom
from ddpprobe.rank.capture.staging import StagedTensor, Staging
from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.stats.dense import dtype_name, local
from ddpprobe.rundir.tensor_pack import ITEM_SIZES

# What the copies of one rank may take of the host at any time, those on their way to the disk
# included: with 8 ranks on a machine 16 GiB. On a GPU the device holds as much for a moment, if it
# has the memory (`headroom`).
MAX_BYTES = 2 << 30


@final
class HostCopy:
    """A copy on the host, perhaps still on its way there.

    Attributes:
        dtype: torch's name without "torch.".
        shape: of the tensor.
    """

    __slots__ = ("_host", "dtype", "shape")

    def __init__(self, host: Tensor) -> None:
        self._host = host
        self.dtype = dtype_name(host.dtype)
        self.shape = tuple(host.shape)

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self._host.numel() * self._host.element_size()

    def raw(self) -> NDArray[np.uint8]:
        """Return its bytes in C order, once the copies are over."""
        flat: NDArray[np.uint8] = self._host.reshape(-1).view(torch.uint8).numpy()
        return flat

    def values(self) -> list[float | int]:
        """Return its elements, once the copies are over."""
        found: list[float | int] = self._host.reshape(-1).tolist()
        return found


@final
class HostCopier:
    """Takes the copies of one step.

    Args:
        room: how many bytes they may take.
        staging: the way from a device.
        headroom: how many of them a device has memory for.

    Attributes:
        taken: bytes of the copies so far.
        dropped, refused: bytes of all tensors that were not kept for want of memory, and number of
            those for which there was no `room`.
        starved: number of those for which their device had no memory.
        left_out: tensors that have no plain bytes, by what they are.
    """

    def __init__(self, room: int, staging: Staging, headroom: Headroom) -> None:
        self.taken = self.dropped = self.refused = self.starved = 0
        self.left_out: Counter[str] = Counter()
        self._room, self._staging, self._headroom = room, staging, headroom
        self._trips: list[StagedTensor] = []

    def take(self, tensor: Tensor) -> HostCopy | None:
        """Copy this rank's part of `tensor`; None if it is left out or dropped."""
        why = _unfit(tensor)
        with torch.no_grad():
            mine = tensor if why else local(tensor)
        why = why or _unfit(mine) or _unreadable(mine)
        if why:
            self.left_out[why] += 1
            return None
        size = mine.numel() * mine.element_size()
        if size > self._room - self.taken:
            self.dropped += size
            self.refused += 1
            return None
        kept = self._kept(mine, size)
        if kept is None:
            self.dropped += size
            self.starved += 1
        else:
            self.taken += size
        return kept

    def give_back(self, kept: HostCopy) -> None:
        """Account for a copy that was replaced by a later one."""
        self.taken -= kept.nbytes

    def ready(self) -> bool:
        """Whether all copies are on the host; never waits."""
        self._staging.pump()
        return not any(trip.missing for trip in self._trips)

    def wait(self) -> None:
        """Wait for the copies: only at the end of a run."""
        self._staging.pump(wait=True)

    def _kept(self, tensor: Tensor, size: int) -> HostCopy | None:
        """Copy plain bytes; None: the device has no memory for it."""
        device = tensor.device
        if lanes.is_near(device):
            return HostCopy(_own(tensor))
        if not self._headroom.take(device, size):
            return None
        try:
            own = _own(tensor)
        except torch.OutOfMemoryError:
            self._headroom.refused(device)
            return None
        trip = self._staging.put(own)
        self._trips.append(trip)
        return HostCopy(trip.host.view(own.dtype).reshape(own.shape))


def _own(tensor: Tensor) -> Tensor:
    """Return a copy in C order, on the same device."""
    with torch.no_grad():
        return tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def has_memory(tensor: Tensor) -> bool:
    """Whether its elements are there: FSDP frees them under the tensor."""
    return not tensor.numel() or bool(tensor.untyped_storage().nbytes())


def _unfit(tensor: Tensor) -> str:
    """Say what keeps a tensor, or the local part of one, from having plain bytes; "": nothing."""
    if torch_private.is_functorch(tensor):
        return "inside vmap, grad or jvp"
    if tensor.is_meta:
        return "on the meta device"
    if tensor.layout != torch.strided or tensor.is_nested:
        return "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
    name = dtype_name(tensor.dtype)
    return "" if name in ITEM_SIZES else name


def _unreadable(tensor: Tensor) -> str:
    if not has_memory(tensor):
        return "without memory"
    kind = type(tensor)
    return "" if kind in (Tensor, torch.nn.Parameter) else kind.__qualname__
