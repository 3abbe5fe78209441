"""Noticing the death of a rank at once, and how it died, although it is not our child.

A pidfd becomes readable the moment its process dies. The wait status then stands in field 52 of
`/proc/<pid>/stat` until the parent (torchrun, which looks every 0.1 s) reaps the zombie, and from
then on, since Linux 6.15, in the answer to PIDFD_GET_INFO. Without either it is "unknown".
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import struct
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.processes import is_process

Key = tuple[int, int]  # attempt, rank

UNKNOWN = "unknown"
SLOW_POLL_SECONDS = 1.0
# struct pidfd_info, first version: mask and cgroupid u64, eleven ids u32, exit_code s32.
_INFO = struct.Struct("<QQ11Ii")
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_INFO_EXIT = 1 << 3
_EXIT_CODE_FIELD = 52  # of /proc/<pid>/stat, counted from 1 (proc(5)); a wait status


@dataclass(frozen=True, slots=True)
class Exit:
    """One process that ended. `how` is "SIGKILL", "exit:1" or "unknown".

    `time_ns` is Unix time in ns, 0 if the process was gone before it was watched. Every process
    with a greater `order` was seen alive after this one's death; -1: nothing is known of that.
    """

    key: Key
    how: str
    time_ns: int
    order: int = -1


class ProcessWatcher:
    """One thread that sleeps until a watched process dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exits: list[Exit] = []
        self._watched: dict[int, tuple[Key, int]] = {}  # pidfd -> key, pid
        self._slow: dict[Key, tuple[int, float | None]] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopped = False
        self._batches = 0
        self.fuse = Fuse("liveness")
        run = self.fuse.guard(self._run)
        self._thread = threading.Thread(target=run, name="ddpprobe-liveness", daemon=True)
        self._thread.start()

    def watch(self, key: Key, pid: int, started: float | None) -> bool:
        """Report the end of process `pid`, started at Unix time `started` (None: not known).

        Returns False for a process that is gone already; it is reported with time 0.
        """
        fd = _open(pid)
        alive = is_process(pid, started)  # asked after opening: the pidfd is of this one
        with self._lock:
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
        for fd in self._watched:
            os.close(fd)
        self._watched.clear()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._stopped:
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            with self._lock:
                for fd in self._watched:
                    poll.register(fd, select.POLLIN)
                slow = bool(self._slow)
            ready = {fd for fd, _ in poll.poll(SLOW_POLL_SECONDS * 1000 if slow else None)}
            if self._wake in ready:
                os.eventfd_read(self._wake)
            self._collect(_closure(poll, ready) - {self._wake})

    def _collect(self, fds: set[int]) -> None:
        """Take the ends of these; all others were alive after the last of them had died."""
        now = time.time_ns()
        ended = []
        for fd in sorted(fds):
            key, pid = self._watched[fd]
            ended.append(Exit(key, describe(_wait_status(pid, fd)), now, self._batches))
        self._batches += bool(fds)
        with self._lock:
            for key, (pid, started) in list(self._slow.items()):
                if not is_process(pid, started):
                    del self._slow[key]
                    ended.append(Exit(key, UNKNOWN, now))
            for fd in fds:
                del self._watched[fd]
                os.close(fd)
            self._exits += ended


def _closure(poll: select.poll, ready: set[int]) -> set[int]:
    """Return which processes are dead when those that are not are looked at once more.

    One look goes from process to process: of those that it found alive one may have died before
    another that it found dead.
    """
    while True:
        again = {fd for fd, _ in poll.poll(0)}
        if again <= ready:
            return ready
        ready |= again


def describe(status: int | None) -> str:
    """Return a wait status in words: "SIGKILL", "exit:1"; "unknown" for None."""
    if status is None:
        return UNKNOWN
    number = status & 0x7F
    if number == 0:
        return f"exit:{(status >> 8) & 0xFF}"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal:{number}"


def _open(pid: int) -> int | None:
    """Return a pidfd; None if there is no such process or no such system call."""
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.ENOSYS, errno.EPERM, errno.EINVAL):
            return None
        raise


def _wait_status(pid: int, fd: int) -> int | None:
    """Return the wait status of a dead process: from its zombie, else from its pidfd."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        # The pid may be somebody else's by now; a pidfd is never: trust a zombie only.
        fields = stat[stat.rindex(")") + 2 :].split()
        if fields[0] in "ZX":
            return int(fields[_EXIT_CODE_FIELD - 3])
    except (OSError, ValueError, IndexError):
        pass  # reaped in between
    answer = bytearray(_INFO.size)
    struct.pack_into("<Q", answer, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(fd, _GET_INFO, answer)
    except OSError:  # before Linux 6.13, or a sandbox that does not know it
        return None
    mask, *_, status = _INFO.unpack(answer)
    return int(status) if mask & _INFO_EXIT else None
