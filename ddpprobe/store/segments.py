"""Journals as the store sees them: segment by segment, records settled into ascending steps.

The folder and the reader both look at journals through this file, so that what is folded later is
what was shown before.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpprobe.records.step import StepRecord
from ddpprobe.rundir import framing, journal, paths, safe_read
from ddpprobe.rundir.framing import Frame, NameTables
from ddpprobe.store.format import attempt_key
from ddpprobe.store.manifest import Consumed, next_frame, read_regular

# An alarm and the full record of its step are at most a few records apart; what comes later than
# this is still kept, as a row of its own that replaces the earlier one on reading.
SETTLE = 16

_RANK = re.compile(r"rank_(\d{5,})")
_DAEMON = re.compile(r"daemon(?:[_-]\d+)?")


@dataclass(frozen=True, slots=True)
class JournalSource:
    """One journal: of a rank, or (`rank` is None) of a node's daemon."""

    attempt: int
    node: str
    name: str
    directory: Path
    rank: int | None

    @property
    def node_group(self) -> str:
        """Group of the readings and events of its node."""
        return f"{attempt_key(self.attempt)}/{self.node}"

    @property
    def record_group(self) -> str:
        """Group of its records."""
        name = "merged" if self.rank is None else paths.rank_name(self.rank)
        return f"{attempt_key(self.attempt)}/{name}"


def sources_of(
    run: paths.RunDir, attempt: int, node: str | None = None, rank: int | None = None
) -> list[JournalSource]:
    """List the journals of an attempt (of one node, or rank), ranks before daemons, ascending."""
    found, only = [], None if rank is None else paths.rank_name(rank)
    top = run.attempt_dir(attempt).relative_to(run.path).as_posix()
    for name in safe_read.directories(run.path, top):
        if not re.fullmatch(r"node_\d{4,}", name) or node not in {None, name}:
            continue
        # Of thousands each is asked for, and there are hundreds of nodes: none of them is listed.
        if only is None:
            own = safe_read.directories(run.path, f"{top}/{name}")
        else:
            own = [only] if _is_directory(f"{run.path}/{top}/{name}/{only}") else []
        for inner in own:
            of_rank = _RANK.fullmatch(inner)
            if of_rank or _DAEMON.fullmatch(inner):
                number = int(of_rank[1]) if of_rank else None
                directory = run.path / top / name / inner
                found.append(JournalSource(attempt, name, inner, directory, number))
    return sorted(found, key=lambda s: (s.rank is None, s.rank or 0, s.node, s.name))


def _is_directory(path: str) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except OSError:
        return False


@dataclass(slots=True)
class Segment:
    """What one segment file holds: intact frames, and what follows them.

    `torn` bytes are the beginning of a frame that its writer did not finish; `damage` is anything
    else, in words.
    """

    number: int
    frames: list[Frame] = field(default_factory=list)
    torn: int = 0
    damage: str | None = None

    @property
    def end(self) -> int:
        """Sequence number after the last frame."""
        return self.frames[-1].seq + 1 if self.frames else 0

    @property
    def meta(self) -> dict[str, Any]:
        """The writer's META, {} if even that is unreadable."""
        first = self.frames[0] if self.frames else None
        found = json_of(first) if first is not None and first.type == framing.META else None
        return dict(found or {})


def segment_path(directory: Path, number: int) -> Path:
    """Return the file of a segment."""
    return directory / f"{number:08d}.wal"


def read_segment(directory: Path, number: int) -> Segment:
    """Read one segment, also while it is being written.

    Raises:
        FileNotFoundError: it was folded into the store and deleted meanwhile.
        OSError: it is no regular file, or cannot be read.
    """
    data = read_regular(directory, segment_path(directory, number).name)
    segment, at = Segment(number), 0
    while at < len(data):
        try:
            frame, at = framing.decode_frame(data, at)
        except framing.FrameError as error:
            # A damaged length looks like an end that comes too early, but for what follows it.
            if error.torn and next_frame(data, at + 1) < 0:
                segment.torn = len(data) - at
            else:
                segment.damage = str(error)
            break
        segment.frames.append(frame)
    return segment


def records_of(
    segment: Segment, tables: NameTables, consumed: Consumed
) -> Iterator[tuple[int, StepRecord]]:
    """Yield (seq, record) of the records that are not consumed; `tables` is filled on the way.

    A record that cannot be decoded although its checksum holds was written wrong: it is damage.
    """
    for frame in segment.frames:
        try:
            if tables.take(frame):
                continue
            if frame.type == framing.RECORD and not consumed.has(frame.seq):
                yield frame.seq, framing.decode_record(frame.payload, tables)
        except ValueError as error:
            segment.damage = f"frame {frame.seq} makes no sense: {error}"


def belongs(record: StepRecord, source: JournalSource) -> bool:
    """Return whether a record is what this journal may hold: its attempt's, its own rank's."""
    if record.attempt != source.attempt:
        return False
    if source.rank is None:
        return True
    own = (source.rank,)
    if record.ranks != own or record.missing or not set(record.scalars) <= set(own):
        return False
    return all(list(held.values()) == [1 << source.rank] for held in record.digests.values())


def settle(
    items: Iterable[tuple[int, StepRecord]], *, final: bool = True
) -> Iterator[tuple[StepRecord, tuple[int, ...]]]:
    """Order records by step, the later one of a step replacing the earlier one.

    Yields (record, the seqs that it stands for). The last `SETTLE` steps stay back unless `final`.
    What comes out depends on the sequence alone, not on when it was looked at: folding again after
    a crash makes the same blocks.
    """
    waiting: dict[int, tuple[StepRecord, tuple[int, ...]]] = {}
    for seq, record in items:
        seqs = (*waiting[record.step][1], seq) if record.step in waiting else (seq,)
        waiting[record.step] = record, seqs
        if len(waiting) > SETTLE:
            yield waiting.pop(min(waiting))
    if final:
        for step in sorted(waiting):
            yield waiting[step]


def json_of(frame: Frame) -> Mapping[str, Any] | None:
    """Return a JSON frame's object, None if it is none."""
    try:
        return frame.json()
    except ValueError:
        return None


def segments_of(source: JournalSource) -> list[int]:
    """Numbers of the segments of a journal, ascending."""
    return journal.segments_of(source.directory)
