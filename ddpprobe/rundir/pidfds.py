"""How a process ended that is not our child, by a descriptor of it (pidfd) held while it lived.

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

UNKNOWN = "unknown"
# struct pidfd_info, first version: mask and cgroupid u64, eleven ids u32, exit_code s32.
_INFO = struct.Struct("<QQ11Ii")
_GET_INFO = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11  # _IOWR(0xFF, 11, struct pidfd_info)
_INFO_EXIT = 1 << 3
_EXIT_CODE_FIELD = 52  # of /proc/<pid>/stat, counted from 1 (proc(5)); a wait status
_STAT_BYTES = 4096


def open_pidfd(pid: int) -> int | None:
    """Return a pidfd; None if there is no such process or no such system call.

    Raises:
        OSError: there is no descriptor to be had.
    """
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        if error.errno in (errno.ESRCH, errno.ENOSYS, errno.EPERM, errno.EINVAL):
            return None
        raise


def closure(poll: select.poll, ready: set[int]) -> set[int]:
    """Return which processes are dead when those that are not are looked at once more.

    One look goes from process to process: of those that it found alive one may have died before
    another that it found dead.

    Args:
        poll: of all of them.
        ready: the pidfds that a look at them has found.
    """
    while True:
        again = {fd for fd, _ in poll.poll(0)}
        if again <= ready:
            return ready
        ready |= again


def how_it_ended(pid: int, fd: int) -> str:
    """Return how a dead process ended, as `describe`.

    Args:
        pid: its number.
        fd: a pidfd of it.
    """
    return describe(_wait_status(pid, fd))


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


def _wait_status(pid: int, fd: int) -> int | None:
    """Return the wait status of a dead process: from its zombie, else from its pidfd."""
    try:
        stat = _stat(pid)
        # The pid may be somebody else's by now; a pidfd is never: trust a zombie only.
        fields = stat[stat.rindex(b")") + 2 :].split()
        if fields[0] in b"ZX":
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


def _stat(pid: int) -> bytes:
    fd = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _STAT_BYTES)
    finally:
        os.close(fd)
