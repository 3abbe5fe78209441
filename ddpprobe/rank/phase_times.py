"""What the phases of a step take on the host, and how much of it the training had no core for."""

from __future__ import annotations

import time
from typing import final

from ddpprobe.rank.run_delay import RunDelay

DATA, FORWARD, BACKWARD, OPTIMIZER = range(4)


@final
class PhaseTimes:
    """Sums of seconds by phase; exactly one phase is under way.

    Attributes:
        phase: that one.
        seconds: cumulative host seconds.
        queued: of these, cumulative, those in which the training thread was ready and another one
            had its core; counted while `counts_queued`.
        counts_queued: they are known of all that passed since `count_queued`.
    """

    def __init__(self) -> None:
        self.phase = DATA
        self.seconds = [0.0, 0.0, 0.0, 0.0]
        self.queued = [0.0, 0.0, 0.0, 0.0]
        self.counts_queued = False
        self._mark = time.perf_counter()
        self._delay = RunDelay()
        self._queued_mark = 0.0

    def enter(self, phase: int) -> None:
        """Begin a phase, which ends the one under way."""
        now = time.perf_counter()
        self.seconds[self.phase] += now - self._mark
        if self.counts_queued:
            self.queued[self.phase] += self._queued_since_mark()
        self._mark, self.phase = now, phase

    def leave_out(self) -> None:
        """Count the time since the last event to no phase."""
        self._mark = time.perf_counter()
        if self.counts_queued:
            self._queued_since_mark()

    def total(self) -> float:
        """Return the seconds of all phases up to now."""
        return sum(self.seconds) + time.perf_counter() - self._mark

    def count_queued(self, *, on: bool) -> None:
        """Begin to count them, or stop: two microseconds for each phase of a step."""
        self.counts_queued = on
        if on:
            self._delay.begin()
            self._queued_since_mark()

    def queued_now(self) -> float:
        """Return the queued seconds of all phases up to now."""
        if self.counts_queued:
            self.queued[self.phase] += self._queued_since_mark()
        return sum(self.queued)

    def close(self) -> None:
        """Let go of what tells of them."""
        self.counts_queued = False
        self._delay.close()

    def _queued_since_mark(self) -> float:
        now = self._delay.seconds()
        if now is None:
            self.counts_queued = False
            return 0.0
        before, self._queued_mark = self._queued_mark, now
        return now - before
