"""One statistic of some sites, or one scalar of some ranks, over the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.text import over_steps, sites_in_words
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import Site, StepRecord, observed
from ddpprobe.rundir import paths

if TYPE_CHECKING:
    from ddpprobe.store.reader import StoredGroup

Floats = NDArray[np.float64]
Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class Series:
    """One statistic over the sampled steps.

    Attributes:
        stat: name out of `records.STATS`.
        sites: one per column, in execution order.
        attempts: int64 [rows].
        steps: int64 [rows]; a restarted run may pass a step twice, in different attempts.
        values: float64 [rows, sites]; NaN where nothing was observed, which is not 0.
        nonfinite: the statistic of that name at the same places.
        absent: int64 [rows]; how many ranks were expected at the step and are not merged in.
    """

    stat: str
    sites: tuple[Site, ...]
    attempts: NDArray[np.int64]
    steps: NDArray[np.int64]
    values: Floats
    nonfinite: Floats
    absent: NDArray[np.int64]

    def __repr__(self) -> str:
        what = f"{sites_in_words(self.sites)} x {over_steps(self.steps)}"
        return f"Series({self.stat!r}, {what})"


@dataclass(frozen=True, slots=True)
class Scalars:
    """One scalar over the steps.

    Attributes:
        name: of it.
        ranks: one per column, ascending.
        attempts: int64 [rows].
        steps: int64 [rows].
        values: float64 [rows, ranks]; NaN also where it was not given.
        given: bool [rows, ranks]; whether the rank said it at all, be it NaN.
    """

    name: str
    ranks: tuple[int, ...]
    attempts: NDArray[np.int64]
    steps: NDArray[np.int64]
    values: Floats
    given: NDArray[np.bool_]

    def __repr__(self) -> str:
        whose = ranks_text(self.ranks) if self.ranks else "no rank"
        return f"Scalars({self.name!r}, {whose} x {over_steps(self.steps)})"


def matches(site: Site, glob: str) -> bool:
    """Return whether a glob matches `fqn`, `fqn:kind`, `fqn[leaf]:kind` or `fqn:kind[leaf]`.

    The third is how a site is printed, the last how a captured tensor is. A name as it is printed
    matches itself: in a glob the brackets around its leaf would be a set of characters.
    """
    names = [str(site), site.fqn, f"{site.fqn}:{site.kind}", site.printed_fqn]
    if site.leaf:
        names += (f"{fqn}:{site.kind}[{site.leaf}]" for fqn in (site.fqn, site.printed_fqn))
    return any(is_named(name, glob) for name in names)


def is_named(name: str, glob: str) -> bool:
    """Return whether a glob matches a name; a name matches itself, whatever is in it."""
    return name == glob or fnmatchcase(name, glob)


def matches_any(site: Site, globs: Iterable[str]) -> bool:
    """Return whether one of several globs matches a site, see `matches`."""
    return any(matches(site, glob) for glob in globs)


def is_within(step: int, steps: slice) -> bool:
    """Return whether a step lies in a slice over step numbers (not over positions)."""
    first, width = steps.start or 0, steps.step or 1
    return (
        step >= first and (steps.stop is None or step < steps.stop) and not (step - first) % width
    )


def _are_within(numbers: NDArray[np.int64], steps: slice) -> NDArray[np.bool_]:
    # No step is larger than an int64, but a bound that somebody typed may be.
    most = int(np.iinfo(np.int64).max)
    first, width = steps.start or 0, min(steps.step or 1, most)
    if first > most:
        return np.zeros(len(numbers), bool)
    last = most if steps.stop is None else min(steps.stop - 1, most)
    inside: NDArray[np.bool_] = (numbers >= first) & (numbers <= last)
    inside &= (numbers - first) % width == 0
    return inside


class _Table:
    """Blocks as they come, columns as they appear; a step that comes again replaces its row."""

    def __init__(self) -> None:
        self.columns: dict[Key, int] = {}
        self.sites: list[Site] = []
        self._blocks: list[_Block] = []

    def columns_of(self, sites: Sequence[Site]) -> NDArray[np.int64]:
        for site in sites:
            if site.key not in self.columns:
                self.columns[site.key] = len(self.sites)
                self.sites.append(site)
        return np.array([self.columns[s.key] for s in sites], np.int64)

    def put(self, block: _Block) -> None:
        self._blocks.append(block)

    def dense(self, stat: str) -> Series:
        """Return what was put, in the order of the steps."""
        attempts = _joined([np.full(len(b.steps), b.attempt, np.int64) for b in self._blocks])
        steps = _joined([b.steps for b in self._blocks])
        absent = _joined([b.absent for b in self._blocks])
        last = last_of_each(attempts, steps)
        out = np.full((2, len(steps), len(self.sites)), np.nan)
        start = 0
        for block in self._blocks:
            stop = start + len(block.steps)
            rows = slice(start, stop)
            for table, part in ((out[0], block.values), (out[1], block.nonfinite)):
                if len(set(block.columns.tolist())) == len(block.columns):
                    table[rows, block.columns] = part
                    continue
                # A site that a model has twice has two places in a record, and one column.
                for place, column in enumerate(block.columns):
                    there = ~np.isnan(part[:, place])
                    table[rows, column][there] = part[there, place]
            start = stop
        sites = tuple(self.sites)
        values, nonfinite = out[:, last]
        return Series(stat, sites, attempts[last], steps[last], values, nonfinite, absent[last])


@dataclass(frozen=True, slots=True)
class _Block:
    """Rows of one attempt: `steps` [rows], which `columns` [sites] of the table, values of both.

    `absent` [rows]: ranks that are not merged in.
    """

    attempt: int
    steps: NDArray[np.int64]
    columns: NDArray[np.int64]
    values: Floats
    nonfinite: Floats
    absent: NDArray[np.int64]


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *parts])


def last_of_each(attempts: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of the last occurrence of each (attempt, step), in their order."""
    order = np.lexsort((steps, attempts))  # stable: of equal ones the last one comes last
    same = (np.diff(attempts[order]) == 0) & (np.diff(steps[order]) == 0)
    kept: NDArray[np.int64] = order[np.append(~same, np.ones(min(len(order), 1), bool))]
    return kept


def read_series(
    merged_reader: MergedReader,
    attempts: list[int],
    globs: Sequence[str],
    stat: str,
    rank: int | None,
    steps: slice,
) -> Series:
    """Read a series; the columns of the store that `stat` does not need are left alone."""
    table = _Table()
    for attempt in attempts:
        last = _stored_series(merged_reader, attempt, globs, stat, rank, steps, table)
        for record in unfolded(merged_reader, attempt, rank, last):
            if record.sampled and is_within(record.step, steps):
                _put_record(table, record, globs, stat)
    return table.dense(stat)


def read_scalars(
    merged_reader: MergedReader,
    attempts: list[int],
    wanted: Callable[[str], bool],
    rank: int | None,
    steps: slice,
) -> list[Scalars]:
    """Read the wanted scalars of every rank (or of one), ascending by name."""
    rows: dict[str, dict[tuple[int, int], dict[int, float]]] = {}
    journaled: dict[tuple[int, int], Mapping[int, Mapping[str, float]]] = {}
    for attempt in attempts:
        last = -1
        group = merged_reader.group(attempt, group_name(rank))
        for name in group.scalar_names() if group else ():
            if group and wanted(name):
                here = rows.setdefault(name, {})
                here.update(((attempt, step), given) for step, given in group.scalar(name))
        if group:
            last = int(group.step_numbers()[0].max(initial=-1))
            merged_reader.note(group)
        for record in unfolded(merged_reader, attempt, rank, last):
            journaled[attempt, record.step] = record.scalars
    for name in {n for by_rank in journaled.values() for given in by_rank.values() for n in given}:
        if wanted(name):
            rows.setdefault(name, {})
    for name, here in rows.items():
        for place, by_rank in journaled.items():
            here[place] = {r: given[name] for r, given in by_rank.items() if name in given}
    return [_dense(name, here, steps) for name, here in sorted(rows.items())]


def no_scalars(name: str) -> Scalars:
    """Return a scalar without steps."""
    return _dense(name, {}, slice(None))


def _dense(name: str, rows: dict[tuple[int, int], dict[int, float]], steps: slice) -> Scalars:
    kept = {key: row for key, row in sorted(rows.items()) if is_within(key[1], steps)}
    ranks = tuple(sorted({r for row in kept.values() for r in row}))
    values = np.array([[row.get(r, np.nan) for r in ranks] for row in kept.values()], np.float64)
    given = np.array([[r in row for r in ranks] for row in kept.values()], np.bool_)
    where, shape = np.array(list(kept), np.int64).reshape(-1, 2), (len(kept), len(ranks))
    attempts, numbers = where[:, 0], where[:, 1]
    return Scalars(name, ranks, attempts, numbers, values.reshape(shape), given.reshape(shape))


def known_sites(
    merged_reader: MergedReader, attempts: list[int], rank: int | None
) -> dict[Key, Site]:
    """Return every site of all steps, in the order in which they came up."""
    found: dict[Key, Site] = {}
    for attempt in attempts:
        group = merged_reader.group(attempt, group_name(rank))
        last, stored = -1, group.sites() if group else []
        found.update((site.key, site) for site in stored or [])
        if group:
            last = int(group.step_numbers()[0].max(initial=-1))
            merged_reader.note(group)
        for record in unfolded(merged_reader, attempt, rank, last):
            found.update((site.key, site) for site in record.sites)
    return found


def group_name(rank: int | None) -> str:
    """Return the name of the stored group of a rank's own rows, or of all ranks merged."""
    return "merged" if rank is None else paths.rank_name(rank)


def unfolded(
    merged_reader: MergedReader, attempt: int, rank: int | None, last: int
) -> Iterator[StepRecord]:
    """Yield the records that a group whose last step is `last` lacks; each replaces its step's."""
    if rank is None:
        return merged_reader.merged_records(attempt, last, gaps_after=-1)
    return merged_reader.rank_records(attempt, rank, last)


def _stored_series(
    merged_reader: MergedReader, attempt: int, globs: Sequence[str], stat: str, rank: int | None,
    steps: slice, table: _Table,
) -> int:  # fmt: skip
    """Take in the committed rows; return the last step among them."""
    group = merged_reader.group(attempt, group_name(rank))
    if group is None:
        return -1
    sites = group.sites() or []
    places = [i for i, site in enumerate(sites) if matches_any(site, globs)]
    last = int(group.step_numbers()[0].max(initial=-1))
    columns = table.columns_of([sites[i] for i in places])
    blocks = group.statistic(stat, places, lambda n: _are_within(n, steps)) if places else ()
    absent = _absent(group) if places and rank is None else {}
    for numbers, here, counts, values in blocks:
        rows = here.any(axis=1) & _are_within(numbers, steps)
        found = np.where(here, observed(stat, counts, values), np.nan)
        bad = np.where(here, observed("nonfinite", counts, values), np.nan)
        lacking = np.array([absent.get(n, 0) for n in numbers[rows].tolist()], np.int64)
        table.put(_Block(attempt, numbers[rows], columns, found[rows], bad[rows], lacking))
    merged_reader.note(group)
    return last


def _absent(group: StoredGroup) -> dict[int, int]:
    """Return how many ranks a merged step lacks, of those that lack any."""
    found: dict[int, int] = {}
    for steps, _, missing in group.missing():
        absent = missing.sum(axis=1)
        lacking = absent > 0
        found.update(zip(steps[lacking].tolist(), absent[lacking].tolist(), strict=True))
    return found


def _put_record(table: _Table, record: StepRecord, globs: Sequence[str], stat: str) -> None:
    rows = [i for i, site in enumerate(record.sites) if matches_any(site, globs)]
    if rows:
        columns = table.columns_of([record.sites[i] for i in rows])
        counts, values = record.counts[None, rows], record.values[None, rows]
        found, bad = observed(stat, counts, values), observed("nonfinite", counts, values)
        steps, absent = np.array([record.step]), np.array([len(record.missing)])
        table.put(_Block(record.attempt, steps, columns, found, bad, absent))
