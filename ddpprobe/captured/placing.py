"""How one rank's part of a tensor lies in the whole, told by DTensors before they are made local.

A tensor-parallel module computes a DTensor and then hands out its plain local part. A hook in front
of that conversion sees the DTensor; what comes out has the same value on the whole, so its layout
follows from the shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from ddpprobe.stats.dense import local
from ddpprobe.torch_private import sharding

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement

REPLICATE, SHARD, PARTIAL, UNKNOWN = "replicate", "shard", "partial", "unknown"


@dataclass(frozen=True, slots=True)
class Axis:
    """What one axis of the mesh does to the tensor.

    Attributes:
        does: `replicate`, `shard`, `partial` (the values are still to be reduced), `unknown`.
        dim: the dim of the tensor that a shard splits.
        split: split factor of a strided shard (FSDP over tensor parallel); 1 for a plain one.
        op: how a partial is reduced: sum, avg, max, min, product.
    """

    does: str
    dim: int = 0
    split: int = 1
    op: str = ""


@dataclass(frozen=True, slots=True)
class Placing:
    """The layout of a tensor over a mesh of ranks.

    Attributes:
        ranks: global ranks of the mesh, row-major.
        mesh: sizes of its axes.
        shape: of the whole tensor.
        axes: one per axis of the mesh.
    """

    ranks: tuple[int, ...]
    mesh: tuple[int, ...]
    shape: tuple[int, ...]
    axes: tuple[Axis, ...]

    @property
    def label(self) -> str:
        """The placement in the words of a site: partial, unknown, sharded or replicated."""
        does = {axis.does for axis in self.axes}
        for word, label in ((UNKNOWN, "unknown"), (PARTIAL, "partial"), (SHARD, "sharded")):
            if word in does:
                return label
        return "replicated"

    def coordinate(self, rank: int) -> tuple[int, ...]:
        """Return the place of `rank` in the mesh."""
        left, place = self.ranks.index(rank), []
        for size in reversed(self.mesh):
            left, at = divmod(left, size)
            place.append(at)
        return tuple(reversed(place))

    def primary(self, rank: int) -> bool:
        """Whether `rank` holds the first of the replicas of its part."""
        pairs = zip(self.axes, self.coordinate(rank), strict=True)
        return all(at == 0 for axis, at in pairs if axis.does == REPLICATE)

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        axes = [[a.does, a.dim, a.split, a.op] for a in self.axes]
        return {"ranks": self.ranks, "mesh": self.mesh, "shape": self.shape, "axes": axes}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Placing:
        """Return the placing that another rank told."""
        axes = tuple(Axis(str(d), int(i), int(s), str(o)) for d, i, s, o in told["axes"])
        return cls(tuple(told["ranks"]), tuple(told["mesh"]), tuple(told["shape"]), axes)


@dataclass(frozen=True, slots=True)
class Origin:
    """A DTensor that a module computed, remembered without holding it."""

    placing: Placing
    memory: tuple[object, ...]


def of(tensor: Tensor) -> Placing:
    """Return the placing of a DTensor."""
    spread = cast("DTensor", tensor)
    mesh = spread.device_mesh.mesh
    return Placing(
        tuple(mesh.flatten().tolist()),
        tuple(mesh.shape),
        tuple(spread.shape),
        tuple(_axis(p) for p in spread.placements),
    )


def origin(tensor: Tensor) -> Origin:
    """Return what must be known of a DTensor to recognise what becomes of it."""
    return Origin(of(tensor), _memory(local(tensor)))


def follow(before: Origin, tensor: Tensor) -> Placing:
    """Return the placing of the plain `tensor` that was made of a DTensor.

    Autograd remembers how it lay when it was made local. Where it does not (no_grad, a cast): if it
    is the DTensor's own local part, nothing has changed; otherwise it was redistributed, which
    keeps the value of the whole, and over one axis the shape tells how it is split now.
    """
    known = before.placing
    told = sharding.localized(tensor)
    if told is not None and tuple(told[0].mesh.flatten().tolist()) == known.ranks:
        return Placing(known.ranks, known.mesh, known.shape, tuple(_axis(p) for p in told[1]))
    if _memory(local(tensor)) == before.memory:
        return known
    differing = [
        dim
        for dim, (mine, whole) in enumerate(zip(tensor.shape, known.shape, strict=False))
        if mine != whole
    ]
    axis = Axis(UNKNOWN)
    if tensor.dim() == len(known.shape) and not differing:
        axis = Axis(REPLICATE)
    elif tensor.dim() == len(known.shape) and len(known.mesh) == 1 and len(differing) == 1:
        axis = Axis(SHARD, differing[0])
    return Placing(known.ranks, known.mesh, known.shape, (axis,) * len(known.mesh))


def agree(told: list[Placing]) -> Placing:
    """Return the one placing that the ranks of a mesh told.

    They can differ where a split leaves everything on one rank, which then looks like a replica.
    """
    axes = []
    for column in zip(*(placing.axes for placing in told), strict=True):
        shards = {axis for axis in column if axis.does == SHARD}
        rest = {axis for axis in column if axis.does not in (SHARD, REPLICATE)}
        if rest or len(shards) > 1:
            same = len(set(column)) == 1
            axes.append(column[0] if same else Axis(UNKNOWN))
        else:
            axes.append(shards.pop() if shards else column[0])
    first = told[0]
    return Placing(first.ranks, first.mesh, first.shape, tuple(axes))


def _axis(placement: Placement) -> Axis:
    if placement.is_replicate():
        return Axis(REPLICATE)
    dim = getattr(placement, "dim", None)
    if dim is not None:
        return Axis(SHARD, int(dim), sharding.split_factor(placement))
    # A masked partial (sharded embedding) holds garbage where another rank has the row.
    if placement.is_partial() and type(placement).__name__ == "Partial":
        return Axis(PARTIAL, op=str(getattr(placement, "reduce_op", "sum")))
    return Axis(UNKNOWN)


def _memory(tensor: Tensor) -> tuple[object, ...]:
    where = tensor.data_ptr() if tensor.numel() else 0
    return where, tuple(tensor.shape), tensor.stride()
