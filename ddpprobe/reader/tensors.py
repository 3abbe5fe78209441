"""Captured tensors of a run: whole, lazily, from the store and from packs not folded yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import TensorError
from ddpprobe.store.captures import dtypes
from ddpprobe.store.captures.reader import empty

if TYPE_CHECKING:
    from ddpprobe.rundir.tensor_pack import TensorKey
    from ddpprobe.store.captures.places import Box, HeldPart, TensorPart
    from ddpprobe.store.captures.plan import Plan

Index = int | slice | type(Ellipsis) | tuple[Any, ...]


class PartSource(Protocol):
    """Where the bytes of one part are."""

    def read(self, inner: Box) -> NDArray[Any]:
        """Return a region of the part. Raises StoreDamaged or PackDamaged if it is damaged."""


@dataclass(frozen=True, slots=True)
class Captured:
    """What was captured at one step.

    Attributes:
        attempt, step: when.
        ranks: whose packs there are.
        modules: what was captured, by FQN.
        reason: why: `capture` (the user asked for it), `trigger: ...`, `nonfinite`, ...
        complete: every rank delivered that was to (of a `nonfinite` one those that met it), and
            nothing was dropped for lack of memory.
        dropped: bytes that the ranks did not keep, for that reason.
        bytes: of the tensors, as they lie on the disk.
        sites: what `Run.tensor` takes.
    """

    attempt: int
    step: int
    ranks: tuple[int, ...]
    modules: tuple[str, ...]
    reason: str
    complete: bool
    dropped: int
    bytes: int
    sites: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of a tensor.

    Attributes:
        ranks: who holds it, the same bytes all of them.
        runs: per dim of the whole (of a `flat` one: of its elements in C order) the runs
            [start, stop) of indices; None: a part without a place.
        delivered: False: nobody delivered it, it cannot be read.
    """

    ranks: tuple[int, ...]
    runs: tuple[tuple[tuple[int, int], ...], ...] | None
    delivered: bool


class GlobalTensor:
    """A captured tensor as if one rank held all of it; nothing is read before it is asked for.

    `tensor[...]` takes integers, slices and an ellipsis, as NumPy does, and reads only the chunks
    that it touches. Where a rank's part is missing it raises, and never makes up numbers.

    Attributes:
        site: which tensor, as `Run.tensor` takes it.
        shape: of the whole; None where the parts make none (`why` says why; `rank(r)` still works).
        dtype: NumPy's; bfloat16 and float8 through ml_dtypes, complex32 as complex64.
    """

    def __init__(
        self,
        key: TensorKey,
        held: Sequence[HeldPart],
        plan: Plan,
        sources: Sequence[PartSource | None],
    ) -> None:
        self.key = key
        self.site = site_of(key)
        self.shape = plan.shape
        self.why = plan.why
        self.dtype = dtypes.dtype_of(key.dtype)
        self._plan, self._sources = plan, sources
        self._held = {h.rank: h for h in held}

    def __repr__(self) -> str:
        what = f"shape {self.shape}" if self.shape is not None else f"no whole ({self.why})"
        return f"GlobalTensor({self.site!r}, {what}, {self.key.dtype}, ranks {self.ranks})"

    @property
    def ranks(self) -> list[int]:
        """Ranks that delivered a part."""
        return sorted(self._held)

    @property
    def regions(self) -> list[Region]:
        """The pieces that it consists of, and those that are missing."""
        parts = [
            Region(p.ranks, p.runs, delivered=s is not None)
            for p, s in zip(self._plan.parts, self._sources, strict=True)
        ]
        return parts + [Region(p.ranks, p.runs, delivered=False) for p in self._plan.missing]

    def layout(self, rank: int) -> Mapping[str, Any]:
        """Return how a rank's part lies in the whole, as its pack says (JSON)."""
        return self._of(rank).layout

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of a rank's part."""
        return self._of(rank).shape

    def rank(self, rank: int) -> NDArray[Any]:
        """Return the tensor that one rank held, in its own shape.

        Raises:
            TensorError: it delivered none.
            StoreDamaged, PackDamaged: what it delivered is damaged.
        """
        shape = self._of(rank).shape
        for part, source in zip(self._plan.parts, self._sources, strict=True):
            if rank in part.ranks:
                return self._read(part, source, tuple((0, n) for n in shape))
        raise TensorError(f"{self.site}: nothing of rank {rank}")  # pragma: no cover

    def __getitem__(self, index: Any) -> NDArray[Any]:  # noqa: ANN401  (as NumPy's)
        """Return a region of the whole.

        Raises:
            TensorError: the parts make no whole, or one that it touches is missing.
            StoreDamaged, PackDamaged: one is damaged.
            IndexError, TypeError: as NumPy.
        """
        if self.shape is None:
            raise TensorError(f"{self.site} has no whole: {self.why}; .rank(r) gives {self.ranks}")
        asked = _indices(index, self.shape)
        box = tuple((r[0], r[-1] + 1) if r.step > 0 else (r[-1], r[0] + 1) for r, _ in asked if r)
        if len(box) < len(asked):
            return empty([len(r) for r, dropped in asked if not dropped], self.key.dtype)
        found = self._flat_box(box) if self._plan.flat else self._box(box)
        picked = found[tuple(slice(None, None, r.step) for r, _ in asked)]
        return picked.reshape([len(r) for r, dropped in asked if not dropped])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:  # noqa: ANN401, FBT001
        """Return the whole, for `np.asarray`."""
        return np.asarray(self[...], dtype)

    def _flat_box(self, box: Box) -> NDArray[Any]:
        """Read a box of a tensor whose parts are runs of its elements in C order."""
        whole = self.shape or ()
        steps = [prod(whole[i + 1 :]) for i in range(len(whole))]
        first = sum(a * s for (a, _), s in zip(box, steps, strict=True))
        last = sum((b - 1) * s for (_, b), s in zip(box, steps, strict=True))
        run = self._box(((first, last + 1),))
        # Not `as_strided`, which does not know the dtypes of ml_dtypes.
        shape, strides = [b - a for a, b in box], [s * run.itemsize for s in steps]
        return np.ndarray(shape, run.dtype, run.view(np.uint8), 0, strides).copy()

    def _box(self, box: Box) -> NDArray[Any]:
        pieces = [
            (part, source, outer, inner)
            for part, source in zip(self._plan.parts, self._sources, strict=True)
            for outer, inner in part.boxes(box)
        ]
        shape = [b - a for a, b in box]
        # Before anything is allocated: a tensor is as large as what was delivered of it.
        if sum(prod(b - a for a, b in outer) for _, _, outer, _ in pieces) != prod(shape):
            gone = sorted({r for p in self._plan.missing if any(p.boxes(box)) for r in p.ranks})
            whose = f"of ranks {gone} " if gone else ""
            raise TensorError(
                f"{self.site}: the parts {whose}were not delivered; .regions says what is there, "
                f".rank(r) gives the parts of the ranks {self.ranks}"
            )
        out = empty(shape, self.key.dtype)
        for part, source, outer, inner in pieces:
            place = tuple(slice(a - s, b - s) for (a, b), (s, _) in zip(outer, box, strict=True))
            out[place] = self._read(part, source, inner)
        return out

    def _read(self, part: TensorPart, source: PartSource | None, inner: Box) -> NDArray[Any]:
        if prod(part.shape) == 0:
            return empty([b - a for a, b in inner], self.key.dtype)
        if source is None:
            raise TensorError(f"{self.site}: the part of ranks {list(part.ranks)} is lost")
        return source.read(inner)

    def _of(self, rank: int) -> HeldPart:
        if rank not in self._held:
            raise TensorError(f"{self.site}: rank {rank!r} delivered nothing, {self.ranks} did")
        return self._held[rank]


@dataclass(frozen=True, slots=True)
class RankTensor:
    """One rank's part of a tensor.

    Attributes:
        rank: whose.
        whole: the tensor that it is a part of.
    """

    rank: int
    whole: GlobalTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return self.whole.local_shape(self.rank)

    @property
    def dtype(self) -> str:
        """Torch's name, without `torch.`."""
        return self.whole.key.dtype

    @property
    def layout(self) -> Mapping[str, Any]:
        """How it lies in the whole, as its pack says (JSON)."""
        return self.whole.layout(self.rank)

    def read(self) -> NDArray[Any]:
        """Return it. Raises as `GlobalTensor.rank`."""
        return self.whole.rank(self.rank)


@dataclass(frozen=True, slots=True)
class StoredCall:
    """All that one rank kept of one call of a module: what runs it again.

    Attributes:
        attempt, step, micro, call: when: the call-th of the micro-batch, from 0.
        rank, module: where.
        about: what the pack says of the module: `class`, `training`, `calls`.
        header: what it says of the step: `reason`, `scaler`, `indices`, `world_size`, ...
        tensors: by (kind, fqn, leaf); parameters, buffers and gradients are those of the step.
    """

    attempt: int
    step: int
    rank: int
    module: str
    about: Mapping[str, Any]
    header: Mapping[str, Any]
    micro: int
    call: int
    tensors: Mapping[tuple[str, str, str], RankTensor]


def site_of(key: TensorKey) -> str:
    """Return the site of a tensor: `fqn:kind`, `fqn:kind[leaf]`."""
    return f"{key.fqn}:{key.kind}" + (f"[{key.leaf}]" if key.leaf else "")


def _indices(index: Any, shape: tuple[int, ...]) -> list[tuple[range, bool]]:  # noqa: ANN401
    """Return per dim (positions, whether the dim is dropped)."""
    given = list(index) if isinstance(index, tuple) else [index]
    dots = [i for i, at in enumerate(given) if at is Ellipsis]
    if len(dots) > 1 or len(given) - len(dots) > len(shape):
        raise IndexError(f"{len(given)} indices for a tensor of shape {shape}")
    at = dots[0] if dots else len(given)
    rest = [slice(None)] * (len(shape) - len(given) + len(dots))
    given[at : at + 1] = rest
    out = []
    for one, size in zip(given, shape, strict=True):
        if isinstance(one, slice):
            out.append((range(size)[one], False))
        elif hasattr(one, "__index__"):
            number = range(size)[one]  # raises IndexError
            out.append((range(number, number + 1), True))
        else:
            raise TypeError(f"{one!r}: an index is an integer, a slice or an ellipsis")
    return out
