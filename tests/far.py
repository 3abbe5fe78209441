"""A device that the host cannot look into, on a machine without one.

Tensors stay on the CPU. The probe is told that they are not near, and gets lanes whose copies take
their time. So every line runs that runs for a GPU, but for the calls of `torch.cuda` in
`lanes.CudaLane`, and on real numbers. `NoWaiting` raises at operators that make the host wait. It
cannot see a copy from the device to the host, which here is none: those are the lanes' alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddpprobe.rank import torch_private
from ddpprobe.rank.hooks import lanes

CPU = torch.device("cpu")
aten = torch.ops.aten
# What gives the host a number, or a tensor of a size that only the device knows.
WAITS = {
    aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select,
    aten.unique_dim, aten._unique, aten._unique2, aten.unique_consecutive, aten.bincount,
    aten.repeat_interleave, aten._coalesce, aten._nested_tensor_size,
}  # fmt: skip


class Waited(AssertionError):
    """The host would have waited for the device."""


class NoWaiting(TorchDispatchMode):
    """Raises where an operator of CUDA would wait, by what torch's own kernels do."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in WAITS:
            raise Waited(str(func))
        if packet is aten.index and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            raise Waited("an index by a mask")
        return func(*args, **kwargs)


class Arrival:
    """A copy that is there after it was asked for `polls` times."""

    def __init__(self, source: Tensor, host: Tensor, polls: int) -> None:
        self.source, self.host, self.polls = source.detach().clone(), host, polls
        self.waited = False
        with torch.no_grad():
            host.view(-1).view(torch.uint8).fill_(0x5A)  # not yet what it will be

    def query(self) -> bool:
        self.polls -= 1
        if self.polls < 0:
            self.host.copy_(self.source)
        return self.polls < 0

    def synchronize(self) -> None:
        self.waited = True
        self.polls = 0
        self.query()


class SlowLane:
    """A lane whose copies arrive when they have been asked for a few times."""

    def __init__(self, polls: int = 2, device: torch.device = CPU) -> None:
        assert isinstance(device, torch.device)  # of which a real lane makes its streams
        self.polls = polls
        self.rooms: list[Tensor] = []

    def room(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.rooms.append(torch.empty(tuple(shape), dtype=dtype, device="cpu"))
        return self.rooms[-1]

    def post(self, source: Tensor, host: Tensor) -> Arrival:
        return Arrival(source, host, self.polls)

    def fence(self) -> None:
        pass

    def send(self, source: Tensor, host: Tensor) -> Arrival:
        return Arrival(source, host, self.polls)

    def follow(self, arrival: Arrival) -> None:
        pass

    def mark(self) -> Arrival:
        return Arrival(torch.zeros(1), torch.zeros(1), min(self.polls, 2))  # the device is idle


def pretend(monkeypatch, polls: int = 2) -> None:
    """From now on nothing is near; our operators are seen by dispatch modes."""
    monkeypatch.setattr(lanes, "is_near", lambda _: False)
    monkeypatch.setattr(lanes, "lane_of", lambda device: SlowLane(polls, device))
    monkeypatch.setattr(torch_private, "outside_modes", contextlib.nullcontext)


def pretend_for_good() -> None:
    """Do so in a process that ends with it."""
    pretend(SimpleNamespace(setattr=setattr))


@contextlib.contextmanager
def no_waiting() -> Iterator[NoWaiting]:
    """Let whatever would make the host wait raise."""
    with NoWaiting() as mode:
        yield mode
