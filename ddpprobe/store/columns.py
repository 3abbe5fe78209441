"""A block of step records as columns and back: NumPy only, exact in both directions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import COUNTS, KINDS, PHASES, VALUES, Digests, FirstBad, Site, StepRecord
from ddpprobe.rundir import framing, safe_read
from ddpprobe.store.format import escape, unescape

T = TypeVar("T")
Arrays = dict[str, NDArray[Any]]

_TABLES = 16  # site tables of one rank; it has one or two
MOST_HISTOGRAMS_TEXT = 240_000  # characters a record: a block of 256 can be read at once
_BAD_NUMBERS = ("step", "micro", "order", "rank", "nan", "pos_inf", "neg_inf", "numel")


@dataclass(slots=True)
class LabelAxis(Generic[T]):
    """Labels of a dimension in order of first appearance; grows, never reorders."""

    labels: list[T] = field(default_factory=list)
    _index: dict[T, int] = field(default_factory=dict)

    def at(self, label: T) -> int:
        """Return the position of a label, appending it if it is new."""
        if not self._index:
            self._index = {value: i for i, value in enumerate(self.labels)}
        if label not in self._index:
            self._index[label] = len(self.labels)
            self.labels.append(label)
        return self._index[label]


class SiteAxis:
    """The sites of a group. A site that occurs twice in one record takes two places."""

    def __init__(self, sites: Sequence[Site] = ()) -> None:
        self._axis: LabelAxis[tuple[Site, int]] = LabelAxis(list(_numbered(sites)))
        self._places = IdentityCache(self._find, _TABLES)

    @property
    def sites(self) -> list[Site]:
        """The site at each position."""
        return [site for site, _ in self._axis.labels]

    def positions(self, sites: tuple[Site, ...]) -> NDArray[np.int64]:
        """Return the place of each row of a record, appending the sites that are new."""
        return self._places(sites)

    def _find(self, sites: tuple[Site, ...]) -> NDArray[np.int64]:
        return np.array([self._axis.at(key) for key in _numbered(sites)], np.int64)


def _numbered(sites: Sequence[Site]) -> list[tuple[Site, int]]:
    seen: dict[Site, int] = {}
    out = []
    for site in sites:
        out.append((site, seen.get(site, 0)))
        seen[site] = seen.get(site, 0) + 1
    return out


def site_columns(sites: Sequence[Site]) -> dict[str, list[Any]]:
    """Return the arrays over dimension `site`."""
    return {
        "site": [escape(str(s)) for s in sites],
        "fqn": [escape(s.fqn) for s in sites],
        "kind": [escape(s.kind) for s in sites],
        "leaf": [escape(s.leaf) for s in sites],
        "placement": [escape(s.placement) for s in sites],
        "primary": [int(s.primary) for s in sites],
        "dtype": [escape(s.dtype) for s in sites],
    }


def decode_sites(columns: Mapping[str, Sequence[Any]]) -> list[Site]:
    """Undo `site_columns`."""
    names = ("fqn", "kind", "leaf", "placement", "dtype")
    texts = zip(*(map(unescape, columns[n]) for n in names), strict=True)
    return [
        Site(f, k, leaf, p, bool(primary), d)
        for (f, k, leaf, p, d), primary in zip(texts, columns["primary"], strict=True)
    ]


def step_columns(records: Sequence[StepRecord]) -> dict[str, Any]:
    """Return the one-dimensional arrays over dimension `step`."""
    bad = [r.first_bad for r in records]
    out: dict[str, Any] = {
        "step": [r.step for r in records],
        "wall_time": [r.wall_time_ns for r in records],
        "sampled": [int(r.sampled) for r in records],
        "skipped": [int(r.skipped) for r in records],
        "partial": [int(r.partial) for r in records],
        "first_bad_phase": [PHASES.index(b.phase) if b else -1 for b in bad],
        "first_bad_kind": [KINDS.index(b.kind) if b and b.kind is not None else -1 for b in bad],
        "first_bad_named": [int(b is not None and b.fqn is not None) for b in bad],
        "first_bad_fqn": [escape(b.fqn or "") if b else "" for b in bad],
        "first_bad_leaf": [escape(b.leaf) if b else "" for b in bad],
    }
    for name in _BAD_NUMBERS:
        out[f"first_bad_{name}"] = [getattr(b, name) if b else -1 for b in bad]
    return out


def encode_rows(records: Sequence[StepRecord], sites: SiteAxis) -> Arrays:
    """Return counts, values and order [records, sites, ...]; `sites` grows first."""
    places = [sites.positions(r.sites) for r in records]
    shape = (len(records), len(sites.sites))
    counts = np.zeros((*shape, len(COUNTS)), np.int64)
    values = np.full((*shape, len(VALUES)), np.nan)
    order = np.full(shape, -1, np.int32)
    for row, (record, place) in enumerate(zip(records, places, strict=True)):
        counts[row, place] = record.counts
        values[row, place] = record.values
        order[row, place] = np.arange(len(place))
    return {"counts": counts, "values": values, "order": order}


def digest_columns(keys: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the arrays over dimension `digest`."""
    return {
        "digest_fqn": [escape(fqn) for fqn, _ in keys],
        "digest_shard": [escape(shard) for _, shard in keys],
    }


def decode_digest_axis(columns: Mapping[str, Sequence[Any]]) -> list[tuple[str, str]]:
    """Undo `digest_columns`."""
    fqns, shards = columns["digest_fqn"], columns["digest_shard"]
    return [(unescape(f), unescape(s)) for f, s in zip(fqns, shards, strict=True)]


def encode_checksums(records: Sequence[StepRecord], axis: LabelAxis[tuple[str, str]]) -> Arrays:
    """Return checksum, checksum_given [records, digests] of one rank's records; `axis` grows."""
    places = [[axis.at(key) for key in r.digests] for r in records]
    shape = (len(records), len(axis.labels))
    checksum, given = np.full(shape, -1, np.int64), np.zeros(shape, np.uint8)
    for row, (record, place) in enumerate(zip(records, places, strict=True)):
        checksum[row, place] = [next(iter(held)) for held in record.digests.values()]
        given[row, place] = 1
    return {"checksum": checksum, "checksum_given": given}


def encode_disputes(records: Sequence[StepRecord]) -> NDArray[Any]:
    """Return what the ranks of each record disagree on as JSON [records]; "" for nothing."""
    compact = (",", ":")
    plain = [plain_digests(r.digests) for r in records]
    return np.array([json.dumps(x, separators=compact) if x else "" for x in plain], object)


def encode_histograms(records: Sequence[StepRecord]) -> NDArray[Any]:
    """Return the histograms of each record as JSON [records]; "" for none.

    Of a record that has more than `MOST_HISTOGRAMS_TEXT` of them the first ones.
    """
    out = np.full(len(records), "", object)
    for at, record in enumerate(records):
        texts, length = [], 0
        for one in framing.encode_histograms(record) if len(record.binned) else ():
            texts.append(json.dumps(one, separators=(",", ":")))
            length += len(texts[-1]) + 1
            if length >= MOST_HISTOGRAMS_TEXT:
                texts.pop()
                break
        out[at] = f"[{','.join(texts)}]" if texts else ""
    return out


def plain_digests(digests: Digests) -> list[Any]:
    """Return checksums as JSON can hold them; the sets of ranks are hexadecimal bit masks."""
    return [
        (fqn, shard, [(checksum, f"{ranks:x}") for checksum, ranks in held.items()])
        for (fqn, shard), held in digests.items()
    ]


def read_digests(plain: Iterable[Any]) -> Digests:
    """Undo `plain_digests`."""
    return {
        (str(fqn), str(shard)): {int(checksum): int(ranks, 16) for checksum, ranks in held}
        for fqn, shard, held in plain
    }


def encode_scalars(
    records: Sequence[StepRecord], names: LabelAxis[str], ranks: LabelAxis[int]
) -> dict[str, NDArray[Any]]:
    """Return scalars, scalar_given [records, ranks, names], delivered, missing [records, ranks]."""
    # Almost always all ranks of a record give the same names: one block then.
    blocks: list[tuple[int, list[int], list[int], list[list[float]]]] = []
    for row, record in enumerate(records):
        alike: dict[tuple[str, ...], list[int]] = {}
        for rank, scalars in record.scalars.items():
            alike.setdefault(tuple(scalars), []).append(rank)
        for keys, whose in alike.items():
            cells = [list(record.scalars[rank].values()) for rank in whose]
            blocks.append((row, [ranks.at(r) for r in whose], [names.at(k) for k in keys], cells))
    there = [(row, ranks.at(r)) for row, record in enumerate(records) for r in record.ranks]
    absent = [(row, ranks.at(r)) for row, record in enumerate(records) for r in record.missing]
    shape = (len(records), len(ranks.labels))
    numbers = np.full((*shape, len(names.labels)), np.nan)
    given = np.zeros(numbers.shape, np.uint8)
    delivered, missing = np.zeros(shape, np.uint8), np.zeros(shape, np.uint8)
    for row, whose_rows, columns, cells in blocks:
        place = np.ix_([row], whose_rows, columns)
        numbers[place] = cells
        given[place] = 1
    for row, rank in there:
        delivered[row, rank] = 1
    for row, rank in absent:
        missing[row, rank] = 1
    return {
        "scalars": numbers, "scalar_given": given, "delivered": delivered, "missing": missing,
    }  # fmt: skip


class BlockDecoder:
    """Turns arrays of one group back into records that share their site tables."""

    def __init__(
        self, attempt: int, sites: list[Site], names: list[str], ranks: list[int],
        digests: list[tuple[str, str]],
    ) -> None:  # fmt: skip
        self.attempt = attempt
        self._sites, self._names, self._ranks = sites, names, ranks
        self._digest_axis = digests
        self._tables: dict[bytes, tuple[NDArray[np.int64], tuple[Site, ...]]] = {}

    def record(self, row: int, block: Arrays) -> StepRecord:
        """Return one row of a block as a record; the arrays of `encode_*`, all with a rank axis."""
        place, sites = self._table(block["order"][row])
        text = str(block["histograms_json"][row]) if "histograms_json" in block else ""
        binned, bins = framing.decode_histograms(safe_read.parse(text or "[]"), len(sites))
        return StepRecord(
            attempt=self.attempt,
            step=int(block["step"][row]),
            ranks=self._who(block["delivered"][row]),
            wall_time_ns=int(block["wall_time"][row]),
            sampled=bool(block["sampled"][row]),
            sites=sites,
            counts=block["counts"][row][place],
            values=block["values"][row][place],
            scalars=self._scalars(block["scalars"][row], block["scalar_given"][row]),
            first_bad=_first_bad(row, block),
            skipped=bool(block["skipped"][row]),
            partial=bool(block["partial"][row]),
            missing=self._who(block["missing"][row]),
            digests=self._digests(row, block),
            binned=binned,
            bins=bins,
        )

    def _digests(self, row: int, block: Arrays) -> Digests:
        if "desync_json" in block:
            return read_digests(safe_read.parse(str(block["desync_json"][row]) or "[]"))
        own, checksums = 1 << self._ranks[0], block["checksum"][row]
        given = np.flatnonzero(block["checksum_given"][row])
        return {self._digest_axis[i]: {int(checksums[i]): own} for i in given}

    def _table(self, order: NDArray[Any]) -> tuple[NDArray[np.int64], tuple[Site, ...]]:
        key = order.tobytes()
        if key not in self._tables:
            rows = np.argsort(order, kind="stable")
            place = rows[int((order < 0).sum()) :]
            self._tables[key] = place, tuple(self._sites[i] for i in place)
        return self._tables[key]

    def _who(self, mask: NDArray[Any]) -> tuple[int, ...]:
        return tuple(sorted(self._ranks[i] for i in np.flatnonzero(mask)))

    def _scalars(self, values: NDArray[Any], given: NDArray[Any]) -> dict[int, Mapping[str, float]]:
        out: dict[int, dict[str, float]] = {}
        for rank, name in zip(*np.nonzero(given), strict=True):
            found = out.setdefault(self._ranks[rank], {})
            found[self._names[name]] = float(values[rank, name])
        return dict(out)


def _first_bad(row: int, block: Arrays) -> FirstBad | None:
    phase = int(block["first_bad_phase"][row])
    if phase < 0:
        return None
    kind = int(block["first_bad_kind"][row])
    numbers = {name: int(block[f"first_bad_{name}"][row]) for name in _BAD_NUMBERS}
    named = bool(block["first_bad_named"][row])
    return FirstBad(
        phase=PHASES[phase],
        fqn=unescape(str(block["first_bad_fqn"][row])) if named else None,
        kind=KINDS[kind] if kind >= 0 else None,
        leaf=unescape(str(block["first_bad_leaf"][row])),
        **numbers,
    )
