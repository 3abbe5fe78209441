"""`dead_units`: the outputs of a module became zero and stay so: its ReLU is dead."""

from __future__ import annotations

import numpy as np

from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Floats, Mask, SitesOfKind, grown
from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.detectors.subtrees import named
from ddpprobe.records.step import Anomaly, StepRecord


class DeadUnits(SoundStepsDetector):
    """Warns when a module whose outputs were alive puts out zeros for a while.

    Half of a ReLU's outputs are zero in a healthy model, and up to 95 % of a wide one's. So a
    module must have been well below that before, at `least` sampled steps; the first one in
    execution order is named, once.

    Args:
        zeros: share of zeros above which a module is dead.
        alive: share of zeros below which it was alive.
        least: sampled steps at which it must have been alive.
        steps: steps for which it must have been dead.
        samples: sampled steps at which it must have been dead.
    """

    name = "dead_units"
    title = "Units died"

    def __init__(
        self, *, zeros: float = 0.99, alive: float = 0.9, least: int = 8, steps: int = 10,
        samples: int = 3,
    ) -> None:  # fmt: skip
        above_zero(zeros=zeros, alive=alive)
        at_least(1, least=least, samples=samples)
        at_least(0, steps=steps)
        self._zeros, self._alive = zeros, alive
        self._least, self._steps, self._samples = least, steps, samples
        self._reset()

    def _reset(self) -> None:
        self._outputs = SitesOfKind("output")
        self._lived = np.zeros(0, np.int64)  # sampled steps alive
        self._since = np.zeros(0, np.int64)  # the step since which it has been dead
        self._dead = np.zeros(0, np.int64)  # sampled steps dead, in a row
        self._told = np.zeros(0, bool)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly, for all modules that died together."""
        share = self._outputs.read(record, "zero_ratio")
        self._grow(len(share))
        dead, alive = share >= self._zeros, share < self._alive
        self._since[dead & (self._dead == 0)] = record.step
        self._dead = np.where(dead, self._dead + 1, np.where(np.isnan(share), self._dead, 0))
        self._lived += alive
        self._told &= ~alive
        lasting = (self._dead >= self._samples) & (record.step - self._since >= self._steps)
        found = dead & lasting & (self._lived >= self._least) & ~self._told
        if not found.any():
            return []
        self._told |= found
        return [self._verdict(record, found, share)]

    def _grow(self, sites: int) -> None:
        self._lived, self._since = grown(self._lived, sites, 0), grown(self._since, sites, 0)
        self._dead = grown(self._dead, sites, 0)
        self._told = grown(self._told, sites, 0)

    def _verdict(self, record: StepRecord, dead: Mask, share: Floats) -> Anomaly:
        first, names = self._outputs.marked(dead)
        then = f"; so do {named(names[1:])}" if names[1:] else ""
        message = (
            f"{share[first]:.0%} of the outputs have been zero since step {self._since[first]}, "
            f"where they were alive before{then}; if a ReLU puts them out, nothing is trained "
            "through it"
        )
        values = {
            "zero_ratio": float(share[first]),
            "since": int(self._since[first]),
            "modules": len(names),
        }
        return self.anomaly(
            record, "warn", message, values, module=names[0], kind="output", phase="forward"
        )
