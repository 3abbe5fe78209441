"""One statistic of some sites, or one scalar of some ranks, over the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ddpprobe import layout
from ddpprobe.records import OBSERVED, Site, StepRecord, derive
from ddpprobe.replay.overlay import Overlay

if TYPE_CHECKING:
    from ddpprobe.store.reader import StoredGroup

Floats = NDArray[np.float64]
# What these say about a site is said whether a tensor arrived or not.
_ALWAYS = ("tapped", "observed")
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


@dataclass(frozen=True, slots=True)
class Scalars:
    """One scalar over the steps: values float64 [rows, ranks], NaN also where it was not given."""

    name: str
    ranks: tuple[int, ...]
    attempts: NDArray[np.int64]
    steps: NDArray[np.int64]
    values: Floats


def matches(site: Site, glob: str) -> bool:
    """Return whether a glob matches `fqn`, `fqn:kind` or `fqn[leaf]:kind`, as sites are printed."""
    names = (str(site), site.fqn, f"{site.fqn}:{site.kind}")
    return any(fnmatchcase(name, glob) for name in names)


def is_within(step: int, steps: slice) -> bool:
    """Return whether a step lies in a slice over step numbers (not over positions)."""
    first, width = steps.start or 0, steps.step or 1
    return (
        step >= first and (steps.stop is None or step < steps.stop) and not (step - first) % width
    )


def _are_within(numbers: NDArray[np.int64], steps: slice) -> NDArray[np.bool_]:
    first, width = steps.start or 0, steps.step or 1
    last = np.iinfo(np.int64).max if steps.stop is None else steps.stop - 1
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
        last = _last_of_each(attempts, steps)
        out = np.full((2, len(steps), len(self.sites)), np.nan)
        start = 0
        for block in self._blocks:
            stop = start + len(block.steps)
            rows = slice(start, stop)
            for table, found in ((out[0], block.values), (out[1], block.nonfinite)):
                if len(set(block.columns.tolist())) == len(block.columns):
                    table[rows, block.columns] = found
                    continue
                # A site that a model has twice has two places in a record, and one column.
                for place, column in enumerate(block.columns):
                    there = ~np.isnan(found[:, place])
                    table[rows, column][there] = found[there, place]
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


def _last_of_each(attempts: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of the last occurrence of each (attempt, step), in their order."""
    order = np.lexsort((steps, attempts))  # stable: of equal ones the last one comes last
    same = (np.diff(attempts[order]) == 0) & (np.diff(steps[order]) == 0)
    kept: NDArray[np.int64] = order[np.append(~same, np.ones(min(len(order), 1), bool))]
    return kept


def read_series(
    overlay: Overlay, attempts: list[int], glob: str, stat: str, rank: int | None, steps: slice
) -> Series:
    """Read a series; the columns of the store that `stat` does not need are left alone."""
    table = _Table()
    for attempt in attempts:
        last = _stored_series(overlay, attempt, glob, stat, rank, steps, table)
        for record in _rest(overlay, attempt, rank, last):
            if record.sampled and is_within(record.step, steps):
                _put_record(table, record, glob, stat)
    return table.dense(stat)


def read_scalars(
    overlay: Overlay, attempts: list[int], name: str, rank: int | None, steps: slice
) -> Scalars:
    """Read one scalar of every rank (or of one)."""
    rows: dict[tuple[int, int], dict[int, float]] = {}
    for attempt in attempts:
        last = -1
        group = overlay.group(attempt, _group_name(rank))
        for step, given in group.scalar(name) if group else ():
            last = max(last, step)
            rows[attempt, step] = given
        for record in _rest(overlay, attempt, rank, last):
            cells = record.scalars.items()
            rows[attempt, record.step] = {r: s[name] for r, s in cells if name in s}
    kept = {key: row for key, row in sorted(rows.items()) if is_within(key[1], steps)}
    ranks = tuple(sorted({r for row in kept.values() for r in row}))
    values = np.array([[row.get(r, np.nan) for r in ranks] for row in kept.values()], np.float64)
    where = np.array(list(kept), np.int64).reshape(-1, 2)
    return Scalars(name, ranks, where[:, 0], where[:, 1], values.reshape(len(kept), len(ranks)))


def _group_name(rank: int | None) -> str:
    return "merged" if rank is None else layout.rank_name(rank)


def _rest(overlay: Overlay, attempt: int, rank: int | None, last: int) -> Iterator[StepRecord]:
    if rank is None:
        return overlay.merged_records(attempt, last, gaps_after=-1)
    return overlay.rank_records(attempt, rank, last)


def _stored_series(
    overlay: Overlay, attempt: int, glob: str, stat: str, rank: int | None, steps: slice,
    table: _Table,
) -> int:  # fmt: skip
    """Take in the committed rows; return the last step among them."""
    group = overlay.group(attempt, _group_name(rank))
    if group is None:
        return -1
    sites = group.sites() or []
    places = [i for i, site in enumerate(sites) if matches(site, glob)]
    last = int(group.step_numbers()[0].max(initial=-1))
    columns = table.columns_of([sites[i] for i in places])
    blocks = group.statistic(stat, places, lambda n: _are_within(n, steps)) if places else ()
    absent = _absent(group) if places and rank is None else {}
    for numbers, here, counts, values in blocks:
        rows = here.any(axis=1) & _are_within(numbers, steps)
        found = np.where(here, _masked(stat, counts, values), np.nan)
        bad = np.where(here, _masked("nonfinite", counts, values), np.nan)
        lacking = np.array([absent.get(n, 0) for n in numbers[rows].tolist()], np.int64)
        table.put(_Block(attempt, numbers[rows], columns, found[rows], bad[rows], lacking))
    overlay.note(group)
    return last


def _absent(group: StoredGroup) -> dict[int, int]:
    """Return how many ranks a merged step lacks, of those that lack any."""
    found: dict[int, int] = {}
    for steps, _, missing in group.missing():
        absent = missing.sum(axis=1)
        lacking = absent > 0
        found.update(zip(steps[lacking].tolist(), absent[lacking].tolist(), strict=True))
    return found


def _put_record(table: _Table, record: StepRecord, glob: str, stat: str) -> None:
    rows = [i for i, site in enumerate(record.sites) if matches(site, glob)]
    if rows:
        columns = table.columns_of([record.sites[i] for i in rows])
        counts, values = record.counts[None, rows], record.values[None, rows]
        found, bad = _masked(stat, counts, values), _masked("nonfinite", counts, values)
        steps, absent = np.array([record.step]), np.array([len(record.missing)])
        table.put(_Block(record.attempt, steps, columns, found, bad, absent))


def _masked(stat: str, counts: NDArray[np.int64], values: Floats) -> Floats:
    found = derive(stat, counts, values)
    return found if stat in _ALWAYS else np.where(counts[..., OBSERVED] > 0, found, np.nan)
