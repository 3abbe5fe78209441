"""What wraps the model, what its parts are called without the wrappers, and who holds what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpprobe import torch_private

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_FSDP = "torch.distributed.fsdp"
_PREFIXES = (
    "_fsdp_wrapped_module",
    "_checkpoint_wrapped_module",
    "_orig_mod",
)


class Refused(ValueError):
    """A model ddpprobe cannot observe truthfully; the text says why and what to do."""


@dataclass(frozen=True, slots=True)
class Topology:
    """The model without its outer wrapper, and how its parameters are laid out.

    `wrapper` is none, ddp or fsdp2; `root` is the user's own module; `ddp` the wrapper around it.
    """

    root: nn.Module
    wrapper: str
    world_size: int
    device: torch.device
    ddp: DistributedDataParallel | None = None

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (FQN, module), parents first; each module once, wrapper classes left out."""
        for name, module in self.root.named_modules():
            if not _is_wrapper(module):
                yield clean(name), module

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (FQN, parameter); a tied parameter once, under its first name."""
        for name, parameter in self.root.named_parameters():
            yield clean(name), parameter

    def units(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (FQN, module) of the FSDP2 units, which gather their parameters before they run."""
        for fqn, module in self.named_modules():
            if torch_private.is_a(module, _FSDP, "FSDPModule"):
                yield fqn, module

    def gradients_are_reduced(self) -> bool:
        """Whether `.grad` is the reduced gradient after this backward (not so in `no_sync`)."""
        return self.ddp is None or bool(self.ddp.require_backward_grad_sync)

    def gradient_placement(self, gradient: Tensor) -> tuple[str, bool]:
        """Placement of a reduced gradient, and whether this rank's part is counted globally."""
        if _is_dtensor(gradient):
            return dtensor_placement(cast("DTensor", gradient))
        return ("local" if self.wrapper == "none" and self.world_size > 1 else "replicated"), True


def describe(model: nn.Module) -> Topology:
    """Recognise what wraps `model`.

    Raises:
        Refused: a wrapper whose numbers would be wrong or silently absent.
    """
    root, wrapper, ddp = model, "none", None
    if isinstance(model, DistributedDataParallel):
        root, wrapper, ddp = model.module, "ddp", model
    _refuse(model)
    parameters = list(root.parameters())
    if not parameters:
        raise Refused(
            f"{type(model).__name__} has no parameters, so there is nothing to train and nothing "
            "to observe. Pass the model that the optimizer updates."
        )
    if any(torch_private.is_a(m, _FSDP, "FSDPModule") for m in root.modules()):
        wrapper = "fsdp2"
    world_size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    return Topology(root, wrapper, world_size, parameters[0].device, ddp)


def outermost(model: nn.Module) -> nn.Module:
    """Inside a forward of `model`: the DDP that was put around it after `install`, or itself."""
    active = torch_private.active_ddp()
    return active if active is not None and active.module is model else model


def _refuse(model: nn.Module) -> None:
    for name, module in model.named_modules():
        where = f"module {name!r}" if name else "the model"
        if torch_private.is_a(module, _FSDP, "FullyShardedDataParallel"):
            raise Refused(
                f"{where} is wrapped in FullyShardedDataParallel (FSDP1), whose flat parameters "
                "ddpprobe does not read yet. Use torch.distributed.fsdp.fully_shard (FSDP2)."
            )
        if isinstance(module, DataParallel):
            raise Refused(
                f"{where} is a DataParallel: its replicas live for one forward only. "
                "Use DistributedDataParallel."
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise Refused(f"{where} is a ScriptModule, which takes no hooks. Pass the eager model.")
        if torch_private.is_compiled(module):
            raise Refused(
                f"{where} is compiled with torch.compile, which silently drops hooks. "
                "ddpprobe observes eager models; leave torch.compile off in the probed run."
            )


def dtensor_placement(tensor: DTensor) -> tuple[str, bool]:
    """Placement of a DTensor's local part, and whether it is the one counted globally.

    `partial` if the value is still to be summed, `sharded` if any mesh axis splits it (only the
    first of its replicas is primary), otherwise `replicated`.
    """
    placements = tensor.placements
    if any(p.is_partial() for p in placements):
        return "partial", True
    if all(p.is_replicate() for p in placements):
        return "replicated", True
    coordinate = tensor.device_mesh.get_coordinate() or ()
    primary = all(c == 0 for c, p in zip(coordinate, placements, strict=False) if p.is_replicate())
    return "sharded", primary


def gathered_parameters(fqn: str, unit: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (FQN, parameter) that an FSDP2 unit holds unsharded now, inside its forward.

    These are the leaves of the autograd graph, so their gradients are local; the same objects
    serve every step. Parameters of modules that are never called themselves are among them.
    """
    for name, parameter in unit.named_parameters(prefix=fqn):
        if not _is_dtensor(parameter):
            yield clean(name), parameter


def tensor_placement(tensor: Tensor) -> tuple[str, bool]:
    """Placement of an activation or its gradient: plain tensors differ by rank."""
    return dtensor_placement(cast("DTensor", tensor)) if _is_dtensor(tensor) else ("local", True)


def clean(name: str) -> str:
    """Remove wrapper components from a dotted name: the FQN the unwrapped model would give."""
    return ".".join(part for part in name.split(".") if part not in _PREFIXES)


def _is_dtensor(tensor: Tensor) -> bool:
    return torch_private.is_a(tensor, "torch.distributed.tensor", "DTensor")


def _is_wrapper(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel) or type(module).__name__ in (
        "CheckpointWrapper",
        "OptimizedModule",
    )
