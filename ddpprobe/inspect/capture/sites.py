"""What a capture has taken, by module."""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from ddpprobe.inspect.capture.held_tensor import HeldTensor, Holder
from ddpprobe.inspect.capture.series import CallSeries, TensorMeter
from ddpprobe.rank.stats.dense import Unsupported, dtype_name
from ddpprobe.rank.topology.dtensor_spec import of
from ddpprobe.rank.topology.placement import is_dtensor
from ddpprobe.records.shard_spec import ShardSpec

KINDS = ("input", "output", "grad")


@final
class CallTensors:
    """One call of one module: its tensors by (kind, leaf)."""

    __slots__ = ("__weakref__", "index", "tapped", "tensors")

    def __init__(self) -> None:
        self.index = -1
        self.tensors: dict[tuple[str, str], HeldTensor] = {}
        self.tapped: set[str] = set()  # leaves on which a gradient hook was placed


@dataclass(slots=True)
class CapturedSite:
    """One captured module on this rank.

    Attributes:
        name: its FQN.
        calls: the calls kept, oldest first; empty if only statistics are.
        series: statistics over the calls, by (kind, leaf).
        seen: the last shard spec of each, and its dtype.
        count: calls seen; gradients: how many of their gradients arrived, by leaf.
        skipped: tensors that could not be taken, by reason.
    """

    name: str
    calls: deque[CallTensors]
    series: dict[tuple[str, str], CallSeries] = field(default_factory=dict)
    seen: dict[tuple[str, str], tuple[ShardSpec | None, str]] = field(default_factory=dict)
    count: int = 0
    gradients: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)

    def leaves(self, kind: str) -> tuple[str, ...]:
        """Return the paths of the tensors of one kind, in the order they were first seen."""
        found = dict.fromkeys(leaf for k, leaf in self.series if k == kind)
        for call in self.calls:
            found |= dict.fromkeys(leaf for k, leaf in call.tensors if k == kind)
        return tuple(found)


@final
class CapturedSites:
    """All captured modules, and how a tensor gets into them.

    Args:
        names: of the modules.
        holder: takes tensors; None: only statistics are kept.
        meter: takes statistics.
        calls: how many calls are kept; None: all.
        history: how many rows of statistics are kept per tensor.
    """

    def __init__(
        self,
        names: Iterable[str],
        holder: Holder | None,
        meter: TensorMeter,
        calls: int | None,
        history: int,
    ) -> None:
        self._holder, self._meter, self._history = holder, meter, history
        self.by_name = {name: CapturedSite(name, deque(maxlen=calls)) for name in names}

    def take(
        self, site: CapturedSite, call: CallTensors, kind: str, leaf: str, tensor: Tensor,
        shard_spec: ShardSpec | None,
    ) -> None:  # fmt: skip
        """Keep one tensor of a call, or its statistics."""
        key = (kind, leaf)
        shard_spec = of(tensor) if is_dtensor(tensor) else shard_spec
        site.seen[key] = shard_spec, dtype_name(tensor.dtype)
        if self._holder is not None:
            call.tensors[key] = self._holder.hold(tensor, shard_spec)
            return
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return
        try:
            row = self._meter.measure(tensor)
        except Unsupported as reason:
            site.skipped[str(reason)] += 1
            return
        site.series.setdefault(key, CallSeries(self._meter, self._history)).add(row)

    def finish(self, site: CapturedSite, call: CallTensors) -> None:
        """Add a call whose forward is over."""
        call.index = site.count
        site.count += 1
        if self._holder is not None:
            site.calls.append(call)

    def refer(self, call: CallTensors) -> Callable[[], CallTensors | None]:
        """Return a reference that does not keep the tensors of a call alive."""
        return weakref.ref(call) if self._holder is not None else lambda: call

    def matching(self, site: CapturedSite, leaf: str, output: Tensor) -> CallTensors | None:
        """Return the call that a recomputation repeats (reentrant checkpointing).

        Its gradient will arrive through the recomputed output. If several calls wait for theirs,
        the one with the same bits is meant, which a comparison on the device has to find.
        """
        if self._holder is None:
            return CallTensors()
        waiting = [c for c in site.calls if ("output", leaf) in c.tensors and leaf not in c.tapped]
        if not waiting:
            return None  # the other kind of checkpointing: the first forward's hooks fire
        if len(waiting) == 1 and site.count - site.gradients[leaf] == 1:
            return waiting[0]
        again = self._holder.hold(output, None).tensor(site.name)
        for call in waiting:
            if same_bits(call.tensors["output", leaf].tensor(site.name), again):
                return call
        return None


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal, NaNs included."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    return torch.allclose(a.detach(), b.detach().to(a.device), rtol=0.0, atol=0.0, equal_nan=True)
