"""`output_jump`: a module puts out values far above everything that it has put out before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Floats, Mask, SitesOfKind, SiteWindow
from ddpprobe.detectors.subtrees import named
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import Anomaly, StepRecord

LEAST = 1e-6  # a module that puts out less than that puts out nothing


class OutputJump(SampledDetector):
    """Warns when the largest output of a module is many times the largest of its own past.

    The first module in execution order that jumped is named: those after it compute with what it
    put out. Steps at which it put out nothing are no past: a branch that begins at zero, and is
    trained later. A rank is named if the run has only one.

    Args:
        ratio: how many times the largest of the window.
        window: sampled steps that are remembered.
        least: sampled steps of them without which there is no verdict on a module,
        few: and below so many the ratio must be twice as large.
        quiet_steps: steps without a jump after which one is told again.
        worse: a jump so many times the reported one is told at once.
    """

    name = "output_jump"
    title = "Outputs exploded"

    def __init__(
        self, *, ratio: float = 4.0, window: int = 64, least: int = 8, few: int = 16,
        quiet_steps: int = 100, worse: float = 10.0,
    ) -> None:  # fmt: skip
        above_zero(ratio=ratio, worse=worse)
        at_least(1, least=least, few=few)
        at_least(least, window=window)
        at_least(0, quiet_steps=quiet_steps)
        self._ratio, self._window, self._least, self._few = ratio, window, least, few
        self._repeat = (quiet_steps, worse)
        self._reset()

    def _reset(self) -> None:
        self._outputs, self._past = SitesOfKind("output"), SiteWindow(self._window)
        self._telling = Telling(*self._repeat)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        now = self._outputs.read(record, "abs_max")
        highest = self._past.highest(len(now))
        points = self._past.points(len(now))
        needed = np.where(points < self._few, 2 * self._ratio, self._ratio)
        with np.errstate(invalid="ignore", over="ignore"):
            ratio = np.where(points >= self._least, now / highest, 0.0)
            jumped = ratio > needed
        self._past.add(np.where(now > LEAST, now, np.nan))
        if not jumped.any() or not self._telling.due(record.step, float(np.nanmax(ratio))):
            return []
        return [self._verdict(record, now, highest, jumped, points)]

    def _verdict(
        self, record: StepRecord, now: Floats, highest: Floats, jumped: Mask,
        points: NDArray[np.int64],
    ) -> Anomaly:  # fmt: skip
        first, names = self._outputs.marked(jumped)
        ratio = float(now[first] / highest[first])
        then = f"; then {named(names[1:])}" if names[1:] else ""
        message = (
            f"largest output {now[first]:.3g} is {ratio:.3g} x the largest {highest[first]:.3g} of "
            f"the last {points[first]} sampled steps{then}"
        )
        values = {
            "abs_max": float(now[first]),
            "highest": float(highest[first]),
            "ratio": ratio,
            "modules": len(names),
        }
        world = record.ranks + record.missing
        return self.anomaly(
            record, "warn", message, values, module=names[0], kind="output",
            rank=world[0] if len(world) == 1 else None, phase="forward",
        )  # fmt: skip
