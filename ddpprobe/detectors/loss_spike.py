"""`loss_spike`: the loss is far above its own history."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ddpprobe.detectors.history import LogHistory, WindowedValue
from ddpprobe.detectors.loss import LossDetector, mean
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.every_loss import losses_of
from ddpprobe.records.step import Anomaly, StepRecord


class LossSpike(LossDetector):
    """Warns when the ranks' mean loss is a robust outlier, above everything in its window.

    Every step's loss is judged, sampled or not, when the next record brings it. A rank is named if
    the mean of the others is no outlier.

    A loss that has been zero or negative has no decades and is not judged: rewards, likelihoods of
    densities. Nor is one that is small beside the first ones: near zero everything is large.

    Args:
        z: robust standard deviations in log10 space.
        ratio: how many times the median of the window.
        highest: how many times the largest of the window.
        small: share of the first losses below which a loss is not judged.
        window: steps that it is compared with.
        least: steps of them without which there is no verdict.
        floor_dex: the least standard deviation that is believed, in decades.
        quiet_steps: steps without a spike after which one is told again.
        worse: a spike so many times the reported one is told at once.
    """

    name = "loss_spike"
    title = "Loss spike"

    def __init__(
        self, *, z: float = 8.0, ratio: float = 2.0, highest: float = 1.5, small: float = 0.05,
        window: int = 64, least: int = 16, floor_dex: float = 0.05, quiet_steps: int = 100,
        worse: float = 10.0,
    ) -> None:  # fmt: skip
        above_zero(z=z, ratio=ratio, highest=highest, small=small, floor_dex=floor_dex, worse=worse)
        at_least(1, least=least)
        at_least(least, window=window)
        at_least(0, quiet_steps=quiet_steps)
        self._rule = (z, math.log10(ratio), highest)
        self._small = small
        self._memory = (window, least, floor_dex)
        self._repeat = (quiet_steps, worse)
        self._reset()

    def _reset(self) -> None:
        super()._reset()
        self._history = LogHistory(*self._memory)
        self._telling = Telling(*self._repeat)

    def _judge(self, record: StepRecord, step: int, loss: float) -> Anomaly | None:
        reading = self._history.read(loss)
        alone = None
        if is_spike := self._is_spike(reading) and loss >= self._small * self._loss.first:
            alone = self._alone(dict(losses_of(record))[step])
        self._history.add(loss)
        if reading is None or not is_spike or not self._telling.due(step, reading.ratio):
            return None
        message = (
            f"loss {loss:.3g} is {reading.ratio:.3g} x the median {reading.median:.3g} of the last "
            f"{reading.points} steps (robust z {reading.z:.3g})"
        )
        rank = None
        if alone is not None:
            rank, own, others = alone
            message += f"; that of rank {rank} is {own:.3g}, the mean of the others {others:.3g}"
        values = {
            "loss": loss,
            "median": reading.median,
            "highest": reading.highest,
            "ratio": reading.ratio,
            "z": reading.z,
            "points": reading.points,
        }
        return self.anomaly(record, "warn", message, values, phase="forward", step=step, rank=rank)

    def _is_spike(self, reading: WindowedValue | None) -> bool:
        z, dex, highest = self._rule
        return (
            reading is not None
            and reading.z > z
            and reading.dex > dex
            and reading.value > highest * reading.highest
        )

    def _alone(self, by_rank: Mapping[int, float]) -> tuple[int, float, float] | None:
        """Return (rank, its loss, mean of the others) if without that one there is no spike."""
        finite = {rank: x for rank, x in by_rank.items() if math.isfinite(x)}
        if len(finite) < 2:
            return None
        rank = max(finite, key=lambda r: finite[r])
        others = mean(x for r, x in finite.items() if r != rank)
        return None if self._is_spike(self._history.read(others)) else (rank, finite[rank], others)
