"""What each rank says of a step besides its tensors (loss, times, ...), merged over steps."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import StepRecord

Floats = NDArray[np.float64]
_N, _SUM, _MIN, _MAX, _BAD = range(5)


@final
@dataclass(slots=True)
class Labels:
    """Ranks and names in order of first appearance, and which ranks delivered."""

    ranks: dict[int, int] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    _places: dict[tuple[str, ...], NDArray[np.intp]] = field(default_factory=dict)

    def rank(self, rank: int) -> int:
        """Return the place of a rank."""
        return self.ranks.setdefault(rank, len(self.ranks))

    def places(self, names: tuple[str, ...]) -> NDArray[np.intp]:
        """Return the places of names; the same few tables of names come again and again."""
        known = self._places.get(names)
        if known is None:
            found = [self.names.setdefault(name, len(self.names)) for name in names]
            known = self._places[names] = np.array(found, np.intp)
        return known


@final
@dataclass(slots=True)
class Numbers:
    """Per rank and name: how many finite values, their sum, minimum, maximum; how many others.

    `cells` are float64 [ranks, names, 5]; `delivered` float64 [ranks] counts records.
    """

    cells: Floats
    delivered: Floats

    @classmethod
    def none(cls) -> Numbers:
        """Return what nobody said anything of."""
        return cls(*_empty(0, 0))

    @classmethod
    def of(cls, record: StepRecord, labels: Labels) -> Numbers:
        """Return a record's numbers; the labels may grow."""
        alike: dict[tuple[str, ...], list[int]] = {}  # almost always all ranks give the same names
        for rank, scalars in record.scalars.items():
            alike.setdefault(tuple(scalars), []).append(rank)
        at = [
            (np.array([labels.rank(rank) for rank in who], np.intp), labels.places(names))
            for names, who in alike.items()
        ]
        here = [labels.rank(rank) for rank in record.ranks]
        numbers = cls(*_empty(len(labels.ranks), len(labels.names)))
        numbers.delivered[here] = 1
        for who, (rows, columns) in zip(alike.values(), at, strict=True):
            values = np.array([list(record.scalars[rank].values()) for rank in who], np.float64)
            good = np.isfinite(values)
            cells = np.stack([good, values, values, values, ~good], axis=-1)
            cells[~good, :_BAD] = 0, 0, np.inf, -np.inf
            numbers.cells[np.ix_(rows, columns)] = cells
        return numbers

    def absorb(self, later: Numbers) -> None:
        """Merge another step's numbers into these."""
        ranks, names = np.maximum(self.cells.shape[:2], later.cells.shape[:2]).tolist()
        mine, theirs = self.padded(ranks, names), later.padded(ranks, names)
        cells = mine.cells + theirs.cells
        cells[..., _MIN] = np.minimum(mine.cells[..., _MIN], theirs.cells[..., _MIN])
        cells[..., _MAX] = np.maximum(mine.cells[..., _MAX], theirs.cells[..., _MAX])
        self.cells, self.delivered = cells, mine.delivered + theirs.delivered

    def padded(self, ranks: int, names: int) -> Numbers:
        """Return these numbers with room for so many ranks and names."""
        here = self.cells.shape[:2]
        if here == (ranks, names):
            return self
        numbers = Numbers(*_empty(ranks, names))
        numbers.cells[: here[0], : here[1]] = self.cells
        numbers.delivered[: here[0]] = self.delivered
        return numbers


@final
@dataclass(frozen=True, slots=True)
class ScalarTable:
    """One name of all columns: arrays [columns, ranks], NaN where no finite value was given.

    `bad` counts the values that were not finite.
    """

    mean: Floats
    low: Floats
    high: Floats
    bad: Floats

    @property
    def known(self) -> bool:
        """Whether there is any finite value."""
        return bool(np.isfinite(self.mean).any())


def table_of(columns: Sequence[Numbers], labels: Labels, name: str) -> ScalarTable:
    """Read one name out of all columns; ranks in the order of `labels`."""
    shape = len(labels.ranks), len(labels.names)
    place = labels.names.get(name)
    if place is None or not columns:
        none = np.full((len(columns), shape[0]), np.nan)
        return ScalarTable(none, none, none, np.zeros_like(none))
    cells = np.stack([c.padded(*shape).cells[:, place] for c in columns])
    given = cells[..., _N] > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        parts = (cells[..., _SUM] / cells[..., _N], cells[..., _MIN], cells[..., _MAX])
    mean, low, high = (np.where(given, part, np.nan) for part in parts)
    return ScalarTable(mean, low, high, cells[..., _BAD])


def quiet(fold: Any, values: Floats, axis: int = 1) -> Floats:  # noqa: ANN401  (a fold of NumPy)
    """Fold over an axis, past NaN; NaN where there is nothing else, without a warning about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        found: Floats = fold(values, axis=axis)
    return found


def _empty(ranks: int, names: int) -> tuple[Floats, Floats]:
    cells = np.zeros((ranks, names, 5))
    cells[..., _MIN], cells[..., _MAX] = np.inf, -np.inf
    return cells, np.zeros(ranks)
