"""Reading one group of the store back: lazily, exactly, and with what is lost listed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import Anomaly, Site, StepRecord
from ddpprobe.rundir import paths, safe_read, validate
from ddpprobe.store import format as fmt
from ddpprobe.store import regions
from ddpprobe.store.columns import Arrays, BlockDecoder, decode_digest_axis, decode_sites
from ddpprobe.store.manifest import GROUP_JSON, Consumed, Lost, manifest_path
from ddpprobe.store.statistic_reader import StatisticReader
from ddpprobe.store.verified_files import GroupArrays, span_of

R = TypeVar("R")
T = TypeVar("T")
Stamp = tuple[tuple[int, ...], ...]


class StoredGroup:
    """What one group says, in the words of `ddpprobe.records.step`.

    Raises:
        StoreDamaged: it was written by a newer version of the format.
    """

    def __init__(self, run: paths.RunDir, key: str) -> None:
        self._arrays = GroupArrays(run, key)

    @property
    def exists(self) -> bool:
        """False if nothing was ever committed to it."""
        return self._arrays.exists

    @property
    def rows(self) -> int:
        """Committed records."""
        return self._arrays.rows

    @property
    def meta(self) -> dict[str, Any]:
        """META of the journal that it was folded from; {} if that is lost."""
        meta = self._arrays.attrs.get("meta")
        return dict(meta) if isinstance(meta, dict) else {}

    @property
    def consumed(self) -> dict[str, Consumed]:
        """How far each journal is in here."""
        return self._arrays.consumed

    @property
    def lost(self) -> list[Lost]:
        """What turned out to be unreadable so far; grows as the group is read."""
        return self._arrays.lost

    def sites(self) -> list[Site] | None:
        """Return the sites of the group; None if they are lost."""
        labels = self._labels("fqn", "kind", "leaf", "placement", "primary", "dtype")
        return None if labels is None else decode_sites(labels)

    def steps(self) -> list[tuple[int, bool]]:
        """Return (step, sampled) of every committed record."""
        steps, sampled = self.step_numbers()
        return list(zip(steps.tolist(), sampled.tolist(), strict=True))

    def step_numbers(self, *, whole: bool = False) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return step and sampled of every committed record [rows], but for those that are lost.

        `whole`: of the sampled ones those alone that came to their end.
        """
        attempt, places = self._arrays.attempt, list(self._columns())
        found = [attempt("sampled", None, a, b) for _, a, b in places]
        flags = [
            np.ones(len(steps), bool) if x is None else x != 0
            for (steps, _, _), x in zip(places, found, strict=True)
        ]
        if whole:
            partial = [attempt("partial", None, a, b) for _, a, b in places]
            pairs = zip(flags, partial, strict=True)
            flags = [flag if x is None else flag & (x == 0) for flag, x in pairs]
        return (
            np.concatenate([np.empty(0, np.int64), *(steps for steps, _, _ in places)]),
            np.concatenate([np.empty(0, bool), *flags]),
        )

    def records(self, attempt: int, after: int = -1) -> Iterator[StepRecord]:
        """Yield the records of steps above `after`, in the order in which they were committed."""
        columns_of_steps = (c for c in self._arrays.columns.values() if c.dims[0] == "step")
        names = [c.name for c in columns_of_steps if c.rewritten and c.name != "step"]
        decoder = None
        for steps, start, stop in self._columns():
            if steps.max() <= after:
                continue
            found = {n: self._arrays.attempt(n, None, start, stop) for n in names}
            columns = {"step": steps} | {n: v for n, v in found.items() if v is not None}
            decoder = decoder or self._decoder(attempt)  # many names, for nothing if all is known
            if decoder is None:
                return
            if len(columns) > len(names):
                yield from self._blocks(decoder, columns, start, stop, after)

    def statistic(
        self,
        stat: str,
        places: Sequence[int],
        wanted: Callable[[NDArray[Any]], NDArray[np.bool_]] | None = None,
    ) -> Iterator[tuple[NDArray[Any], NDArray[np.bool_], NDArray[Any], NDArray[Any]]]:
        """Yield blocks of (step, whether there is a row, counts, values) at ascending places.

        Of `counts` and `values` only the columns are read that tell of the non-finite elements, of
        whether anything was observed, and those that `stat` needs; the others hold 0 and NaN.
        Blocks in which `wanted` takes none of the steps are left alone.
        """
        reader = StatisticReader(self._arrays, stat, places)
        for steps, start, stop in self._blocks_of("counts", reader.widest):
            if wanted is None or wanted(steps).any():
                found = reader.read(span_of(steps), start, stop)
                if found is not None:
                    yield steps, *found

    def scalar_names(self) -> list[str]:
        """Return the names of its scalars."""
        return [fmt.unescape(str(name)) for name in self._arrays.labels("scalar")]

    def scalar(
        self, name: str, wanted: AbstractSet[int] | None = None
    ) -> Iterator[tuple[int, dict[int, float]]]:
        """Yield (step, rank -> value) of one scalar, for the ranks that gave it.

        `wanted`: of these steps alone; what holds none of them is not read.
        """
        names, ranks = self.scalar_names(), self.ranks()
        if name not in names or ranks is None:
            return
        at: tuple[Any, ...] = (names.index(name),)
        at = (slice(None), *at) if "delivered" in self._arrays.columns else at
        for steps, start, stop in self._blocks_of("scalars"):
            if wanted is not None and wanted.isdisjoint(steps.tolist()):
                continue
            span = span_of(steps)
            values = self._arrays.attempt("scalars", span, start, stop, at)
            given = self._arrays.attempt("scalar_given", span, start, stop, at)
            if values is None or given is None:
                continue
            shape = (stop - start, len(ranks))
            cells = zip(steps, values.reshape(shape), given.reshape(shape), strict=True)
            for step, row, here in cells:
                if wanted is not None and int(step) not in wanted:
                    continue
                yield int(step), {ranks[i]: float(row[i]) for i in np.flatnonzero(here)}

    def ranks(self) -> list[int] | None:
        """Return the ranks of its rank axis, in its order; None if they are lost."""
        if "delivered" not in self._arrays.columns:
            return [int(self._arrays.key.rpartition("_")[2])]
        found = self._arrays.attempt("rank")
        return None if found is None else [int(r) for r in found.tolist()]

    def delivered(self) -> Iterator[tuple[NDArray[Any], list[int], NDArray[np.bool_]]]:
        """Yield blocks of (sampled steps [rows], ranks, whether each is merged in [rows, ranks]).

        Of what retention took away all ranks count as merged in: the head judged it before.
        """
        ranks, block = self.ranks(), self._rows_of("delivered")
        if ranks is None or "delivered" not in self._arrays.columns:
            return
        for steps, start, stop in self._blocks_of("delivered"):
            sampled = self._arrays.attempt("sampled", None, start, stop)
            chosen = np.ones(len(steps), bool) if sampled is None else sampled != 0
            flags = self._arrays.attempt("delivered", span_of(steps), start, stop)
            if self._arrays.has_expired(start // block):
                flags = np.ones((len(steps), len(ranks)), bool)
            if flags is not None:
                yield steps[chosen], ranks, flags[chosen] != 0

    def missing(self) -> Iterator[tuple[NDArray[Any], list[int], NDArray[np.bool_]]]:
        """Yield blocks of (steps [rows], ranks, who was waited for in vain [rows, ranks])."""
        ranks = self.ranks()
        if ranks is None or "missing" not in self._arrays.columns:
            return
        for steps, start, stop in self._blocks_of("missing"):
            missing = self._arrays.attempt("missing", span_of(steps), start, stop)
            if missing is not None:
                yield steps, ranks, missing != 0

    def expired(self) -> list[tuple[int, int]]:
        """Return the spans of steps, first and last, whose records retention took away."""
        block, gone = self._rows_of("counts"), self._arrays.has_expired
        return [span_of(n) for n, start, _ in self._blocks_of("counts") if gone(start // block)]

    def _columns(self) -> Iterator[tuple[NDArray[Any], int, int]]:
        """Yield steps, first row and row after the last of a chunk of columns, but lost ones."""
        for start in range(0, self.rows, fmt.COLUMN_CHUNK):
            stop = min(start + fmt.COLUMN_CHUNK, self.rows)
            steps = self._arrays.attempt("step", None, start, stop)
            if steps is not None:
                yield steps, start, stop

    def _blocks_of(self, array: str, sites: int = 0) -> Iterator[tuple[NDArray[Any], int, int]]:
        """Yield steps, first row and row after the last of what is stored together of an array.

        Or of a part of it, where so many sites of it are more than one read can hold.
        """
        for steps, a, b in self._columns():
            for start, stop in regions.cuts(a, b, self._rows_of(array), sites):
                yield steps[start - a : stop - a], start, stop

    def _rows_of(self, array: str) -> int:
        """Rows of an array that are stored, and so best read, together."""
        return self._arrays.chunks.get(array, {}).get("step", fmt.BLOCK)

    def anomalies(self) -> list[Anomaly]:
        """Return the anomalies of an `anomalies` group."""
        names = [c.name for c in self._arrays.columns.values()]
        found = {n: self._arrays.labels(n) for n in names}
        size = min(len(v) for v in found.values())
        rows = ({n: v[i] for n, v in found.items()} for i in range(size))
        return list(self._each("values_json", rows, _anomaly))

    def events(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Return (journal, seq, event) of a node group."""
        names = ("event_source", "event_seq", "event_json")
        rows = zip(*(self._arrays.labels(n) for n in names), strict=False)
        return list(self._each("event_json", rows, _event))

    def samples(self) -> list[dict[str, Any]]:
        """Return the readings of a node group."""
        texts = self._arrays.labels("sample_json")
        return list(self._each("sample_json", texts, _object))

    def _each(self, name: str, rows: Iterable[R], read: Callable[[R], T]) -> Iterator[T]:
        """Yield what each row says; one that makes no sense was written so, and is lost."""
        for number, row in enumerate(rows):
            try:
                yield read(row)
            except validate.MALFORMED as error:
                self._arrays.lose(name, None, f"entry {number} makes no sense: {error}")

    def _blocks(
        self, decoder: BlockDecoder, columns: Arrays, start: int, stop: int, after: int
    ) -> Iterator[StepRecord]:
        block = self._rows_of("counts")
        for a, b in regions.cuts(start, stop, block, self._arrays.sizes["site"]):
            here = {n: v[a - start : b - start] for n, v in columns.items()}
            if here["step"].max() <= after or self._arrays.has_expired(a // block):
                continue
            rows = self._rows(here, a, b)
            if rows is None:
                continue
            for row in np.flatnonzero(here["step"] > after):
                try:
                    record = decoder.record(int(row), rows)
                except validate.MALFORMED as error:
                    step = int(here["step"][row])
                    self._arrays.lose("", (step, step), f"a record makes no sense: {error}")
                else:
                    yield record

    def _rows(self, here: Arrays, a: int, b: int) -> Arrays | None:
        span = span_of(here["step"])
        merged = "delivered" in self._arrays.columns
        names = ["counts", "values", "order", "scalars", "scalar_given"]
        more = ["delivered", "missing", "desync_json"] if merged else ["checksum", "checksum_given"]
        names += more
        names += ["histograms_json"] if "histograms_json" in self._arrays.chunks else []
        parts = {n: self._arrays.attempt(n, span, a, b) for n in names}
        rows = {n: v for n, v in parts.items() if v is not None}
        if len(rows) < len(parts):
            return None
        if not merged:  # the rank axis that only a merged group has
            rows["scalars"], rows["scalar_given"] = (
                rows["scalars"][:, None],
                rows["scalar_given"][:, None],
            )
            rows["delivered"] = np.ones((b - a, 1), np.uint8)
            rows["missing"] = np.zeros((b - a, 1), np.uint8)
        return {**here, **rows}

    def _decoder(self, attempt: int) -> BlockDecoder | None:
        sites, names = self.sites(), self._arrays.attempt("scalar")
        ranks = self.ranks()
        if sites is None or names is None or ranks is None:
            return None
        scalars = [fmt.unescape(str(n)) for n in names.tolist()]
        digests = self._digest_axis()
        return None if digests is None else BlockDecoder(attempt, sites, scalars, ranks, digests)

    def _digest_axis(self) -> list[tuple[str, str]] | None:
        if "digest_fqn" not in self._arrays.columns:
            return []
        found = self._labels("digest_fqn", "digest_shard")
        return None if found is None else decode_digest_axis(found)

    def _labels(self, *names: str) -> dict[str, list[Any]] | None:
        """Read one-dimensional arrays; None if one of them is lost."""
        found = {name: self._arrays.attempt(name) for name in names}
        whole = {name: column.tolist() for name, column in found.items() if column is not None}
        return whole if len(whole) == len(found) else None


def stamp_of(run: paths.RunDir, key: str) -> Stamp:
    """Return what changes with every commit to a group; equal stamps, equal content."""
    files = (manifest_path(run, key), run.store / key / GROUP_JSON)
    return tuple(_state_of(path) for path in files)


def _state_of(path: Path) -> tuple[int, ...]:
    try:
        status = path.lstat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns


def _event(row: tuple[Any, Any, Any]) -> tuple[str, int, dict[str, Any]]:
    name, seq, text = row
    return str(name), int(seq), _object(text)


def _object(text: str) -> dict[str, Any]:
    document = safe_read.parse(text)
    if not isinstance(document, dict):
        raise TypeError(f"{type(document).__name__} is no JSON object")
    return document


def _anomaly(row: dict[str, Any]) -> Anomaly:
    texts = {name: fmt.unescape(row[name]) for name in ("detector", "level", "phase", "message")}
    return validate.anomaly(
        {
            **texts,
            "step": row["anomaly_step"],
            "micro": row["micro"],
            "rank": row["rank"] if row["rank"] >= 0 else None,
            "module": fmt.unescape(row["module"]) if row["module_named"] else None,
            "kind": fmt.unescape(row["kind"]) or None,
            "first_cause": row["first_cause"],
            "values": _object(row["values_json"]),
            "sampled": row["sampled"],
            "attempt": row["attempt"],
            "wall_time_ns": row["wall_time"],
        }
    )
