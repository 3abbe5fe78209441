"""Records as one long table: a row for each site of each sampled step, and for each scalar.

Cells without data are absent, which is not NaN: a NaN that stands in the table was a number of the
run (a loss, a sum of infinities). Where a cell is absent `Run.series` says NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.selection import Selection
from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import (
    ALWAYS,
    COUNTS,
    NONFINITE,
    NUMEL,
    OBSERVED,
    STATS,
    VALUES,
    Site,
    StepRecord,
    derive,
)
from ddpprobe.store.format import escape

# The row groups of a Parquet file, and all that is held in memory: 65 536 rows are about 30 MB.
GROUP_ROWS = 1 << 16
SCALAR = "scalar"  # the `kind` of a row that is a scalar: `fqn` is its name, `value` the number
INTEGERS = (*COUNTS, "nonfinite")
TEXTS = ("fqn", "kind", "leaf", "placement", "dtype")
# Type of each column, in order: "int", "float", "text" or "time" (Unix ns).
TYPES = {
    "attempt": "int", "step": "int", "wall_time": "time", "rank": "int",
    **dict.fromkeys(TEXTS, "text"), "value": "float",
    **{stat: "int" if stat in INTEGERS else "float" for stat in STATS},
    "absent": "int",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cells:
    """One column of a block: numbers or texts [rows], and which of them are there (None: all)."""

    data: NDArray[Any]
    there: NDArray[np.bool_] | None = None


Block = dict[str, Cells]


def blocks(
    merged_reader: MergedReader, part: Selection, advance: Callable[[int], object] = lambda _: None
) -> Iterator[Block]:
    """Yield the table in blocks of about `GROUP_ROWS` rows, with the columns of `TYPES`.

    Args:
        merged_reader: of the run.
        part: of it. Without a rank the rows of all ranks merged, in which `rank` is absent; a
            scalar always is one rank's.
        advance: told the number of records that were read.
    """
    waiting: list[tuple[int | None, StepRecord]] = []
    rows = 0
    for rank, record in _records(merged_reader, part):
        waiting.append((rank, record))
        rows += len(record.sites) + sum(map(len, record.scalars.values()))
        if rows >= GROUP_ROWS:
            yield _block(waiting)
            advance(len(waiting))
            waiting, rows = [], 0
    if rows:
        yield _block(waiting)
        advance(len(waiting))


def _records(
    merged_reader: MergedReader, part: Selection
) -> Iterator[tuple[int | None, StepRecord]]:
    for attempt in part.attempts(merged_reader):
        if part.rank is None:
            yield from ((None, record) for record in part.merged(merged_reader, attempt))
        else:
            for rank in part.ranks(merged_reader, attempt):
                yield from ((rank, record) for record in part.of_rank(merged_reader, attempt, rank))


def _texts(sites: tuple[Site, ...]) -> dict[str, list[str]]:
    return {name: [escape(getattr(site, name)) for site in sites] for name in TEXTS}


_texts_of = IdentityCache(_texts, 64)


def _block(records: Sequence[tuple[int | None, StepRecord]]) -> Block:
    """Lay records out as columns: of each record first the sites, then the scalars."""
    scalars = [[(k, *cell) for k, v in r.scalars.items() for cell in v.items()] for _, r in records]
    sizes = [len(r.sites) + len(s) for (_, r), s in zip(records, scalars, strict=True)]
    is_site = np.concatenate(
        [np.arange(n) < len(r.sites) for n, (_, r) in zip(sizes, records, strict=True)]
    )
    ranks = [
        [-1 if rank is None else rank] * len(r.sites) + [cell[0] for cell in cells]
        for (rank, r), cells in zip(records, scalars, strict=True)
    ]
    whose = np.array(list(chain.from_iterable(ranks)), np.int64)
    values = np.full(len(whose), np.nan)
    values[~is_site] = [cell[2] for cells in scalars for cell in cells]
    out = {
        "attempt": Cells(np.repeat([r.attempt for _, r in records], sizes)),
        "step": Cells(np.repeat([r.step for _, r in records], sizes)),
        "wall_time": Cells(np.repeat([r.wall_time_ns for _, r in records], sizes)),
        "rank": Cells(whose, whose >= 0),
        "value": Cells(values, ~is_site),
        **_names([r for _, r in records], scalars),
        **_statistics([r for _, r in records], is_site),
        # How many ranks a merged row lacks; a row of one rank lacks none, nor does a scalar.
        "absent": Cells(np.repeat([len(r.missing) for _, r in records], sizes), whose < 0),
    }
    return {name: out[name] for name in TYPES}


def _names(
    records: Sequence[StepRecord], scalars: Sequence[Sequence[tuple[int, str, float]]]
) -> Block:
    out: dict[str, list[str]] = {name: [] for name in TEXTS}
    for record, cells in zip(records, scalars, strict=True):
        texts, n = _texts_of(record.sites), len(cells)
        out["fqn"] += [*texts["fqn"], *(escape(name) for _, name, _ in cells)]
        out["kind"] += [*texts["kind"], *[SCALAR] * n]
        for name in ("leaf", "placement", "dtype"):
            out[name] += [*texts[name], *[""] * n]
    return {name: Cells(np.array(column, object)) for name, column in out.items()}


def _statistics(records: Sequence[StepRecord], is_site: NDArray[np.bool_]) -> Block:
    counts = np.zeros((len(is_site), len(COUNTS)), np.int64)
    counts[is_site] = np.concatenate([r.counts for r in records])
    values = np.zeros((len(is_site), len(VALUES)))
    values[is_site] = np.concatenate([r.values for r in records])
    nonfinite, numel = counts[:, NONFINITE].sum(axis=1), counts[:, NUMEL]
    seen = is_site & (counts[:, OBSERVED] > 0)
    out: Block = {}
    for stat in STATS:
        if stat in COUNTS:
            there = is_site if stat in ALWAYS else seen
            out[stat] = Cells(counts[:, COUNTS.index(stat)], there)
        elif stat == "nonfinite":
            out[stat] = Cells(nonfinite, seen)
        else:
            some = numel > 0 if stat == "zero_ratio" else numel > nonfinite
            out[stat] = Cells(derive(stat, counts, values), seen & some)
    return out
