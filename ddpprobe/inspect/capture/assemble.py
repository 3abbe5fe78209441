"""From the parts that the ranks hold to the whole tensor. No communication in here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ddpprobe.errors import CaptureError
from ddpprobe.records.shard_spec import (
    PARTIAL,
    REPLICATE,
    SHARD,
    UNKNOWN,
    MeshAxis,
    ShardSpec,
    agree,
)

REDUCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum,
    "product": torch.mul,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RankPart:
    """What one rank tells of its part.

    Attributes:
        shape, dtype: of the local tensor (dtype without `torch.`).
        shard_spec: its layout over a mesh; None: a plain tensor.
        group: ranks that share one tensor-parallel computation with this one; () if none do.
        alike: whether these ranks are concluded to hold the same plain tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    shard_spec: ShardSpec | None = None
    group: tuple[int, ...] = ()
    alike: bool = False


class Piece(NamedTuple):
    """A piece of the batch: its ranks, and its shard spec; None: one rank's plain tensor."""

    ranks: tuple[int, ...]
    shard_spec: ShardSpec | None


def pieces(parts: Mapping[int, RankPart], joined: str | int | None, what: str) -> list[Piece]:
    """Group the ranks into the pieces of the batch, in order of their lowest rank.

    Args:
        parts: by rank; ranks that hold nothing are absent.
        joined: what the user says of plain tensors inside a tensor-parallel group: None,
            "replicated", or the dim along which its ranks hold shards.
        what: the tensor's name, for messages.

    Raises:
        CaptureError: the layout of a part is not known.
    """
    found: list[Piece] = []
    seen: set[int] = set()
    for rank in sorted(parts):
        if rank in seen:
            continue
        part = parts[rank]
        ranks: tuple[int, ...] = (rank,)
        shard_spec = part.shard_spec
        if shard_spec is not None:
            ranks = shard_spec.ranks
            specs = [p.shard_spec for r, p in parts.items() if r in ranks]
            shard_spec = agree([spec for spec in specs if spec is not None])
        elif len(part.group) > 1:
            ranks = part.group
            shard_spec = _as_said(part, {r: parts[r] for r in ranks if r in parts}, joined, what)
        if shard_spec is not None and any(axis.does == UNKNOWN for axis in shard_spec.axes):
            raise _not_known(what, ranks)
        seen.update(ranks)
        found.append(Piece(ranks, shard_spec))
    return found


def needed(pieces: Sequence[Piece]) -> list[int]:
    """Return the ranks whose tensors make the whole: of replicas the first."""
    return [r for ranks, spec in pieces for r in ranks if spec is None or spec.primary(r)]


def whole(
    pieces: Sequence[Piece],
    tensors: Mapping[int, Tensor],
    dim: int,
    what: str,
) -> Tensor:
    """Return the whole tensor: each piece assembled, the pieces joined along `dim`.

    Args:
        pieces: what the function `pieces` returned.
        tensors: local tensors of the `needed` ranks.
        dim: the dim of the batch.
        what: the tensor's name, for messages.

    Raises:
        CaptureError: parts are missing, or the pieces do not fit together.
    """
    done = []
    for ranks, shard_spec in pieces:
        if shard_spec is None:
            done.append(tensors[ranks[0]])
            continue
        missing = [r for r in ranks if shard_spec.primary(r) and r not in tensors]
        if missing:
            raise CaptureError(
                f"{what} is spread over the ranks {list(ranks)}, but rank {missing[0]} has no "
                "part of it: the module did not run there. .by_rank() gives what there is."
            )
        done.append(_piece(shard_spec, {r: tensors[r] for r in ranks if r in tensors}, what))
    return done[0] if len(done) == 1 else _join(pieces, done, dim, what)


def _piece(spec: ShardSpec, tensors: Mapping[int, Tensor], what: str) -> Tensor:
    ops = {axis.op for axis in spec.axes if axis.does == PARTIAL}
    if len(ops) > 1 or not ops <= set(REDUCE):
        raise CaptureError(
            f"{what} is a partial value over {sorted(ops)}, which ddpprobe cannot reduce. "
            ".by_rank() gives the parts."
        )
    like = next(iter(tensors.values()))
    exact = like.double() if ops and like.is_floating_point() else like
    out = torch.empty(spec.shape, dtype=exact.dtype, device=like.device)
    reduced: dict[tuple[int, ...], int] = {}
    covered = 0
    for rank in spec.ranks:
        if not spec.primary(rank):
            continue
        place = spec.coordinate(rank)
        index = region(spec, place)
        if tuple(map(len, index)) != tuple(tensors[rank].shape):
            raise CaptureError(
                f"{what}: rank {rank} holds the shape {tuple(tensors[rank].shape)}, but its shard "
                f"of {spec.shape} should be {tuple(map(len, index))}. .by_rank() gives the parts."
            )
        key = tuple(at for at, axis in zip(place, spec.axes, strict=True) if axis.does == SHARD)
        grid = torch.meshgrid(*index, indexing="ij") if index else ()
        part = tensors[rank].to(exact.dtype)
        first = key not in reduced
        covered += part.numel() if first else 0
        out[grid] = part if first else REDUCE[next(iter(ops))](out[grid], part)
        reduced[key] = reduced.get(key, 0) + 1
    if covered != out.numel():
        raise CaptureError(f"{what}: the shards do not tile {spec.shape}. .by_rank() gives them.")
    if "avg" in ops:
        out /= max(reduced.values())
    return out.to(like.dtype)


def region(spec: ShardSpec, place: Sequence[int]) -> list[Tensor]:
    """Return per dim the global indices that the rank at `place` of the mesh holds, int64 [n]."""
    empty = torch.arange(0, device="cpu")
    return [
        torch.cat([empty, *(torch.arange(*r, device="cpu") for r in runs)])
        for runs in spec.runs(place)
    ]


def _as_said(
    part: RankPart, parts: Mapping[int, RankPart], joined: str | int | None, what: str
) -> ShardSpec | None:
    """Return the layout that the user states for plain tensors of a tensor-parallel group."""
    ranks = part.group
    if joined is None and not all(p.alike for p in parts.values()):
        raise _not_known(what, ranks)
    if joined is None or isinstance(joined, str):
        return ShardSpec(ranks, (len(ranks),), part.shape, (MeshAxis(REPLICATE),))
    dim = joined % max(len(part.shape), 1)
    shape = list(part.shape)
    shape[dim] = sum(p.shape[dim] for p in parts.values())
    return ShardSpec(ranks, (len(ranks),), tuple(shape), (MeshAxis(SHARD, dim),))


def _not_known(what: str, ranks: Sequence[int]) -> CaptureError:
    return CaptureError(
        f"{what} is a plain tensor inside a tensor-parallel computation of the ranks "
        f"{list(ranks)}, and torch does not tell whether they hold one tensor or shards of it. "
        'Say it: .full(tp="replicated") (checked bit by bit), .full(tp=-1) for shards of the last '
        "dim; or take the parts with .by_rank()."
    )


def _join(
    pieces: Sequence[Piece],
    done: Sequence[Tensor],
    dim: int,
    what: str,
) -> Tensor:
    shapes = {ranks[0]: tuple(t.shape) for (ranks, _), t in zip(pieces, done, strict=True)}
    dims = {len(shape) for shape in shapes.values()}
    rest = {
        tuple(n for i, n in enumerate(shape) if i != dim % max(len(shape), 1))
        for shape in shapes.values()
    }
    if dims == {0} or not -min(dims) <= dim < min(dims) or len(dims) > 1 or len(rest) > 1:
        raise CaptureError(
            f"{what} cannot be joined along dim {dim}: the ranks hold the shapes {shapes}. "
            ".by_rank() gives them one by one."
        )
    return torch.cat(list(done), dim)
