"""`output_drop`: a module puts out far less than it ever has."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Floats, Mask, SitesOfKind, SiteWindow, grown
from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.detectors.subtrees import named
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import Anomaly, StepRecord

LEAST = 1e-6  # a module that puts out less than that puts out nothing


class OutputDrop(SoundStepsDetector):
    """Warns when the rms of a module's output is far below the lowest of its own past.

    A gain or a weight that became zero, a mask over everything, a dead activation. It is told at
    the second look in a row at the module, and the first module in execution order that dropped is
    named.

    Args:
        ratio: how many times below the lowest of the window.
        window: sampled steps that are remembered.
        least: sampled steps of them without which there is no verdict on a module.
        quiet_steps: steps without a drop after which one is told again.
    """

    name = "output_drop"
    title = "Outputs dropped"

    def __init__(
        self, *, ratio: float = 3.0, window: int = 64, least: int = 12, quiet_steps: int = 100
    ) -> None:
        above_zero(ratio=ratio)
        at_least(1, least=least)
        at_least(least, window=window)
        at_least(0, quiet_steps=quiet_steps)
        self._ratio, self._window, self._least, self._quiet = ratio, window, least, quiet_steps
        self._reset()

    def _reset(self) -> None:
        self._outputs, self._past = SitesOfKind("output"), SiteWindow(self._window)
        self._dropped = np.zeros(0, np.bool_)  # at the last look at the module
        self._telling = Telling(self._quiet)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        now = self._outputs.read(record, "rms")
        sites, seen = len(now), np.isfinite(now)
        lowest = self._past.lowest(sites)
        points = self._past.points(sites)
        known = seen & (points >= self._least) & (lowest > LEAST)
        dropped = known & (now * self._ratio < lowest)
        before = grown(self._dropped, sites, 0)
        self._dropped = np.where(seen, dropped, before)
        # A drop is not what is usual, until it has been told or is over.
        self._past.add(np.where(dropped & ~before, np.nan, now))
        twice = dropped & before
        if not twice.any() or not self._telling.due(record.step):
            return []
        return [self._verdict(record, now, lowest, twice, points)]

    def _verdict(
        self, record: StepRecord, now: Floats, lowest: Floats, dropped: Mask,
        points: NDArray[np.int64],
    ) -> Anomaly:  # fmt: skip
        first, names = self._outputs.marked(dropped)
        then = f"; then {named(names[1:])}" if names[1:] else ""
        many = "nothing is left of" if now[first] == 0 else (
            f"{lowest[first] / now[first]:.3g} x below"
        )  # fmt: skip
        message = (
            f"rms of the output {now[first]:.3g}: {many} the lowest {lowest[first]:.3g} of the "
            f"last {points[first]} sampled steps{then}: look at the weights "
            "and masks of it and of what comes before it"
        )
        values = {
            "rms": float(now[first]),
            "lowest": float(lowest[first]),
            "modules": len(names),
        }
        world = record.ranks + record.missing
        return self.anomaly(
            record, "warn", message, values, module=names[0], kind="output",
            rank=world[0] if len(world) == 1 else None, phase="forward",
        )  # fmt: skip
