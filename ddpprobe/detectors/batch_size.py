"""`batch_size`: a step is given far less than the steps before."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from ddpprobe.detectors.rank_scalars import largest
from ddpprobe.detectors.settings import at_least
from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import INPUT_ELEMENTS, LEARNING_RATE, Anomaly, StepRecord

NOW = 3  # looks at which it is less
MOST = 64  # looks before them that are remembered
SAME = 1e-3  # relative: a rate that hardly moved
MEANT = 0.7  # of the learning rate before: at most so much tells that the batch is meant


class BatchSize(SoundStepsDetector):
    """Warns when an optimizer step is given a part of what each was given, and learns as fast.

    Counted are the elements that the model is given in a step, over all micro-batches and ranks: a
    loop that accumulates no more, a loader with another batch size, texts that are cut. Where they
    vary, as texts of any length do, they must be less by more than they ever varied. It is silent
    if the learning rate falls with them.

    Args:
        ratio: how many times less it must be.
        looks: sampled steps before it that are compared with, at least.
        quiet_steps: steps without it after which it is told again.
    """

    name = "batch_size"
    title = "A step is given far less than before"

    def __init__(self, *, ratio: int = 3, looks: int = 8, quiet_steps: int = 1000) -> None:
        at_least(1, ratio=ratio, looks=looks)
        at_least(0, quiet_steps=quiet_steps)
        self._ratio, self._needed, self._quiet = ratio, looks, quiet_steps
        self._reset()

    def _reset(self) -> None:
        self._sizes: deque[float] = deque(maxlen=MOST + NOW)
        self._rates: deque[float] = deque(maxlen=MOST + NOW)
        self._telling = Telling(self._quiet)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        size = _elements(record)
        if record.missing or math.isnan(size):
            return []
        self._sizes.append(size)
        self._rates.append(largest(record, LEARNING_RATE))
        if len(self._sizes) < self._needed + NOW:
            return []
        sizes, rates = np.array(self._sizes), np.array(self._rates)
        before, now = sizes[:-NOW], sizes[-NOW:]
        varied = float(before.max() / before.min())
        times = float(before.min() / now.max())
        if times < self._ratio or times <= varied:
            return []
        was, rate = float(rates[-NOW - 1]), float(rates[-1])
        usual = float(np.median(before))
        self._sizes.clear()
        self._rates.clear()
        if rate <= MEANT * was or not self._telling.due(record.step):
            return []
        message = (
            f"at the last {NOW} sampled steps the model is given {now.max():.6g} numbers in a step "
            f"where it was given {usual:.6g}{_rates(was, rate)}: look at the micro-batches that "
            "are accumulated, the batch size, the length of texts, and which data are left"
        )
        values = {"elements": float(now.max()), "before": usual}
        return [self.anomaly(record, "warn", message, values, module="", phase="forward")]


def _rates(was: float, now: float) -> str:
    """Return what is to be said of the learning rate; nothing where it is not known."""
    if not (math.isfinite(was) and math.isfinite(now)):
        return ""
    if math.isclose(was, now, rel_tol=SAME):
        return ", at the same learning rate"
    return f", at a learning rate of {now:.3g}, before {was:.3g}"


def _elements(record: StepRecord) -> float:
    """Return how many numbers all ranks' models are given in a step; NaN: somebody does not say."""
    given = [
        said.get(INPUT_ELEMENTS, math.nan) * said.get("micro_batches", math.nan)
        for said in record.scalars.values()
    ]
    known = len(given) == len(record.ranks) and all(0 < one < math.inf for one in given)
    return float(sum(given)) if known else math.nan
