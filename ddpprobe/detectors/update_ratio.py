"""`update_ratio`: a step changes the weights far more than any before did, or all hardly do."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.learning_rate import ReturnedRate, RisenRate
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Mask, grown
from ddpprobe.detectors.slow_start import Guess, SlowStart
from ddpprobe.detectors.telling import Telling
from ddpprobe.detectors.weight_rows import WeightRows, WeightsOfStep
from ddpprobe.records.step import Anomaly, StepRecord


class UpdateRatio(SampledDetector):
    """Warns when a step changes the weights by a share that is out of proportion to all before.

    The share is the root mean square of the change over that of the weights, over all parameters
    that were looked at, so that biases about zero count for as little as they are. A learning rate
    or a loss that became many times too large does that, before the loss tells. A learning rate
    that rises far above its highest, after a rest, is told by itself; one that comes back to where
    it rested before it fell; and one by which a model that still guesses hardly moves.

    Args:
        share: below it, no change is too large.
        ratio: how many times the median of the window.
        over_highest: how many times the largest of the window.
        window: looks that are compared with.
        least: looks of them without which there is no verdict.
        quiet_steps: steps without one after which it is told again.
        worse: a share so many times the reported one is told at once.
        rate: how many times its highest before a rest the learning rate must be.
        slow: the share that is too small for a model that still guesses.
    """

    name = "update_ratio"
    title = "A step changed the weights too far, or all of them hardly do"

    def __init__(
        self, *, share: float = 0.05, ratio: float = 20.0, over_highest: float = 3.0,
        window: int = 64, least: int = 8, quiet_steps: int = 100, worse: float = 10.0,
        rate: float = 3.0, slow: float = 1e-5,
    ) -> None:  # fmt: skip
        above_zero(share=share, ratio=ratio, over_highest=over_highest, worse=worse, rate=rate)
        above_zero(slow=slow)
        self._risen, self._slow = rate, slow
        at_least(1, least=least)
        at_least(least, window=window)
        at_least(0, quiet_steps=quiet_steps)
        self._share, self._ratio, self._over = share, ratio, over_highest
        self._window, self._least, self._repeat = window, least, (quiet_steps, worse)
        self._reset()

    def _reset(self) -> None:
        self._rows, self._rate, self._anew = WeightRows(), RisenRate(self._risen), ReturnedRate()
        self._start = SlowStart(self._slow)
        self._past: deque[float] = deque(maxlen=self._window)
        self._telling = Telling(*self._repeat)
        self._moving = np.zeros(0, bool)  # which moved at the last look at each

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.skipped or record.missing:
            return []
        now = self._rows.read(record)
        others = self._others_move(now)
        risen = self._rate.update(record, others=others)
        returned = self._anew.update(record, others=others)
        if risen is not None:
            return [self._of_rate(record, *risen)]
        if returned is not None:
            return [self._of_return(record, *returned)]
        share = _share(now, now.seen)
        if share is None:
            return []
        # Of what moved: what is frozen may be far more.
        guess = self._start.update(record, _share(now, now.moved))
        if guess is not None:
            return [self._of_guess(record, guess)]
        return self._judge(record, share)

    def _judge(self, record: StepRecord, share: float) -> list[Anomaly]:
        """Compare a step's share with those of the window."""
        past, looks = self._past, len(self._past)
        found = None
        if len(past) >= self._least and share > self._share:
            middle, highest = median(past), max(past)
            if share > max(self._ratio * middle, self._over * highest):
                found = middle, highest
        self._past.append(share)
        if found is None or not self._telling.due(record.step, share):
            return []
        middle, highest = found
        message = (
            f"the step changed the weights by {share:.3g} of their size, {share / middle:.3g} x "
            f"the median and {share / highest:.3g} x the largest of the last {looks} "
            "looks: look at the learning rate, the scale of the loss, and clipping"
        )
        values = {"share": share, "median": middle, "highest": highest}
        return [self.anomaly(record, "warn", message, values, kind="update")]

    def _others_move(self, now: WeightsOfStep) -> bool:
        """Whether half of those that moved stand still now."""
        self._moving = grown(self._moving, len(now.seen), 0)
        moved = self._moving & now.seen
        stopped = int((moved & now.still).sum())
        self._moving = np.where(now.seen, now.moved, self._moving)
        return stopped > 0 and 2 * stopped >= int(moved.sum())

    def _of_guess(self, record: StepRecord, guess: Guess) -> Anomaly:
        steps = record.step - guess.since
        message = (
            f"a step changes the weights that it trains by {guess.share:.3g} of their size, at a "
            f"learning rate of {guess.rate:.3g} that does not rise, and after {steps} steps the "
            f"model still guesses (loss {guess.loss:.3g}; a guess among {guess.labels} labels has "
            f"{math.log(guess.labels):.3g}): the rate may be many times too low"
        )
        values = {"share": guess.share, "lr": guess.rate, "loss": guess.loss, "since": guess.since}
        return self.anomaly(record, "warn", message, values, kind="update")

    def _of_rate(self, record: StepRecord, rate: float, highest: float) -> Anomaly:
        message = (
            f"the learning rate is {rate:.3g}, {rate / highest:.3g} x its highest ({highest:.3g}) "
            "before it rested, and the parameters to train are the same: look at the schedule"
        )
        values = {"lr": rate, "highest": highest}
        return self.anomaly(record, "warn", message, values, kind="update")

    def _of_return(self, record: StepRecord, rate: float, fallen: float) -> Anomaly:
        message = (
            f"the learning rate is {rate:.3g} again, where it rested before it fell to "
            f"{fallen:.3g}, and the parameters to train are the same: if no new task begins, the "
            "schedule began anew (a resume without its state)"
        )
        values = {"lr": rate, "before": fallen}
        return self.anomaly(record, "warn", message, values, kind="update")


def _share(now: WeightsOfStep, of: Mask) -> float | None:
    """Return by how much of their size a step changed these weights; None where nobody knows."""
    if (now.numel > 0)[~now.seen].any():  # the others weigh more where one is not finite
        return None
    both = of & np.isfinite(now.change)
    weights = float(np.square(now.rms[both]).sum())
    changes = float(np.square(now.change[both]).sum())
    return (changes / weights) ** 0.5 if weights > 0 and changes > 0 else None
