"""One look at many tensors together: is any of them non-finite, and which?

Where the host can read them, small ones of one row shape are put after each other and added up at
once, as in `Sweep`; a closer look follows only where a sum is not finite. On a device the largest
magnitude of each is taken by one pass over all, and sent to the host beside the training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.lanes import Arrival, Lane
from ddpprobe.rank.hooks.sweep import is_plain, pack, total
from ddpprobe.rank.stats import rows as stats
from ddpprobe.rank.topology.outliving import Key


@dataclass(frozen=True, slots=True)
class BadTensor:
    """A tensor that is not finite: its key, and counts of elements, all 0 where not known.

    `infinite`: it has infinities and no NaN.
    """

    key: Key
    infinite: bool
    counts: stats.Nonfinite = (0, 0, 0, 0)


@dataclass(slots=True)
class Look:
    """What was looked at, and what of it is bad once it is `ready`.

    `keys` are of all that was given, `count` says how many of them could be looked at.
    """

    keys: tuple[Key, ...]
    count: int = 0
    near: list[BadTensor] = field(default_factory=list)
    far: list[tuple[list[int], Tensor, Arrival | None]] = field(default_factory=list)

    def ready(self) -> bool:
        """Whether all has arrived; never waits."""
        return all(arrival is None or arrival.query() for _, _, arrival in self.far)

    def wait(self) -> None:
        """Wait for it: only at the end of a run."""
        for _, _, arrival in self.far:
            if arrival is not None:
                arrival.synchronize()

    def bad(self) -> list[BadTensor]:
        """Return what is not finite, in the order in which it was looked at."""
        by_key = {bad.key: bad for bad in self.near}
        for places, host, _ in self.far:
            for place, peak in zip(places, host.tolist(), strict=True):
                if not math.isfinite(peak):
                    key = self.keys[place]
                    by_key[key] = BadTensor(key, infinite=not math.isnan(peak))
        return [by_key[key] for key in self.keys if key in by_key]


@dataclass(slots=True)
class _Plan:
    """How to look at tensors by their places in a list; holds none of them."""

    together: list[list[int]] = field(default_factory=list)
    count: int = 0
    numbers: dict[torch.dtype, list[int]] = field(default_factory=dict)
    alone: list[int] = field(default_factory=list)
    far: dict[tuple[torch.device, torch.dtype], list[int]] = field(default_factory=dict)


@final
class Looker:
    """Looks, and remembers how: mostly the next look is at the same tensors."""

    def __init__(self) -> None:
        self._keys: tuple[Key, ...] | None = None
        self._plan = _Plan()
        self._lanes: dict[torch.device, Lane] = {}

    def look(self, keys: tuple[Key, ...], tensors: Sequence[Tensor]) -> Look:
        """Look at floating, dense tensors; leaves out whatever is of another kind.

        Args:
            keys: of the tensors; the same object as the last time if these are the same ones.
            tensors: as many, where grad is off.
        """
        if keys is not self._keys:
            self._lay(keys, tensors)
        try:
            return self._look(keys, tensors)
        except (RuntimeError, IndexError):  # others have taken the places of some
            self._lay(keys, tensors)
            return self._look(keys, tensors)

    def _lay(self, keys: tuple[Key, ...], tensors: Sequence[Tensor]) -> None:
        self._keys, self._plan = keys, _Plan()
        near: list[tuple[int, Tensor]] = []
        plan = self._plan
        for place, tensor in enumerate(tensors):
            if not _is_there(tensor):
                continue
            plan.count += 1
            if not lanes.is_near(tensor.device):
                plan.far.setdefault((tensor.device, tensor.dtype), []).append(place)
                continue
            if tensor.dim() == 0:
                plan.numbers.setdefault(tensor.dtype, []).append(place)
            else:
                near.append((place, tensor))
        plan.together, plan.alone = pack(near)

    def _look(self, keys: tuple[Key, ...], tensors: Sequence[Tensor]) -> Look:
        plan = self._plan
        look = Look(keys, plan.count)
        suspects: list[int] = []
        for group in plan.together:
            if not math.isfinite(total(torch.cat([tensors[i] for i in group]))):
                suspects += group
        for group in plan.numbers.values():
            if not math.isfinite(total(torch.stack([tensors[i] for i in group]))):
                suspects += group
        suspects += [i for i in plan.alone if not math.isfinite(total(tensors[i]))]
        for place in sorted(suspects):
            counts = counts_of(tensors[place])
            if any(counts[:3]):
                look.near.append(BadTensor(keys[place], infinite=not counts[0], counts=counts))
        self._send(tensors, look)
        return look

    def _send(self, tensors: Sequence[Tensor], found: Look) -> None:
        for (device, _), places in self._plan.far.items():
            norms = torch._foreach_norm([tensors[i] for i in places], torch.inf)  # noqa: SLF001
            peaks = torch.stack(norms).double()
            lane = self._lanes.get(device)
            if lane is None:
                lane = self._lanes[device] = lanes.lane_of(device)
            host = lane.room(peaks.shape, peaks.dtype)
            lane.fence()
            found.far.append((places, host, lane.send(peaks, host)))


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor that the host can read has no NaN or infinity."""
    return not _is_there(tensor) or math.isfinite(total(tensor)) or not any(counts_of(tensor)[:3])


def counts_of(tensor: Tensor) -> stats.Nonfinite:
    """Return NaN, +Inf, -Inf and elements of a plain tensor on the host; zeros for any other."""
    if not _is_there(tensor):
        return 0, 0, 0, 0
    return stats.nonfinite_of(tensor)


def _is_there(tensor: Tensor) -> bool:
    return is_plain(tensor) and not tensor.is_meta and tensor.untyped_storage().nbytes() > 0
