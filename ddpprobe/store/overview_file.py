"""What the overview of a run is made from: the merged records and notes that its store holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ddpprobe.errors import StoreDamaged
from ddpprobe.records.events import Event, NoteEvent, TopologyEvent
from ddpprobe.rundir import validate
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store.group_names import attempts_of, groups_of
from ddpprobe.store.newest_identity import ASKED, newest_identity
from ddpprobe.store.overview import Overview
from ddpprobe.store.reader import StoredGroup
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
    whole = (columns["sampled"] != 0) & (columns["partial"] == 0)
    into.add_steps(columns["step"][start:stop], whole[start:stop])
    into.add_sites(sites, counts, values)
    into.add_scalars(names, scalars, given != 0)


def noted_config(run: RunDir) -> dict[str, str]:
    """Return what the script said by `probe.note(config=...)`, as far as it is in the store."""
    config: dict[str, str] = {}
    for attempt in attempts_of(run):
        for event in _events(run, attempt):
            if isinstance(event, NoteEvent):
                config |= event.config
    return config


def stored_metas(run: RunDir, attempt: int) -> Iterator[dict[str, Any]]:
    """Yield what each rank of an attempt wrote of itself, {} if that is not stored, ascending.

    Of each only what `stored_identity` asks for: of thousands of ranks all are held together, and
    they take seconds to read.
    """
    for key in groups_of(run, attempt):
        if "/rank_" in key:
            meta = StoredGroup(run, key).meta or {}
            yield {name: meta[name] for name in ASKED if name in meta}


def stored_identity(
    run: RunDir, identity: Mapping[str, Any], attempt: int, metas: Iterable[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return content of run.json, with what an attempt knows better, as far as it is stored.

    Args:
        run: the run directory.
        identity: content of run.json.
        attempt: its number.
        metas: what `stored_metas` yields.
    """
    wrappers = (e.wrapper for e in _events(run, attempt) if isinstance(e, TopologyEvent))
    return {**identity, **newest_identity(identity, list(filter(None, metas)), wrappers)}


def _events(run: RunDir, attempt: int) -> Iterator[Event]:
    for key in groups_of(run, attempt):
        if "/node_" in key:
            found = (validate.known_event(e) for _, _, e in StoredGroup(run, key).events())
            yield from (event for event in found if event is not None)
