"""The levels of a run: what each of its numbers was, in one stretch of steps after another.

A stretch is a tenth of the run before it, and at least eight sampled steps. So what is kept grows
with the number of sites, and with the logarithm of the number of steps.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from ddpprobe.reader.compare.scalars import (
    MEAN_BY_SPLIT,
    MICRO_BATCHES,
    NORM_BY_SPLIT,
    OF_THE_BATCH,
)
from ddpprobe.reader.compare.site_matching import BY_SPLIT, ONE_RANKS
from ddpprobe.reader.series import matches
from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import (
    CHECKED,
    CLASS_LABELLED,
    CLASS_OF_ALL,
    CLASS_RIGHT,
    FIRST_DECAY,
    INPUT_ELEMENTS,
    INPUT_MEAN,
    INPUT_RMS,
    INPUT_SPREAD,
    INPUT_ZEROS,
    JOINED,
    LEARNING_RATE,
    LOSS_OF_BAD,
    MOMENT_DECAY,
    NORM_MOMENTUM,
    NOTED,
    NUMEL,
    OBSERVED,
    OPTIMIZER_STEPS,
    OPTION,
    OUTPUT_SPREAD,
    PASS,
    PASS_OF_BAD,
    REDUCE_SECONDS,
    STEP_PHASES,
    TRAINABLE,
    TRAINING,
    UNREAD_INPUT,
    WEIGHT_DECAY,
    Site,
    StepRecord,
    derive,
)

Floats = NDArray[np.float64]
Rows = NDArray[np.intp]
LOOKS = 8  # sampled steps of a stretch, at least
_PART = 10  # a stretch is one of so many parts of what was before it
# Of a site. What lies around zero, or is zero, says little of a gradient or a weight of few
# elements, and nothing of it that the outputs do not say.
RMS, NONFINITE, ZEROS, SHIFT = STATISTICS = ("rms", "nonfinite_ratio", "zero_ratio", "mean/rms")
_OF_OUTPUTS = (ZEROS, SHIFT)
MEAN, RANGE = "mean of the ranks", "range over the ranks"  # of a scalar
SECONDS = {*(f"{phase}_seconds" for phase in STEP_PHASES), REDUCE_SECONDS}
# Scalars of one batch that have a level over many, and those of one moment, which have none.
_OF_MANY_BATCHES = {
    CLASS_LABELLED, CLASS_OF_ALL, CLASS_RIGHT, INPUT_ELEMENTS, INPUT_MEAN, INPUT_RMS, INPUT_SPREAD,
    INPUT_ZEROS, OUTPUT_SPREAD, MICRO_BATCHES,
}  # fmt: skip
_LEFT_OUT = (OF_THE_BATCH - _OF_MANY_BATCHES) | {
    CHECKED, JOINED, LOSS_OF_BAD, NOTED, OPTIMIZER_STEPS, PASS, PASS_OF_BAD, UNREAD_INPUT,
}  # fmt: skip
# NaN where nobody can tell them: of another loss than a cross-entropy, say.
_MAY_BE_UNKNOWN = {CLASS_LABELLED, CLASS_OF_ALL, CLASS_RIGHT}
# What a script sets, and training does not change.
_SET = {
    FIRST_DECAY, LEARNING_RATE, MOMENT_DECAY, NORM_MOMENTUM, TRAINABLE, TRAINING, WEIGHT_DECAY,
}  # fmt: skip
# Of one rank's part of the batch, however large that is.
_BY_SPLIT = {
    CLASS_OF_ALL, INPUT_ELEMENTS, INPUT_SPREAD, MICRO_BATCHES, OUTPUT_SPREAD, *MEAN_BY_SPLIT,
}  # fmt: skip
_TABLES = 64  # tables of sites that are remembered; a run has a handful
# What is kept of a number in a stretch: at how many looks it was finite, its sum, and that of its
# squares; how often it was above zero, and the same sums of its logarithm to the base of 10; at how
# many looks it was not finite; and of how many elements it is, at most.
COUNT, SUM, SQUARES, POSITIVE, LOG_SUM, LOG_SQUARES, BAD, ELEMENTS = range(8)
_KEPT = 8


class Quantity(NamedTuple):
    """What has a level: a statistic of a site, or a scalar over the ranks.

    `nth` counts sites of the same name in a step. A scalar's site is None, its `stat` `MEAN` or
    `RANGE`.
    """

    site: Site | None
    nth: int
    scalar: str
    stat: str

    @property
    def key(self) -> tuple[str, ...]:
        """Its identity in all runs."""
        site = self.site.key if self.site else ()
        return (*site, str(self.nth), self.scalar, self.stat)

    def __str__(self) -> str:
        """Name its site, or the scalar."""
        return self.scalar if self.site is None else str(self.site)

    @property
    def is_setting(self) -> bool:
        """Whether a script sets it, and training does not change it."""
        is_set = self.scalar in _SET or self.scalar.startswith(OPTION)
        return self.stat == MEAN and is_set

    @property
    def is_by_split(self) -> bool:
        """Whether it depends on how the batch is split over ranks and micro-batches."""
        if self.site is None:
            return self.scalar.startswith(NORM_BY_SPLIT) or self.scalar in _BY_SPLIT
        return self.site.kind in BY_SPLIT or self.site.placement in ONE_RANKS


@final
class Levels:
    """The levels of one run.

    Args:
        glob: over sites, as `Run.series` takes it; scalars are taken if it is "*".
        edges: the first steps of the stretches of another run, ascending; None: it makes its own.

    Attributes:
        edges: the first step of each stretch.
        steps: how many sampled steps were taken.
        last: the newest of them.
        quantities: by their keys.
        splits: how the batch was split: over how many ranks, in how many micro-batches.
    """

    def __init__(self, glob: str = "*", edges: Sequence[int] | None = None) -> None:
        self._glob, self._makes = glob, edges is None
        self.edges: list[int] = list(edges or ())
        self.steps, self.last = 0, -1
        self.quantities: dict[tuple[str, ...], Quantity] = {}
        self.splits: set[tuple[int, float | None]] = set()
        self._row: dict[tuple[str, ...], int] = {}
        self._stretches: list[Floats] = []  # [_KEPT, rows] each
        self._looks: Counter[int] = Counter()  # of each stretch, and the newest sampled step in it
        self._newest: dict[int, int] = {}
        self._of_sites = IdentityCache(self._place, _TABLES)

    def take(self, record: StepRecord) -> None:
        """Take the next step, if it was sampled, came to its end, and was not skipped.

        One before the first stretch of another run is left out as well.
        """
        if not record.sampled or record.partial or record.skipped:
            return
        at = self._stretch(record.step)
        if at < 0:
            return
        self.steps, self.last = self.steps + 1, record.step
        self._looks[at] += 1
        self._newest[at] = record.step
        ranks = len(record.ranks) + len(record.missing)
        self.splits |= {(ranks, cells.get(MICRO_BATCHES)) for cells in record.scalars.values()}
        self._add(at, *self._statistics(record))
        scalars = dict(self._scalars(record))
        rows = np.array([self._row_of(quantity) for quantity in scalars], np.intp)
        numbers = np.array(list(scalars.values()), np.float64)
        self._add(at, rows, numbers, np.zeros(len(rows), np.int64))

    def table(self, keys: Sequence[tuple[str, ...]]) -> Floats:
        """Return what is kept of some quantities [8, keys, stretches]; 0 where there is nothing."""
        rows = np.array([self._row[key] for key in keys], np.intp)
        out = np.zeros((_KEPT, len(keys), len(self.edges)))
        for at, stretch in enumerate(self._stretches):
            known = rows < stretch.shape[1]
            out[:, known, at] = stretch[:, rows[known]]
        return out

    def looks(self, stretch: int) -> int:
        """Return how many sampled steps a stretch has; 0 of one that there is not."""
        return self._looks[stretch]

    def newest(self, stretch: int) -> int:
        """Return the newest sampled step of a stretch that has any."""
        return self._newest[stretch]

    def _stretch(self, step: int) -> int:
        """Return the stretch of a step, which may be a new one; -1: it is before all of them."""
        is_full = self.looks(len(self.edges) - 1) >= max(LOOKS, self.steps // _PART)
        if self._makes and (is_full or not self.edges):
            self.edges.append(step)
        return bisect_right(self.edges, step) - 1

    def _add(self, at: int, rows: Rows, numbers: Floats, elements: NDArray[np.int64]) -> None:
        while len(self._stretches) <= at:
            self._stretches.append(np.zeros((_KEPT, 0)))
        new = len(self._row) - self._stretches[at].shape[1]
        if new:
            self._stretches[at] = np.pad(self._stretches[at], ((0, 0), (0, new)))
        stretch = self._stretches[at]
        stretch[ELEMENTS, rows] = np.maximum(stretch[ELEMENTS, rows], elements)
        finite = np.isfinite(numbers)
        stretch[BAD, rows[~finite]] += 1
        rows, numbers = rows[finite], numbers[finite]
        stretch[COUNT, rows] += 1
        stretch[SUM, rows] += numbers
        stretch[SQUARES, rows] += numbers**2
        rows, logs = rows[numbers > 0], np.log10(numbers[numbers > 0])
        stretch[POSITIVE, rows] += 1
        stretch[LOG_SUM, rows] += logs
        stretch[LOG_SQUARES, rows] += logs**2

    def _row_of(self, quantity: Quantity) -> int:
        key = quantity.key
        self.quantities.setdefault(key, quantity)
        return self._row.setdefault(key, len(self._row))

    def _place(self, sites: tuple[Site, ...]) -> tuple[Rows, Rows, Rows]:
        """Return of each quantity of some sites: the site's row, the statistic, its own row."""
        seen: dict[tuple[str, str, str], int] = defaultdict(int)
        found = []
        for i, site in enumerate(sites):
            nth = seen[site.key]
            seen[site.key] += 1
            if matches(site, self._glob):
                found += [
                    (i, j, self._row_of(Quantity(site, nth, "", stat)))
                    for j, stat in enumerate(STATISTICS)
                    if site.kind == "output" or stat not in _OF_OUTPUTS
                ]
        table = np.array(found, np.intp).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2]

    def _statistics(self, record: StepRecord) -> tuple[Rows, Floats, NDArray[np.int64]]:
        """Return rows of quantities, their numbers and elements: of sites that were observed."""
        at, stat, rows = self._of_sites(record.sites)
        counts, values = record.counts, record.values
        rms, zeros, mean, bad = (
            derive(name, counts, values) for name in ("rms", "zero_ratio", "mean", "nonfinite")
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            shift = np.where(rms > 0, mean / rms, 0.0)
            table = np.stack((rms, bad / counts[:, NUMEL], zeros, shift), axis=1)
        seen = counts[at, OBSERVED] > 0
        return rows[seen], table[at, stat][seen], counts[at, NUMEL][seen]

    def _scalars(self, record: StepRecord) -> Iterator[tuple[Quantity, float]]:
        """Yield the scalars of a record: their means over the ranks, and their ranges."""
        by_name: dict[str, list[float]] = defaultdict(list)
        for cells in record.scalars.values() if self._glob == "*" else ():
            for name, value in cells.items():
                if not (name in _MAY_BE_UNKNOWN and math.isnan(value)):
                    by_name[name].append(value)
        for name, values in by_name.items():
            if not _is_left_out(name):
                yield Quantity(None, 0, name, MEAN), sum(values) / len(values)
                if len(values) > 1:
                    yield Quantity(None, 0, name, RANGE), max(values) - min(values)


def _is_left_out(name: str) -> bool:
    other_times = name.endswith("_seconds") and name not in SECONDS
    return name in _LEFT_OUT or other_times or "@-" in name  # a loss of a step before
