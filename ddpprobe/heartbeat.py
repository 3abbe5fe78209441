"""Where a rank is now: one small file, overwritten in place, read by the daemon.

The journal says what happened at sampled steps; the heartbeat says that steps happen at all. One
`pwrite` of 120 bytes costs about a microsecond, survives the rank, and cannot hurt it: a mapped
file would raise SIGBUS in the training process if the disk were full.
"""

from __future__ import annotations

import math
import os
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from ddpprobe import layout

STATES = ("start", "data", "forward", "backward", "optimizer", "paused", "closed")
STEP_PHASES = ("data", "forward", "backward", "optimizer")
_BODY = struct.Struct("<qqiiqqq4ddqd")
_SIZE = _BODY.size + 4


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
    """

    def __init__(self, path: Path) -> None:
        self.every = 0
        self.overhead_ratio = math.nan
        layout.make_dir(path.parent)
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._fd = os.open(path, flags, layout.FILE_MODE)
        os.posix_fallocate(self._fd, 0, _SIZE)

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
        try:
            os.pwrite(self._fd, body + zlib.crc32(body).to_bytes(4, "little"), 0)
        except OSError:
            return

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read(path: Path) -> Heartbeat | None:
    """Return the last reading; None if there is none or it is being written just now."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    if len(data) != _SIZE or zlib.crc32(data[:-4]).to_bytes(4, "little") != data[-4:]:
        return None
    time_ns, step, micro, state, steps, skipped, sampled, *rest = _BODY.unpack(data[:-4])
    *phases, own, every, ratio = rest
    if not 0 <= state < len(STATES) or time_ns == 0:
        return None
    return Heartbeat(
        time_ns, step, micro, STATES[state], steps, skipped, sampled,
        (phases[0], phases[1], phases[2], phases[3]), own, every, ratio,
    )  # fmt: skip
