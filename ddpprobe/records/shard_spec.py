"""Who holds which part of a whole: layouts over a mesh of ranks, as plain numbers.

The training process tells them, the reader of a run needs them without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REPLICATE, SHARD, PARTIAL, UNKNOWN = "replicate", "shard", "partial", "unknown"
Runs = list[tuple[int, int]]  # [start, stop) one after the other
SpecJson = Mapping[str, Any]  # how a part lies in the whole, as `tensor_pack` describes it
WHOLE: SpecJson = {"kind": "replicated"}
OWN: SpecJson = {"kind": "local"}


@dataclass(frozen=True, slots=True)
class MeshAxis:
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
class ShardSpec:
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
    axes: tuple[MeshAxis, ...]

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

    def runs(self, place: Sequence[int]) -> list[Runs]:
        """Return per dim the runs of global indices that the rank at `place` of the mesh holds."""
        held: list[Runs] = [[(0, size)] for size in self.shape]
        for axis, size, at in zip(self.axes, self.mesh, place, strict=True):
            if axis.does == SHARD:
                held[axis.dim] = deal(held[axis.dim], size, at, axis.split)
        return held

    def to_json(self) -> SpecJson:
        """Return what `from_json` takes."""
        axes = [[a.does, a.dim, a.split, a.op] for a in self.axes]
        whole = {"ranks": self.ranks, "mesh": self.mesh, "shape": self.shape, "axes": axes}
        return {"kind": "dtensor", **whole}

    @classmethod
    def from_json(cls, told: SpecJson) -> ShardSpec:
        """Return the shard spec that another rank told."""
        axes = tuple(MeshAxis(str(d), int(i), int(s), str(o)) for d, i, s, o in told["axes"])
        return cls(tuple(told["ranks"]), tuple(told["mesh"]), tuple(told["shape"]), axes)


def agree(told: list[ShardSpec]) -> ShardSpec:
    """Return the one shard spec that the ranks of a mesh told.

    They can differ where a split leaves everything on one rank, which then looks like a replica.
    """
    axes = []
    for column in zip(*(shard_spec.axes for shard_spec in told), strict=True):
        shards = {axis for axis in column if axis.does == SHARD}
        rest = {axis for axis in column if axis.does not in (SHARD, REPLICATE)}
        if rest or len(shards) > 1:
            same = len(set(column)) == 1
            axes.append(column[0] if same else MeshAxis(UNKNOWN))
        else:
            axes.append(shards.pop() if shards else column[0])
    first = told[0]
    return ShardSpec(first.ranks, first.mesh, first.shape, tuple(axes))


def deal(runs: Runs, ranks: int, rank: int, pieces: int) -> Runs:
    """Cut runs [start, stop) into `pieces`, each of these for `ranks`; return what `rank` gets.

    Chunks are cut as by torch.chunk; `pieces` is the split factor of a strided shard, else 1.
    """
    size = sum(b - a for a, b in runs)
    mine: Runs = []
    for start, stop in (_chunk(size, pieces, p) for p in range(pieces)):
        a, b = _chunk(stop - start, ranks, rank)
        for run in _cut(runs, start + a, start + b):
            if mine and mine[-1][1] == run[0]:
                mine[-1] = mine[-1][0], run[1]
            else:
                mine.append(run)
    return mine


def _chunk(size: int, chunks: int, index: int) -> tuple[int, int]:
    """[start, stop) of a chunk as torch.chunk makes them: full ones first, then less or none."""
    full = -(-size // chunks)
    return min(index * full, size), min((index + 1) * full, size)


def _cut(runs: Runs, start: int, stop: int) -> Runs:
    """Positions [start, stop) of what `runs` hold one after the other."""
    out, position = [], 0
    for a, b in runs:
        low, high = max(start, position), min(stop, position + b - a)
        if low < high:
            out.append((a + low - position, a + high - position))
        position += b - a
    return out
