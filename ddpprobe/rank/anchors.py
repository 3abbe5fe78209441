"""The parameters whose vanished `.grad` tells that a step was given up, or thrown away.

They are held as they are, and their gradients by their memory: torch swaps no tensor that has a
weak reference (`torch.utils.swap_tensors`), which is how `model.to()` changes a DTensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn

from ddpprobe.rank.topology.describe import Topology

_MOST = 3
_Memory = weakref.ref[torch.UntypedStorage]


@final
class Anchors:
    """Chosen once, among those that the first backward has left a gradient.

    An engine takes `.grad` away as it likes, and tells of its steps itself: there are none then.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._chosen: list[nn.Parameter] = []
        self._left: list[_Memory | None] = []  # their gradients, by the last backward

    @property
    def dropped(self) -> bool:
        """Whether there are any."""
        return bool(self._chosen)

    def drop(self) -> None:
        """After a backward: choose them, at the first one, and remember what it has left them."""
        if self._topology.engine is not None:
            return
        if not self._chosen:
            with_grad = [p for _, p in self._topology.named_parameters() if p.grad is not None]
            self._chosen = with_grad[:_MOST]
        self._left = [_memory_of(parameter.grad) for parameter in self._chosen]

    def look_again(self) -> None:
        """Let go of those that the model has no more; not for every step."""
        mine = {id(parameter) for _, parameter in self._topology.named_parameters()}
        if not all(id(parameter) in mine for parameter in self._chosen):
            self._chosen = [parameter for parameter in self._chosen if id(parameter) in mine]
            self._left = []

    def living(self) -> Iterator[nn.Parameter]:
        """Yield them."""
        return iter(self._chosen)

    def vanished(self) -> bool:
        """Whether the gradients that were there after the backward are gone."""
        return all(parameter.grad is None for parameter in self._chosen)

    def replaced(self) -> bool:
        """Whether one of them has another gradient now than the last backward has left it."""
        return any(
            left is not None and parameter.grad is not None and left != _memory_of(parameter.grad)
            for parameter, left in zip(self._chosen, self._left, strict=False)
        )


def _memory_of(gradient: Tensor | None) -> _Memory | None:
    """Return what tells whether another gradient is this one; None if there is none, or no way."""
    if gradient is None or gradient.layout is not torch.strided:
        return None
    return weakref.ref(gradient.untyped_storage())
