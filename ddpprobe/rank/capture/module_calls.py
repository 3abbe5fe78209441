"""Calls of modules that are under way, and the shard spec of what they return.

Both captures use it: the one to the disk (`rank/capture/calls.py`) and the one in memory
(`inspect/capture/watcher.py`). A hook in front of all others sees the DTensor that a
tensor-parallel module computed; what the module returns is plain. Whoever is given that very
tensor, unchanged, knows its shard spec.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn

from ddpprobe.rank import torch_private
from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.topology import dtensor_spec
from ddpprobe.rank.topology.dtensor_spec import Origin
from ddpprobe.rank.topology.placement import is_dtensor
from ddpprobe.rank.torch_private import dynamo
from ddpprobe.records.shard_spec import PARTIAL, REPLICATE, MeshAxis, ShardSpec

Record = TypeVar("Record")  # what a capture notes of one call


class Output(NamedTuple):
    """A tensor that a module returned, its path in the output, and its shard spec, if known."""

    leaf: str
    tensor: Tensor
    shard_spec: ShardSpec | None


@final
class _Running(Generic[Record]):
    """A call that is under way.

    Attributes:
        record: what the capture notes of it.
        same: shape and shard spec that an output of that shape shares with the input.
        origins: DTensors that the module computed, by leaf.
    """

    __slots__ = ("origins", "record", "same")

    def __init__(self, record: Record, same: tuple[torch.Size, ShardSpec] | None) -> None:
        self.record, self.same = record, same
        self.origins: dict[str, Origin] = {}


@final
class ModuleCalls(Generic[Record]):
    """The calls under way, by module, and the plain tensors whose shard spec is known.

    Keeps no tensor alive.
    """

    def __init__(self) -> None:
        self._running: dict[int, list[_Running[Record]]] = {}
        self._known: dict[int, tuple[weakref.ref[Tensor], int, ShardSpec]] = {}

    def drop(self) -> None:
        """Drop the calls under way."""
        self._running.clear()

    def forget(self) -> None:
        """Drop the calls under way, and forget every shard spec."""
        self.drop()
        self._known.clear()

    def begin(
        self, module: nn.Module, record: Record, args: tuple[object, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Note that a call begins with these arguments."""
        running = _Running(record, self._shared(module, args, kwargs or {}))
        self._running.setdefault(id(module), []).append(running)

    def current(self, module: nn.Module) -> Record | None:
        """Return the record of the module's innermost call under way."""
        running = self._running.get(id(module))
        return running[-1].record if running else None

    def computed(self, module: nn.Module, output: object) -> None:
        """Note the DTensors that a module computed, in front of whatever makes them local."""
        running = self._running.get(id(module))
        if running:
            for leaf, tensor in leaves(output):
                if is_dtensor(tensor):
                    running[-1].origins[leaf] = dtensor_spec.origin(tensor)

    def end(self, module: nn.Module, output: object) -> tuple[Record, list[Output]] | None:
        """Return the record of the call that ends, and its outputs; None: its begin was not seen.

        Tensors inside vmap, grad or jvp are left out: they have no values that can be read.
        """
        under_way = self._running.get(id(module))
        if not under_way:
            return None
        running = under_way.pop()
        return running.record, [
            Output(leaf, tensor, self._learn(running, leaf, tensor))
            for leaf, tensor in leaves(output)
            if not torch_private.is_functorch(tensor)
        ]

    def shard_spec(self, tensor: Tensor) -> ShardSpec | None:
        """Return the shard spec of a DTensor, or of the very tensor that a module has returned."""
        if is_dtensor(tensor):
            return dtensor_spec.of(tensor)
        ref, version, shard_spec = self._known.get(id(tensor), (None, 0, None))
        if ref is None or ref() is not tensor or tensor._version != version:  # noqa: SLF001  (public by docs)
            return None
        return shard_spec

    def _shared(
        self, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any]
    ) -> tuple[torch.Size, ShardSpec] | None:
        """Return shape and shard spec of the input if an output of that shape has the same.

        So it is with torch's own modules without parameters and children, where the shape is kept
        too: activations, dropout. (What they compute along a dim, they compute within the shard.)
        """
        own = type(module).__module__.startswith("torch.nn.modules.")
        if not own or next(module.children(), None) or next(module.parameters(), None) is not None:
            return None
        inputs = [tensor for _, tensor in leaves((args, kwargs))]
        shard_spec = self.shard_spec(inputs[0]) if len(inputs) == 1 else None
        if shard_spec is None or shard_spec.label not in ("sharded", "replicated"):
            return None
        return inputs[0].shape, shard_spec

    def _learn(self, running: _Running[Record], leaf: str, tensor: Tensor) -> ShardSpec | None:
        """Return the shard spec of an output, and remember it for whom it is passed on to."""
        if is_dtensor(tensor):
            return dtensor_spec.of(tensor)
        origin = running.origins.get(leaf)
        known = self.shard_spec(tensor) if origin is None else dtensor_spec.follow(origin, tensor)
        if known is None and running.same is not None and running.same[0] == tensor.shape:
            known = running.same[1]
        if known is not None and not tensor.is_inference():
            key = id(tensor)
            gone = weakref.ref(tensor, lambda _: self._known.pop(key, None))
            self._known[key] = gone, tensor._version, known  # noqa: SLF001  (public by docs)
        return known


@final
class GradientHook:
    """A tensor hook that keeps nothing alive: one that held a tensor would never be freed.

    Args:
        target: called with `about` and the gradient, as long as its owner keeps it.
        about: what `target` must know of the tensor.
    """

    __slots__ = ("_about", "_target")

    def __init__(self, target: Callable[..., object], *about: object) -> None:
        self._target, self._about = weakref.ref(target), about

    @dynamo.hands_back
    def __call__(self, gradient: Tensor | None) -> None:
        """Pass the gradient on; autograd gives None where there is none."""
        target = self._target()
        if target is not None and gradient is not None and not torch.compiler.is_compiling():
            target(*self._about, gradient)


def of_sum(shard_spec: ShardSpec) -> ShardSpec:
    """Shard spec of a gradient: what is added up has, on every rank, the gradient of the sum."""
    axes = tuple(MeshAxis(REPLICATE) if a.does == PARTIAL else a for a in shard_spec.axes)
    return ShardSpec(shard_spec.ranks, shard_spec.mesh, shard_spec.shape, axes)
