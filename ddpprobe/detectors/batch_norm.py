"""`batch_norm`: a batch norm normalizes by so few values that it lets through their sign alone."""

from __future__ import annotations

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.rank_scalars import scalars
from ddpprobe.detectors.settings import at_least
from ddpprobe.records.step import NORM_VALUES, Anomaly, StepRecord


class BatchNorm(SampledDetector):
    """Warns when a batch norm in training mode normalizes each channel by one or two values.

    Of two values it makes -1 and 1, whatever they were: all that comes through is which was larger.
    Told at the second sampled step in a row at which it is so on a rank, and again where it had
    ended. More values than that are a
    matter of degree, and not told; a synchronized batch norm has the values of all ranks.

    Args:
        values: of a channel on a rank (samples, times places), up to which it is told.
    """

    name = "batch_norm"
    title = "A batch norm over two values"

    def __init__(self, *, values: int = 2) -> None:
        at_least(1, values=values)
        self._values = values
        self._reset()

    def _reset(self) -> None:
        self._looks = 0

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        fewest = min(scalars(record, NORM_VALUES), default=self._values + 1.0)
        if fewest > self._values:
            self._looks = 0
            return []
        self._looks += 1
        if self._looks != 2:
            return []
        message = (
            "a batch norm in training mode normalizes each channel by no more than "
            f"{fewest:.0f} values of a rank: of two it makes -1 and 1, whatever they were; give a "
            "rank more samples, or take SyncBatchNorm, or a norm that does not look across samples"
        )
        return [self.anomaly(record, "warn", message, {"values": fewest}, phase="forward")]
