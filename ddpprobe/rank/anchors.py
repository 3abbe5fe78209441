"""The parameters whose vanished `.grad` tells that a step was given up, or thrown away."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import final

from torch import nn

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

    @property
    def dropped(self) -> bool:
        """Whether there are any."""
        return bool(self._chosen)

    def drop(self) -> None:
        """Behind a backward: choose them."""
        if self._chosen or self._topology.engine is not None:
            return
        with_grad = [p for _, p in self._topology.named_parameters() if p.grad is not None]
        self._chosen = [weakref.ref(parameter) for parameter in with_grad[:_MOST]]

    def living(self) -> Iterator[nn.Parameter]:
        """Yield those that the model still has."""
        return (p for ref in self._chosen if (p := ref()) is not None)

    def vanished(self) -> bool:
        """Whether the gradients that were there after the backward are gone."""
        return all(parameter.grad is None for parameter in self.living())
