"""When ranks stand still: none of them moved, for much longer than a step takes."""

from __future__ import annotations

from collections.abc import Sequence

from ddpprobe.records.step import STEP_PHASES
from ddpprobe.rundir.heartbeat import CLOSED, Heartbeat

LATE_SECONDS = 10.0  # a rank that was silent for longer, and for that many steps, is late
LATE_STEPS = 10


def is_late(seen: float, step_seconds: float | None) -> bool:
    """Return whether a rank was silent for too long (`seen` seconds), by what a step takes it.

    Before it is known what a step takes (None) nobody is late: the first one may compile, or wait
    for its data.
    """
    return step_seconds is not None and seen > max(LATE_SECONDS, LATE_STEPS * step_seconds)


def is_still(beats: Sequence[Heartbeat], now_ns: int) -> bool:
    """Return whether none of these living ranks moves although they train.

    A job in which one rank says that it is paused waits for that. One that has closed moves no
    more; the others are then what is looked at.
    """
    training = [beat for beat in beats if beat.state != CLOSED]
    if not training or any(beat.state not in STEP_PHASES for beat in training):
        return False
    steps = min(beat.steps for beat in training)
    if steps <= 0:  # how long a step takes is not known: the first one may compile
        return False
    usual = max(sum(beat.phase_seconds) / beat.steps for beat in training)
    newest = max(beat.time_ns for beat in beats)
    return is_late((now_ns - newest) / 1e9, usual)
