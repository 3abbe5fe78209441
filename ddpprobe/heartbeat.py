"""Where a rank is now: one small file, overwritten in place, read by the daemon.

The journal says what happened at sampled steps; the heartbeat says that steps happen at all.
"""

from __future__ import annotations

import math
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from ddpprobe import inside
from ddpprobe.slate import Slate, whole

STATES = ("start", "data", "forward", "backward", "optimizer", "paused", "closed")
STEP_PHASES = ("data", "forward", "backward", "optimizer")
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
    """

    def __init__(self, path: Path) -> None:
        self.every = 0
        self.overhead_ratio = math.nan
        self._slate = Slate(path, _BODY.size, clean=True)

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
        self._slate.write(body)

    def close(self) -> None:
        """Close the file."""
        self._slate.close()


def read(path: Path) -> Heartbeat | None:
    """Return the last reading; None if there is none or it is being written just now."""
    try:
        return read_bytes(inside.read_regular(path.parent, path.name))
    except OSError:
        return None


def read_bytes(data: bytes) -> Heartbeat | None:
    """Return the last reading in the content of a heartbeat file; None as `read`."""
    body = whole(data, _BODY.size)
    if body is None:
        return None
    time_ns, step, micro, state, steps, skipped, sampled, *rest = _BODY.unpack(body)
    *phases, own, every, ratio = rest
    if not 0 <= state < len(STATES) or time_ns == 0:
        return None
    return Heartbeat(
        time_ns, step, micro, STATES[state], steps, skipped, sampled,
        (phases[0], phases[1], phases[2], phases[3]), own, every, ratio,
    )  # fmt: skip
