"""Noticing the death of a rank at once, and how it died, although it is not our child.

See `rundir.pidfds`.
"""

from __future__ import annotations

import os
import select
import threading
import time
from dataclasses import dataclass, replace

from ddpprobe.daemon.memory_kills import MemoryKills
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.pidfds import UNKNOWN, closure, how_it_ended, open_pidfd
from ddpprobe.rundir.processes import is_process

Key = tuple[int, int]  # attempt, rank

SLOW_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Exit:
    """One process that ended. `how` is "SIGKILL", "exit:1" or "unknown".

    `time_ns` is Unix time in ns, 0 if the process was gone before it was watched. Every process
    with a greater `order` was seen alive after this one's death; -1: nothing is known of that.
    `memory_kills`: processes around it that the kernel had killed for want of memory within about
    the last minute, see `MemoryKills`.
    """

    key: Key
    how: str
    time_ns: int
    order: int = -1
    memory_kills: int = 0


class ProcessWatcher:
    """One thread that sleeps until a watched process dies.

    Args:
        given: the number of a process and a pidfd of it, which are taken over: how it ended is told
            even if it is gone before it is watched.
    """

    def __init__(self, given: tuple[int, int] | None = None) -> None:
        self._given = {} if given is None else dict([given])  # process number -> pidfd
        self._lock = threading.Lock()
        self._exits: list[Exit] = []
        self._watched: dict[int, tuple[Key, int]] = {}  # pidfd -> key, pid
        self._slow: dict[Key, tuple[int, float | None]] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._looked: list[threading.Event] = []  # set once the next look is over
        self._stopped = False
        self._batches = 0
        self._memory_kills = MemoryKills()
        self.fuse = Fuse("liveness")
        run = self.fuse.guard(self._run)
        self._thread = threading.Thread(target=run, name="ddpprobe-liveness", daemon=True)
        self._thread.start()

    def watch(self, key: Key, pid: int, started: float | None) -> bool:
        """Report the end of process `pid`, started at Unix time `started` (None: not known).

        Returns False for a process that is gone already, and of which nobody knows how; it is
        reported with time 0.
        """
        given = self._given.pop(pid, None)
        fd = open_pidfd(pid) if given is None else given
        alive = is_process(pid, started)  # asked after opening: the pidfd is of this one
        if given is not None and not alive:
            alive = how_it_ended(pid, given) != UNKNOWN  # found at the next look
        with self._lock:
            if alive:
                self._memory_kills.watch(key, pid, time.monotonic())
            if not alive:
                self._exits.append(Exit(key, UNKNOWN, 0))
            elif fd is None:
                self._slow[key] = (pid, started)
            else:
                self._watched[fd] = (key, pid)
        if not alive and fd is not None:
            os.close(fd)
        os.eventfd_write(self._wake, 1)
        return alive

    def look(self) -> None:
        """Wait until all that has ended by now is known, as `exits` tells it."""
        looked = threading.Event()
        with self._lock:
            self._looked.append(looked)
        os.eventfd_write(self._wake, 1)
        while self._thread.is_alive() and not looked.wait(SLOW_POLL_SECONDS):
            pass

    def sample(self) -> None:
        """Look whether the kernel kills for want of memory; to be called every few seconds."""
        with self._lock:
            self._memory_kills.look(time.monotonic())

    def exits(self) -> list[Exit]:
        """Return what ended since the last call, in the order in which it was noticed."""
        with self._lock:
            out, self._exits = self._exits, []
        return out

    def close(self) -> None:
        """Stop the thread and close every descriptor."""
        self._stopped = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        for fd in (*self._watched, *self._given.values()):
            os.close(fd)
        self._watched.clear()
        self._given.clear()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._stopped:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            with self._lock:
                for fd in self._watched:
                    poll.register(fd, select.POLLIN)
                slow, looked, self._looked = bool(self._slow), self._looked, []
            longest = 0 if looked else SLOW_POLL_SECONDS * 1000 if slow else None
            ready = {fd for fd, _ in poll.poll(longest)}
            if self._wake in ready:
                os.eventfd_read(self._wake)
            self._collect(closure(poll, ready) - {self._wake})
            for each in looked:
                each.set()

    def _collect(self, fds: set[int]) -> None:
        """Take the ends of these; all others were alive after the last of them had died."""
        now = time.time_ns()
        ended = []
        for fd in sorted(fds):
            key, pid = self._watched[fd]
            ended.append(Exit(key, how_it_ended(pid, fd), now, self._batches))
        self._batches += bool(fds)
        with self._lock:
            for key, (pid, started) in list(self._slow.items()):
                if not is_process(pid, started):
                    del self._slow[key]
                    ended.append(Exit(key, UNKNOWN, now))
            for fd in fds:
                del self._watched[fd]
                os.close(fd)
            kills = self._memory_kills
            self._exits += [replace(end, memory_kills=kills.take(end.key)) for end in ended]
