"""What a step took on the host, by phase, and what of it was ours."""

from __future__ import annotations

import time
from typing import final

from ddpprobe.rank.phase_times import PhaseTimes
from ddpprobe.records.step import QUEUED, REDUCE_SECONDS, STEP_PHASES
from ddpprobe.rundir.stopwatch import Stopwatch

_NAMES = (*(f"{phase}_seconds" for phase in STEP_PHASES), "probe_seconds")


@final
class StepTimes:
    """Turns running sums of seconds into those of a step.

    Args:
        phases: of all steps so far; changed by its owner.
        stopwatch: of what was ours.
    """

    def __init__(self, phases: PhaseTimes, stopwatch: Stopwatch) -> None:
        self._phases, self._stopwatch = phases, stopwatch
        phases.count_queued(on=True)
        self._base, self._queued_base = self._readings(), list(phases.queued)
        self._computed: float | None = None  # when the gradients of a backward were there, local
        self._reduced = 0.0  # seconds from there until they were reduced, in this step
        self._queued_reduced = self._queued_computed = 0.0  # of these, and up to there, on a queue
        self._told_own = self._told_beside = self._behind = 0.0  # see `told`

    def backward_computed(self) -> None:
        """The gradients of a backward are there; what follows is their reduction."""
        self._computed = time.perf_counter()
        self._queued_computed = self._phases.queued_now()

    def backward_ended(self) -> None:
        """They are reduced."""
        if self._computed is not None:
            self._reduced += time.perf_counter() - self._computed
            self._queued_reduced += self._phases.queued_now() - self._queued_computed
            self._computed = None

    def is_reducing(self) -> bool:
        """Whether a backward under way has its gradients, and they are not reduced yet."""
        return self._computed is not None

    def told(self) -> dict[str, float]:
        """Return the scalars of the step under way.

        A record cannot tell what it takes to write it. So the next one does: what passed after the
        last record in its step, and what the disk thread has taken since.
        """
        now, beside = self._readings(), self._stopwatch.beside
        spent = zip(now, self._base, strict=True)
        told = {name: after - before for name, (after, before) in zip(_NAMES, spent, strict=True)}
        told["probe_seconds"] += self._behind + beside - self._told_beside
        self._told_own, self._told_beside = now[-1], beside
        return told | {REDUCE_SECONDS: self._reduced} | self._queued()

    def end_step(self, *, sampled: bool, following: bool) -> None:
        """Begin anew, after a step; `following`: the next one is sampled, as far as is known."""
        self._base, self._reduced = self._readings(), 0.0
        if sampled:
            self._behind = self._base[-1] - self._told_own
        self._phases.count_queued(on=following)
        self._queued_base, self._queued_reduced = list(self._phases.queued), 0.0

    def _readings(self) -> tuple[float, ...]:
        return *self._phases.seconds, self._stopwatch.seconds

    def _queued(self) -> dict[str, float]:
        if not self._phases.counts_queued:
            return {}
        spent = zip(STEP_PHASES, self._phases.queued, self._queued_base, strict=True)
        told = {QUEUED[phase]: after - before for phase, after, before in spent}
        return told | {QUEUED["reduce"]: self._queued_reduced}
