"""Which plain tensors of a tensor-parallel model are the same on all ranks of a group.

What `tp_inference` concludes from one forward, kept by tensor of a capture: a block's output that
was computed from replicated tensors alone is replicated, although torch does not say so.
"""

from __future__ import annotations

from functools import partial
from typing import final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddpprobe.errors import ModelRefused
from ddpprobe.rank.hooks.copy_safe_hook import CopySafeObserver, take_off
from ddpprobe.rank.hooks.tp_inference import TpInference
from ddpprobe.rank.topology.describe import describe
from ddpprobe.rank.topology.placement import UNKNOWN, TpPlacement
from ddpprobe.rundir.fuse import Fuse

Key = tuple[str, str, str]  # name, kind, leaf


@final
class Inference:
    """Follows the forwards of one model. Without tensor parallelism it does nothing.

    Args:
        model: as the user gave it.
        fuse: contains whatever goes wrong.
    """

    def __init__(self, model: nn.Module, fuse: Fuse) -> None:
        self._fuse = fuse
        self._slots: dict[Key, int] = {}
        self._layouts: dict[int, TpPlacement] = {}
        self._handles: list[RemovableHandle] = []
        self._follower: TpInference | None = None
        try:
            topology = describe(model)
        except ModelRefused:
            return  # what cannot be described is not concluded upon
        self._root = topology.root
        follower = TpInference(topology, self._layouts.__setitem__, fuse)
        self._follower = follower if follower.active else None

    @property
    def active(self) -> bool:
        """Whether there is anything to conclude."""
        return self._follower is not None

    def begin(self) -> None:
        """Follow the forward whose root pre-hooks are running."""
        self.close()
        if self._follower is not None:
            self._handles = self._follower.attach()
            end = CopySafeObserver(self._fuse.guard(partial(_end, self._follower)))
            self._handles.append(self._root.register_forward_hook(end, always_call=True))

    def bind(self, name: str, leaf: str, tensor: Tensor, *, again: bool) -> None:
        """Say that `tensor` is an output of module `name`; `again`: recomputed in the backward."""
        if self._follower is not None:
            slots = [self._slot((name, kind, leaf)) for kind in ("output", "grad")]
            self._follower.bind(tensor, slots[0], slots[1], again=again)

    def doubts(self, key: Key) -> bool:
        """Whether a tensor was followed, and nothing is known of how it lies."""
        return key in self._slots and self._layouts.get(self._slots[key], UNKNOWN) == UNKNOWN

    def alike(self, key: Key) -> bool:
        """Whether all ranks of the tensor-parallel group are concluded to hold the same."""
        slot = self._slots.get(key)
        return slot is not None and self._layouts.get(slot, UNKNOWN)[0] == "local"

    def close(self) -> None:
        """Take every hook off."""
        take_off(self._handles)

    def _slot(self, key: Key) -> int:
        return self._slots.setdefault(key, len(self._slots))


def _end(follower: TpInference, *_: object) -> None:
    follower.end()
