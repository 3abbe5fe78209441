"""What one rank keeps of one step: copies on their way to the host, and what a reader must know."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from ddpprobe.rank.capture.host_copy import HostCopier, HostCopy
from ddpprobe.rank.topology.naming import own_class
from ddpprobe.records.shard_spec import SpecJson
from ddpprobe.rundir.tensor_pack import PackedTensor

MAX_SAMPLES = 100_000  # sample indices of a step: more are dropped, and counted


class PackKey(NamedTuple):
    """What a tensor is: see `packs.PackedTensor`."""

    module: str
    kind: str
    fqn: str
    leaf: str = ""
    micro: int = 0
    call: int = 0


@final
class StepCapture:
    """The full tensors of one step.

    Args:
        step: the optimizer step.
        reason: why it is kept.
        keeper: takes the copies.

    Attributes:
        keeper: the same.
        whole: keep also what another rank keeps, which may not be doing so.
    """

    def __init__(self, step: int, reason: str, keeper: HostCopier, *, whole: bool = False) -> None:
        self.step, self.reason, self.whole = step, reason, whole
        self.keeper = keeper
        self._modules: dict[str, dict[str, Any]] = {}
        self._held: dict[PackKey, tuple[HostCopy, SpecJson]] = {}
        self._scale: HostCopy | None = None
        self._samples: list[tuple[int, HostCopy | list[int]]] = []

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: PackKey) -> bool:
        return key in self._held

    def add(self, key: PackKey, tensor: Tensor, spec: SpecJson) -> None:
        """Copy a tensor; one that was kept under this key before is replaced."""
        before = self._held.pop(key, None)
        if before is not None:
            self.keeper.give_back(before[0])
        kept = self.keeper.take(tensor)
        if kept is not None:
            self._held[key] = kept, spec

    def lay(self, key: PackKey, judge: Callable[[tuple[int, ...], SpecJson], SpecJson]) -> None:
        """Let `judge` say anew, from its shape and layout so far, how a tensor lies."""
        if key in self._held:
            kept, spec = self._held[key]
            self._held[key] = kept, judge(kept.shape, spec)

    def module(self, fqn: str, module: nn.Module) -> dict[str, Any]:
        """Return what the header says of a module, to be filled in."""
        kind = own_class(module)
        name = f"{kind.__module__}.{kind.__qualname__}"
        header = self._modules.setdefault(fqn, {"class": name, "state": {}, "calls": []})
        header["training"] = module.training
        return header

    def log_scale(self, scale: Tensor | None) -> None:
        """Keep the scale of the loss."""
        self._scale = self.keeper.take(scale) if scale is not None else None

    def log_samples(self, micro: int, samples: Tensor | Sequence[int]) -> None:
        """Keep which samples a micro-batch was made of.

        Raises:
            TypeError: they are no whole numbers.
        """
        count = samples.numel() if isinstance(samples, Tensor) else len(samples)
        if count > MAX_SAMPLES:
            self.keeper.left_out["sample indices"] += count
        elif not isinstance(samples, Tensor):
            self._samples.append((micro, [operator.index(sample) for sample in samples]))
        elif samples.is_floating_point() or samples.is_complex():
            raise TypeError(f"sample indices must be whole numbers, got {samples.dtype}")
        elif (kept := self.keeper.take(samples)) is not None:
            self._samples.append((micro, kept))

    def header(self) -> dict[str, Any]:
        """Return what `tensor_pack` says a header holds of a step, once the copies are over."""
        scale = self._scale.values()[0] if self._scale is not None else None
        samples = [
            {"micro": micro, "samples": s.values() if isinstance(s, HostCopy) else s}
            for micro, s in self._samples
        ]
        return {
            "step": self.step, "wall_time_ns": time.time_ns(), "reason": self.reason,
            "dropped": self.keeper.dropped, "left_out": dict(self.keeper.left_out),
            "indices": samples or None, "scaler": scale, "modules": self._modules,
        }  # fmt: skip

    def tensors(self) -> list[tuple[PackedTensor, NDArray[np.uint8]]]:
        """Return the tensors with their bytes, once the copies are over."""
        packed = []
        for key, (kept, spec) in self._held.items():
            tensor = PackedTensor(
                key.module, key.fqn, key.kind, key.leaf, key.micro, key.call, kept.dtype,
                kept.shape, spec,
            )  # fmt: skip
            packed.append((tensor, kept.raw()))
        return packed
