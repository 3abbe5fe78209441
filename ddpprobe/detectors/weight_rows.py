"""What a record says of the weights: each parameter, what the step changed of it, its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddpprobe.detectors.rank_scalars import scalars
from ddpprobe.detectors.sites_of_kind import Beside, Floats, Mask, SitesOfKind
from ddpprobe.records.step import TRAINABLE, VALUES, StepRecord

# Between 1 and the next number of a dtype.
_SPACING = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True, slots=True)
class WeightsOfStep:
    """One sampled step, arrays over the parameters that the run has shown [n]; NaN: no row.

    Attributes:
        seen: their turn was in this step.
        print: float64 [n, 4], all columns of the row: as long as it is the same, so are the bits.
        numel, norm, largest, rms: of the weight.
        change, largest_change: rms and largest magnitude of what the step changed.
        gradient, gradient_rms: norm and rms of the reduced gradient.
        spacing: of the numbers of the dtype about the largest one.
    """

    seen: Mask
    print: Floats
    numel: Floats
    norm: Floats
    largest: Floats
    rms: Floats
    change: Floats
    largest_change: Floats
    gradient: Floats
    gradient_rms: Floats
    spacing: Floats

    @property
    def moved(self) -> Mask:
        """Which the step has changed."""
        moved: Mask = self.seen & (self.largest_change > 0)
        return moved

    @property
    def still(self) -> Mask:
        """Which the step has not changed by a bit."""
        still: Mask = self.seen & (self.largest_change == 0)
        return still


def trained(record: StepRecord) -> float:
    """Return how many parameters require a gradient, observed or not; 0 where no rank tells it."""
    return min(scalars(record, TRAINABLE), default=0.0)


class WeightRows:
    """The parameters whose rows a run has shown, in the order in which it did.

    Attributes:
        fqns: of them.
    """

    def __init__(self) -> None:
        self._weights = SitesOfKind("param")
        self._changes = Beside(self._weights, "update")
        self._gradients = Beside(self._weights, "grad")
        self._spacing = np.zeros(0)

    @property
    def fqns(self) -> list[str]:
        """FQNs of the parameters."""
        return self._weights.fqns

    @property
    def dtypes(self) -> list[str]:
        """Dtypes of the parameters."""
        return self._weights.dtypes

    def read(self, record: StepRecord) -> WeightsOfStep:
        """Return what a record says."""
        columns = [self._weights.read(record, name) for name in VALUES]
        largest = self._weights.read(record, "abs_max")
        if len(self._spacing) < len(self.fqns):
            self._spacing = np.array([_SPACING.get(d, np.inf) for d in self._weights.dtypes])
        return WeightsOfStep(
            seen=np.isfinite(largest),
            print=np.stack(columns, 1),
            numel=self._weights.read(record, "numel"),
            norm=self._weights.read(record, "norm"),
            largest=largest,
            rms=self._weights.read(record, "rms"),
            change=self._changes.read(record, "rms"),
            largest_change=self._changes.read(record, "abs_max"),
            gradient=self._gradients.read(record, "norm"),
            gradient_rms=self._gradients.read(record, "rms"),
            spacing=largest * self._spacing,
        )
