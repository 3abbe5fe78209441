"""What a squared error shows of the targets: how far they are from what a model answers."""

from __future__ import annotations

import math
from typing import NamedTuple

from ddpprobe.detectors.first_outputs import gradient_rows, stat_of
from ddpprobe.detectors.loss import loss_of
from ddpprobe.records.step import StepRecord

# Relative: how well the loss must be what the gradient says. Of each number bfloat16 rounds as
# much, and the loss may have a small term beside the squares.
_FITS = 0.01


class SquaredError(NamedTuple):
    """A mean squared error of what the model returns.

    Attributes:
        module: the FQN of the one whose output that is.
        output: rms of the output.
        error: rms of targets less outputs.
        offset: their mean.
    """

    module: str
    output: float
    error: float
    offset: float


def squared_error(record: StepRecord, least: float) -> SquaredError | None:
    """Return the squared error that a run is trained by; None where its loss is another one.

    The gradient of an output o by the mean of (o - t)^2 over the n elements of a rank is
    2 (o - t) / n, so the loss is n / 4 times the sum of its squares. What the loss does not look at
    has a gradient of zero, and is not counted.

    Args:
        record: of a sampled step.
        least: of the rms error; for a smaller one nothing is computed.
    """
    loss = loss_of(record)
    if not loss >= least**2:  # NaN is not
        return None
    ranks = len(record.scalars)
    for module, output, gradient in gradient_rows(record):
        numel, zeros, rms, mean = (
            stat_of(record, gradient, stat) for stat in ("numel", "zero_ratio", "rms", "mean")
        )
        count = numel * (1 - zeros) / ranks  # n
        found = count / 4 * (rms * rms * numel) / ranks  # the ranks' mean
        if abs(found - loss) <= _FITS * loss:
            offset = -mean * numel / (2 * ranks)
            return SquaredError(module, stat_of(record, output, "rms"), math.sqrt(found), offset)
    return None
