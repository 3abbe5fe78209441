"""One tensor kept by a capture, and how it is taken without touching the training."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import Tensor

from ddpprobe.errors import CaptureError
from ddpprobe.rank.stats.dense import local
from ddpprobe.rank.topology import dtensor_spec
from ddpprobe.rank.topology.placement import is_dtensor
from ddpprobe.records.shard_spec import ShardSpec

Apply = Callable[[Tensor], Tensor]


@final
class HeldTensor:
    """A rank's part of one tensor.

    Attributes:
        shard_spec: its layout over a mesh; None: a plain tensor, or the result of a function.
        applied: whether a function of the user's made it, so that it has no layout.
    """

    __slots__ = ("_event", "_tensor", "_version", "applied", "shard_spec")

    def __init__(
        self,
        tensor: Tensor,
        version: int | None,
        event: torch.cuda.Event | None,
        shard_spec: ShardSpec | None,
        *,
        applied: bool,
    ) -> None:
        self._tensor, self._version, self._event = tensor, version, event
        self.shard_spec, self.applied = shard_spec, applied

    def tensor(self, what: str) -> Tensor:
        """Return the tensor as it was when it was captured.

        Raises:
            CaptureError: it was kept without a copy and has been changed in place since.
        """
        if self._event is not None:
            self._event.synchronize()
        if self._version is not None and self._tensor._version != self._version:  # noqa: SLF001  (public by docs)
            raise CaptureError(
                f"{what} was changed in place after it was captured, so its value is gone. "
                "Capture with copy=True (the default), which costs one copy of the tensor."
            )
        return self._tensor


@final
class Holder:
    """Takes tensors as the user wants them.

    Args:
        copy: whether to copy: a later in-place change then does no harm.
        detach: whether to leave the autograd graph behind.
        to: device to keep them on; None: where they are. Copies from a GPU to the CPU are
            asynchronous, into pinned memory.
        apply: a function of the local tensor whose result is kept instead.
    """

    def __init__(
        self, *, copy: bool, detach: bool, to: torch.device | None, apply: Apply | None
    ) -> None:
        self._copy, self._detach, self._to, self._apply = copy, detach, to, apply

    def hold(self, tensor: Tensor, shard_spec: ShardSpec | None) -> HeldTensor:
        """Keep the local part of `tensor`.

        Args:
            tensor: whatever a module returned or autograd hands to a hook.
            shard_spec: of a plain tensor, where it is known; a DTensor tells its own.
        """
        if is_dtensor(tensor):
            shard_spec = dtensor_spec.of(tensor)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._detach):
            mine = self._local(tensor)
            return self._taken(mine, shard_spec) if self._apply is None else self._made(mine)

    def _local(self, tensor: Tensor) -> Tensor:
        if self._detach:
            return local(tensor)
        return tensor.to_local() if is_dtensor(tensor) else tensor

    def _made(self, tensor: Tensor) -> HeldTensor:
        result: object = self._apply(tensor) if self._apply is not None else tensor
        if not isinstance(result, Tensor):
            raise CaptureError(
                f"apply= must return a tensor, got {type(result).__name__}. "
                "For example apply=lambda x: x.abs().mean(dim=0)."
            )
        return HeldTensor(result.clone(), None, None, None, applied=True)

    def _taken(self, tensor: Tensor, shard_spec: ShardSpec | None) -> HeldTensor:
        if self._to is not None and tensor.device != self._to:
            quick = tensor.device.type == "cuda" and tensor.layout == torch.strided
            if quick and self._to.type == "cpu" and not tensor.requires_grad:
                host = torch.empty_like(tensor, device="cpu", pin_memory=True)
                host.copy_(tensor, non_blocking=True)
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(tensor.device))
                return HeldTensor(host, None, event, shard_spec, applied=False)
            return HeldTensor(tensor.to(self._to), None, None, shard_spec, applied=False)
        if self._copy or tensor.is_inference():
            return HeldTensor(tensor.clone(), None, None, shard_spec, applied=False)
        return HeldTensor(tensor, tensor._version, None, shard_spec, applied=False)  # noqa: SLF001  (public by docs)
