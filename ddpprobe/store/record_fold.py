"""Folding the records of one journal into its group, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from ddpprobe.records.step import COUNTS, VALUES, StepRecord
from ddpprobe.rundir import framing, paths
from ddpprobe.rundir.framing import Frame, NameTables
from ddpprobe.store import format as fmt
from ddpprobe.store.columns import (
    LabelAxis,
    SiteAxis,
    decode_digest_axis,
    decode_sites,
    digest_columns,
    encode_checksums,
    encode_disputes,
    encode_histograms,
    encode_rows,
    encode_scalars,
    site_columns,
    step_columns,
)
from ddpprobe.store.commit import GroupWriter
from ddpprobe.store.manifest import Consumed
from ddpprobe.store.root import Root
from ddpprobe.store.segments import (
    JournalSource,
    Segment,
    belongs,
    read_segment,
    records_of,
    settle,
)

MIN_BLOCK = 8  # records: of a smaller block most would be what each file costs
ROW_BYTES = 8 * (len(COUNTS) + len(VALUES)) + 4  # of one site in one record, before compression


@dataclass(slots=True)
class Pass:
    """One reading of a journal's segments: what was met on the way.

    `seqs` are the records by segment, `events` its LIFE frames, `refused` those that belong to
    somebody else. `growing` is the segment that its writer may still write to.
    """

    growing: int | None = None
    segments: dict[int, Segment] = field(default_factory=dict)
    seqs: dict[int, list[int]] = field(default_factory=dict)
    events: list[Frame] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    seen: set[int] = field(default_factory=set)
    end: int = 0

    def items(
        self, source: JournalSource, numbers: list[int], consumed: Consumed
    ) -> Iterator[tuple[int, StepRecord]]:
        """Yield (seq, record) of the segments `numbers`."""
        tables = NameTables()
        for number in numbers:
            segment = read_segment(source.directory, number)
            self.segments[number] = segment
            self.seqs[number] = []
            self.events += [f for f in segment.frames if f.type == framing.LIFE]
            for seq, record in records_of(segment, tables, consumed):
                if not belongs(record, source):
                    self.refused.append(seq)
                    continue
                self.seqs[number].append(seq)
                self.seen.add(seq)
                self.end = seq + 1
                yield seq, record
            self.end = max(
                self.end, segment.end if number != self.growing else settled_end(segment)
            )
            # Only what deletion must know is kept: the frames of a segment can be 30 MB.
            last = segment.frames[-1:]
            segment.frames = segment.frames[:1] + (last if len(segment.frames) > 1 else [])


class RecordFold:
    """Folds one source; nothing of it outlives the call, so an error leaves no half state.

    A new group's blocks take `block_bytes` at most, but for the least that makes a block.
    """

    def __init__(
        self, run: paths.RunDir, root: Root, source: JournalSource, *, block: int, durable: bool,
        block_bytes: float | None = None,
    ) -> None:  # fmt: skip
        self._root, self._source = root, source
        self._block, self._block_bytes = block, block_bytes
        self._group = GroupWriter(run, source.record_group, durable=durable)
        self._sites, self._scalars, self._ranks = SiteAxis(), LabelAxis[str](), LabelAxis[int]()
        self._digests = LabelAxis[tuple[str, str]]()
        if self._group.exists:
            self._block = self._group.chunks["step"]
            self._read_axes()

    def fold(
        self, numbers: list[int], *, final: bool, growing: int | None = None
    ) -> tuple[int, Pass]:
        """Fold the segments `numbers`.

        Args:
            numbers: of the segments, ascending.
            final: nothing follows: what does not fill a block goes in as well.
            growing: that one may still grow; what does not fill a block goes in nevertheless, and
                what follows is added to it. None: whole blocks only, unless `final`.
        """
        group, name = self._group, self._source.name
        before = group.consumed.get(name, Consumed())
        done, rows, taken = Pass(growing), 0, set[int]()
        everything = final or growing is not None
        stream = settle(done.items(self._source, numbers, before), final=everything)
        while True:
            room = self._block - group.sizes.get("step", 0) % self._block
            batch = list(islice(stream, room))
            if batch and not group.exists:
                room = self._block = self._fitting(batch)
                batch, stream = batch[:room], chain(batch[room:], stream)
            if not batch or (len(batch) < room and not everything):
                break
            if not (final or group.exists or len(batch) == room or _has_sites(batch)):
                break  # the chunks are chosen by the number of sites, once for all: wait for some
            taken.update(seq for _, seqs in batch for seq in seqs)
            self._append([record for record, _ in batch], done)
            self._commit(before.advanced(taken, done.seen - taken, done.end))
            rows += len(batch)
        if final and self._source.rank is not None and not group.exists and done.segments:
            self._define(0, done)  # a rank that died before its first record was still there
        progress = before.advanced(taken, done.seen - taken, done.end)
        if group.exists and progress != group.consumed.get(name):
            self._commit(progress)
        return rows, done

    def _fitting(self, batch: list[tuple[StepRecord, tuple[int, ...]]]) -> int:
        """Return how many records like these a block of a new group holds."""
        if self._block_bytes is None:
            return self._block
        row = ROW_BYTES * max(len(record.sites) for record, _ in batch)
        return min(self._block, max(MIN_BLOCK, int(self._block_bytes // max(row, 1))))

    def has(self, seq: int) -> bool:
        """Return whether a record is committed."""
        return self._group.consumed.get(self._source.name, Consumed()).has(seq)

    def _commit(self, progress: Consumed) -> None:
        self._root.prepare(self._source.attempt)
        self._group.commit({self._source.name: progress})

    def _append(self, records: list[StepRecord], done: Pass) -> None:
        group = self._group
        known = len(self._sites.sites), len(self._scalars.labels), len(self._ranks.labels)
        rows = encode_rows(records, self._sites)
        if not group.exists:
            self._define(len(self._sites.sites), done)
            known = 0, 0, 0
        cells = encode_scalars(records, self._scalars, self._ranks)
        group.append("site", site_columns(self._sites.sites[known[0] :]))
        group.append(
            "scalar", {"scalar": [fmt.escape(s) for s in self._scalars.labels[known[1] :]]}
        )
        if self._source.rank is None:
            group.append("rank", {"rank": self._ranks.labels[known[2] :]})
            cells["desync_json"] = encode_disputes(records)
        else:
            cells = {name: cells[name][:, 0] for name in ("scalars", "scalar_given")}
            old = len(self._digests.labels)
            cells |= encode_checksums(records, self._digests)
            group.append("digest", digest_columns(self._digests.labels[old:]))
        histograms = encode_histograms(records)
        if histograms.any():
            rows["histograms_json"] = histograms
        start = group.sizes["step"]
        for name, data in {**rows, **cells}.items():
            group.put(name, (start, *[0] * (data.ndim - 1)), data)
        group.append("step", step_columns(records))

    def _define(self, sites: int, done: Pass) -> None:
        meta = next((s.meta for s in done.segments.values() if s.meta), {})
        world = meta.get("world_size", 1)
        ranks = list(range(world)) if isinstance(world, int) and 0 < world < 1 << 20 else []
        for rank in ranks if self._source.rank is None else [self._source.rank]:
            self._ranks.at(rank)
        kind = "merged" if self._source.rank is None else "rank"
        attrs = {"kind": kind, "attempt": self._source.attempt, "meta": meta}
        self._group.define(attrs, fmt.chunk_sizes(sites, len(self._ranks.labels), self._block))

    def _read_axes(self) -> None:
        group = self._group
        names = ("fqn", "kind", "leaf", "placement", "primary", "dtype")
        self._sites = SiteAxis(decode_sites({name: group.labels(name) for name in names}))
        self._scalars = LabelAxis([fmt.unescape(s) for s in group.labels("scalar")])
        own = [] if self._source.rank is None else [self._source.rank]
        self._ranks = LabelAxis(own or [int(r) for r in group.labels("rank")])
        if own:
            labels = {name: group.labels(name) for name in ("digest_fqn", "digest_shard")}
            self._digests = LabelAxis(decode_digest_axis(labels))


def settled_end(segment: Segment) -> int:
    """Return the sequence number after what the writer of a growing segment will not take back.

    A table stands before the record that needs it, in one write. If the disk refuses the rest of
    it the table goes again, and its number with it.
    """
    ends = (f.seq + 1 for f in reversed(segment.frames) if f.type in {framing.RECORD, framing.LIFE})
    return next(ends, 0)


def _has_sites(batch: list[tuple[StepRecord, tuple[int, ...]]]) -> bool:
    return any(record.sites for record, _ in batch)
