"""Full copies of tensors on the host, taken without waiting for anything.

On the CPU a tensor is copied at once: it may be changed in place a moment later. On a GPU it is
copied on the device first, in the training's own order, and from there into pinned memory on a
stream of its own, so that the training's never waits for the bus.
"""

from __future__ import annotations

from collections import Counter
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpprobe import torch_private
from ddpprobe.packs import ITEM_SIZES
from ddpprobe.stats.dense import dtype_name, local

# What the copies of one rank may take of the host at any time, those on their way to the disk
# included: with 8 ranks on a machine 16 GiB. On a GPU the device holds as much for a moment.
MAX_BYTES = 2 << 30


@final
class Kept:
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
class Keeper:
    """Takes the copies of one step.

    Args:
        room: how many bytes they may take.

    Attributes:
        taken: bytes of the copies so far.
        dropped, refused: bytes and number of tensors for which there was no room.
        left_out: tensors that have no plain bytes, by what they are.
    """

    def __init__(self, room: int) -> None:
        self.taken = self.dropped = self.refused = 0
        self.left_out: Counter[str] = Counter()
        self._room = room
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._events: list[torch.cuda.Event] = []

    def take(self, tensor: Tensor) -> Kept | None:
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
        self.taken += size
        return Kept(self._copied(mine))

    def give_back(self, kept: Kept) -> None:
        """Account for a copy that was replaced by a later one."""
        self.taken -= kept.nbytes

    def end(self) -> None:
        """All is taken: from now on `ready` says when it has arrived."""
        self._events = [stream.record_event() for stream in self._streams.values()]

    def ready(self) -> bool:
        """Whether all copies are on the host; never waits."""
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        """Wait for the copies: only at the end of a run."""
        for event in self._events:
            event.synchronize()

    def _copied(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            own = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        if own.device.type != "cuda":
            return own if own.device.type == "cpu" else own.to("cpu")
        stream = self._streams.get(own.device)
        if stream is None:
            stream = self._streams[own.device] = torch.cuda.Stream(own.device)
        host = torch.empty(own.shape, dtype=own.dtype, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(own.device))
        with torch.cuda.stream(stream):
            host.copy_(own, non_blocking=True)
        own.record_stream(stream)
        return host


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
