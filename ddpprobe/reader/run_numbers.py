"""A run as numbers over its steps: records, series, tables, pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddpprobe.errors import UnknownSeries
from ddpprobe.reader import long_table
from ddpprobe.reader.dataframes import pandas_frame, polars_frame
from ddpprobe.reader.derived_series import NAMES, DerivedSeries, read_derived
from ddpprobe.reader.histograms import Histograms, near_zero_series, read_histograms
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.needs import needs
from ddpprobe.reader.no_data import no_site
from ddpprobe.reader.selection import (
    Selection,
    check_attempt,
    check_rank,
    check_step,
    check_steps,
    check_text,
    globs_of,
    is_whole,
)
from ddpprobe.reader.series import (
    Scalars,
    Series,
    is_named,
    known_sites,
    matches,
    no_scalars,
    read_scalars,
    read_series,
)
from ddpprobe.records.histogram import NEAR_ZERO_RATIO
from ddpprobe.records.near_names import by_nearness
from ddpprobe.records.step import STATS, Site, StepRecord
from ddpprobe.rundir.paths import RunDir

if TYPE_CHECKING:
    import pandas as pd
    import polars as pl
    import xarray
    from matplotlib.figure import Figure

_SITES = "blocks.*.mlp:output"  # what a glob over sites looks like, for messages


class RunNumbers:
    """What the ranks of a run recorded; `reader.run.Run` adds what became of it.

    Args:
        path: the run directory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._merged_reader = MergedReader(RunDir(path))

    def records(
        self, rank: int | None = None, attempt: int | None = None, *, after: int = -1
    ) -> Iterator[StepRecord]:
        """Yield step records, ascending within each attempt.

        Args:
            rank: one rank's own; None: all ranks merged.
            attempt: of one attempt; None: of all, one after the other.
            after: of steps above this one only.

        Raises:
            UnknownSeries: there is no such rank or attempt, although there are others.
        """
        check_step("after", after)
        return self._records(self._asked(rank, attempt), rank, after)

    def _records(self, attempts: list[int], rank: int | None, after: int) -> Iterator[StepRecord]:
        for number in attempts:
            if rank is None:
                yield from self._merged_reader.merged_records(number, after)
            else:
                yield from self._merged_reader.rank_records(number, rank, after)

    def series(
        self,
        site_glob: str | Sequence[str],
        stat: str,
        rank: int | None = None,
        steps: slice = slice(None),
        attempt: int | None = None,
    ) -> Series:
        """Return one statistic of the matching sites over the sampled steps.

        Args:
            site_glob: over `fqn:kind`, or `fqn` for every kind; `*` and `?` as in file names. Or
                several of them.
            stat: one of `records.STATS`, among them mean, std, rms, norm, abs_max, zero_ratio; or
                near_zero_ratio (|x| < 2**-4), which sites with a histogram have.
            rank: one rank's own rows; None: all ranks merged.
            steps: slice over step numbers.
            attempt: None: all of them.

        Raises:
            UnknownSeries: there is no such statistic, rank or attempt, or no such site at any step,
                although there are others; the text names what comes close. Or `steps` is no slice
                over step numbers, which are not negative. It is a ValueError.
        """
        globs = globs_of("site_glob", site_glob, _SITES)
        check_text("stat", stat, "rms")
        if stat == NEAR_ZERO_RATIO:
            return near_zero_series(self.histograms(globs, rank, steps, attempt), stat, globs)
        if stat not in STATS:
            near = ", ".join(by_nearness(stat, (*STATS, NEAR_ZERO_RATIO)))
            raise UnknownSeries(f"no statistic {stat!r}: choose one of {near}")
        reader, attempts = self._merged_reader, self._asked(rank, attempt, steps)
        found = read_series(reader, attempts, globs, stat, rank, steps)
        self._check_globs(globs, found.sites, attempts, rank)
        return found

    def _check_globs(
        self, globs: Sequence[str], found: Sequence[Site], attempts: list[int], rank: int | None
    ) -> None:
        """Raise UnknownSeries if a glob matches no site that was found, nor any that there is."""
        for glob in globs:
            if any(matches(site, glob) for site in found):
                continue
            known = known_sites(self._merged_reader, attempts, rank)
            if known and not any(matches(site, glob) for site in known.values()):
                raise UnknownSeries(no_site(self._merged_reader, attempts, glob, known.values()))

    def histograms(
        self,
        site_glob: str | Sequence[str] = "*",
        rank: int | None = None,
        steps: slice = slice(None),
        attempt: int | None = None,
    ) -> Histograms:
        """Return the histograms of the matching sites: those that `install(histograms=...)` named.

        Arguments as of `series`. Where none of these was named it has no sites.

        Raises:
            UnknownSeries: there is no such site, rank or attempt, although there are others.
        """
        globs = globs_of("site_glob", site_glob, _SITES)
        attempts = self._asked(rank, attempt, steps)
        found = read_histograms(self._records(attempts, rank, -1), globs, steps)
        self._check_globs(globs, found.sites, attempts, rank)
        return found

    def scalars(
        self,
        name: str,
        rank: int | None = None,
        steps: slice = slice(None),
        attempt: int | None = None,
    ) -> Scalars:
        """Return one per-rank number, e.g. `loss` or `grad_norm_local`, over the steps.

        Raises:
            UnknownSeries: there is no such scalar, rank or attempt, although there are others.
        """
        check_text("name", name, "loss")
        reader, attempts = self._merged_reader, self._asked(rank, attempt, steps)
        found = read_scalars(reader, attempts, name.__eq__, rank, steps)
        if found:
            return found[0]
        others = [s.name for s in read_scalars(reader, attempts, bool, rank, steps)]
        if others:
            near = ", ".join(by_nearness(name, others))
            raise UnknownSeries(f"no scalar {name!r} in this run: it has {near}")
        return no_scalars(name)

    def matching_scalars(
        self,
        glob: str | Sequence[str] = "*",
        rank: int | None = None,
        steps: slice = slice(None),
        attempt: int | None = None,
    ) -> list[Scalars]:
        """Return the scalars whose names match a glob, or one of several; [] if none does.

        They are ascending by name.

        Raises:
            UnknownSeries: there is no such rank or attempt, although there are others.
        """
        globs = globs_of("glob", glob, "grad_norm*")

        def wanted(name: str) -> bool:
            return any(is_named(name, one) for one in globs)

        attempts = self._asked(rank, attempt, steps)
        return read_scalars(self._merged_reader, attempts, wanted, rank, steps)

    def derived(
        self,
        glob: str | Sequence[str] = "*",
        steps: slice = slice(None),
        attempt: int | None = None,
    ) -> list[DerivedSeries]:
        """Return numbers of whole steps that follow from the records: noise scale, growth, balance.

        A number is left out where no step holds what its formula needs.

        Args:
            glob: over the names in `reader.derived_series.NAMES`, or several.
            steps: slice over step numbers.
            attempt: None: all of them.

        Raises:
            UnknownSeries: there is no such number, in any run, or no such attempt in this one.
        """
        globs = globs_of("glob", glob, "grad_noise*")
        for one in globs:
            if not any(is_named(name, one) for name in NAMES):
                near = ", ".join(by_nearness(one, NAMES))
                raise UnknownSeries(f"no derived number {one!r}: choose one of {near}")
        records = self._records(self._asked(None, attempt, steps), None, -1)
        return read_derived(records, lambda name: any(is_named(name, g) for g in globs), steps)

    def to_xarray(
        self,
        rank: int | None = None,
        attempt: int | None = None,
        chunks: int | dict[str, int] | str | None = None,
    ) -> xarray.Dataset:
        """Return records as a dataset, with what is not folded yet.

        Dimensions step, site, count_stat, value_stat, and for scalars rank and scalar, named as in
        the store, whose `values` is called `aggregates` here; every statistic that is derived (rms,
        mean, ...; NaN where nothing was observed) is a variable [step, site] of its name; of all
        ranks merged also derived [step, quantity], see `Run.derived`.

        Args:
            rank: one rank's own; None: all ranks merged.
            attempt: default: the last one.
            chunks: None: all of it in memory. Else arrays of dask, which read the store when they
                are computed, checked as ever: {} for its own blocks of steps, or sizes by
                dimension, or one for all, or "auto". In memory are only the columns of one number
                a step, and what no daemon has folded yet.

        Raises:
            ImportError: xarray is not installed; with `chunks`, dask is not.
            UnknownSeries: there is no such rank or attempt, although there are others; `chunks`
                names no dimension of the dataset, or no size. It is a ValueError.
            StoreDamaged: with `chunks`, also when they are computed: a part of it is damaged.
                Without, what is damaged is left out and listed in `lost`.
        """
        with needs("Run.to_xarray()", "xarray"):
            from ddpprobe.reader.dataset import to_dataset  # noqa: PLC0415
        attempts = self._asked(rank, attempt)
        chosen = attempts[-1] if attempt is None and attempts else attempt
        if chunks is None:
            return to_dataset(list(self.records(rank, chosen)), merged=rank is None)
        with needs("Run.to_xarray(chunks=...)", "dask"):
            from ddpprobe.reader.lazy_dataset import cut, lazy_dataset  # noqa: PLC0415
        return cut(lazy_dataset(self._merged_reader, chosen or 0, rank), chunks)

    def to_pandas(
        self,
        rank: int | None = None,
        steps: slice = slice(None),
        attempt: int | None = None,
    ) -> pd.DataFrame:
        """Return the long table of `ddpprobe export --format parquet` as a pandas DataFrame.

        A row for each site of each sampled step, with every statistic, and for each scalar (kind
        `scalar`, its name in `fqn`, the number in `value`). It is in memory as a whole. What is
        absent is `pd.NA` in columns of integers, and NaN in those of floats.

        Args:
            rank: one rank's own rows; None: of all ranks merged.
            steps: slice over step numbers.
            attempt: None: all of them.

        Raises:
            ImportError: pandas is not installed.
            UnknownSeries: as `series` does, of a rank, an attempt or steps.
        """
        return pandas_frame(self._table(rank, steps, attempt))

    def to_polars(
        self,
        rank: int | None = None,
        steps: slice = slice(None),
        attempt: int | None = None,
    ) -> pl.DataFrame:
        """Return the table of `to_pandas` as a polars DataFrame; what is absent is null.

        Raises:
            ImportError: polars is not installed.
            UnknownSeries: as `series` does, of a rank, an attempt or steps.
        """
        return polars_frame(self._table(rank, steps, attempt))

    def plot(
        self,
        site_glob: str | Sequence[str],
        stat: str,
        rank: int | None = None,
        steps: slice = slice(None),
        attempt: int | None = None,
    ) -> Figure:
        """Draw one statistic of the matching sites over the steps, as a matplotlib figure.

        A line per site; of more than `series_plot.MOST_LINES` an image, sites in execution order.
        Steps with elements that are not finite are marked. The arguments are those of `series`.

        Raises:
            ImportError: matplotlib is not installed.
            UnknownSeries: as `series` does; also if there is nothing to draw.
        """
        with needs("Run.plot()", "matplotlib", extra="plot"):
            from ddpprobe.reader.series_plot import figure_of  # noqa: PLC0415
        found = self.series(site_glob, stat, rank, steps, attempt)
        if not found.steps.size or not found.sites:
            raise UnknownSeries(f"nothing to draw: no step of {site_glob!r} was sampled in there")
        return figure_of(found)

    def _table(
        self, rank: int | None, steps: slice, attempt: int | None
    ) -> Iterator[long_table.Block]:
        self._asked(rank, attempt, steps)
        return long_table.blocks(self._merged_reader, Selection(rank, steps, attempt))

    def _asked(
        self, rank: int | None, attempt: int | None, steps: slice = slice(None)
    ) -> list[int]:
        """Return the attempts that are asked for; raise UnknownSeries for what the run has not."""
        check_steps(steps)
        attempts = self._attempts(attempt)
        if rank is not None and not self._has_rank(rank, attempts):
            reader = self._merged_reader
            known = sorted({r for number in attempts for r in reader.ranks(number)})
            check_rank(rank, known, attempt)
        return attempts

    def _has_rank(self, rank: int, attempts: list[int]) -> bool:
        return is_whole(rank) and any(self._merged_reader.has_rank(n, rank) for n in attempts)

    def _attempts(self, attempt: int | None) -> list[int]:
        known = self._merged_reader.attempts()
        check_attempt(attempt, known)
        return known if attempt is None else [attempt]
