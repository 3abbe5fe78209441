"""The write-ahead log of one writer: segment files of frames, appended by one, tailed by another.

A directory holds `00000000.wal`, `00000001.wal`, ...; every segment starts with the writer's META
frame and, before the first record that needs them, the tables, so each can be read alone.
A frame that reached the page cache survives the death of its writer; a frame torn by the death or
by a full disk fails its checksum and is dropped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpprobe.records import events
from ddpprobe.records.events import Event
from ddpprobe.records.step import StepRecord
from ddpprobe.rundir import framing, paths, safe_read
from ddpprobe.rundir.framing import Frame, FrameError, NameTables
from ddpprobe.rundir.own_descriptor import OwnDescriptor

SEGMENT_FRAMES = 256
# A segment goes once it is closed and in the store, so an open one should be small. Each repeats
# its head, META and tables, which takes as much as two thirds of a record: of that there is more
# than a few times in it.
SEGMENT_BYTES, SEGMENT_HEADS = 4 << 20, 16
MAX_SEGMENT_BYTES = 64 << 20  # a reader takes a segment into memory as a whole
BACK_OFF_SECONDS = 1.0
READ_BYTES = 4 << 20


class JournalWriter:
    """Appends frames; a full or failing disk costs frames, never an exception.

    Any thread may append.

    `place` is where readers find them.

    Args:
        directory: created (0700) if missing; must hold no segment of another writer.
        meta: JSON object repeated at the head of every segment.
        segment_frames: frames per segment file.
        first_segment: number of the first segment; above 0 for the successor of a dead writer.
        first_seq: sequence number of the first frame; a successor goes on where the other ended.
        segment_bytes: size at which a segment is closed, unless its head takes much of that; None:
            `SEGMENT_BYTES`.

    Raises:
        OSError: the directory or the first segment cannot be created: a start that fails is loud.
    """

    def __init__(
        self,
        directory: Path,
        meta: Mapping[str, Any],
        segment_frames: int = SEGMENT_FRAMES,
        first_segment: int = 0,
        first_seq: int = 0,
        segment_bytes: int | None = None,
    ) -> None:
        self.directory = self.place = paths.make_dir(directory)
        self.dropped: Counter[str] = Counter()
        self._meta = framing.encode_json(meta)
        self._segment_frames = segment_frames
        self._segment_bytes = SEGMENT_BYTES if segment_bytes is None else segment_bytes
        self._segment = first_segment - 1
        self._frames = 0
        self._seq = first_seq
        self._size = self._head = 0  # bytes of the segment; of those META and tables
        self._file: OwnDescriptor | None = None
        self._tables: set[tuple[int, int]] = set()  # type and id of those in this segment
        self._retry_at = 0.0
        # A handler of a signal may append in the middle of an append of the same thread.
        self._lock = threading.RLock()
        self._rotate()

    @property
    def segment(self) -> int:
        """Number of the segment that the last frame went to."""
        return self._segment

    def append(self, type_: int, payload: bytes) -> bool:
        """Append one frame; False if the disk refused it (counted in `dropped`)."""
        with self._lock:
            return self._write([(type_, payload)])

    def append_json(self, type_: int, value: Mapping[str, Any]) -> bool:
        """Append one JSON frame."""
        return self.append(type_, framing.encode_json(value))

    def append_event(self, event: Event) -> bool:
        """Append what happened."""
        return self.append_json(framing.LIFE, events.to_json(event))

    def append_record(self, record: StepRecord) -> bool:
        """Append a record, and those of its tables that this segment does not hold yet."""
        with self._lock:
            return self._append_record(record)

    def _append_record(self, record: StepRecord) -> bool:
        if self._is_full:
            self._tables.clear()  # the record will open a new segment, which needs them again
        tables = [t for t in framing.tables_of(record) if (t.type, t.id) not in self._tables]
        frames = [(table.type, table.payload) for table in tables]
        written = self._write([*frames, (framing.RECORD, framing.encode_record(record))])
        if written:
            self._tables.update((table.type, table.id) for table in tables)
            self._head += sum(len(table.payload) for table in tables)
        return written

    def close(self) -> None:
        """Close the segment; the files stay."""
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _is_full(self) -> bool:
        most = min(max(self._segment_bytes, SEGMENT_HEADS * self._head), MAX_SEGMENT_BYTES)
        return self._frames >= self._segment_frames or self._size >= most

    def _write(self, frames: list[tuple[int, bytes]]) -> bool:
        if time.monotonic() < self._retry_at:
            self.dropped["back_off"] += 1
            return False
        try:
            if self._file is None or self._is_full or not self._file.is_ours():
                self._rotate()
            self._put(frames)
        except OSError as error:
            self.dropped[self._why(error)] += 1
            self._retry_at = time.monotonic() + BACK_OFF_SECONDS
            return False
        return True

    def _why(self, error: OSError) -> str:
        """Return what a refused frame counts as."""
        return errno.errorcode.get(error.errno or 0, "io")

    def _rotate(self) -> None:
        self.close()
        self._segment += 1
        path = self.directory / f"{self._segment:08d}.wal"
        self._file = OwnDescriptor(paths.open_own(path, os.O_WRONLY | os.O_EXCL))
        self._frames = self._size = 0
        self._head = len(self._meta)
        self._tables.clear()
        try:
            self._put([(framing.META, self._meta)])
        except OSError:  # a segment that does not say whose it is would be nobody's
            self.close()
            path.unlink(missing_ok=True)
            raise

    def _put(self, frames: list[tuple[int, bytes]]) -> None:
        block = b"".join(
            framing.encode_frame(type_, self._seq + i, payload)
            for i, (type_, payload) in enumerate(frames)
        )
        written, fd = 0, -1 if self._file is None else self._file.number
        try:
            while written < len(block):  # a full disk writes short before it says ENOSPC
                written += os.pwrite(fd, block[written:], self._size + written)
        except OSError:
            os.ftruncate(fd, self._size)  # or what follows would be unreachable
            raise
        self._size += written
        self._seq += len(frames)
        self._frames += len(frames)


class JournalTail:
    """Reads a journal directory from its first segment on, while it is being written.

    `poll()` returns the frames that became complete since the last call. A damaged segment is left
    at the damage (in words in `damage`, by place) and reading goes on with the next one.
    """

    def __init__(self, directory: Path, first_segment: int = 0) -> None:
        self.directory = directory
        self.damage: dict[str, str] = {}
        self.segment = first_segment
        self.tables = NameTables()
        self._fd = -1
        self._offset = 0
        self._next_seq = -1  # -1: nobody can say, at the beginning and after damage

    def poll(self) -> Iterator[Frame]:
        """Yield new frames, oldest first, then return; never waits."""
        while self._open():
            yield from self._read_segment()
            if not self._has_next():
                return
            # The writer has moved on, so this segment is final: look once more for what was
            # appended between our read and its rotation; the rest is torn.
            yield from self._read_segment()
            self.close()
            self.segment += 1

    def close(self) -> None:
        """Close the open segment."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @property
    def read_to(self) -> tuple[int, int]:
        """Segment, and byte in it, up to which everything is decoded."""
        return self.segment, self._offset

    @property
    def written_to(self) -> tuple[int, int]:
        """Segment, and byte in it, up to which the writer has written what can be decoded."""
        last = max(segments_of(self.directory), default=self.segment)
        if last <= self.segment and self._name in self.damage:
            return self.read_to
        try:
            return last, (self.directory / f"{last:08d}.wal").stat().st_size
        except OSError:  # it was folded into the store just now
            return self.read_to

    @property
    def _name(self) -> str:
        return f"{self.segment:08d}.wal"

    def _open(self) -> bool:
        if self._fd >= 0:
            return True
        later = [n for n in segments_of(self.directory) if n >= self.segment]
        if not later:
            return False
        self.segment, self._offset = later[0], 0
        self._fd = safe_read.open_regular(self.directory, self._name)
        return True

    def _has_next(self) -> bool:
        return any(n > self.segment for n in segments_of(self.directory))

    def _read_segment(self) -> Iterator[Frame]:
        size = READ_BYTES
        while self._name not in self.damage:
            # Always from the first undecoded byte: the writer takes torn bytes back (full disk).
            data, at = os.pread(self._fd, size, self._offset), 0
            while at < len(data):
                try:
                    frame, at = framing.decode_frame(data, at)
                except FrameError as error:
                    if not error.torn:
                        self.damage[self._name] = str(error)
                        self._next_seq = -1
                    break
                if -1 < self._next_seq < frame.seq:  # a segment is gone
                    missing = frame.seq - self._next_seq
                    self.damage[f"before {self._name}"] = f"{missing} frames are missing"
                self._next_seq = frame.seq + 1
                # Records that refer to a table of no sense are refused one by one, as are those
                # whose table is missing.
                with contextlib.suppress(ValueError):
                    self.tables.take(frame)
                yield frame
            self._offset += at
            if len(data) < size:
                return
            if at == 0:
                size *= 2  # one frame is larger than what was read
                if size > safe_read.MAX_FILE_BYTES:
                    self.damage[self._name] = f"no frame in {len(data)} bytes"
                    self._next_seq = -1


def segments_of(directory: Path) -> list[int]:
    """Numbers of the segment files in a directory, ascending; [] if there is none."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    return sorted(int(n[:-4]) for n in names if n.endswith(".wal") and n[:-4].isdecimal())
