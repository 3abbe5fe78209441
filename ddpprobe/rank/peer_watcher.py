"""Ranks as witnesses of each other: how another rank of the node ended while this one lived.

A node's daemon sees that, too. But it may have been killed, be suspended, or not be there yet, and
how a process ended can be asked only by who held a descriptor of it (`rundir.pidfds`).
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ddpprobe.records.events import ClosedEvent, Event, PeerExitEvent
from ddpprobe.rundir import pidfds, processes
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.own_descriptor import OwnDescriptor

JOIN_SECONDS = 2.0  # for a thread that writes where a disk may not answer
# A process that dies closes its connections first, and who waited there may end before it is dead:
# so long it waits for that if its connection broke, or if its script may have caught such an error.
BROKEN_SECONDS, CAUGHT_SECONDS = 1.0, 0.2
_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True)
class Process:
    """What a process is to others: its number, in which PID namespace that counts, and its start.

    `namespace` is 0, `started` (Unix time) None, if that is not known.
    """

    pid: int
    namespace: int
    started: float | None

    @classmethod
    def own(cls) -> Process:
        """Return this process."""
        try:
            namespace = _NAMESPACE.stat().st_ino
        except OSError:  # no /proc, or it hides that
            namespace = 0
        return cls(os.getpid(), namespace, processes.own_start())


@final
class PeerWatcher:
    """One thread that sleeps until another rank of the node dies, and says so in the journal.

    It is not there while the process forks: a child would inherit its locks, and Python warns of
    that. Where the kernel has no pidfds, or nobody is to be watched, there is no thread.

    Args:
        rank: of this process.
        say: takes events, on the thread.
    """

    def __init__(self, rank: int, say: Callable[[Event], object]) -> None:
        self._rank, self._say = rank, say
        self._watched: dict[int, tuple[int, int]] = {}  # pidfd -> rank, process number
        self._files: dict[int, OwnDescriptor] = {}  # of these
        self._wake: OwnDescriptor | None = None
        self._thread: threading.Thread | None = None
        self._seen = threading.Event()  # that one ended
        self._fuse = Fuse("peer watcher")

    def start(self, peers: Mapping[int, Process]) -> None:
        """Begin to watch.

        Args:
            peers: the other ranks of the node; those of another PID namespace are not seen.

        Raises:
            RuntimeError: there is no thread to be had.
            OSError: there are no descriptors to be had.
        """
        own = Process.own().namespace
        try:
            for number, peer in peers.items():
                fd = pidfds.open_pidfd(peer.pid) if own and peer.namespace == own else None
                if fd is not None:
                    self._files[fd] = OwnDescriptor(fd)
                    self._watched[fd] = number, peer.pid
                    if not processes.is_process(peer.pid, peer.started):  # its number is another's
                        self._forget(fd)
            self.go_on()
        except (OSError, RuntimeError):
            self.abandon()
            raise

    def go_on(self) -> None:
        """After a fork, in the parent: watch again."""
        if self._watched and self._thread is None:
            self._wake = OwnDescriptor(os.eventfd(0))  # no program that a child starts gets it
            run = self._fuse.guard(self._run)
            thread = threading.Thread(target=run, name="ddpprobe peers", daemon=True)
            thread.start()
            self._thread = thread

    def rest(self) -> None:
        """Before a fork: end the thread; what happens until `go_on` is told then."""
        if self._thread is not None and self._wake is not None and self._wake.is_ours():
            os.eventfd_write(self._wake.number, 1)
            self._thread.join(JOIN_SECONDS)
            if not self._thread.is_alive():
                self._thread = None
                self._close_wake()

    def close(self, seconds: float = 0.0) -> None:
        """Watch nobody any more; leave no thread and no descriptor.

        Args:
            seconds: one of them may be about to die: wait for that, so long at most.
        """
        if seconds and self._thread is not None and self._thread.is_alive():
            self._seen.wait(seconds)
        self.rest()
        if self._thread is None:  # or the descriptors are still its own
            self.abandon()

    def abandon(self) -> None:
        """Let go of the descriptors; in a forked child there is no thread."""
        self._thread = None
        self._close_wake()
        for fd in list(self._watched):
            self._forget(fd)

    def _close_wake(self) -> None:
        if self._wake is not None:
            self._wake.close()
            self._wake = None

    def _forget(self, fd: int) -> None:
        del self._watched[fd]
        self._files.pop(fd).close()

    def _run(self) -> None:
        poll, wake = select.poll(), -1 if self._wake is None else self._wake.number
        for fd in (wake, *self._watched):
            poll.register(fd, select.POLLIN)
        while self._watched:
            ready = {fd for fd, _ in poll.poll()}
            if not all(file.is_ours() for file in self._files.values()):
                return  # they are files of the script's, which are always ready
            gone = pidfds.closure(poll, ready) - {wake}
            self._tell(gone)
            for fd in gone:
                poll.unregister(fd)
                self._forget(fd)
            if wake in ready:
                return

    def _tell(self, gone: set[int]) -> None:
        """Say how these ended; all others were alive after the last of them had died."""
        now = time.time_ns()
        alive = sorted([self._rank, *(r for fd, (r, _) in self._watched.items() if fd not in gone)])
        for fd in gone:
            rank, pid = self._watched[fd]
            how = pidfds.how_it_ended(pid, fd)
            self._say(PeerExitEvent(rank=rank, how=how, alive=tuple(alive), time_ns=now))
            self._seen.set()


def patience(words: ClosedEvent, *, midway: bool) -> float:
    """Return how long to wait for the death of another rank that may be why this one ends.

    Args:
        words: its last ones.
        midway: training stands within a step; of an interpreter that ends there nobody may say why.
    """
    if words.error is None:
        return CAUGHT_SECONDS if midway and words.at_exit and not words.asked else 0.0
    return BROKEN_SECONDS if words.error.collective and not words.error.timed_out else 0.0
