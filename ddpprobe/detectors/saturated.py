"""`saturated`: nearly all outputs of a tanh are -1 or 1, where it lets no gradient through."""

from __future__ import annotations

import numpy as np

from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Floats, Mask, SitesOfKind, grown
from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.detectors.subtrees import and_also
from ddpprobe.records.step import Anomaly, StepRecord

BOTH_SIDES = 0.5  # its outputs reach beyond that, to both sides
FEWEST = 32  # elements: a few may well be large
ROUNDING = 1e-3  # by which a slope may be below 0; an rms above 1 is no tanh's


class Saturated(SoundStepsDetector):
    """Warns, once, of a module whose outputs lie between -1 and 1 and are nearly all at the ends.

    That is a tanh, or what ends in one (an RNN), whose inputs are too large. The mean slope of a
    tanh is 1 - rms² of its outputs, exactly: that is the share of the gradient which gets through.
    Outputs without a gradient (inputs, targets) are left alone. A sign with a gradient that goes
    straight through it has the same numbers. A sigmoid is not looked at, as attention and masks are
    just as often 0 or 1 in good health.

    Args:
        slope: mean slope below which it is saturated; in 935 healthy runs none was below 0.25.
        looks: sampled steps in a row at which it must be,
        steps: and so many steps.
    """

    name = "saturated"
    title = "An activation is saturated"

    def __init__(self, *, slope: float = 0.05, looks: int = 4, steps: int = 20) -> None:
        above_zero(slope=slope)
        at_least(1, looks=looks, steps=steps)
        self._slope, self._looks, self._steps = slope, looks, steps
        self._reset()

    def _reset(self) -> None:
        self._outputs = SitesOfKind("output")
        self._gradients = SitesOfKind("grad_output")
        self._since = np.zeros(0, np.int64)  # the step since which it has been saturated
        self._lasted = np.zeros(0, np.int64)  # looks at which it was, in a row
        self._told = np.zeros(0, np.bool_)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly, for all modules that are told of together."""
        rms = self._outputs.read(record, "rms")
        slope = np.where(self._like_tanh(record), 1 - rms * rms, np.nan)
        self._grow(len(slope))
        flat, seen = (slope < self._slope) & (slope > -ROUNDING), np.isfinite(rms)
        self._since[flat & (self._lasted == 0)] = record.step
        self._lasted = np.where(flat, self._lasted + 1, np.where(seen, 0, self._lasted))
        lasting = (self._lasted >= self._looks) & (record.step - self._since >= self._steps)
        found = flat & lasting & ~self._told
        if not found.any():
            return []
        first, names = self._outputs.marked(found)
        self._told |= np.isin(self._outputs.fqns, names)  # the other outputs of a module too
        return [self._verdict(record, first, names, slope)]

    def _like_tanh(self, record: StepRecord) -> Mask:
        """Return which outputs [sites] are between -1 and 1, and on both sides of 0.

        Where gradients of outputs are observed, these must have one: inputs and targets have none.
        """
        low, high = self._outputs.read(record, "min"), self._outputs.read(record, "max")
        enough: Mask = self._outputs.read(record, "numel") >= FEWEST
        enough &= (low >= -1) & (low < -BOTH_SIDES) & (high <= 1) & (high > BOTH_SIDES)
        norms = self._gradients.read(record, "norm")
        if not enough.any():
            return enough
        trained = {self._gradients.fqns[site] for site in np.flatnonzero(np.isfinite(norms))}
        if trained:  # one of a module's outputs may have none: the last state of an RNN
            enough &= np.array([fqn in trained for fqn in self._outputs.fqns], np.bool_)
        return enough

    def _grow(self, sites: int) -> None:
        self._since, self._lasted = grown(self._since, sites, 0), grown(self._lasted, sites, 0)
        self._told = grown(self._told, sites, 0)

    def _verdict(self, record: StepRecord, first: int, names: list[str], slope: Floats) -> Anomaly:
        share = max(0.0, float(slope[first]))
        message = (
            f"nearly all of its outputs have been -1 or 1 since step {self._since[first]}"
            f"{and_also(names[1:])}. If it is a tanh, it lets {share:.2g} of the gradient through: "
            "look at the weights and inputs before it, and at the learning rate. If it is a sign, "
            "or a binary code, all is well"
        )
        values = {"slope": share, "since": int(self._since[first]), "modules": len(names)}
        return self.anomaly(
            record, "warn", message, values, module=names[0], kind="output", phase="forward"
        )
