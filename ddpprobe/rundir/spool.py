"""A rank's journal on its way to the disk: written into memory, carried into the run directory.

The training thread appends to segments in memory (`tmpfs`), which waits for no disk. The disk
thread (`disk_thread`) copies their bytes into segments of the same names in the run directory, and
deletes them when they are closed. To copy the same bytes again changes nothing, so whoever finds
the segments of a killed rank (the node's daemon, a later attempt) simply goes on.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

from ddpprobe.records.rank_names import ranks_text
from ddpprobe.rundir import heartbeat, paths, safe_read, tmpfs
from ddpprobe.rundir.journal import BACK_OFF_SECONDS, SEGMENT_BYTES, JournalWriter, segments_of
from ddpprobe.rundir.own_descriptor import OwnDescriptor
from ddpprobe.rundir.paths import RunDir

logger = logging.getLogger("ddpprobe")

MAX_ROOM = 16 << 20  # bytes of records that wait for the disk, at most
SHARE = 64  # of what is free in memory a rank takes this part at most: loaders need it, too
SEGMENTS = 4  # in the room: what is carried takes memory until its segment is closed
SLOW = "slow disk"  # why a record is lost that found no room, if the disk refuses nothing
_PIECE = 1 << 20


def room_in(place: Path) -> int:
    """Return the bytes that may wait in a directory in memory.

    Raises:
        OSError: it is not there.
    """
    return min(MAX_ROOM, tmpfs.free(place) // SHARE)


def directory_of(place: Path, rank_name: str) -> Path:
    """Return where a rank's segments lie in a directory in memory."""
    return place / f"{rank_name}.journal"


@final
class Carrier:
    """Copies segments from memory to the disk, each in order and from where its copy ends.

    Attributes:
        carried: bytes copied so far.
        error: why the disk does not take them now; None: it does.
    """

    def __init__(self, source: Path, target: Path) -> None:
        self.carried = 0
        self.error: OSError | None = None
        self._source, self._target = source, target
        self._number = -1
        self._in: OwnDescriptor | None = None
        self._out: OwnDescriptor | None = None
        self._offset = 0
        self._retry_at = 0.0

    def carry(self, upto: tuple[int, int] | None = None) -> bool:
        """Copy what is there; False if the disk refuses a part, which stays in memory.

        Args:
            upto: number of the writer's segment and its size up to the last whole frame; None:
                nothing more will be written, so all of it, and nothing stays in memory.
        """
        if time.monotonic() < self._retry_at and upto is not None:
            return False
        try:
            # The open one too: a cleaner of memory (logind's RemoveIPC) may have deleted its name.
            for number in sorted({*segments_of(self._source), *self._opened}):
                if upto is None or number <= upto[0]:
                    source, target = self._open(number)
                    final = upto is None or number < upto[0]
                    end = os.fstat(source).st_size if final or upto is None else upto[1]
                    self._copy(source, target, end)
                    if final:
                        self.close()
                        (self._source / f"{number:08d}.wal").unlink(missing_ok=True)
        except OSError as error:
            self.error = error
            self._retry_at = time.monotonic() + BACK_OFF_SECONDS
            return False
        self.error = None
        return True

    @property
    def refused(self) -> str:
        """The name of the error, as of an errno; "": there is none."""
        return errno.errorcode.get(self.error.errno or 0, "io") if self.error is not None else ""

    def close(self) -> None:
        """Close the files."""
        for each in (self._in, self._out):
            if each is not None:
                each.close()
        self._number, self._in, self._out = -1, None, None

    @property
    def _opened(self) -> set[int]:
        return {self._number} if self._number >= 0 else set()

    def _open(self, number: int) -> tuple[int, int]:
        """Return the descriptors of a segment and its copy."""
        source, target = self._in, self._out
        if (
            number == self._number
            and source is not None and source.is_ours()
            and target is not None and target.is_ours()
        ):  # fmt: skip
            return source.number, target.number
        self.close()
        name = f"{number:08d}.wal"
        self._in = source = OwnDescriptor(safe_read.open_regular(self._source, name))
        self._out = target = OwnDescriptor(paths.open_own(self._target / name, os.O_WRONLY))
        self._number, self._offset = number, os.fstat(target.number).st_size
        return source.number, target.number

    def _copy(self, source: int, target: int, end: int) -> None:
        while self._offset < end:
            data = os.pread(source, min(_PIECE, end - self._offset), self._offset)
            written = os.pwrite(target, data, self._offset)
            self._offset += written
            self.carried += written


@final
class SpooledJournal(JournalWriter):
    """A journal that is written into memory; a disk that is too slow for too long costs records.

    Args:
        source: directory of the segments in memory.
        target: the journal's directory; it is made.
        meta: as for `JournalWriter`.
        room: bytes that may wait for the disk.
        wake: called when there is something to carry, and not again before `carry`.

    Attributes:
        room: as given.
        carrier: what brings it to the disk.

    Raises:
        OSError: as `JournalWriter`, or the disk does not take the first segment's head: from then
            on the journal can be found.
    """

    def __init__(
        self, source: Path, target: Path, meta: Mapping[str, Any], room: int,
        wake: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        paths.make_dir(target)
        self.carrier = Carrier(source, target)
        self.room, self._wake = room, wake
        self._at = (-1, 0)
        self._put_bytes = 0
        self._woken = True
        segment = min(SEGMENT_BYTES, room // SEGMENTS)
        super().__init__(source, meta, segment_bytes=segment)
        self.place = target
        if segments_of(target):
            raise FileExistsError(errno.EEXIST, "another writer's journal", str(target))
        if not self.carry() and self.carrier.error is not None:
            raise self.carrier.error

    def carry(self) -> bool:
        """Carry all whole frames to the disk, on the thread that may wait for it."""
        self._woken = False  # before it looks: what comes now wakes it again
        return self.carrier.carry(self._at)

    def finish(self) -> bool:
        """Carry all that is left, and leave nothing in memory; after `close`. As `carry`."""
        done = self.carrier.carry()
        self.carrier.close()
        return done

    @property
    def waiting(self) -> int:
        """Bytes that are not on the disk yet."""
        return max(0, self._put_bytes - self.carrier.carried)

    def _rotate(self) -> None:
        paths.make_dir(self.directory)  # it may have been deleted, see `Carrier.carry`
        super()._rotate()

    def _why(self, error: OSError) -> str:
        return f"memory: {super()._why(error)}"

    def _write(self, frames: list[tuple[int, bytes]]) -> bool:
        if self.waiting > self.room:
            self.dropped[self.carrier.refused or SLOW] += 1
            return False
        return super()._write(frames)

    def _put(self, frames: list[tuple[int, bytes]]) -> None:
        before = self._size
        super()._put(frames)
        self._put_bytes += self._size - before
        self._at = (self._segment, self._size)
        if not self._woken:
            self._woken = True
            self._wake()


def settle(run: RunDir, attempt: int, node: str, rank: int, said: bytes | None = None) -> bool:
    """Bring what a rank that has ended left in memory into the run directory. May wait for a disk.

    Args:
        run: the run.
        attempt: of the rank, as `node`.
        node: its name.
        rank: its number.
        said: its last beat, if the rank itself asks; None: what is in memory.

    Returns whether nothing of it is in memory (any more); False: the disk refuses a part of it.
    """
    path = run.heartbeat(attempt, node, rank)
    place = tmpfs.beside(path.parent)
    try:
        if place is not None and not _empty(
            directory_of(place, path.name), run.rank_journal(attempt, node, rank)
        ):
            return False
        heartbeat.finish(path, place, said)
        if place is not None:
            tmpfs.leave(path.parent, place)
    except OSError:
        return False
    return True


def _empty(source: Path, target: Path) -> bool:
    if not source.is_dir():
        return True
    carrier = Carrier(source, target)
    done = carrier.carry()
    carrier.close()
    if done:
        source.rmdir()
    return done


def waiting_at(run: RunDir, attempt: int, node: str, rank: int) -> tuple[int, int] | None:
    """Return where the part of a rank's journal begins that is in memory only: segment and byte.

    None: there is no such part.
    """
    path = run.heartbeat(attempt, node, rank)
    place = tmpfs.beside(path.parent)
    if place is None:
        return None
    target = run.rank_journal(attempt, node, rank)
    source = directory_of(place, path.name)
    for number in segments_of(source):
        carried = _size(target, number)
        if _size(source, number) > carried:
            return number, carried
    return None


def _size(directory: Path, number: int) -> int:
    try:
        return (directory / f"{number:08d}.wal").stat().st_size
    except OSError:  # its copy is about to be made, or it has been copied just now
        return 0


def settle_all(run: RunDir, node: str) -> None:
    """Settle all ranks of a node that were killed when nobody was there to do it."""
    for attempt, rank in _ended(run, node):
        settle(run, attempt, node, rank)


def bring_left(run: RunDir, node: str) -> bool:
    """Settle what waits in memory; return whether any did, and all of it is on the disk now.

    Never raises. What the disk refuses stays in memory, and the log says how it is brought later.
    """
    left = [(n, r) for n, r in _ended(run, node) if waiting_at(run, n, node, r) is not None]
    for attempt, rank in left:
        settle(run, attempt, node, rank)
    refused = [r for n, r in left if waiting_at(run, n, node, r) is not None]
    if refused:
        logger.error(
            "ddpprobe: the disk has no room for the last records of %s, which are in memory until "
            "this machine restarts; make room, and type: ddpprobe daemon --dir %s --node %s",
            ranks_text(refused), run.path, node,
        )  # fmt: skip
    return bool(left) and not refused


def _ended(run: RunDir, node: str) -> Iterator[tuple[int, int]]:
    """Yield attempts and ranks of a node that have a part in memory, and have ended."""
    for attempt in run.attempts():
        place = tmpfs.beside(run.heartbeat(attempt, node, 0).parent)
        for path in sorted(place.glob("rank_*")) if place is not None else ():
            # Of a heartbeat, which is locked from its start.
            digits = path.name.removeprefix("rank_")
            if digits.isdecimal() and not paths.is_locked(path):
                yield attempt, int(digits)


def clear_away(run: RunDir, node: str) -> None:
    """Bring to the disk what killed ranks of this run left in memory, and delete what is nobody's.

    Never raises: what the disk refuses stays in memory.
    """
    settle_all(run, node)
    for place, own in tmpfs.origins().items():
        if not own.exists():
            with contextlib.suppress(OSError):
                shutil.rmtree(place)


def settle_others() -> None:
    """Bring to the disk what any run's ranks left that were killed together with their daemon.

    For runs that nobody continues. Waits for the disks of all of them; never raises.
    """
    for own in tmpfs.origins().values():
        with contextlib.suppress(OSError):
            settle_all(RunDir(own.parents[2]), own.name)
