"""What a step took on the host, by phase, and what of it was ours."""

from __future__ import annotations

import time
from typing import final

from ddpprobe.records.step import REDUCE_SECONDS, STEP_PHASES
from ddpprobe.rundir.stopwatch import Stopwatch

_NAMES = (*(f"{phase}_seconds" for phase in STEP_PHASES), "probe_seconds")


@final
class StepTimes:
    """Turns running sums of seconds into those of a step.

    Args:
        phase_seconds: of all steps so far, by phase; changed by its owner.
        stopwatch: of what was ours.
    """

    def __init__(self, phase_seconds: list[float], stopwatch: Stopwatch) -> None:
        self._phase_seconds, self._stopwatch = phase_seconds, stopwatch
        self._base = self._readings()
        self._computed: float | None = None  # when the gradients of a backward were there, local
        self._reduced = 0.0  # seconds from there until they were reduced, in this step
        self._told_own = self._told_beside = self._behind = 0.0  # see `told`

    def backward_computed(self) -> None:
        """The gradients of a backward are there; what follows is their reduction."""
        self._computed = time.perf_counter()

    def backward_ended(self) -> None:
        """They are reduced."""
        if self._computed is not None:
            self._reduced += time.perf_counter() - self._computed
            self._computed = None

    def is_reducing(self) -> bool:
        """Whether a backward under way has its gradients, and they are not reduced yet."""
        return self._computed is not None

    def told(self) -> dict[str, float]:
        """Return the scalars of the step under way.

        A record cannot tell what it takes to write it. So the next one does: what passed behind the
        last record in its step, and what the disk thread has taken since.
        """
        now, beside = self._readings(), self._stopwatch.beside
        spent = zip(now, self._base, strict=True)
        told = {name: after - before for name, (after, before) in zip(_NAMES, spent, strict=True)}
        told["probe_seconds"] += self._behind + beside - self._told_beside
        self._told_own, self._told_beside = now[-1], beside
        return told | {REDUCE_SECONDS: self._reduced}

    def end_step(self, *, sampled: bool) -> None:
        """Begin anew, behind a step."""
        self._base, self._reduced = self._readings(), 0.0
        if sampled:
            self._behind = self._base[-1] - self._told_own

    def _readings(self) -> tuple[float, ...]:
        return *self._phase_seconds, self._stopwatch.seconds
