"""How plain tensors lie that tensor-parallel modules have handed out, by the tensor itself.

A hook in front of all others sees the DTensor that such a module computed; what the module hands
out is plain. Whoever is given that very tensor, unchanged, knows how it lies.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from ddpprobe.dealing import PARTIAL, REPLICATE, Axis, Placing
from ddpprobe.hooks.outputs import leaves
from ddpprobe.topology import placing
from ddpprobe.topology.placement import is_dtensor
from ddpprobe.topology.placing import Origin

Kept = tuple[torch.Size, Placing]  # of an input; an output of that shape lies like it


@final
class Handed:
    """Remembers layouts; keeps no tensor alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Placing]] = {}

    def forget(self) -> None:
        """Forget everything."""
        self._known.clear()

    def kept(
        self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any]
    ) -> Kept | None:
        """Return shape and layout of a plain input if the output's elements lie as the input's do.

        So it is with torch's own modules without parameters and children, where the shape is kept
        too: activations, dropout. (What they compute along a dim, they compute within the shard.)
        """
        own = type(module).__module__.startswith("torch.nn.modules.")
        if not own or next(module.children(), None) or next(module.parameters(), None) is not None:
            return None
        given = [tensor for _, tensor in leaves((args, kwargs))]
        laid = self.layout(given[0]) if len(given) == 1 else None
        known = laid is not None and laid.label in ("sharded", "replicated")
        return (given[0].shape, laid) if known and laid is not None else None

    def learn(self, tensor: Tensor, origin: Origin | None, given: Kept | None) -> Placing | None:
        """Return the layout of an output, and remember it for modules that it is passed on to.

        Args:
            tensor: as the module hands it out.
            origin: the DTensor that it was before that, if it was one.
            given: what `kept` said of the call.
        """
        if is_dtensor(tensor):
            return placing.of(tensor)
        laid = placing.follow(origin, tensor) if origin is not None else self.layout(tensor)
        if laid is None and given is not None and given[0] == tensor.shape:
            laid = given[1]
        if laid is None:
            return None
        if not tensor.is_inference():
            key = id(tensor)
            gone = weakref.ref(tensor, lambda _: self._known.pop(key, None))
            self._known[key] = gone, tensor._version, laid  # noqa: SLF001  (public by docs)
        return laid

    def layout(self, tensor: Tensor) -> Placing | None:
        """Return the layout of a tensor if it is the very one that a module has handed out."""
        ref, version, laid = self._known.get(id(tensor), (None, 0, None))
        if ref is None or ref() is not tensor or tensor._version != version:  # noqa: SLF001  (public by docs)
            return None
        return laid


def of_sum(laid: Placing) -> Placing:
    """Layout of a gradient: what is added up has, on every rank, the gradient of the sum."""
    axes = tuple(Axis(REPLICATE) if axis.does == PARTIAL else axis for axis in laid.axes)
    return Placing(laid.ranks, laid.mesh, laid.shape, axes)
