"""One look at many gradients together, where a look at each costs more than the numbers in them.

A hook per parameter costs 3 us, a sum of its own 1.5 us. Small gradients of one row shape are put
after each other instead (one copy; no view of each is needed) and added up at once: 0.2 us each,
all told. Large ones are added up where they lie. A sum is finite unless an element is not, or
finite ones overflow it, which a closer look tells.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import cast, final

import torch
from torch import Tensor

from ddpprobe.rank import torch_private
from ddpprobe.rank.stats.dense import FLOATS

SMALL = 8192  # elements: of more than these a copy costs more than a call
TOGETHER = 1 << 18  # elements put together: 1 MiB of float32, inside the second-level cache
_WIDE = (torch.float32, torch.float64)


@final
class Sweep:
    """Plain, dense parameters of floating dtype on one device, whose gradients are looked at.

    Args:
        parameters: at least one, none of them empty.

    Attributes:
        parameters: the same.
        device: where they are.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters, self.device = parameters, parameters[0].device
        together, alone = pack(enumerate(parameters))
        self._large = [parameters[place] for place in alone]
        self._together = [[parameters[place] for place in group] for group in together]
        self._dtypes: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            self._dtypes.setdefault(parameter.dtype, []).append(parameter)

    def is_clean(self) -> bool:
        """Whether all gradients, on the CPU, are there and have finite sums: else look closer."""
        try:
            for group in self._together:
                if not math.isfinite(total(torch.cat(gradients(group)))):
                    return False
        except TypeError:  # one of them has none
            return False
        return all(g is not None and math.isfinite(total(g)) for g in gradients(self._large))

    def peak(self) -> Tensor | None:
        """Return the largest magnitude, float64 [] on the device; NaN wins. Nothing waits for it.

        None if a parameter has no gradient.
        """
        try:
            peaks = [
                torch.stack(torch._foreach_norm(gradients(group), torch.inf)).amax()  # noqa: SLF001
                for group in self._dtypes.values()
            ]
        except TypeError:
            return None
        return torch.stack([peak.double() for peak in peaks]).amax()


def sweeps_of(parameters: Iterable[Tensor]) -> list[Sweep]:
    """Return a sweep for each device that any of the parameters is on."""
    devices: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        devices.setdefault(parameter.device, []).append(parameter)
    return [Sweep(there) for there in devices.values()]


def pack(tensors: Iterable[tuple[int, Tensor]]) -> tuple[list[list[int]], list[int]]:
    """Say which tensors are put after each other: small ones of one dtype and row shape.

    Args:
        tensors: (place, tensor).

    Returns:
        The places of each group, and of those that are looked at alone.
    """
    together: list[list[int]] = []
    alone: list[int] = []
    rooms: dict[object, int] = {}  # (dtype, shape of a row) -> elements still free
    groups: dict[object, list[int]] = {}
    for place, tensor in tensors:
        size, key = tensor.numel(), (tensor.dtype, tensor.shape[1:])
        if tensor.dim() == 0 or size > SMALL:
            alone.append(place)
            continue
        if rooms.get(key, 0) < size:
            groups[key], rooms[key] = [], TOGETHER
            together.append(groups[key])
        groups[key].append(place)
        rooms[key] -= size
    return together, alone


def is_plain(tensor: Tensor) -> bool:
    """Whether its numbers can be read as they lie."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.dtype in FLOATS
        and tensor.numel() > 0
        and not torch_private.is_functorch(tensor)
    )


def gradients(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return what is in `.grad`, None where nothing is (as torch's own functions refuse)."""
    return cast("list[Tensor]", [parameter.grad for parameter in parameters])


def total(tensor: Tensor) -> float:
    """Return the sum of a plain tensor on the CPU: not finite if an element is not."""
    if tensor.dim() == 0:
        return tensor.item()
    if tensor.dtype in _WIDE:
        return tensor.sum().item()
    return tensor.sum(dtype=torch.float32).item()
