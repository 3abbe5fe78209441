"""Statistics of one tensor over its calls, in bounded memory, mergeable over calls and ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ddpprobe.rank.stats import histogram
from ddpprobe.rank.stats.histogram import ABOVE, BELOW, HEAD, NEAR_ZERO
from ddpprobe.records.step import derive


@dataclass(frozen=True, slots=True)
class TensorMeter:
    """What is measured of a tensor.

    Attributes:
        bins: number of bins of the histogram; 0: none.
        limits: their fixed range; None: the symmetric range that fits.
        near_zero: largest magnitude that counts as near zero.
    """

    bins: int
    limits: tuple[float, float] | None
    near_zero: float

    @property
    def width(self) -> int:
        """Columns of a wide row."""
        return HEAD + self.bins

    def measure(self, tensor: Tensor) -> Tensor:
        """Return the wide row of `tensor` (see `stats.histogram`)."""
        return histogram.measure(tensor, self.bins, self.limits, self.near_zero)

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        """Merge wide rows of equal shape."""
        return histogram.merge(a, b, fixed=self.limits is not None)

    def total(self, rows: Tensor) -> Tensor:
        """Merge the rows [calls, width] into one, halving them until it is alone."""
        if not len(rows):
            return histogram.empty(self.bins)
        while len(rows) > 1:
            rows = self.pairs(rows)
        return rows[0]

    def pairs(self, rows: Tensor) -> Tensor:
        """Merge each two neighbours; an odd last one stays."""
        even = len(rows) // 2 * 2
        return torch.cat((self.merge(rows[0:even:2], rows[1:even:2]), rows[even:]))


@final
class CallSeries:
    """The rows of the calls, on the tensor's device. When `most` are kept, neighbours are merged.

    So the whole run stays covered, at half the resolution; each row stands for `stride` calls.

    Attributes:
        stride: calls per row; the last row may cover fewer.
        calls: calls added so far.
    """

    def __init__(self, meter: TensorMeter, most: int) -> None:
        self._meter, self._most = meter, most + most % 2  # even: no row is left half full
        self._rows: Tensor | None = None
        self._filled = 0
        self.stride, self.calls = 1, 0

    def add(self, row: Tensor) -> None:
        """Add the row of one call. No host-device sync."""
        if self._rows is None or self._rows.device != row.device:
            kept = self._rows[: self._filled].to(row.device) if self._rows is not None else None
            self._rows = row.new_zeros(max(self._filled, 16), len(row))
            if kept is not None:
                self._rows[: self._filled] = kept
        if self.calls % self.stride:
            last = self._rows[self._filled - 1]
            last.copy_(self._meter.merge(last, row))
        else:
            if self._filled == self._most:
                self._halve()
            if self._filled == len(self._rows):
                self._rows = torch.cat((self._rows, torch.zeros_like(self._rows)))
            self._rows[self._filled] = row
            self._filled += 1
        self.calls += 1

    def rows(self) -> Tensor:
        """Return the rows, float64 [rows, width] on the CPU; waits for the device."""
        if self._rows is None:
            return histogram.empty(self._meter.bins)[None][:0]
        return self._rows[: self._filled].cpu()

    def _halve(self) -> None:
        if self._rows is not None:
            merged = self._meter.pairs(self._rows[: self._filled])
            self._filled = len(merged)
            self._rows[: self._filled] = merged
            self.stride *= 2


def align(meter: TensorMeter, rows: Tensor, stride: int, to: int) -> Tensor:
    """Return rows of `stride` calls as rows of `to` calls each; both are powers of two."""
    while stride < to:
        rows, stride = meter.pairs(rows), stride * 2
    return rows


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of the finite elements by value.

    Attributes:
        edges: borders of the bins, float64 [bins + 1], ascending; an element on a border belongs
            to the bin above it.
        counts: int64 [bins].
        below, above: finite elements outside a fixed range.
    """

    edges: NDArray[np.float64]
    counts: NDArray[np.int64]
    below: int = 0
    above: int = 0


# name, kind, leaf, dtype, placement, ranks: see TensorStats
About = tuple[str, str, str, str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class TensorStats:
    """Statistics of one captured tensor, over calls and ranks.

    mean, std (population), rms, norm, min, max and abs_max are over the finite elements, NaN where
    there are none; near_zero and zeros are what their names say.

    Attributes:
        name, kind, leaf: which tensor: module FQN, input, output or grad, path inside a structure.
        dtype: without the `torch.` prefix.
        placement: local (each rank its own), sharded, replicated (each tensor-parallel group holds
            it alike): merged over the ranks, each element once; partial or unknown: the values of
            the lowest rank alone, since they cannot be merged.
        ranks: the ranks that had it.
        calls: calls covered (the most of any rank).
        numel, nan, pos_inf, neg_inf, zeros: exact counts of elements.
        near_zero: share of the elements with |x| <= the capture's `near_zero`.
        histogram: None if the capture has bins=0.
    """

    name: str
    kind: str
    leaf: str
    dtype: str
    placement: str
    ranks: tuple[int, ...]
    calls: int
    numel: int
    nan: int
    pos_inf: int
    neg_inf: int
    zeros: int
    min: float
    max: float
    mean: float
    std: float
    rms: float
    norm: float
    abs_max: float
    near_zero: float
    histogram: Histogram | None = None


def read(wide: Tensor, meter: TensorMeter, about: About, calls: int) -> TensorStats:
    """Return the statistics in one wide row, which covers `calls` calls."""
    row = wide.tolist()
    numel, nan, pos_inf, neg_inf, zeros = (int(n) for n in row[:5])
    counts = np.array([numel, nan, pos_inf, neg_inf, zeros, 0, 1], np.int64)
    values = np.array(row[5:9])

    def value(stat: str) -> float:
        return float(derive(stat, counts, values))

    return TensorStats(
        *about, calls=calls, numel=numel, nan=nan, pos_inf=pos_inf, neg_inf=neg_inf, zeros=zeros,
        min=value("min"), max=value("max"), mean=value("mean"), std=value("std"),
        rms=value("rms"), norm=value("norm"), abs_max=value("abs_max"),
        near_zero=row[NEAR_ZERO] / numel if numel else float("nan"),
        histogram=_bars(wide, meter) if meter.bins else None,
    )  # fmt: skip


def _bars(wide: Tensor, meter: TensorMeter) -> Histogram:
    return Histogram(
        histogram.edges(wide, meter.limits).numpy(),
        wide[HEAD:].numpy().astype(np.int64),
        int(wide[BELOW]),
        int(wide[ABOVE]),
    )


class StatsTable(list[TensorStats]):
    """Statistics of several tensors; prints as a table."""

    COLUMNS = ("mean", "std", "min", "max", "near_zero")

    def __str__(self) -> str:
        head = ["tensor", "numel", "nan", "inf", *self.COLUMNS, "placement"]
        lines = [head, *(self._line(stats) for stats in self)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
        return "\n".join(
            "  ".join(
                text.ljust(width) if i in (0, len(head) - 1) else text.rjust(width)
                for i, (text, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    __repr__ = __str__

    def _line(self, stats: TensorStats) -> list[str]:
        leaf = f"[{stats.leaf}]" if stats.leaf else ""
        numbers = [f"{getattr(stats, column):.4g}" for column in self.COLUMNS]
        return [
            f"{stats.name or '(root)'}.{stats.kind}{leaf}",
            f"{stats.numel:,}",
            f"{stats.nan:,}",
            f"{stats.pos_inf + stats.neg_inf:,}",
            *numbers,
            stats.placement,
        ]
