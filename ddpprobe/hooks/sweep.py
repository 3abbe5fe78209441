"""One look at many gradients together, where a look at each costs more than the numbers in them.

A hook per parameter costs 3 us, a sum of its own 1.5 us. Small gradients of one row shape are put
behind each other instead (one copy; no view of each is needed) and added up at once: 0.2 us each,
all told. Large ones are added up where they lie. A sum is finite unless an element is not, or
finite ones overflow it, which a closer look tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast, final

import torch
from torch import Tensor

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
        self._large: list[Tensor] = []
        self._together: list[list[Tensor]] = []
        self._dtypes: dict[torch.dtype, list[Tensor]] = {}
        rooms: dict[object, int] = {}  # (dtype, shape of a row) -> elements still free
        groups: dict[object, list[Tensor]] = {}
        for parameter in parameters:
            self._dtypes.setdefault(parameter.dtype, []).append(parameter)
            size, key = parameter.numel(), (parameter.dtype, parameter.shape[1:])
            if parameter.dim() == 0 or size > SMALL:
                self._large.append(parameter)
                continue
            if rooms.get(key, 0) < size:
                groups[key], rooms[key] = [], TOGETHER
                self._together.append(groups[key])
            groups[key].append(parameter)
            rooms[key] -= size

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
