"""`stale_weights`: a forward that computes with weights of before the last optimizer step."""

from __future__ import annotations

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.rank_scalars import scalars
from ddpprobe.detectors.settings import at_least
from ddpprobe.records.step import STALE, Anomaly, StepRecord


class StaleWeights(SampledDetector):
    """Pages when units of FSDP2 forward with weights that were gathered before the optimizer.

    A unit that is not resharded after its backward (`set_reshard_after_backward(False)`) stays
    gathered, and does not gather again in the next forward: the optimizer changes shards that
    nothing computes with. It is told once for each attempt, and again where it had ended.

    Args:
        over: sampled steps one after the other for which it must be so.
    """

    name = "stale_weights"
    title = "Stale weights in the forward"

    def __init__(self, *, over: int = 2) -> None:
        at_least(1, over=over)
        self._over = over
        self._reset()

    def _begin(self) -> None:
        self._told = False

    def _reset(self) -> None:
        self._row = 0  # sampled steps in a row

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; one anomaly when it has lasted long enough."""
        counts = scalars(record, STALE)
        if not counts:
            return []
        units = max(counts)
        self._row = self._row + 1 if units else 0
        self._told &= units != 0
        if self._told or self._row < self._over:
            return []
        self._told = True
        message = (
            f"{units:.0f} units of FSDP2 compute with weights that were gathered before the "
            "optimizer's last step: what it learns is not used. Leave set_reshard_after_backward "
            "at True, or call reshard() after optimizer.step()"
        )
        return [
            self.anomaly(
                record, "page", message, {"units": units}, module="", kind="param", phase="forward"
            )
        ]
