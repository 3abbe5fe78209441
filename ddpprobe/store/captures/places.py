"""Where the ranks' parts of one tensor lie in the whole, by what their packs say of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from math import prod
from typing import Any

from ddpprobe.records.shard_spec import PARTIAL, UNKNOWN, Runs, ShardSpec, agree

ACTIVATIONS = ("input", "output", "grad_output")
Box = tuple[tuple[int, int], ...]  # [start, stop) per dim


@dataclass(frozen=True, slots=True)
class HeldPart:
    """What one rank says of its part: its shape, its layout (JSON), the crc32 of its bytes."""

    rank: int
    shape: tuple[int, ...]
    layout: Mapping[str, Any]
    crc: int


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One piece of data.

    Attributes:
        ranks: who holds it, the same bytes all of them, ascending; in `Plan.missing` who should.
        shape: of the ranks' tensor.
        runs: per dim of the whole, the runs of indices that it consists of; None: it has no place.
    """

    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    runs: tuple[tuple[tuple[int, int], ...], ...] | None

    def boxes(self, within: Box) -> Iterator[tuple[Box, Box]]:
        """Yield (box of the whole, box of the part) of what lies in a box of the whole."""
        per_dim = []
        for runs, (low, high) in zip(self.runs or (), within, strict=True):
            found, at = [], 0
            for start, stop in runs:
                a, b = max(start, low), min(stop, high)
                if a < b:
                    found.append(((a, b), (at + a - start, at + b - start)))
                at += stop - start
            per_dim.append(found)
        for pairs in product(*per_dim):
            yield tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)


@dataclass(slots=True)
class Placed:
    """Parts on their places.

    Attributes:
        shape: of the whole.
        space: shape in which the runs lie: `shape`, or its number of elements.
        runs: rank -> per dim, the runs that it holds.
        absent: places of which nobody delivered anything.
    """

    shape: tuple[int, ...]
    space: tuple[int, ...]
    runs: dict[int, list[Runs]] = field(default_factory=dict)
    absent: list[TensorPart] = field(default_factory=list)


class NoWholeError(Exception):
    """The parts make no whole; the text says why."""


def place(kind: str, held: Sequence[HeldPart], silent: Sequence[int], world: int) -> Placed:
    """Give each part its place; the arguments are those of `make_plan`.

    Raises:
        NoWholeError: they make no whole.
        ValueError: a layout makes no sense.
    """
    kinds = {h.layout["kind"] for h in held}
    if len(kinds) > 1:
        raise NoWholeError(f"the ranks say different layouts: {', '.join(sorted(kinds))}")
    match kinds.pop():
        case "dtensor":
            return _place_dtensor(kind, held, silent)
        case "flat":
            return _place_flat(held)
        case "batch":
            return _place_batch(held)
        case "replicated":
            return _place_replicas(held)
        case "local" if world == 1:
            return _place_replicas(held)
        case "local":
            raise NoWholeError("each rank has its own")
    raise ValueError(f"unknown layout {held[0].layout!r}")


def _place_replicas(held: Sequence[HeldPart]) -> Placed:
    shapes = {h.shape for h in held}
    if len(shapes) > 1:
        raise NoWholeError(f"replicas of different shapes: {sorted(shapes)}")
    shape = shapes.pop()
    return Placed(shape, shape, {h.rank: [[(0, n)] for n in shape] for h in held})


def _place_flat(held: Sequence[HeldPart]) -> Placed:
    shapes = {tuple(map(int, h.layout["shape"])) for h in held}
    if len(shapes) > 1:
        raise NoWholeError(f"the ranks say different shapes: {sorted(shapes)}")
    shape = shapes.pop()
    placed = Placed(shape, (prod(shape),))
    for h in held:
        start, stop = int(h.layout["start"]), int(h.layout["stop"])
        if not 0 <= start <= stop <= prod(shape) or prod(h.shape) != stop - start:
            raise ValueError(f"elements {start} to {stop} of {shape}, in a tensor {h.shape}")
        placed.runs[h.rank] = [[(start, stop)] if start < stop else []]
    here = sorted({run for (runs,) in placed.runs.values() for run in runs})
    if any(a[1] > b[0] for a, b in pairwise(here)):
        raise NoWholeError("the ranks' runs overlap")
    edges = [(0, 0), *here, (prod(shape), prod(shape))]
    gaps = [(a[1], b[0]) for a, b in pairwise(edges) if a[1] < b[0]]
    placed.absent = [TensorPart((), (b - a,), (((a, b),),)) for a, b in gaps]
    return placed


def _place_batch(held: Sequence[HeldPart]) -> Placed:
    groups: dict[tuple[int, tuple[int, ...]], dict[int, HeldPart]] = {}
    for h in held:
        ranks = tuple(sorted(map(int, h.layout["ranks"])))
        groups.setdefault((int(h.layout["dim"]), ranks), {})[h.rank] = h
    wholes, placed = set(), Placed((), ())
    for (dim, ranks), parts in groups.items():
        absent = [r for r in ranks if r not in parts]
        if absent:
            raise NoWholeError(f"rank {absent[0]} delivered no part, how long it is nobody knows")
        shapes = {r: parts[r].shape for r in ranks}
        joined, starts = _join(list(shapes.values()), dim)
        for r, start in zip(ranks, starts, strict=True):
            placed.runs[r] = [[(0, n)] if n else [] for n in shapes[r]]
            if shapes[r]:
                stop = start + shapes[r][dim]
                placed.runs[r][dim] = [(start, stop)] if start < stop else []
        wholes.add(joined)
    if len(wholes) > 1:
        raise NoWholeError(f"groups of ranks hold different batches: {sorted(wholes)}")
    placed.shape = placed.space = wholes.pop()
    return placed


def _join(shapes: Sequence[tuple[int, ...]], dim: int) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of parts joined along `dim`, and where each begins."""
    first = shapes[0]
    if len(shapes) == 1:
        return first, [0]
    rest = {(len(s), s[:dim], s[dim + 1 :]) for s in shapes}
    if not 0 <= dim < len(first) or len(rest) > 1:
        raise NoWholeError(f"parts of shapes {sorted(set(shapes))} cannot be joined")
    starts = [0]
    for shape in shapes:
        starts.append(starts[-1] + shape[dim])
    return (*first[:dim], starts[-1], *first[dim + 1 :]), starts[:-1]


def _place_dtensor(kind: str, held: Sequence[HeldPart], silent: Sequence[int]) -> Placed:
    groups: dict[tuple[int, ...], list[tuple[HeldPart, ShardSpec]]] = {}
    told: ShardSpec | None = None
    for before, h in zip((None, *held), held, strict=False):
        if told is None or before is None or before.layout != h.layout:  # else as the one before
            told = ShardSpec.from_json(h.layout)
            _check_mesh(told)
        if len(told.shape) != len(h.shape) or h.rank not in told.ranks:
            raise ValueError(
                f"rank {h.rank} holds {h.shape} of a mesh that cannot be: {told!s:.200}"
            )
        groups.setdefault(told.ranks, []).append((h, told))
    specs = {ranks: agree([p for _, p in group]) for ranks, group in sorted(groups.items())}
    for shard_spec in specs.values():
        if shard_spec.label in {PARTIAL, UNKNOWN}:
            raise NoWholeError(f"its layout over the ranks is {shard_spec.label}")
    shapes = [p.shape for p in specs.values()]
    known = {r for ranks in specs for r in ranks}
    starts = [0] * len(specs)
    if kind in ACTIVATIONS:  # one piece of the batch per mesh
        unknown = next((r for r in silent if r not in known), None)
        if unknown is not None:
            raise NoWholeError(f"rank {unknown} delivered nothing, its part is not known")
        whole, starts = _join(shapes, 0)
    elif len(set(shapes)) > 1:
        raise NoWholeError(f"meshes hold different shapes: {sorted(set(shapes))}")
    else:
        whole = shapes[0]
    placed = Placed(whole, whole)
    for (ranks, shard_spec), start in zip(specs.items(), starts, strict=True):
        _place_mesh(placed, shard_spec, {h.rank: h for h, _ in groups[ranks]}, start)
    return placed


def _check_mesh(spec: ShardSpec) -> None:
    ranks, numbers = len(spec.ranks), (*spec.ranks, *spec.mesh, *spec.shape)
    if (
        not all(type(n) is int and n >= 0 for n in numbers)
        or prod(spec.mesh) != ranks
        or len(spec.axes) != len(spec.mesh)
        or not all(0 <= a.dim < max(len(spec.shape), 1) for a in spec.axes)
        # A strided shard is split by other axes of the mesh.
        or not all(1 <= a.split <= ranks // n for a, n in zip(spec.axes, spec.mesh, strict=True))
    ):
        raise ValueError(f"a mesh that cannot be: {spec!s:.200}")


def _place_mesh(
    placed: Placed, shard_spec: ShardSpec, here: Mapping[int, HeldPart], start: int
) -> None:
    for rank, place in zip(shard_spec.ranks, product(*map(range, shard_spec.mesh)), strict=True):
        runs = shard_spec.runs(place)
        shape = tuple(sum(b - a for a, b in r) for r in runs)
        runs = [[(a, b) for a, b in r if a < b] for r in runs]
        if start:
            runs[0] = [(a + start, b + start) for a, b in runs[0]]
        if rank not in here:
            if prod(shape):
                placed.absent.append(TensorPart((rank,), shape, _frozen(runs)))
            continue
        if here[rank].shape != shape:
            raise NoWholeError(f"rank {rank} holds {here[rank].shape}, its shard is {shape}")
        placed.runs[rank] = runs


def _frozen(runs: Sequence[Runs]) -> tuple[tuple[tuple[int, int], ...], ...]:
    return tuple(tuple(r) for r in runs)


def merged(held: Sequence[HeldPart], placed: Placed) -> tuple[TensorPart, ...]:
    """Return the parts on their places, replicas as one. Raises NoWholeError where they differ."""
    found: dict[Any, list[HeldPart]] = {}
    for h in held:
        found.setdefault(_frozen(placed.runs[h.rank]), []).append(h)
    parts = []
    for runs, holders in sorted(found.items(), key=lambda item: item[1][0].rank):
        other = next((h for h in holders if h.crc != holders[0].crc), None)
        if other is not None:
            a, b = holders[0].rank, other.rank
            raise NoWholeError(f"ranks {a} and {b} should hold the same bytes, and do not")
        parts.append(TensorPart(tuple(h.rank for h in holders), holders[0].shape, runs))
    return tuple(parts)


def unplaced(held: Sequence[HeldPart]) -> tuple[TensorPart, ...]:
    """Return parts that have no place in a whole; equal ones as one."""
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for h in held:
        found.setdefault((h.crc, h.shape), []).append(h.rank)
    return tuple(TensorPart(tuple(ranks), shape, None) for (_, shape), ranks in found.items())
