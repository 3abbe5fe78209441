"""The fold: journal segments become blocks of the store, and are deleted when closed and in it.

One node's daemon folds its own ranks; where its own journal holds merged records and anomalies (the
head's does) it folds those as well. So every group has one writer. A fold interrupted anywhere, by
SIGKILL or a full disk, is repeated by the next one from the journals, which makes the same bytes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import psutil

from ddpprobe.errors import StoreDamaged
from ddpprobe.rundir import paths, processes
from ddpprobe.store import format as fmt
from ddpprobe.store.captures.fold import CaptureFold, remembering
from ddpprobe.store.event_fold import EventFold
from ddpprobe.store.reader import StoredGroup
from ddpprobe.store.record_fold import RecordFold
from ddpprobe.store.retention import Retention, RetentionLimits
from ddpprobe.store.root import Root
from ddpprobe.store.segments import (
    JournalSource,
    read_segment,
    segment_path,
    segments_of,
    sources_of,
)

SAME_START_SECONDS = 1.0
TRIM_SECONDS = 30.0  # between two looks at what the run may keep, if nothing is committed
# Closed segments of one journal that wait for the rest of a block: with more it is not waited for.
JOURNAL_BYTES = 32 << 20
SHARES = 8  # of `max_bytes` no one sort of thing, open journals or newest blocks, should take more
# A record waits no longer for the rest of its block: who loses the machine has lost a minute.
REST_SECONDS = 60.0
# A block that is not full is written again with what is added to it. So that a wide model's blocks
# neither hold the daemon's loop up nor keep a core busy, one is written at a time, and as many as
# take this share of the time.
HOLD_SECONDS, SHARE = 0.25, 0.05


class StoreWriter:
    """Folds one node's journals into the store; one per daemon.

    Args:
        run: the run directory.
        node: this node's directory name, e.g. `node_0000`.
        block: records per block; a group keeps the one that it was created with.
        durable: every commit reaches the disk before its journal segments are deleted.
        limits: what the run may keep; what is too much or too old is taken away.
        captures: fold captured tensors; False leaves them packs.
        clock: seconds, monotonic.

    Attributes:
        damaged: groups that cannot be written any more, and why; their journals are kept whole.
    """

    def __init__(
        self,
        run: paths.RunDir,
        node: str,
        *,
        block: int = fmt.BLOCK,
        durable: bool = True,
        limits: RetentionLimits | None = None,
        captures: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.node = run, node
        self._folds_captures = captures
        self._block, self._durable = block, durable
        self._root = Root(run, durable=durable)
        self._captures = CaptureFold(run, self._root, node, durable=durable)
        self.damaged = self._captures.damaged
        self._retention: Retention | None = None
        if limits is not None and limits != RetentionLimits():
            self._retention = Retention(run, self._root, limits, durable=durable)
        self._max_bytes = None if limits is None else limits.max_bytes
        self._clock = clock
        self._trimmed = -TRIM_SECONDS
        self._rested: dict[JournalSource, float] = {}
        self._rest_at = 0.0
        self._events: dict[int, EventFold] = {}
        self._seen: dict[JournalSource, list[int]] = {}
        self._first: dict[JournalSource, int] = {}
        self._whole: dict[JournalSource, bool] = {}
        self._ended: set[int] = set()
        self._unread: Mapping[tuple[int, int], int] = {}
        self._reading: Mapping[tuple[int, int], int] = {}

    def fold(self, reading: Mapping[tuple[int, int], int] = MappingProxyType({})) -> int:
        """Fold what is complete; return how many rows became readable in the store.

        Cheap when there is nothing new: a few directory listings.

        Args:
            reading: by attempt and rank, the segment that the daemon reads now. It stays with those
                after it: what a daemon that lags has not read has been merged by nobody.

        Raises:
            OSError: the disk is full or failing; what it would take is folded, nothing is lost,
                call again later.
        """
        self._reading = reading
        rows = self._fold(final=False) + self._fold_rest()
        if rows or self._clock() - self._trimmed > TRIM_SECONDS:
            self._trim()
        return rows

    def seal(self, unread: Mapping[tuple[int, int], int] = MappingProxyType({})) -> int:
        """Fold everything that is left and consolidate the root's metadata: the end of the run.

        The journals of dead writers are deleted; a living one's newest segment stays.

        Args:
            unread: by attempt and rank, the first segment that a later daemon has to read, which
                stays with those after it while the rank lives.

        Raises:
            OSError: as `fold`.
        """
        self._unread = unread
        rows = self._fold(final=True)
        self._trim()
        try:
            if not self._others_write():
                self._root.seal()
        except StoreDamaged as error:
            self.damaged[""] = str(error)
        return rows

    def _others_write(self) -> bool:
        """Whether other nodes have yet to seal: the last one of them lists all that there is.

        Each of hundreds would write what the next one takes away, and that for all ranks.
        """
        sources = (s for n in self.run.attempts() for s in sources_of(self.run, n))
        others = (s for s in sources if s.rank is not None and s.node != self.node)
        return any(map(segments_of, others))

    def close(self) -> None:
        """Close the journals that are being followed."""
        for events in self._events.values():
            events.close()
        self._events = {}

    def _trim(self) -> None:
        if self._retention is None:
            return
        self._trimmed = self._clock()
        own = {n: self._own_groups(n) for n in self.run.attempts()}
        try:
            self._retention.apply(own, spare=self._spare)
        except StoreDamaged as error:
            self.damaged["retention"] = str(error)

    def _spare(self) -> Iterator[Path]:
        """Yield the segments of this daemon's journals that are in the store, oldest first."""
        for attempt in self.run.attempts():
            events = self._events_of(attempt)
            for source in sources_of(self.run, attempt, self.node):
                numbers = segments_of(source) if source.rank is None else []
                for number in (n for n in numbers[:-1] if n < self._first.get(source, -1)):
                    segment = read_segment(source.directory, number)
                    if segment.damage or not events.is_committed(source, segment.end):
                        break  # what is left of a journal has no gap
                    yield segment_path(source.directory, number)

    def _own_groups(self, attempt: int) -> set[str]:
        """Names of the record groups that this daemon writes: its ranks', the head's `merged`."""
        ranks = {s.rank for s in sources_of(self.run, attempt, self.node) if s.rank is not None}
        head = StoredGroup(self.run, f"{fmt.attempt_key(attempt)}/{self.node}").meta.get(
            "head", True
        )
        return {paths.rank_name(r) for r in ranks} | ({"merged"} if head else set())

    def _fold(self, *, final: bool) -> int:
        """Fold all attempts; what the disk refuses of one keeps no other from being folded."""
        rows, attempts = 0, self.run.attempts()
        refused: list[OSError] = []
        for attempt in attempts:
            if attempt not in self._ended or final:
                with remembering(refused):
                    rows += self._fold_attempt(attempt, attempts[-1], final=final)
        if refused:
            raise refused[0]
        return rows

    def _fold_attempt(self, attempt: int, newest: int, *, final: bool) -> int:
        """Fold an attempt; what the disk refuses of captures keeps no records from being folded."""
        rows, sources = 0, sources_of(self.run, attempt, self.node)
        # An attempt that was followed by another is over: its short tail may go in as well.
        over = final or (attempt < newest and not any(map(is_alive, sources)))
        refused: list[OSError] = []
        if self._folds_captures:
            with remembering(refused):
                self._captures.fold(attempt, final=over)
        # The daemon's journal first: as long as a rank's is left, a later daemon knows that there
        # is something to seal, captures too.
        for source in sorted(sources, key=lambda s: s.rank is not None):
            rows += self._fold_source(source, final=over, keep=bool(refused))
        if refused:
            raise refused[0]
        if over:
            self._delete_finished(attempt)
            self._ended.add(attempt)
        return rows

    def _fold_rest(self) -> int:
        """Fold also what fills no block, of the journals for which this is due.

        It is after a minute, or when too much waits. What their newest segments hold is taken from
        them as well: a rank that hangs closes none.
        """
        rows, began = 0, self._clock()
        due = []
        attempts = (n for n in self.run.attempts() if n not in self._ended)
        sources = [s for n in attempts for s in sources_of(self.run, n, self.node)]
        for number, source in enumerate(sources):
            since = self._rested.setdefault(source, began)
            if self._waiting_bytes(source) > self._share_of(len(sources), JOURNAL_BYTES):
                self._rested[source] = began
                rows += self._fold_source(source, final=False, keep=True, rest=True)
            elif began - since >= REST_SECONDS:
                due.append((since, number, source))
        began = self._clock()
        for _, _, source in sorted(due) if began >= self._rest_at else ():
            self._rested[source] = began
            rows += self._fold_source(source, final=False, keep=True, rest=True)
            spent = self._clock() - began
            if spent > HOLD_SECONDS:
                self._rest_at = began + spent / SHARE
                break
        return rows

    def _waiting_bytes(self, source: JournalSource) -> int:
        """Return the bytes of closed segments that are not in the store."""
        first, total = self._first.get(source, -1), 0
        for number in self._segments_of(source)[:-1]:
            if number >= first:
                with contextlib.suppress(FileNotFoundError):
                    total += segment_path(source.directory, number).stat().st_size
        return total

    def _segments_of(self, source: JournalSource, *, final: bool = False) -> list[int]:
        """Return a journal's segments, up to the one that is read now unless it is over."""
        numbers = segments_of(source)
        last = None
        if source.rank is not None and not final:
            last = self._reading.get((source.attempt, source.rank))
        return numbers if last is None else [n for n in numbers if n <= last]

    def _share_of(self, sources: int, most: float) -> float:
        """Return what one of so many journals, or the newest block of its group, may take."""
        if self._max_bytes is None:
            return most
        return min(most, self._max_bytes / SHARES / max(sources, 1))

    def _fold_source(
        self, source: JournalSource, *, final: bool, keep: bool, rest: bool = False
    ) -> int:
        """Fold a journal, with `final` its newest segment too, which `keep` does not delete.

        With `rest` what fills no block goes in as well.
        """
        numbers = self._segments_of(source, final=final)
        moved = final or rest or self._seen.get(source) != numbers
        if not moved and source.rank is not None:
            return 0
        try:
            rows = 0
            if moved:
                rows = self._fold_moved(source, numbers, final=final, keep=keep, rest=rest)
            events = self._events_of(source.attempt)
            if source.rank is None:
                events.poll(source)
            rows += events.flush(everything=moved)
        except StoreDamaged as error:
            self.damaged[source.record_group] = str(error)
            rows = 0
        left = self._segments_of(source, final=final)
        if left[-1:] == numbers[-1:]:  # else there is a new one, to be looked at next time
            self._seen[source] = left
        return rows

    def _fold_moved(
        self, source: JournalSource, numbers: list[int], *, final: bool, keep: bool, rest: bool
    ) -> int:
        # Segments that are in the store but had to stay (a daemon's) are not read again.
        first = self._first.get(source, -1)
        closed = [n for n in (numbers if final or rest else numbers[:-1]) if n >= first]
        if not closed:
            return 0
        growing = numbers[-1] if rest and not final else None
        many = len(sources_of(self.run, source.attempt, self.node))
        block_bytes = None if self._max_bytes is None else self._share_of(many, JOURNAL_BYTES)
        fold = RecordFold(
            self.run, self._root, source, block=self._block, durable=self._durable,
            block_bytes=block_bytes,
        )  # fmt: skip
        rows, done = fold.fold(closed, final=final, growing=growing)
        if done.refused:
            self.damaged[source.record_group] = f"{len(done.refused)} records belong elsewhere"
        events = self._events_of(source.attempt)
        if source.rank is None:
            events.poll(source)
        else:
            events.take_life(source, done.events, done.end)
        rows += events.flush(everything=True)
        folded = [n for n in closed if n != growing and all(map(fold.has, done.seqs[n]))]
        # The newest one may still grow, also after a seal.
        self._first[source] = next((n for n in closed if n not in folded), numbers[-1])
        self._whole[source] = closed == folded
        if source.rank is not None:
            stays = self._unread.get((source.attempt, source.rank))
            if stays is not None and is_alive(source):
                folded = [n for n in folded if n < stays]
            whole = [n for n in folded if not done.segments[n].damage]
            self._delete(source, whole, numbers[-1], keep=keep)
        return rows

    def _delete(
        self, source: JournalSource, numbers: list[int], newest: int, *, keep: bool = False
    ) -> None:
        for number in numbers:
            if number != newest or not (keep or is_alive(source)):
                segment_path(source.directory, number).unlink(missing_ok=True)

    def _delete_finished(self, attempt: int) -> None:
        """Delete a daemon's journal, once no rank of its node has any.

        Until then a successor of a killed daemon reads it, to go on where the other one stopped.
        """
        sources = sources_of(self.run, attempt, self.node)
        if any(segments_of(s) for s in sources if s.rank is not None):
            return
        try:
            events = self._events_of(attempt)
        except StoreDamaged:  # `damaged` says so: the journal is kept whole
            return
        for source in sources:
            numbers = segments_of(source)
            first = self._first.get(source, -1)
            ready = [n for n in numbers if n < first or (n == first and self._whole[source])]
            whole = [read_segment(source.directory, n) for n in ready]
            gone = [s.number for s in whole if not s.damage and events.is_committed(source, s.end)]
            self._delete(source, gone, numbers[-1] if numbers else -1)

    def _events_of(self, attempt: int) -> EventFold:
        if attempt not in self._events:
            self._events[attempt] = EventFold(
                self.run, self._root, self.node, attempt, durable=self._durable
            )
        return self._events[attempt]


def is_alive(source: JournalSource) -> bool:
    """Return whether the writer of a journal still runs on this machine: same pid, same start.

    A zombie writes no more.
    """
    numbers = segments_of(source)
    if not numbers:
        return False
    meta = read_segment(source.directory, numbers[-1]).meta
    pid, start = meta.get("pid"), meta.get("pid_start")
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        process = psutil.Process(pid)
        began, zombie = process.create_time(), process.status() == psutil.STATUS_ZOMBIE
    except psutil.AccessDenied:
        return True
    except (psutil.Error, OSError):
        return processes.is_process(pid, None)  # it is gone, or there is no /proc that tells
    same = not isinstance(start, int | float) or abs(began - start) < SAME_START_SECONDS
    return same and not zombie
