"""`batch_norm`: a batch norm sees too few values of a channel, or keeps the last batch alone."""

from __future__ import annotations

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.rank_scalars import scalars
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.records.step import NORM_MOMENTUM, NORM_VALUES, Anomaly, StepRecord

LOOKS = 2  # sampled steps in a row, so that one small last batch of an epoch is none


class BatchNorm(SampledDetector):
    """Warns of batch norms in training mode by whose numbers nothing is learned, or evaluated.

    Of one or two values of a channel it makes -1 and 1, whatever they were: all that comes through
    is which was larger. More values than that are a matter of degree, and not told; a synchronized
    batch norm has the values of all ranks. And with a `momentum` near 1 its running statistics,
    which evaluation normalizes by, are those of the last batch: other frameworks call that what
    PyTorch calls 1 - momentum, so 0.99 there is 0.01 here. A momentum of 1 is taken for meant. Each
    is told at the second sampled step in a row, and again where it had ended.

    Args:
        values: of a channel on a rank (samples, times places), up to which it is told.
        momentum: from which on it is told.
    """

    name = "batch_norm"
    title = "A batch norm over two values, or over the last batch alone"

    def __init__(self, *, values: int = 2, momentum: float = 0.8) -> None:
        at_least(1, values=values)
        above_zero(momentum=momentum)
        self._values, self._momentum = values, momentum
        self._reset()

    def _reset(self) -> None:
        self._few = self._last_alone = 0  # looks in a row

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; an anomaly for each of the two."""
        fewest = min(scalars(record, NORM_VALUES), default=self._values + 1.0)
        momentum = max(scalars(record, NORM_MOMENTUM), default=0.0)
        self._few = self._few + 1 if fewest <= self._values else 0
        is_near_one = self._momentum <= momentum < 1
        self._last_alone = self._last_alone + 1 if is_near_one else 0
        found = []
        if self._few == LOOKS:
            few = (
                "a batch norm in training mode normalizes each channel by no more than "
                f"{fewest:.0f} values of a rank: of two it makes -1 and 1, whatever they were; "
                "give a rank more samples, or take SyncBatchNorm, or a norm that does not look "
                "across samples"
            )
            found.append((few, {"values": fewest}))
        if self._last_alone == LOOKS:
            alone = (
                f"the momentum of a batch norm is {momentum:g}: its running statistics, by which "
                f"evaluation normalizes, are to {100 * momentum:.4g} % those of the last batch; "
                f"what TensorFlow and Keras call {momentum:g} is {1 - momentum:.3g} here"
            )
            found.append((alone, {"momentum": momentum}))
        return [self.anomaly(record, "warn", *told, phase="forward") for told in found]
