"""Where one rank writes: into memory, with a thread that brings it to the disk, or to the disk.

Memory it is wherever there is a file system in it (`/dev/shm`) with room, and a thread to be had.
Elsewhere the training thread writes into the run directory, and waits for its disk: that is said.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddpprobe.rank.disk_thread import DiskThread
from ddpprobe.rank.standing import StandingLook
from ddpprobe.rundir import heartbeat, spool, tmpfs
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.heartbeat import HeartbeatWriter
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.paths import RunDir
from ddpprobe.rundir.spool import SpooledJournal

logger = logging.getLogger("ddpprobe")


@dataclass(frozen=True, slots=True)
class Spot:
    """One rank's place in an attempt: of `run`, `attempt`, `node` and `rank`."""

    run: RunDir
    attempt: int
    node: str
    rank: int

    @property
    def heartbeat(self) -> Path:
        """Its heartbeat file in the run directory."""
        return self.run.heartbeat(self.attempt, self.node, self.rank)


def look() -> tmpfs.Tmpfs:
    """As `tmpfs.look`; there is no use of memory without a thread that brings it to the disk."""
    trial = threading.Thread(target=int)
    try:
        trial.start()
    except RuntimeError as error:
        return tmpfs.Tmpfs("", str(error))
    trial.join()
    return tmpfs.look()


class RecordFiles:
    """What one rank writes to.

    Attributes:
        journal, heartbeat: its own.
        disk_thread: the disk thread; None: the training thread waits for the disk.
        memory: directory in memory of this attempt; None: there is none.

    Args:
        spot: the rank's.
        meta: as for `JournalWriter`.
        unique: what `tmpfs.token` gave rank 0.
        refused: why there is no memory to write to; "": there is.

    Raises:
        OSError: the run directory, or the memory that was there a moment ago, takes nothing.
    """

    def __init__(self, spot: Spot, meta: Mapping[str, Any], unique: str, refused: str = "") -> None:
        self._spot = spot
        self.journal: JournalWriter
        self.disk_thread: DiskThread | None = None
        self.memory: Path | None = None
        self._refused = False
        target = spot.run.rank_journal(spot.attempt, spot.node, spot.rank)
        if refused:
            logger.warning(
                "ddpprobe: rank %d: no memory to write to (%s), so its training thread writes into "
                "the run directory: a slow disk slows its steps down",
                spot.rank, refused,
            )  # fmt: skip
            self.journal = JournalWriter(target, meta)
            self.heartbeat = HeartbeatWriter(spot.heartbeat)
            return
        self.memory = tmpfs.make(spot.heartbeat.parent, unique)
        source = spool.directory_of(self.memory, spot.heartbeat.name)
        try:
            room = spool.room_in(self.memory)
            self.journal = SpooledJournal(source, target, meta, room, self._wake)
            self.heartbeat = HeartbeatWriter(spot.heartbeat, self.memory)
        except OSError:  # the install is refused
            shutil.rmtree(source, ignore_errors=True)
            tmpfs.leave(spot.heartbeat.parent, self.memory)
            raise
        self.disk_thread = DiskThread()

    def shared(self, path: Path, *, far: bool = False) -> Path:
        """Return where the ranks of a node find a file that they share.

        Args:
            path: of the file in the run directory, beside the heartbeats.
            far: who writes it is on another machine.
        """
        return path if self.memory is None or far else self.memory / path.name

    def start(self, is_reducing: Callable[[], bool], *chores: Callable[[], object]) -> None:
        """Let the disk thread begin, with `chores` to do about once a second.

        Args:
            is_reducing: as for `StandingLook`.
            chores: besides its own.
        """
        if self.disk_thread is not None:
            beats = self.heartbeat
            look = StandingLook(lambda: beats.last, self.journal.append_event, is_reducing)
            # With a fuse of its own: what goes wrong in it must not end what carries the journal.
            still = Fuse("saying where a rank stands").guard(look)
            self.disk_thread.start(still, self._carry, *chores)

    def close(self) -> None:
        """Bring what is in memory to the disk, unless that takes longer than two seconds.

        Journal and heartbeat have been closed.
        """
        journal, spot = self.journal, self._spot
        if self.disk_thread is None or not isinstance(journal, SpooledJournal):
            return
        self.disk_thread.do(journal.carry)
        self.disk_thread.do(partial(self._settle, journal))
        self.disk_thread.close()
        if journal.waiting and self.memory is not None:
            gone = sum(journal.dropped.values())
            lost = f"; {gone} more found no room there, and are lost" if gone else ""
            logger.warning(
                "ddpprobe: rank %d: the disk does not take %d bytes of records for %s now (%s). "
                "They are in the memory of %s%s. The node's daemon brings them to the disk once "
                "that takes them; only if none is at work there: ddpprobe daemon --dir %s --node "
                "%s",
                spot.rank, journal.waiting, journal.place, _why(journal), socket.gethostname(),
                lost, spot.run.path, spot.node,
            )  # fmt: skip

    def give_up(self) -> None:
        """Before the start: leave nothing open and nothing in memory."""
        self.journal.close()
        self.heartbeat.close()
        self.close()

    def abandon(self) -> None:
        """In a forked child: the files are the parent's, and no thread is there."""
        if self.disk_thread is not None:
            self.disk_thread.abandon()
        if isinstance(self.journal, SpooledJournal):
            self.journal.carrier.close()

    def _wake(self) -> None:
        if self.disk_thread is not None and isinstance(self.journal, SpooledJournal):
            self.disk_thread.do(self.journal.carry)

    def _forsake(self, memory: Path) -> None:
        """Leave nothing in memory of a run whose directory was deleted."""
        self.memory, own = None, self._spot.heartbeat
        shutil.rmtree(spool.directory_of(memory, own.name), ignore_errors=True)
        (memory / own.name).unlink(missing_ok=True)
        tmpfs.leave(own.parent, memory)

    def _carry(self) -> None:
        said = self.heartbeat.said  # first: a copy of it then counts no record that is not carried
        if isinstance(self.journal, SpooledJournal):
            self._tell_refused(self.journal, taken=self.journal.carry())
        self._carry_beat(said)

    def _carry_beat(self, said: bytes | None) -> None:
        with contextlib.suppress(OSError):  # a lost beat is no loss, the next one comes
            heartbeat.carry(self._spot.heartbeat, said)

    def _tell_refused(self, journal: SpooledJournal, *, taken: bool) -> None:
        """Say once that the disk takes nothing, before anything is lost by it."""
        if not taken and not self._refused and journal.carrier.refused:
            logger.warning(
                "ddpprobe: rank %d: the disk refuses %s (%s): records wait in memory, up to %d "
                "KiB of them, and are lost beyond that; training goes on",
                self._spot.rank, journal.place, _why(journal), journal.room >> 10,
            )  # fmt: skip
        self._refused = not taken

    def _settle(self, journal: SpooledJournal) -> None:
        spot, said = self._spot, self.heartbeat.said
        if not journal.finish() or not spool.settle(
            spot.run, spot.attempt, spot.node, spot.rank, said
        ):
            self._carry_beat(said)
            if self.memory is not None and not spot.run.path.is_dir():
                self._forsake(self.memory)


def _why(journal: SpooledJournal) -> str:
    """Say why the disk does not take a journal; a limit of this process is no fault of the disk."""
    why = journal.carrier.refused or spool.SLOW
    return f"{why}: a limit of this process, see ulimit -f" if why == "EFBIG" else why
