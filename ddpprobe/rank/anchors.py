"""The parameters whose vanished `.grad` tells that a step was given up, or thrown away."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import final

from torch import nn
from torch.utils.weak import TensorWeakRef

from ddpprobe.rank.topology.describe import Topology

_MOST = 3


@final
class Anchors:
    """Chosen once, among those that the first backward has left a gradient.

    An engine takes `.grad` away as it likes, and tells of its steps itself: there are none then.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._chosen: list[weakref.ref[nn.Parameter]] = []
        self._left: list[TensorWeakRef | None] = []  # their gradients, by the last backward

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
            self._chosen = [weakref.ref(parameter) for parameter in with_grad[:_MOST]]
        grads = (parameter.grad for parameter in self.living())
        self._left = [None if grad is None else TensorWeakRef(grad) for grad in grads]

    def living(self) -> Iterator[nn.Parameter]:
        """Yield those that the model still has."""
        return (p for ref in self._chosen if (p := ref()) is not None)

    def vanished(self) -> bool:
        """Whether the gradients that were there after the backward are gone."""
        return all(parameter.grad is None for parameter in self.living())

    def replaced(self) -> bool:
        """Whether one of them has another gradient now than the last backward has left it."""
        return any(
            left is not None and parameter.grad is not None and left() is not parameter.grad
            for parameter, left in zip(self.living(), self._left, strict=False)
        )
