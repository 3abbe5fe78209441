"""From what the ranks say of their parts of one tensor to the whole, and to its chunks.

Everything here is a function of what the packs say, in a fixed order: a fold that was interrupted
comes to the same bytes, and a reader of packs that are not folded yet sees what will be stored.

A chunk lies in one rank's part, so it has one writer. Where the parts end at multiples of some
length, the array is the whole tensor, with chunks of that length (DTensor shards: the ceil grid).
An FSDP1 parameter lies in runs of the flattened elements: its array is one-dimensional, and begins
with `origin` elements of padding, so that its chunks end where the ranks' runs do. What fits no
grid (parts of a batch with lengths such as 1000 and 1001, parts that are no parts of a whole)
is stacked: one chunk per part, along a first dimension `part`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import ceil, gcd, prod

from ddpprobe.rundir.validate import MALFORMED
from ddpprobe.store.captures.places import (
    Box,
    HeldPart,
    NoWholeError,
    Placed,
    TensorPart,
    merged,
    place,
    unplaced,
)

# More chunk files than this, and stacking the parts is better.
CHUNKS_PER_PART, CHUNKS_AT_LEAST = 4, 16


@dataclass(frozen=True, slots=True)
class Plan:
    """A tensor made of its parts, and how it is stored.

    Attributes:
        shape: of the whole; None where the parts make none.
        why: why they make none.
        space: shape in which the parts' runs lie: `shape`, or its number of elements (`flat`).
        parts: what was delivered.
        missing: places in the whole that nobody delivered.
        stacked: one chunk per part, in their order.
        origin: elements of padding in front of a flat array.
        array, chunk: shape of the array, and of its chunks.
    """

    shape: tuple[int, ...] | None
    why: str
    space: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    missing: tuple[TensorPart, ...]
    stacked: bool
    origin: int
    array: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def flat(self) -> bool:
        """Whether the runs are those of the flattened tensor."""
        return self.shape is not None and self.space != self.shape

    @property
    def dims(self) -> tuple[str, ...]:
        """Names of the array's dimensions."""
        names = [f"d{i}" for i in range(len(self.array) - self.stacked)]
        return ("part", *names) if self.stacked else ("element",) if self.flat else tuple(names)

    def chunks(self, part: int) -> Iterator[tuple[tuple[int, ...], Box]]:
        """Yield (index in the grid, box of the whole) of the chunks that hold a part.

        A stacked one has its index, and an empty box.
        """
        if self.stacked:
            if prod(self.parts[part].shape):
                yield (part, *[0] * (len(self.array) - 1)), ()
            return
        for box, _ in self.parts[part].boxes(tuple((0, n) for n in self.space)):
            yield from self.chunks_of(box)

    def chunks_of(self, box: Box) -> Iterator[tuple[tuple[int, ...], Box]]:
        """Yield (index in the grid, its box of the whole) of the chunks that a box touches."""
        o = self.origin
        spans = [
            range((a + o) // c, -(-(b + o) // c)) for (a, b), c in zip(box, self.chunk, strict=True)
        ]
        for at in product(*spans):
            yield (
                at,
                tuple(
                    (max(i * c - o, 0), min((i + 1) * c - o, n))
                    for i, c, n in zip(at, self.chunk, self.space, strict=True)
                ),
            )


def make_plan(kind: str, held: Sequence[HeldPart], silent: Sequence[int], world: int) -> Plan:
    """Put the parts of one tensor together.

    Args:
        kind: of the tensor, as in a pack; the batch runs along dim 0 of an activation.
        held: what the ranks say, ascending by rank, each once.
        silent: ranks of the job from which nothing at all came.
        world: ranks of the job.
    """
    try:
        placed = place(kind, held, silent, world)
        parts = merged(held, placed)
    except NoWholeError as error:
        return no_whole(held, str(error))
    except MALFORMED as error:
        # Whoever wrote that: the parts themselves are there, and can be asked for rank by rank.
        return no_whole(held, f"a layout makes no sense: {error!r}")
    here = {part.runs for part in parts}
    missing = tuple(part for part in placed.absent if part.runs not in here)
    return _chunked(placed, parts, missing)


def no_whole(held: Sequence[HeldPart], why: str) -> Plan:
    """Put nothing together: each rank's part is stored as its own."""
    return _stack(None, why, (), unplaced(held), ())


def _chunked(
    placed: Placed, parts: tuple[TensorPart, ...], missing: tuple[TensorPart, ...]
) -> Plan:
    shape, space = placed.shape, placed.space
    everything = (*parts, *missing)
    edges = [
        {e for p in everything for run in (p.runs or ())[d : d + 1] for r in run for e in r}
        - {0, n}
        for d, n in enumerate(space)
    ]
    chunk = tuple(gcd(*e) if e else max(n, 1) for e, n in zip(edges, space, strict=True))
    origin = 0
    if space != shape:
        chunk, origin = _flat_grid(parts, edges[0], chunk)
    count = prod(ceil((n + origin) / c) for n, c in zip(space, chunk, strict=True))
    if count > max(CHUNKS_PER_PART * len(everything), CHUNKS_AT_LEAST):
        return _stack(shape, "", space, parts, missing)
    array = tuple(n + origin for n in space)
    return Plan(shape, "", space, parts, missing, False, origin, array, chunk)  # noqa: FBT003


def _flat_grid(
    parts: Sequence[TensorPart], edges: set[int], chunk: tuple[int, ...]
) -> tuple[tuple[int, ...], int]:
    """Return the chunk and the padding in front with which chunks end where the runs do."""
    longest = max((b - a for p in parts for a, b in (p.runs or ((),))[0]), default=0)
    if not edges or not longest:
        return chunk, 0
    origin = -min(edges) % longest
    if all((edge + origin) % longest == 0 for edge in edges):
        return (longest,), origin
    return chunk, 0


def _stack(
    shape: tuple[int, ...] | None,
    why: str,
    space: tuple[int, ...],
    parts: tuple[TensorPart, ...],
    missing: tuple[TensorPart, ...],
) -> Plan:
    shapes = {p.shape for p in parts}
    inner = parts[0].shape if len(shapes) == 1 else (max(map(prod, shapes), default=0),)
    chunk = (1, *(max(n, 1) for n in inner))
    return Plan(shape, why, space, parts, missing, True, 0, (len(parts), *inner), chunk)  # noqa: FBT003
