"""How a tensor lies over the ranks: its placement, and who counts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor
from torch.nn import Parameter

from ddpprobe.rank import torch_private

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

# (one of records.PLACEMENTS, whether this rank's part is counted in the global value)
TpPlacement = tuple[str, bool]
LOCAL: TpPlacement = ("local", True)
REPLICATED: TpPlacement = ("replicated", True)
PARTIAL: TpPlacement = ("partial", True)
SHARDED: TpPlacement = ("sharded", True)
UNKNOWN: TpPlacement = ("unknown", True)
_PLAIN = (Tensor, Parameter)


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether `tensor` is a DTensor, without importing them."""
    return type(tensor) not in _PLAIN and torch_private.is_a(
        tensor, "torch.distributed.tensor", "DTensor"
    )


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Global ranks of a mesh, row-major."""
    return tuple(mesh.mesh.flatten().tolist())


def layout_of(mesh: DeviceMesh, placements: Sequence[Placement]) -> TpPlacement:
    """Placement of a tensor spread over `mesh`, whose other dimensions differ by rank.

    `partial` if the value is still to be summed; `sharded` if any mesh axis splits it; `local` if
    the ranks of the mesh hold the same. Of replicas along the mesh only the first is primary.
    """
    if any(p.is_partial() for p in placements):
        return PARTIAL
    coordinate = mesh.get_coordinate() or ()
    primary = all(c == 0 for c, p in zip(coordinate, placements, strict=False) if p.is_replicate())
    return ("local" if all(p.is_replicate() for p in placements) else "sharded"), primary


def within(outer: TpPlacement, group: TpPlacement) -> TpPlacement:
    """Placement of a tensor: `outer` over some ranks and as `group` within their groups.

    `group` is `local` (the group holds the same, its first rank counts it) or unknown.
    """
    if group[0] != "local":
        return UNKNOWN
    return outer if outer[0] == "replicated" else (outer[0], outer[1] and group[1])


def reduced_layout(tensor: DTensor) -> TpPlacement:
    """Placement of a reduced gradient: `replicated` if every rank of its mesh holds it whole."""
    placement, primary = layout_of(tensor.device_mesh, tensor.placements)
    return REPLICATED if placement == "local" else (placement, primary)


def shard_name(tensor: DTensor) -> str | None:
    """Name the shard that replicas along the mesh hold as well; "" is the whole tensor.

    None if nobody on the mesh holds the same part.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    sizes, coordinate = tuple(mesh.shape), mesh.get_coordinate()
    if coordinate is None or any(p.is_partial() for p in placements):
        return None
    copies = [n for n, p in zip(sizes, placements, strict=True) if p.is_replicate()]
    return shard_id(tensor) if any(n > 1 for n in copies) else None


def shard_id(tensor: DTensor) -> str:
    """Name of the shard held here among all of the tensor, such as "2/4"; "" if it is whole."""
    mesh = tensor.device_mesh
    coordinate: Sequence[int] = mesh.get_coordinate() or ()
    index, count = 0, 1
    for size, at, placement in zip(tuple(mesh.shape), coordinate, tensor.placements, strict=True):
        if not placement.is_replicate():
            index, count = index * size + at, count * size
    return f"{index}/{count}" if count > 1 else ""
