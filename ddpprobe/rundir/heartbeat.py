"""Where a rank is now: one small file, overwritten in place, read by the daemon.

The journal says what happened at sampled steps; the heartbeat says that steps happen at all.

A beat is a store into mapped memory (`tmpfs`), where no disk can make training wait. It is carried
into the run directory about once a second and at the end; `read` finds the newest. Without such
memory each beat is a write into the run directory.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from ddpprobe.rundir import paths, safe_read, tmpfs
from ddpprobe.rundir.slot_file import MappedSlotFile, SlotFile, checked, newest, whole

CLOSED = "closed"
STATES = ("start", "data", "forward", "backward", "optimizer", "paused", CLOSED)
_BODY = struct.Struct("<qqiiqqq4ddqd")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One reading. `steps` and `skipped` count since the start; seconds are cumulative.

    `step` is the optimizer step under way, `state` one of `STATES`, `time_ns` Unix time in ns,
    `sampled` the number of sampled steps finished, `phase_seconds` the host time spent in data,
    forward, backward, optimizer, and `probe_seconds` the part of it that was ours. `every` is the
    interval of sampled steps now (0: not said), `overhead_ratio` what ddpprobe adds to a step at
    that interval, by the step's own time (NaN: not known yet).
    """

    time_ns: int
    step: int
    micro: int
    state: str
    steps: int
    skipped: int
    sampled: int
    phase_seconds: tuple[float, float, float, float]
    probe_seconds: float
    every: int = 0
    overhead_ratio: float = math.nan


class HeartbeatWriter:
    """Overwrites one heartbeat file; never raises after construction (a lost beat is no loss).

    `every` and `overhead_ratio` go with each beat; whoever measures them sets them.

    Args:
        path: of the file in the run directory; it is made.
        memory: the directory in memory that `tmpfs.make` gave; None: beats go to `path`.

    Raises:
        OSError: a file cannot be made.
    """

    def __init__(self, path: Path, memory: Path | None = None) -> None:
        self.every = 0
        self.overhead_ratio = math.nan
        self._slot_file: SlotFile | MappedSlotFile = SlotFile(path, _BODY.size, clean=True)
        if memory is not None:
            self._slot_file.close()
            self._slot_file = MappedSlotFile(memory / path.name, _BODY.size)

    @property
    def said(self) -> bytes | None:
        """The last beat, for `carry` to write; None: it is in the run directory."""
        return self._slot_file.said if isinstance(self._slot_file, MappedSlotFile) else None

    @property
    def last(self) -> Heartbeat | None:
        """The last beat, if that is in memory: no disk is asked."""
        said = self.said
        return _decoded(said) if said else None

    def beat(
        self,
        *,
        step: int,
        micro: int,
        state: int,
        steps: int,
        skipped: int,
        sampled: int,
        phase_seconds: tuple[float, float, float, float],
        probe_seconds: float,
    ) -> None:
        """Write one reading; `state` is an index into `STATES`."""
        body = _BODY.pack(
            time.time_ns(), step, micro, state, steps, skipped, sampled, *phase_seconds,
            probe_seconds, self.every, self.overhead_ratio,
        )  # fmt: skip
        self._slot_file.write(body)

    def close(self) -> None:
        """Close the file."""
        self._slot_file.close()


def read(path: Path) -> Heartbeat | None:
    """Return the last reading; None if there is none or it is being written just now.

    Args:
        path: of the file in the run directory. What is in memory on this machine is newer.
    """
    said = _in_memory(tmpfs.beside(path.parent), path.name)
    beat = _decoded(said) if said is not None else None
    if beat is not None:
        return beat
    try:
        return read_bytes(safe_read.read_regular(path.parent, path.name))
    except OSError:
        return None


def read_bytes(data: bytes) -> Heartbeat | None:
    """Return the last reading in the content of a heartbeat file; None as `read`."""
    body = whole(data, _BODY.size)
    return None if body is None else _decoded(body)


def carry(path: Path, said: bytes | None = None) -> None:
    """Carry what is in memory into the run directory, if there is anything. May wait for a disk.

    Args:
        path: of the file in the run directory.
        said: the writer's `HeartbeatWriter.said`; None: what `tmpfs` holds.

    Raises:
        OSError: the disk refuses.
    """
    # Opened first: `finish` puts another file in its place, which must not become older again.
    with contextlib.suppress(FileNotFoundError):
        fd = paths.open_own(path, os.O_WRONLY)
        try:
            body = said
            if body is None:
                body = _in_memory(tmpfs.beside(path.parent), path.name)
            if body:
                os.pwrite(fd, checked(body), 0)
        finally:
            os.close(fd)


def finish(path: Path, place: Path | None, said: bytes | None = None) -> None:
    """Carry the last beat of a rank that has ended, and take it out of memory; as `carry`.

    Args:
        path: of the file in the run directory.
        place: the directory in memory, `tmpfs.beside` that.
        said: as `carry`.

    Raises:
        OSError: the disk refuses; it stays in memory.
    """
    body = _in_memory(place, path.name) if said is None else said
    if body:
        paths.replace_file(path, [checked(body)])
    if place is not None:
        (place / path.name).unlink(missing_ok=True)


def _in_memory(place: Path | None, name: str) -> bytes | None:
    data = tmpfs.read(place, name)
    return newest(data, _BODY.size) if data is not None else None


def _decoded(body: bytes) -> Heartbeat | None:
    time_ns, step, micro, state, steps, skipped, sampled, *rest = _BODY.unpack(body)
    *phases, own, every, ratio = rest
    if not 0 <= state < len(STATES) or time_ns == 0:
        return None
    return Heartbeat(
        time_ns, step, micro, STATES[state], steps, skipped, sampled,
        (phases[0], phases[1], phases[2], phases[3]), own, every, ratio,
    )  # fmt: skip
