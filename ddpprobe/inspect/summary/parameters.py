"""Each parameter as the whole job holds it: global shape, this rank's part, and the sharding.

Only local facts are read, never a value and never a collective: a DTensor knows its mesh, an FSDP2
unit the shards it will go back to after this forward, an FSDP1 unit what its flat parameter is
made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddpprobe.rank import torch_private
from ddpprobe.rank.topology.placement import is_dtensor
from ddpprobe.rank.topology.replicas import parameters_of
from ddpprobe.rank.torch_private import sharding

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

UNINITIALIZED = "uninitialized"


@dataclass(frozen=True, slots=True)
class HeldParameter:
    """One parameter or buffer.

    Attributes:
        shape, stride: of the whole tensor, in elements.
        numel, numel_local: elements of the whole tensor, and of what this rank stores of it.
        device: where this rank stores it.
        placement: how it is spread, such as "Shard(0) over dp(4)"; "" if nothing is known of it.
        identity: the same for a tied parameter under each of its names.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None
    numel: int
    numel_local: int
    dtype: torch.dtype
    device: torch.device
    trainable: bool
    placement: str
    identity: object


def held_parameters(model: nn.Module) -> Mapping[tuple[int, str], HeldParameter]:
    """Return all parameters by (id of the module that owns it, name in that module)."""
    parameters: dict[tuple[int, str], HeldParameter] = {}
    flat: set[int] = set()
    for part in torch_private.flat_parts(model):
        flat.add(id(part.flat))
        parameters[id(part.module), part.name] = _of_flat(part)
    gathered = {
        (id(module), name): tensor for module, name, tensor in sharding.sharded_parameters(model)
    }
    replicated = _replicated(model)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            key = id(module), name
            if key in parameters or id(parameter) in flat:
                continue
            held = held_tensor(gathered.get(key, parameter))
            if ranks := replicated.get(id(parameter)):
                also = f"replicated over {ranks} ranks (DDP)"
                held = replace(held, placement="; ".join(filter(None, (held.placement, also))))
            parameters[key] = held
    return parameters


def held_tensor(tensor: Tensor) -> HeldParameter:
    """Return the facts of a plain tensor or a DTensor."""
    local, placement = tensor, ""
    if nn.parameter.is_lazy(tensor):
        return HeldParameter(
            (), None, 0, 0, tensor.dtype, tensor.device, tensor.requires_grad, UNINITIALIZED,
            id(tensor),
        )  # fmt: skip
    if is_dtensor(tensor):
        with torch.no_grad():
            local, placement = tensor.to_local(), placement_text(tensor)
    strided = tensor.layout == torch.strided
    return HeldParameter(
        tuple(tensor.shape), tuple(tensor.stride()) if strided else None, tensor.numel(),
        local.numel(), tensor.dtype, tensor.device, tensor.requires_grad, placement, id(tensor),
    )  # fmt: skip


def placement_text(tensor: DTensor) -> str:
    """Say how a DTensor is spread, axis by axis: "Replicate over dp(2), Shard(0) over tp(4)"."""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(f"axis {axis} " for axis in range(mesh.ndim))
    texts = []
    for axis, placement in enumerate(tensor.placements):
        kind = type(placement).__name__.lstrip("_")
        dim = getattr(placement, "dim", None)
        what = kind if dim is None else f"{kind}({dim})"
        texts.append(f"{what} over {names[axis]}({mesh.size(axis)})")
    return ", ".join(texts)


def _of_flat(part: torch_private.FlatPart) -> HeldParameter:
    numel = part.shape.numel()
    text = f"flat shard over {part.ranks} ranks" if part.sharded else ""
    if part.replicas > 1:
        text = ", ".join(filter(None, (text, f"replicated over {part.replicas} ranks")))
    return HeldParameter(
        tuple(part.shape), None, numel, part.numel_local, part.flat.dtype, part.flat.device,
        part.trainable, f"{text} (FSDP1)".lstrip(), part.identity,
    )  # fmt: skip


def _replicated(model: nn.Module) -> dict[int, int]:
    """Ids of the parameters under DistributedDataParallel, and over how many ranks."""
    found: dict[int, int] = {}
    for wrapper in model.modules():
        if isinstance(wrapper, DistributedDataParallel):
            ranks = wrapper.process_group.size()
            found.update((id(p), ranks) for p in parameters_of(wrapper))
    return found
