"""Records as a dataset of dask arrays, which read the store block by block when computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
from dask.delayed import delayed
from numpy.typing import NDArray

from ddpprobe.errors import StoreDamaged, UnknownSeries
from ddpprobe.reader.dataset import (
    AGGREGATES,
    QUANTITY,
    STATISTICS,
    RunDataset,
    derived_numbers,
    labelled,
)
from ddpprobe.reader.derived_series import NAMES
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.series import group_name, last_of_each, unfolded
from ddpprobe.records.step import COUNTS, VALUES, Floats, Site, observed
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store.columns import (
    Arrays,
    LabelAxis,
    SiteAxis,
    encode_rows,
    encode_scalars,
    step_columns,
)
from ddpprobe.store.format import attempt_key
from ddpprobe.store.row_reader import ROW_COLUMNS, RowReader

Load = Callable[..., NDArray[Any]]


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a group holds: its labels, and where its rows lie.

    Attributes:
        reader: of its rows.
        blocks: spans of rows that are stored together.
        columns: of one number a step [rows in the blocks].
        sites, names, ranks: its labels, in its order.
    """

    reader: RowReader
    blocks: Sequence[tuple[int, int]]
    columns: dict[str, NDArray[Any]]
    sites: Sequence[Site]
    names: Sequence[str]
    ranks: Sequence[int]


def lazy_dataset(merged_reader: MergedReader, attempt: int, rank: int | None) -> RunDataset:
    """Return the dataset of `to_dataset`, its arrays cut as the store's blocks of steps.

    Args:
        merged_reader: of the run.
        attempt: one of them.
        rank: one rank's own; None: all ranks merged.

    Raises:
        StoreDamaged: labels or columns of the group are damaged.
    """
    stored = _stored(merged_reader, attempt, rank)
    last = int(stored.columns["step"].max(initial=-1))
    rest = list(unfolded(merged_reader, attempt, rank, last))
    axis, names = SiteAxis(stored.sites), LabelAxis(list(stored.names))
    known = {*stored.ranks, *(r for record in rest for r in (*record.ranks, *record.missing))}
    ranks = LabelAxis(sorted(known))
    rows, cells = encode_rows(rest, axis), encode_scalars(rest, names, ranks)
    told = step_columns(rest)
    columns = {n: np.append(stored.columns[n], np.array(told[n], np.int64)) for n in ROW_COLUMNS}
    order = last_of_each(np.zeros(len(columns["step"]), np.int64), columns["step"])

    def array(load: Load, tail: NDArray[Any], *arguments: object) -> Any:  # noqa: ANN401
        """Put the blocks of the store, and what it lacks, one after the other."""
        parts = [
            da.from_delayed(
                delayed(load, pure=False)(stored.reader, a, b, tail.shape[1:], *arguments),
                shape=(b - a, *tail.shape[1:]), dtype=tail.dtype,
            )
            for a, b in stored.blocks
        ]  # fmt: skip
        if len(tail) or not parts:
            parts.append(da.from_array(tail, chunks=tail.shape))
        whole = da.concatenate(parts)
        if np.array_equal(order, np.arange(len(whole))):
            return whole
        return whole[order]

    merged = rank is None
    places = [ranks.at(r) for r in stored.ranks]
    variables = _variables(array, {**rows, **cells}, stored, places, merged=merged)
    ordered = {name: column[order] for name, column in columns.items()}
    dataset = labelled(variables, ordered, axis, names, ranks)
    if not merged:
        return dataset
    steps = ordered["step"].tolist()
    numbers = delayed(_derived, pure=False)(merged_reader.run.path, attempt, steps)
    derived = da.from_delayed(numbers, shape=(len(steps), len(NAMES)), dtype=np.float64)
    whole = dataset.assign_coords({QUANTITY: list(NAMES)})
    return whole.assign(derived=(("step", QUANTITY), derived))


def cut(dataset: RunDataset, chunks: int | dict[str, int] | str) -> RunDataset:
    """Cut the arrays of a lazy dataset anew; coordinates stay in memory.

    Args:
        dataset: of `lazy_dataset`.
        chunks: {} leaves them as they are; see `Run.to_xarray`.

    Raises:
        UnknownSeries: one of these dimensions does not exist, or it is no size.
    """
    if chunks == {}:
        return dataset
    named = chunks if isinstance(chunks, dict) else {}
    if unknown := sorted(map(str, set(named) - set(dataset.sizes))):
        there = ", ".join(map(str, dataset.sizes))
        raise UnknownSeries(f"no dimension {', '.join(unknown)} in chunks=: there are {there}")
    try:
        return _cut(dataset, chunks, named)
    except (TypeError, ValueError, ZeroDivisionError) as error:  # dask's own
        raise UnknownSeries(
            f"chunks={chunks!r:.80} is no size: give {{}} for the store's own blocks, sizes by "
            "dimension such as {'step': 1024}, one size for all, or 'auto'"
        ) from error


def _cut(
    dataset: RunDataset, chunks: int | dict[str, int] | str, named: dict[str, int]
) -> RunDataset:
    lazy = {name: array for name, array in dataset.data_vars.items() if array.chunks is not None}
    return dataset.assign(
        {
            name: array.variable.chunk(
                {d: n for d, n in named.items() if d in array.dims} or chunks
            )
            for name, array in lazy.items()
            if not named or set(named) & set(array.dims)
        }
    )


def _variables(
    array: Callable[..., Any], rest: Arrays, stored: _Stored, places: list[int], *, merged: bool
) -> dict[str, tuple[tuple[str, ...], Any]]:
    """Return (dimensions, array) of each variable; `rest` is of the records that are not stored."""
    sites = len(stored.sites)
    return {
        "counts": (
            ("step", "site", "count_stat"),
            array(_counts, rest["counts"], sites),
        ),
        AGGREGATES: (
            ("step", "site", "value_stat"),
            array(_aggregates, rest["values"], sites),
        ),
        **{
            stat: (
                ("step", "site"),
                array(_statistic, observed(stat, rest["counts"], rest["values"]), sites, stat),
            )
            for stat in STATISTICS
        },
        "scalars": (
            ("step", "rank", "scalar"),
            array(_scalars, rest["scalars"], places, len(stored.names), merged),
        ),
        "missing": (
            ("step", "rank"),
            array(_missing, rest["missing"].astype(bool), places, merged),
        ),
    }


def _stored(merged_reader: MergedReader, attempt: int, rank: int | None) -> _Stored:
    key = f"{attempt_key(attempt)}/{group_name(rank)}"
    reader = RowReader(merged_reader.run.path, key)
    none = {name: np.empty(0, np.int64) for name in ROW_COLUMNS}
    if not reader.exists:
        return _Stored(reader, [], none, [], [], [])
    # Its rows first: a live run's labels, looked at later, may be more, and never others.
    sizes, blocks, columns = reader.sizes(), reader.blocks(), reader.columns()
    group = merged_reader.group(attempt, group_name(rank))
    if group is None:  # it was written by a newer version: listed as lost
        return _Stored(reader, [], none, [], [], [])
    sites, ranks, names = group.sites(), group.ranks(), group.scalar_names()
    merged_reader.note(group)
    if sites is None or ranks is None:
        raise StoreDamaged(f"{key}: the labels of its sites or ranks are lost; leave chunks= out")
    sites, names = sites[: sizes["site"]], names[: sizes["scalar"]]
    ranks = ranks[: sizes.get("rank", len(ranks))]
    rows = np.concatenate([np.empty(0, np.intp), *(np.arange(a, b) for a, b in blocks)])
    kept = {name: column[rows].astype(np.int64) for name, column in columns.items()}
    return _Stored(reader, blocks, kept, sites, names, ranks)


def _counts(
    reader: RowReader, start: int, stop: int, shape: tuple[int, ...], sites: int
) -> NDArray[np.int64]:
    out = np.zeros((stop - start, *shape), np.int64)
    out[:, :sites] = reader.read("counts", start, stop, sites, len(COUNTS))
    return out


def _aggregates(
    reader: RowReader, start: int, stop: int, shape: tuple[int, ...], sites: int
) -> Floats:
    out = np.full((stop - start, *shape), np.nan)
    out[:, :sites] = reader.read("values", start, stop, sites, len(VALUES))
    return out


def _statistic(
    reader: RowReader, start: int, stop: int, shape: tuple[int, ...], sites: int, stat: str
) -> Floats:
    out = np.full((stop - start, *shape), np.nan)
    here, counts, values = reader.statistic(stat, start, stop, sites)
    out[:, :sites] = np.where(here, observed(stat, counts, values), np.nan)
    return out


def _scalars(
    reader: RowReader, start: int, stop: int, shape: tuple[int, ...], places: list[int],
    names: int, merged: bool,  # noqa: FBT001  (dask passes arguments by position)
) -> Floats:  # fmt: skip
    out = np.full((stop - start, *shape), np.nan)
    sizes = (len(places), names) if merged else (names,)
    found = reader.read("scalars", start, stop, *sizes)
    out[:, places, :names] = found.reshape(stop - start, len(places), names)
    return out


def _missing(
    reader: RowReader, start: int, stop: int, shape: tuple[int, ...], places: list[int],
    merged: bool,  # noqa: FBT001  (as above)
) -> NDArray[np.bool_]:  # fmt: skip
    out = np.zeros((stop - start, *shape), bool)
    if merged:
        out[:, places] = reader.read("missing", start, stop, len(places)) != 0
    return out


def _derived(path: Path, attempt: int, steps: list[int]) -> Floats:
    """Read all records, one after the other: some numbers are means over the steps before."""
    return derived_numbers(MergedReader(RunDir(path)).merged_records(attempt), steps)
