"""`optimizer_reset`: the optimizer has begun anew, while the model has not."""

from __future__ import annotations

from dataclasses import dataclass

from ddpprobe.detectors.detector import AFTERMATH_STEPS, Detector
from ddpprobe.detectors.rank_scalars import largest, scalars
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import NOTED, OPTIMIZER_STEPS, TRAINABLE, Anomaly, StepRecord


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a sampled step says: steps that were counted, parameters that are trained."""

    attempt: int
    step: int
    count: float
    trained: float


class OptimizerReset(Detector):
    """Warns when the optimizer counts its steps from the start again in the middle of a run.

    Its moments are lost then: a resume from a checkpoint that holds the model alone, or an
    optimizer that was built anew. With Adam the first updates are several times as large as those
    before, whatever the gradient. Judged is the count that an optimizer keeps in its state
    (`state["step"]`: the Adam family, Adagrad, Adadelta, NAdam, RAdam, RMSprop, Rprop; SGD keeps
    none), also from one attempt to the next. What `probe.note` announces at that step is meant, and
    so is an optimizer that comes with other parameters to train. In an attempt it is told again
    after 100 steps without: one that is built anew in each short cycle is told once.

    Args:
        least: steps that it must have counted before.
        left: share of that count which may be left.
    """

    name = "optimizer_reset"
    title = "The optimizer's state was lost"
    across_attempts = True

    def __init__(self, *, least: int = 20, left: float = 0.5) -> None:
        at_least(1, least=least)
        above_zero(left=left)
        self._least, self._left = least, left
        self._last: _Seen | None = None
        self._telling = Telling(AFTERMATH_STEPS)

    def update(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        counts = scalars(record, OPTIMIZER_STEPS)
        if not record.sampled or not counts:
            return []
        trained = largest(record, TRAINABLE)
        last, now = self._last, _Seen(record.attempt, record.step, max(counts), trained)
        self._last = now
        if last is not None and now.attempt != last.attempt:
            self._telling = Telling(AFTERMATH_STEPS)
        if last is None or scalars(record, NOTED) or now.trained != last.trained:
            return []
        # A resume may go back to an earlier step, where the optimizer had counted less.
        expected = min(last.count, last.count + now.step - last.step)
        if expected < self._least or now.count >= self._left * expected:
            return []
        if not self._telling.due(record.step):
            return []
        message = (
            f"the optimizer has counted {now.count:.0f} steps before this one, and "
            f"{last.count:.0f} before step {last.step}; maybe {_why(last, now)}. If its moments "
            "are lost with the count, the next updates are not those of a run that went on"
        )
        values = {"count": now.count, "before": last.count}
        return [self.anomaly(record, "warn", message, values)]


def _why(last: _Seen, now: _Seen) -> str:
    """Return what may have taken the count back."""
    if now.attempt == last.attempt:
        return "it was built anew, or its state was cleared"
    lost = "the checkpoint that this attempt began with holds no state of it, or it was not loaded"
    return f"{lost}, or it is that of an older checkpoint" if now.count else lost
