"""The overview of a run as a Parquet file in its directory, made from what the store holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from ddpprobe.errors import StoreDamaged
from ddpprobe.records.events import NoteEvent
from ddpprobe.rundir import validate
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store.format import escape
from ddpprobe.store.overview import TYPES, Overview
from ddpprobe.store.reader import StoredGroup, attempts_of, groups_of
from ddpprobe.store.row_reader import RowReader

NAME = "overview.parquet"


def read_overview(run: RunDir, into: Overview) -> Iterator[None]:
    """Take in the merged records in the store, a block of steps at a time.

    What is damaged there is left out: `verify` lists it.

    Args:
        run: the run directory.
        into: the overview.
    """
    for attempt in attempts_of(run):
        key = next((k for k in groups_of(run, attempt) if k.endswith("/merged")), None)
        if key is None:
            continue
        group, reader = StoredGroup(run, key), RowReader(run.path, key)
        sites, names, ranks = group.sites(), group.scalar_names(), group.ranks()
        if sites is None or ranks is None:
            continue
        try:
            columns = reader.columns()
        except StoreDamaged:
            continue
        for start, stop in reader.blocks():
            _read_block(reader, into, columns, start, stop, (sites, names, ranks))
            yield


def _read_block(
    reader: RowReader, into: Overview, columns: Mapping[str, Any], start: int, stop: int,
    labels: tuple[Sequence[Any], Sequence[str], Sequence[int]],
) -> None:  # fmt: skip
    sites, names, ranks = labels
    try:
        counts = reader.read("counts", start, stop)
        values = reader.read("values", start, stop)
        scalars = reader.read("scalars", start, stop, len(ranks), len(names))
        given = reader.read("scalar_given", start, stop, len(ranks), len(names))
    except StoreDamaged:
        return
    into.add_steps(columns["step"][start:stop], columns["sampled"][start:stop] != 0)
    into.add_sites(sites, counts, values)
    into.add_scalars(names, scalars, given != 0)


def noted_config(run: RunDir) -> dict[str, str]:
    """Return what the script said by `probe.note(config=...)`, as far as it is in the store."""
    config: dict[str, str] = {}
    for attempt in attempts_of(run):
        for key in groups_of(run, attempt):
            if "/node_" not in key:
                continue
            for _, _, value in StoredGroup(run, key).events():
                event = validate.known_event(value)
                if isinstance(event, NoteEvent):
                    config |= event.config
    return config


def write_overview(rows: Mapping[str, Sequence[Any]], out: BinaryIO) -> int:
    """Write a table as Parquet to a binary file; return the number of rows.

    Args:
        rows: a list for each of `overview.TYPES`.
        out: where to.

    Raises:
        ModuleNotFoundError: pyarrow is not installed.
    """
    import pyarrow as pa  # noqa: PLC0415  (an extra)
    import pyarrow.parquet as pq  # noqa: PLC0415

    types = {
        "int": pa.int64(), "float": pa.float64(), "text": pa.string(),
        "time": pa.timestamp("ns", tz="UTC"),
    }  # fmt: skip
    arrays = {
        name: pa.array(_escaped(rows[name]) if kind == "text" else rows[name], types[kind])
        for name, kind in TYPES.items()
    }
    pq.write_table(pa.table(arrays), out, compression="zstd")
    return len(rows["kind"])


def _escaped(texts: Sequence[str | None]) -> list[str | None]:
    return [None if text is None else escape(text) for text in texts]
