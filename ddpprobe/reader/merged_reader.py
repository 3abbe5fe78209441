"""The store and the journals as one: committed rows, then what is not folded yet.

A daemon may fold and delete while we read. So the journals are listed first and the store opened
after: whatever was deleted in between is in the store, and what is in both is skipped by its
sequence number.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, count, groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddpprobe.ends.anomalies import last_words
from ddpprobe.errors import StoreDamaged
from ddpprobe.reader.rank_facts import Event, RankFacts, Steps
from ddpprobe.records.gather import Gather
from ddpprobe.records.step import Anomaly, StepRecord
from ddpprobe.rundir import framing, paths, validate
from ddpprobe.store import segments
from ddpprobe.store.format import attempt_key
from ddpprobe.store.group_names import attempts_of, groups_of
from ddpprobe.store.manifest import Consumed, Losses, Lost
from ddpprobe.store.segments import JournalSource, Segment

if TYPE_CHECKING:
    from ddpprobe.store.reader import Stamp, StoredGroup

RESTARTS = 100
MOST_RANKS = 1 << 17  # a claim of more is not believed, as a list is made of them
MOST_LOST = 1000  # places listed
OPEN_GROUPS = 32  # kept for the next question; each holds its manifest
Listing = list[tuple[JournalSource, list[int]]]


class _Mark(NamedTuple):
    """What a record says beside its numbers."""

    step: int
    sampled: bool
    partial: bool
    missing: tuple[int, ...]


class MergedReader:
    """Reads one run directory; holds no file open between calls.

    Attributes:
        lost: what turned out to be unreadable so far, each thing once.
    """

    def __init__(self, run: paths.RunDir) -> None:
        self.run = run
        self.lost = Losses()
        self._open: dict[str, tuple[Stamp, StoredGroup]] = {}
        # Where a rank writes, once it does: in an attempt it stays on its node.
        self._journals: dict[tuple[int, int], list[JournalSource]] = {}
        self._world: dict[int, int] = {}  # of attempts of which it is known: it stays

    def attempts(self) -> list[int]:
        """Attempts that left anything, ascending."""
        return sorted({*self.run.attempts(), *attempts_of(self.run)})

    def groups(self, attempt: int) -> list[str]:
        """Names of the stored groups of an attempt."""
        return [key.rpartition("/")[2] for key in groups_of(self.run, attempt)]

    def ranks(self, attempt: int) -> list[int]:
        """Ranks that left a journal or a group, ascending."""
        sources = segments.sources_of(self.run, attempt)
        numbers = {s.rank for s in sources if s.rank is not None}
        numbers |= {int(n[5:]) for n in self.groups(attempt) if n.startswith("rank_")}
        return sorted(numbers)

    def has_rank(self, attempt: int, rank: int) -> bool:
        """Return whether a rank left a journal or a group; cheaper than `ranks`."""
        name = paths.rank_name(rank) if rank >= 0 else ""
        return bool(name and (self._sources(attempt, rank) or name in self.groups(attempt)))

    def rank_records(self, attempt: int, rank: int, after: int = -1) -> Iterator[StepRecord]:
        """Yield one rank's records of steps above `after`, ascending."""
        return self._stream(attempt, paths.rank_name(rank), rank, after)

    def daemon_records(self, attempt: int, after: int = -1) -> Iterator[StepRecord]:
        """Yield the merged records that the head daemon made, ascending."""
        return self._stream(attempt, "merged", None, after)

    def merged_records(
        self, attempt: int, after: int = -1, *, gaps_after: int | None = None
    ) -> Iterator[StepRecord]:
        """Yield the whole merged stream of steps above `after`, ascending.

        What the daemon merged. A step that it did not (it was dead, or its disk full), or merged
        without a rank whose record is here, is merged here from the ranks. Gaps are looked for
        above `gaps_after` (default: `after`).
        """
        gaps = self.unmerged_steps(attempt, after if gaps_after is None else gaps_after)
        rest = self._merge_ranks(attempt, gaps) if gaps else ()
        both = heapq.merge(self.daemon_records(attempt, after), rest, key=_step_of)
        for _, same in groupby(both, key=_step_of):  # two if the daemon merged it in the meantime
            yield max(same, key=lambda record: len(record.ranks))

    def unmerged_steps(self, attempt: int, after: int = -1) -> set[int]:
        """Return the steps above `after` that ranks wrote down, and no daemon merged as a whole.

        A node whose daemon died, or that was slow, is missing in what the head merged. Its records
        come later: folded on a shared disk, or collected.
        """
        told, unmerged = list(self._marks(self._daemons(attempt))), set[int]()
        merged = self._steps(attempt, "merged", told)[0]
        ranks = self.ranks(attempt)
        # Where other nodes' records are missing here, what the head has merged is more.
        whole = len(ranks) >= self.world_size(attempt)
        lacking = self._lacking(attempt, told) if whole and len(merged) else {}
        for rank in ranks:
            written, sampled = self.rank_steps(attempt, rank)
            if not np.array_equal(written, merged):
                unmerged.update(np.setdiff1d(written, merged).tolist())
            if rank in lacking:
                unmerged.update(lacking[rank].intersection(written[sampled].tolist()))
        return {s for s in unmerged if s > after}

    def has_head(self, attempt: int) -> bool:
        """Return whether anything that the head's daemon merged is here."""
        return bool(len(self.told_steps(attempt)[0]))

    def rank_steps(self, attempt: int, rank: int) -> tuple[Steps, NDArray[np.bool_]]:
        """Return the steps of a rank's own records, ascending, and which of them are sampled."""
        marks = self._marks(self._listing(attempt, rank))
        return self._steps(attempt, paths.rank_name(rank), marks)

    def whole_steps(self, attempt: int, rank: int) -> Steps:
        """Return the sampled steps of a rank's own records that came to their end, ascending."""
        marks = self._marks(self._listing(attempt, rank))
        steps, whole = self._steps(attempt, paths.rank_name(rank), marks, whole=True)
        return steps[whole]

    def delivered_steps(self, attempt: int, ranks: Iterable[int]) -> dict[int, Steps]:
        """Return for each of these ranks the sampled steps that the head merged it into."""
        delivered: dict[int, list[Steps]] = {rank: [] for rank in ranks}
        if not delivered:
            return {}
        for record in self._written(self._daemons(attempt)):
            for rank in delivered.keys() & set(record.ranks) if record.sampled else ():
                delivered[rank].append(np.array([record.step], np.int64))
        group = self.group(attempt, "merged")
        for steps, held, flags in group.delivered() if group else ():
            for column, rank in enumerate(held):
                if rank in delivered:
                    delivered[rank].append(steps[flags[:, column]])
        self.note(group)
        none = np.empty(0, np.int64)
        return {rank: np.unique(np.concatenate([none, *of])) for rank, of in delivered.items()}

    def lacking_steps(self, attempt: int) -> dict[int, set[int]]:
        """Return for each rank that was missing in a merged step those steps."""
        return self._lacking(attempt, self._marks(self._daemons(attempt)))

    def _lacking(self, attempt: int, told: Iterable[_Mark]) -> dict[int, set[int]]:
        lacking_of: dict[int, set[int]] = {}
        for mark in told:
            for rank in mark.missing:
                lacking_of.setdefault(rank, set()).add(mark.step)
        group = self.group(attempt, "merged")
        for steps, ranks, missing in group.missing() if group else ():
            for column in np.flatnonzero(missing.any(axis=0)).tolist():
                lacking = lacking_of.setdefault(ranks[column], set())
                lacking.update(steps[missing[:, column]].tolist())
        self.note(group)
        return lacking_of

    def told_steps(self, attempt: int, *, whole: bool = False) -> tuple[Steps, NDArray[np.bool_]]:
        """Return the steps that the head's daemon merged, ascending, and which are sampled.

        `whole`: which are sampled and came to their end, on each rank of which they have a record.
        """
        return self._steps(attempt, "merged", self._marks(self._daemons(attempt)), whole=whole)

    def _steps(
        self, attempt: int, name: str, marks: Iterable[_Mark], *, whole: bool = False
    ) -> tuple[Steps, NDArray[np.bool_]]:
        """Return the steps of a group and of the journals that go into it, and which are sampled.

        Ascending, each once: as it was said last. `whole`: and came to their end.
        """
        later = [(m.step, m.sampled and not (whole and m.partial)) for m in marks]
        steps = np.array([step for step, _ in later], np.int64)
        sampled = np.array([flag for _, flag in later], np.bool_)
        group = self.group(attempt, name)  # after the journals: what was folded meanwhile is in it
        if group is not None:
            stored = group.step_numbers(whole=whole)
            steps, sampled = np.append(stored[0], steps), np.append(stored[1], sampled)
            self.note(group)
        if not (np.diff(steps) > 0).all():
            steps, newest = np.unique(steps[::-1], return_index=True)
            sampled = sampled[::-1][newest]
        return steps, sampled

    def _marks(self, listing: Listing) -> Iterator[_Mark]:
        """Yield of every record in these journals what tells which steps are held."""
        return (_Mark(r.step, r.sampled, r.partial, r.missing) for r in self._written(listing))

    def _written(self, listing: Listing) -> Iterator[StepRecord]:
        """Yield every record in these journals that belongs there."""
        for source, numbers in listing:
            tables = framing.NameTables()
            for number in numbers:
                items = segments.records_of(self._segment(source, number), tables, Consumed())
                yield from (r for _, r in items if segments.belongs(r, source))

    def _merge_ranks(self, attempt: int, steps: set[int]) -> Iterator[StepRecord]:
        """Merge the ranks' own records of these steps."""
        ranks, after = self.ranks(attempt), min(steps) - 1
        expected = range(self.world_size(attempt)) or ranks
        gather = Gather(expected, after=after)
        for rank in set(expected) - set(ranks):
            gather.mark_dead(rank)
        streams = {
            rank: (r for r in self.rank_records(attempt, rank, after) if r.step in steps)
            for rank in ranks
        }
        heads = {rank: next(stream, None) for rank, stream in streams.items()}
        while True:
            for rank in [r for r, head in heads.items() if head is None]:
                gather.mark_dead(rank)  # it has nothing more to say
                del heads[rank]
            due = min((h.step for h in heads.values() if h), default=None)
            if due is None:
                break
            for rank, head in heads.items():
                if head is not None and head.step == due:
                    gather.add(head, 0.0)
                    heads[rank] = next(streams[rank], None)
            yield from gather.ready(0.0)
        yield from gather.drain()

    def world_size(self, attempt: int) -> int:
        """Ranks of the attempt as its writers knew it; 0 if none of them says."""
        if not self._world.get(attempt):
            self._world[attempt] = self._world_size(attempt)
        return self._world[attempt]

    def _world_size(self, attempt: int) -> int:
        for source, numbers in self._listing(attempt):
            if numbers:
                size = self._meta(source, numbers[0]).get("world_size", 0)
                if isinstance(size, int) and 0 < size <= MOST_RANKS:
                    return size
        for name in self.groups(attempt):
            group = self.group(attempt, name)
            size = group.meta.get("world_size", 0) if group else 0
            if isinstance(size, int) and 0 < size <= MOST_RANKS:
                return size
        return 0

    def rank_meta(self, attempt: int) -> dict[str, Any]:
        """What a rank of the attempt wrote of itself and of its options; {} if none did."""
        for source, numbers in self._listing(attempt):
            if source.rank is not None and numbers and (meta := self._meta(source, numbers[0])):
                return meta
        for name in self.groups(attempt):
            group = self.group(attempt, name) if name.startswith("rank_") else None
            if group and group.meta:
                return group.meta
        return {}

    def facts(self, attempt: int, rank: int) -> RankFacts:
        """Read through one rank's records and say what there is."""
        name, listing = paths.rank_name(rank), self._listing(attempt, rank)
        facts = RankFacts(rank)
        for source, numbers in listing:
            tables = framing.NameTables()
            for number in numbers:
                segment = self._segment(source, number)
                facts.meta = facts.meta or segment.meta
                facts.torn += segment.torn
                for _ in segments.records_of(segment, tables, Consumed()):
                    pass  # fills the tables
            facts.sites |= {site.key for site in tables.sites()}
        facts.steps, facts.sampled = self._steps(attempt, name, self._marks(listing))
        group = self.group(attempt, name)  # after the journals, as `_steps` does
        if group is not None:
            facts.meta = group.meta or facts.meta
            facts.sites |= {site.key for site in group.sites() or []}
            self.note(group)
        return facts

    def events(self, attempt: int) -> list[Event]:
        """Return the events of an attempt, of daemons and ranks, each once.

        Those that make no sense are left out: `verify` lists them.
        """
        # The journals first: what is folded and deleted meanwhile is in the store afterwards.
        written: dict[tuple[str, str, int], Mapping[str, Any]] = {}
        for source, frame in self._frames(self._listing(attempt), framing.LIFE):
            value = segments.json_of(frame)
            if value is not None:
                written[source.node, source.name, frame.seq] = value
        stored: dict[tuple[str, str, int], Mapping[str, Any]] = {}
        for name in self.groups(attempt):
            group = self.group(attempt, name) if name.startswith("node_") else None
            for journal, seq, value in group.events() if group else []:
                stored[name, journal, seq] = value
            if group:
                self.note(group)
        both = ((key, validate.known_event(value)) for key, value in {**stored, **written}.items())
        return [Event(*key, event) for key, event in both if event is not None]

    def daemon_anomalies(self, attempt: int) -> list[Anomaly]:
        """Return the anomalies that the head daemon wrote down, in its order; last words hold."""
        listing = self._daemons(attempt)
        frames = list(self._frames(listing, framing.ANOMALY))  # before the store, as above
        group = self.group(attempt, "anomalies")
        anomalies = group.anomalies() if group else []
        consumed = group.consumed if group else {}
        if group:
            self.note(group)
        for source, frame in frames:
            if not consumed.get(source.name, Consumed()).has(frame.seq):
                try:
                    anomalies.append(framing.decode_anomaly(frame.payload))
                except ValueError as error:
                    self._lose_frame(source, frame, error)
        return last_words(anomalies)

    def group(self, attempt: int, name: str) -> StoredGroup | None:
        """Open a stored group; None if nothing was committed to it."""
        if not self.run.has_store:
            return None
        from ddpprobe.store.reader import StoredGroup, stamp_of  # noqa: PLC0415

        key = f"{attempt_key(attempt)}/{name}"
        stamp = stamp_of(self.run, key)
        known = self._open.pop(key, None)
        try:
            group = known[1] if known and known[0] == stamp else StoredGroup(self.run, key)
        except StoreDamaged as error:
            self._lose(Lost(f"run.zarr/{key}", None, str(error)))
            return None
        self._open[key] = stamp, group  # the newest last
        if len(self._open) > OPEN_GROUPS:
            del self._open[next(iter(self._open))]
        return group if group.exists else None

    def _stream(
        self, attempt: int, name: str, rank: int | None, after: int
    ) -> Iterator[StepRecord]:
        last = after
        for _ in range(RESTARTS):
            listing = self._listing(attempt, rank) if rank is not None else self._daemons(attempt)
            group = self.group(attempt, name)
            consumed = group.consumed if group else {}
            stored: Iterable[StepRecord] = group.records(attempt, last) if group else ()
            both = chain(stored, self._journal(listing, consumed))
            try:
                for record, _ in segments.settle(zip(count(), both)):
                    if record.step > last:  # else: seen before the restart
                        last = record.step
                        yield record
            except FileNotFoundError:
                continue  # folded and deleted since we listed it: it is in the store now
            finally:
                self.note(group)
            return

    def _journal(self, listing: Listing, consumed: dict[str, Consumed]) -> Iterator[StepRecord]:
        for source, numbers in listing:
            tables = framing.NameTables()
            done = consumed.get(source.name, Consumed())
            for number in numbers:
                segment = segments.read_segment(source.directory, number)
                for _, record in segments.records_of(segment, tables, done):
                    if segments.belongs(record, source):
                        yield record
                self._note_segment(source, segment)

    def _listing(self, attempt: int, rank: int | None = None) -> Listing:
        return [(s, segments.segments_of(s)) for s in self._sources(attempt, rank)]

    def _sources(self, attempt: int, rank: int | None = None) -> list[JournalSource]:
        if rank is None:
            return segments.sources_of(self.run, attempt)
        if (attempt, rank) in self._journals:
            return self._journals[attempt, rank]
        found = segments.sources_of(self.run, attempt, rank=rank)
        if found:
            self._journals[attempt, rank] = found
        return found

    def _daemons(self, attempt: int) -> Listing:
        sources = (s for s in self._sources(attempt) if s.rank is None)
        return [(s, segments.segments_of(s)) for s in sources]

    def _frames(
        self, listing: Listing, type_: int
    ) -> Iterator[tuple[JournalSource, framing.Frame]]:
        for source, numbers in listing:
            for number in numbers:
                for frame in self._segment(source, number).frames:
                    if frame.type == type_:
                        yield source, frame

    def _segment(self, source: JournalSource, number: int) -> Segment:
        try:
            segment = segments.read_segment(source.directory, number)
        except FileNotFoundError:
            return Segment(number)  # folded meanwhile
        except OSError as error:
            segment = Segment(number, damage=str(error))
        self._note_segment(source, segment)
        return segment

    def _meta(self, source: JournalSource, number: int) -> dict[str, Any]:
        return self._segment(source, number).meta

    def note(self, group: StoredGroup | None) -> None:
        """Take over what a group turned out to have lost."""
        for lost in group.lost if group else []:
            self._lose(lost)

    def _note_segment(self, source: JournalSource, segment: Segment) -> None:
        if segment.damage:
            path = segments.segment_path(source.directory, segment.number)
            self._lose(Lost(str(path.relative_to(self.run.path)), None, segment.damage))

    def lose(self, *found: Lost) -> None:
        """List what somebody else found damaged, each thing once."""
        for lost in found:
            self._lose(lost)

    def _lose_frame(self, source: JournalSource, frame: framing.Frame, error: Exception) -> None:
        where = str(source.directory.relative_to(self.run.path))
        self._lose(Lost(where, None, f"frame {frame.seq} makes no sense: {error}"))

    def _lose(self, lost: Lost) -> None:
        if len(self.lost) < MOST_LOST and lost not in self.lost:
            self.lost.append(lost)


def _step_of(record: StepRecord) -> int:
    return record.step
