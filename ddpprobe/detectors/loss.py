"""The loss of a run as one number per step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from typing import final

from ddpprobe.detectors.detector import SampledDetector, is_noted
from ddpprobe.records.every_loss import losses_of
from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import Anomaly, StepRecord


def mean_losses(record: StepRecord, *, whole: bool = False) -> list[tuple[int, float]]:
    """Return (step, mean of the ranks' finite losses) of each step that has one, ascending.

    Where something was noted since the record before, of the record's own step alone: of those
    before it nobody knows on which side of the note they were.

    `whole`: of the steps all of whose losses are finite. Beside a NaN the mean is another number
    than it was, by as much as ranks differ.

    One rank's own loss is no ground to wake somebody: with heavy-tailed data its chance outliers,
    which are its gradient's as well, grow with the number of ranks.
    """
    return list(_means_of(record, whole))


def _means(record: StepRecord, whole: bool) -> list[tuple[int, float]]:  # noqa: FBT001
    found = []
    first = record.step if is_noted(record) else 0
    for step, by_rank in losses_of(record):
        if step < first:
            continue
        finite = [x for x in by_rank.values() if math.isfinite(x)]
        if finite and not (whole and len(finite) < len(by_rank)):
            found.append((step, mean(finite)))
    return found


_means_of = IdentityCache(_means, 2)  # half a dozen detectors ask for those of one record


def loss_of(record: StepRecord) -> float:
    """Return the mean of the ranks' losses at a record's own step; NaN: none, or not all finite."""
    losses = dict(mean_losses(record, whole=True))
    return losses.get(record.step, math.nan)


def losses_by_rank(record: StepRecord) -> dict[int, float]:
    """Return the mean loss of each rank that has one, over the steps of a record that all have.

    Steps that lack a rank's are left out, as others are not to be compared with them. It is not
    finite where one of them is not.
    """
    steps = [by_rank for _, by_rank in losses_of(record)]
    ranks = sorted({rank for by_rank in steps for rank in by_rank})
    whole = [by_rank for by_rank in steps if len(by_rank) == len(ranks)]
    return {rank: sum(of[rank] / len(whole) for of in whole) for rank in ranks if whole}


def mean(losses: Iterable[float]) -> float:
    """Return the mean of one or more finite numbers; it is finite."""
    numbers = list(losses)
    return math.fsum(x / len(numbers) for x in numbers)


class LossDetector(SampledDetector):
    """A detector of the mean losses of all steps, sampled or not, that begins anew in an attempt.

    A loss that has been zero or negative has no ratio: from there on nothing is judged.
    """

    @final
    def _is_about(self, record: StepRecord) -> bool:
        """Whether it looks at this record: also at one that is there for its losses alone."""
        return not record.partial

    def _reset(self) -> None:
        self._loss = PositiveLoss()

    def _look(self, record: StepRecord) -> list[Anomaly]:
        found = (self._judge(record, *loss) for loss in self._loss.read(record))
        return [anomaly for anomaly in found if anomaly is not None]

    @abstractmethod
    def _judge(self, record: StepRecord, step: int, loss: float) -> Anomaly | None:
        """Take the next loss, of the record's step or of one before it; return what it shows."""


class PositiveLoss:
    """The mean losses of an attempt, as long as none has been zero or negative.

    After such a one a ratio of losses says nothing.

    Args:
        whole: as of `mean_losses`.

    Attributes:
        first: the first one; NaN before.
        over: one has been zero or negative.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self.first = math.nan
        self.over = False

    def read(self, record: StepRecord) -> Iterable[tuple[int, float]]:
        """Yield the (step, mean loss) of the next record that can be judged."""
        for step, loss in mean_losses(record, whole=self._whole):
            self.over |= loss <= 0
            if self.over:
                return
            if math.isnan(self.first):
                self.first = loss
            yield step, loss
