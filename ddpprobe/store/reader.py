"""Reading one group of the store back: lazily, exactly, and with what is lost listed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpprobe import layout
from ddpprobe.records import VALUES, Anomaly, Site, StepRecord
from ddpprobe.store import format as fmt
from ddpprobe.store.columns import Arrays, BlockDecoder, decode_digest_axis, decode_sites
from ddpprobe.store.manifest import Consumed, Lost
from ddpprobe.store.verified import GroupArrays, span_of

_VALUES_OF = {
    "min": ("min",), "max": ("max",), "abs_max": ("min", "max"), "sum": ("sum",),
    "mean": ("sum",), "sum_sq": ("sum_sq",), "rms": ("sum_sq",), "norm": ("sum_sq",),
    "std": ("sum", "sum_sq"),
}  # fmt: skip


class StoredGroup:
    """What one group says, in the words of `ddpprobe.records`.

    Raises:
        StoreError: it was written by a newer version of the format.
    """

    def __init__(self, run: layout.RunDir, key: str) -> None:
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
        found = self._arrays.attrs.get("meta")
        return dict(found) if isinstance(found, dict) else {}

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
        names = ("fqn", "kind", "leaf", "placement", "primary", "dtype")
        found = {name: self._arrays.attempt(name, None) for name in names}
        if any(v is None for v in found.values()):
            return None
        return decode_sites({k: v.tolist() for k, v in found.items() if v is not None})

    def steps(self) -> list[tuple[int, bool]]:
        """Return (step, sampled) of every committed record."""
        steps, sampled = self._arrays.labels("step"), self._arrays.labels("sampled")
        return [(int(s), bool(x)) for s, x in zip(steps, sampled, strict=False)]

    def records(self, attempt: int, after: int = -1) -> Iterator[StepRecord]:
        """Yield the records of steps above `after`, in the order in which they were committed."""
        decoder = self._decoder(attempt)
        if decoder is None:
            return
        columns_of_steps = (c for c in self._arrays.columns.values() if c.dims[0] == "step")
        names = [c.name for c in columns_of_steps if c.rewritten]
        for start in range(0, self.rows, fmt.COLUMN_CHUNK):
            stop = min(start + fmt.COLUMN_CHUNK, self.rows)
            columns = {n: self._arrays.attempt(n, None, start, stop) for n in names}
            if any(v is None for v in columns.values()):
                continue
            whole = {n: v for n, v in columns.items() if v is not None}
            if whole["step"].max() > after:
                yield from self._blocks(decoder, whole, start, stop, after)

    def statistic(
        self, stat: str, places: Sequence[int]
    ) -> Iterator[tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]]:
        """Yield blocks of (step, order, counts, values) at these places of the site axis.

        Only the columns of `values` that `stat` needs are read; the others hold NaN.
        """
        low, high = min(places), max(places) + 1
        pick = np.asarray(places) - low
        wanted = _VALUES_OF.get(stat, ())
        block = self._arrays.chunks.get("counts", {}).get("step", fmt.BLOCK)
        for start in range(0, self.rows, block):
            stop = min(start + block, self.rows)
            steps = self._arrays.attempt("step", None, start, stop)
            if steps is None:
                continue
            span = span_of(steps)
            inner = (slice(low, high),)
            order = self._arrays.attempt("order", span, start, stop, inner)
            counts = self._arrays.attempt("counts", span, start, stop, (*inner, slice(None)))
            values = np.full((stop - start, high - low, len(VALUES)), np.nan)
            parts = {
                name: self._arrays.attempt(
                    "values", span, start, stop, (*inner, VALUES.index(name))
                )
                for name in wanted
            }
            if order is None or counts is None or any(p is None for p in parts.values()):
                continue
            for name, part in parts.items():
                values[..., VALUES.index(name)] = part
            yield steps, order[:, pick], counts[:, pick], values[:, pick]

    def scalar(self, name: str) -> Iterator[tuple[int, dict[int, float]]]:
        """Yield (step, rank -> value) of one scalar, for the ranks that gave it."""
        names = [fmt.unescape(str(n)) for n in self._arrays.labels("scalar")]
        ranks, block = self._ranks(), self._arrays.chunks.get("scalars", {}).get("step", fmt.BLOCK)
        if name not in names or ranks is None:
            return
        at: tuple[Any, ...] = (names.index(name),)
        at = (slice(None), *at) if "delivered" in self._arrays.columns else at
        for start in range(0, self.rows, block):
            stop = min(start + block, self.rows)
            steps = self._arrays.attempt("step", None, start, stop)
            if steps is None:
                continue
            span = span_of(steps)
            values = self._arrays.attempt("scalars", span, start, stop, at)
            given = self._arrays.attempt("scalar_given", span, start, stop, at)
            if values is None or given is None:
                continue
            shape = (stop - start, len(ranks))
            cells = zip(steps, values.reshape(shape), given.reshape(shape), strict=True)
            for step, row, here in cells:
                yield int(step), {ranks[i]: float(row[i]) for i in np.flatnonzero(here)}

    def anomalies(self) -> list[Anomaly]:
        """Return the anomalies of an `anomalies` group."""
        names = [c.name for c in self._arrays.columns.values()]
        found = {n: self._arrays.labels(n) for n in names}
        size = min(len(v) for v in found.values())
        return [_anomaly({n: v[i] for n, v in found.items()}) for i in range(size)]

    def events(self) -> list[tuple[str, int, dict[str, Any]]]:
        """Return (journal, seq, event) of a node group."""
        names = ("event_source", "event_seq", "event_json")
        rows = zip(*(self._arrays.labels(n) for n in names), strict=False)
        return [(str(name), int(seq), json.loads(text)) for name, seq, text in rows]

    def samples(self) -> list[dict[str, Any]]:
        """Return the readings of a node group."""
        return [json.loads(text) for text in self._arrays.labels("sample_json")]

    def _blocks(
        self, decoder: BlockDecoder, columns: Arrays, start: int, stop: int, after: int
    ) -> Iterator[StepRecord]:
        block = (
            self._arrays.chunks["counts"]["step"] if "counts" in self._arrays.chunks else fmt.BLOCK
        )
        for a in range(start, stop, block):
            b = min(a + block, stop)
            here = {n: v[a - start : b - start] for n, v in columns.items()}
            if here["step"].max() <= after:
                continue
            rows = self._rows(here, a, b)
            if rows is None:
                continue
            for row in np.flatnonzero(here["step"] > after):
                yield decoder.record(int(row), rows)

    def _rows(self, here: Arrays, a: int, b: int) -> Arrays | None:
        span = span_of(here["step"])
        merged = "delivered" in self._arrays.columns
        names = ["counts", "values", "order", "scalars", "scalar_given"]
        more = ["delivered", "missing", "desync_json"] if merged else ["checksum", "checksum_given"]
        names += more
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
        ranks = self._ranks()
        if sites is None or names is None or ranks is None:
            return None
        scalars = [fmt.unescape(str(n)) for n in names.tolist()]
        digests = self._digest_axis()
        return None if digests is None else BlockDecoder(attempt, sites, scalars, ranks, digests)

    def _digest_axis(self) -> list[tuple[str, str]] | None:
        if "digest_fqn" not in self._arrays.columns:
            return []
        found = {name: self._arrays.attempt(name) for name in ("digest_fqn", "digest_shard")}
        if any(v is None for v in found.values()):
            return None
        return decode_digest_axis({k: v.tolist() for k, v in found.items() if v is not None})

    def _ranks(self) -> list[int] | None:
        if "delivered" not in self._arrays.columns:
            return [int(self._arrays.key.rpartition("_")[2])]
        found = self._arrays.attempt("rank")
        return None if found is None else [int(r) for r in found.tolist()]


def groups_of(run: layout.RunDir, attempt: int) -> list[str]:
    """Paths of the groups of an attempt, committed or only listed in a manifest, ascending."""
    top = fmt.attempt_key(attempt)
    names = _names(run.store / top)
    names |= {
        n.removeprefix(f"{top}.").removesuffix(".log")
        for n in _names(run.path / "manifest")
        if n.startswith(f"{top}.") and n.endswith(".log")
    }
    return sorted(key for name in names if fmt.kind_of_group(key := f"{top}/{name}"))


def attempts_of(run: layout.RunDir) -> list[int]:
    """Attempts that have a group in the store, ascending."""
    names = {n.partition(".")[0] for n in _names(run.store) | _names(run.path / "manifest")}
    digits = [n.removeprefix("attempt_") for n in names if n.startswith("attempt_")]
    return sorted(int(d) for d in digits if d.isdecimal())


def _names(path: Path) -> set[str]:
    try:
        return {p.name for p in path.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return set()


def _anomaly(row: dict[str, Any]) -> Anomaly:
    return Anomaly(
        detector=fmt.unescape(row["detector"]),
        level=fmt.unescape(row["level"]),
        step=int(row["anomaly_step"]),
        micro=int(row["micro"]),
        rank=int(row["rank"]) if row["rank"] >= 0 else None,
        module=fmt.unescape(row["module"]) if row["module_named"] else None,
        kind=fmt.unescape(row["kind"]) or None,
        phase=fmt.unescape(row["phase"]),
        first_cause=bool(row["first_cause"]),
        message=fmt.unescape(row["message"]),
        values={str(k): v for k, v in json.loads(row["values_json"]).items()},
        sampled=bool(row["sampled"]),
        attempt=int(row["attempt"]),
        wall_time_ns=int(row["wall_time"]),
    )
