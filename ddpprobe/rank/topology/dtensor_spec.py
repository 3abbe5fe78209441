"""How one rank's part of a tensor lies in the whole, told by DTensors before they are made local.

A tensor-parallel module computes a DTensor and then hands out its plain local part. A hook in front
of that conversion sees the DTensor; what comes out has the same value on the whole, so its layout
follows from the shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from torch import Tensor

from ddpprobe.rank.stats.dense import local
from ddpprobe.rank.torch_private import sharding
from ddpprobe.records.shard_spec import PARTIAL, REPLICATE, SHARD, UNKNOWN, MeshAxis, ShardSpec

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


@dataclass(frozen=True, slots=True)
class Origin:
    """A DTensor that a module computed, remembered without holding it."""

    shard_spec: ShardSpec
    memory: tuple[object, ...]


def of(tensor: Tensor) -> ShardSpec:
    """Return the shard spec of a DTensor."""
    spread = cast("DTensor", tensor)
    mesh = spread.device_mesh.mesh
    return ShardSpec(
        tuple(mesh.flatten().tolist()),
        tuple(mesh.shape),
        tuple(spread.shape),
        tuple(_axis(p) for p in spread.placements),
    )


def origin(tensor: Tensor) -> Origin:
    """Return what must be known of a DTensor to recognise what becomes of it."""
    return Origin(of(tensor), _memory(local(tensor)))


def follow(before: Origin, tensor: Tensor) -> ShardSpec:
    """Return the shard spec of the plain `tensor` that was made of a DTensor.

    Autograd remembers how it lay when it was made local. Where it does not (no_grad, a cast): if it
    is the DTensor's own local part, nothing has changed; otherwise it was redistributed, which
    keeps the value of the whole, and over one axis the shape tells how it is split now.
    """
    known = before.shard_spec
    before_local = sharding.localized(tensor)
    if before_local is not None and tuple(before_local[0].mesh.flatten().tolist()) == known.ranks:
        axes = tuple(_axis(p) for p in before_local[1])
        return ShardSpec(known.ranks, known.mesh, known.shape, axes)
    if _memory(local(tensor)) == before.memory:
        return known
    differing = [
        dim
        for dim, (mine, whole) in enumerate(zip(tensor.shape, known.shape, strict=False))
        if mine != whole
    ]
    axis = MeshAxis(UNKNOWN)
    if tensor.dim() == len(known.shape) and not differing:
        axis = MeshAxis(REPLICATE)
    elif tensor.dim() == len(known.shape) and len(known.mesh) == 1 and len(differing) == 1:
        axis = MeshAxis(SHARD, differing[0])
    return ShardSpec(known.ranks, known.mesh, known.shape, (axis,) * len(known.mesh))


def _axis(placement: Placement) -> MeshAxis:
    if placement.is_replicate():
        return MeshAxis(REPLICATE)
    dim = getattr(placement, "dim", None)
    if dim is not None:
        return MeshAxis(SHARD, int(dim), sharding.split_factor(placement))
    # A masked partial (sharded embedding) holds garbage where another rank has the row.
    if placement.is_partial() and type(placement).__name__ == "Partial":
        return MeshAxis(PARTIAL, op=str(getattr(placement, "reduce_op", "sum")))
    return MeshAxis(UNKNOWN)


def _memory(tensor: Tensor) -> tuple[object, ...]:
    where = tensor.data_ptr() if tensor.numel() else 0
    return where, tuple(tensor.shape), tensor.stride()
