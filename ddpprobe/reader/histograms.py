"""Histograms of named sites over the steps: what `install(histograms=...)` asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ddpprobe.errors import UnknownSeries
from ddpprobe.reader.needs import needs
from ddpprobe.reader.selection import told_as
from ddpprobe.reader.series import Floats, Key, Series, is_within, last_of_each, matches_any
from ddpprobe.reader.text import over_steps, sites_in_words
from ddpprobe.records.histogram import BINS, EDGES, NEAR_ZERO, near_zero, quantiles
from ddpprobe.records.step import COUNTS, NONFINITE, VALUES, Counts, Site, StepRecord, Values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE = (
    "has a histogram in this run, and near_zero_ratio comes from it; name the modules at the next "
    "start: ddpprobe.install(model, histograms=['blocks.*.mlp'])"
)


@dataclass(frozen=True, slots=True)
class Histograms:
    """The histograms of some sites over the sampled steps.

    Attributes:
        sites: one per column, in execution order.
        attempts: int64 [rows].
        steps: int64 [rows]; a restarted run may pass a step twice, in different attempts.
        edges: float64 [bins + 1], the same for all of them: powers of two of either sign.
        bins: int64 [rows, sites, bins], elements; those that are zero or not finite are in none.
        counts: int64 [rows, sites, len(COUNTS)], the rest of the elements among them.
        values: float64 [rows, sites, len(VALUES)].
        known: bool [rows, sites]; whether there is a histogram. Else bins and counts are 0.
        absent: int64 [rows]; how many ranks were expected at the step and are not merged in.
    """

    sites: tuple[Site, ...]
    attempts: NDArray[np.int64]
    steps: NDArray[np.int64]
    edges: Floats
    bins: NDArray[np.int64]
    counts: Counts
    values: Values
    known: NDArray[np.bool_]
    absent: NDArray[np.int64]

    def __repr__(self) -> str:
        return f"Histograms({sites_in_words(self.sites)} x {over_steps(self.steps)})"

    def near_zero(self, below: float = NEAR_ZERO) -> Floats:
        """Return the share of elements with |x| < `below` [rows, sites]; NaN: no histogram.

        Args:
            below: a power of two, by default 2**-4: of any other number the share is not known.

        Raises:
            UnknownSeries: it is no power of two, or has no bin.
        """
        counts, bins = self.counts.reshape(-1, len(COUNTS)), self.bins.reshape(-1, BINS)
        with told_as(UnknownSeries, ValueError):
            share = near_zero(counts, bins, below)
        return np.where(self.known, share.reshape(self.known.shape), np.nan)

    def quantiles(self, q: Sequence[float]) -> Floats:
        """Return quantiles of the finite elements [rows, sites, len(q)]; NaN: no histogram.

        Each is in the right bin, so it is right to a factor of two.

        Args:
            q: shares, each from 0 to 1.

        Raises:
            UnknownSeries: they are none.
        """
        counts, bins = self.counts.reshape(-1, len(COUNTS)), self.bins.reshape(-1, BINS)
        with told_as(UnknownSeries, ValueError):
            found = quantiles(counts, self.values.reshape(-1, len(VALUES)), bins, q)
        return found.reshape(*self.known.shape, len(q))

    def plot(self) -> Figure:
        """Draw each site as an image: steps to the right, values upwards, log(1 + count) in colour.

        It is what fastai calls `color_dim`. With at most `histogram_plot.MOST_SITES` sites.

        Raises:
            ImportError: matplotlib is not installed.
        """
        with needs("Histograms.plot()", "matplotlib", extra="plot"):
            from ddpprobe.reader.histogram_plot import figure_of  # noqa: PLC0415
        return figure_of(self.sites, self.steps, self.edges, self.bins, self.absent)


def read_histograms(
    records: Iterable[StepRecord], globs: Sequence[str], steps: slice
) -> Histograms:
    """Collect the histograms of the matching sites; a step that comes again replaces its row.

    Args:
        records: ascending within each attempt.
        globs: as of `Run.series`.
        steps: over step numbers.
    """
    columns: dict[Key, int] = {}
    sites: list[Site] = []
    rows: list[tuple[StepRecord, list[int], list[int]]] = []  # record, its histograms, columns
    for record in records:
        if not (len(record.binned) and is_within(record.step, steps)):
            continue
        found = [(i, record.sites[row]) for i, row in enumerate(record.binned.tolist())]
        mine = [(i, site) for i, site in found if matches_any(site, globs)]
        for _, site in mine:
            if columns.setdefault(site.key, len(sites)) == len(sites):
                sites.append(site)
        if mine:
            rows.append((record, [i for i, _ in mine], [columns[site.key] for _, site in mine]))
    shape = len(rows), len(sites)
    bins, known = np.zeros((*shape, BINS), np.int64), np.zeros(shape, bool)
    counts, values = (
        np.zeros((*shape, len(COUNTS)), np.int64),
        np.full((*shape, len(VALUES)), np.nan),
    )
    for at, (record, chosen, where) in enumerate(rows):
        places = record.binned[chosen]
        bins[at, where], known[at, where] = record.bins[chosen], True
        counts[at, where], values[at, where] = record.counts[places], record.values[places]
    attempts, numbers, absent = (
        np.array([get(record) for record, _, _ in rows], np.int64)
        for get in (lambda r: r.attempt, lambda r: r.step, lambda r: len(r.missing))
    )
    last = last_of_each(attempts, numbers)
    return Histograms(
        tuple(sites), attempts[last], numbers[last], EDGES, bins[last], counts[last], values[last],
        known[last], absent[last],
    )  # fmt: skip


def near_zero_series(found: Histograms, stat: str, globs: Iterable[str]) -> Series:
    """Return the shares near zero as a series.

    Raises:
        UnknownSeries: no site has a histogram.
    """
    if not found.sites:
        asked = " or ".join(map(repr, globs))
        raise UnknownSeries(f"no site that matches {asked} {NONE}")
    bad = np.where(found.known, found.counts[..., NONFINITE].sum(-1), np.nan)
    return Series(
        stat, found.sites, found.attempts, found.steps, found.near_zero(), bad, found.absent
    )
