"""`loss_runaway`: the loss has left what had been reached, and does not come back."""

from __future__ import annotations

import math

import numpy as np

from ddpprobe.detectors.loss import LossDetector, PositiveLoss
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import SitesOfKind
from ddpprobe.records.step import Anomaly, StepRecord

SMOOTH_STEPS, SMOOTH_SAMPLES = 10, 3  # of the running mean, whichever is longer
FIRST_LOSSES = 5  # that what comes after them is compared with
ZERO = 1e-3  # of the largest of these; a loss that begins below it begins at zero, but for rounding


class LossRunaway(LossDetector):
    """Warns when the smoothed loss stays far above its best for a while; pages after a blow-up.

    What was learned may be lost: wrong labels, a shard that is corrupt, weights that blew up. The
    last of these is a page: a warning of weights, outputs or gradients that grew at once came at
    the same time, or the loss is a thousand times what it began with, so no harder data are behind
    it, and every further step is lost.
    A loss that has been zero or negative, or begins at zero (a distance from where it began, as in
    GRPO), has no ratio and is not judged, and one that is still a small part of the first losses is
    not lost. Where all outputs together have more elements than
    then (a longer sequence, whose loss is a sum), it must be above by so many times more. It is
    told again when a new best was reached. What began at less than so many times its best, as the
    loss of a small vocabulary, is lost where it is back at the first losses for longer. Once in an
    attempt it warns as well where all losses of a while are above those that it began with.

    Args:
        ratio: how many times the best.
        blown: how many times the best, and the mean of the first losses, from which it is a page.
        steps: steps for which it must last.
        samples: losses for which it must last.
        least: losses of the attempt before which there is no best.
        small: share of the first losses below which nothing is lost.
        chance: share of the mean of the first losses at which it is back at them,
        learned: after a best of less than this share,
        lost_steps: for so many steps.
        start: how many times the mean of the first losses,
        above: at so many losses in a row,
        settle: so many steps after the first one.
    """

    name = "loss_runaway"
    title = "The loss ran away"
    raised_after = frozenset(
        {"weight_jump", "update_ratio", "output_jump", "grad_spike", "unsampled_spike"}
    )

    def __init__(
        self, *, ratio: float = 3.0, blown: float = 1000.0, steps: int = 15, samples: int = 3,
        least: int = 8, small: float = 0.5, chance: float = 0.9, learned: float = 0.75,
        lost_steps: int = 30, start: float = 1.5, above: int = 50, settle: int = 100,
    ) -> None:  # fmt: skip
        above_zero(ratio=ratio, blown=blown, small=small)
        above_zero(chance=chance, learned=learned, start=start)
        at_least(0, steps=steps, lost_steps=lost_steps, settle=settle)
        at_least(1, samples=samples, least=least, above=above)
        self._start, self._above, self._settle = start, above, settle
        self._ratio, self._blown, self._small = ratio, blown, small
        self._steps, self._samples, self._least = steps, samples, least
        self._chance, self._learned, self._lost_steps = chance, learned, lost_steps
        self._reset()

    def _reset(self) -> None:
        self._loss = PositiveLoss(whole=True)
        self._mean = _RunningMean()
        self._outputs, self._elements = SitesOfKind("output"), _RunningMean()  # of all outputs
        self._best_elements = self._first_elements = math.nan  # when it was the best, and at first
        self._best, self._seen = math.inf, 0
        self._far = _Lasting(self._steps, self._samples)  # above the best
        self._back = _Lasting(self._lost_steps, self._samples)  # at the first losses
        self._told = False
        self._firsts: list[tuple[int, float]] = []  # steps and losses that it began with
        self._worse = 0  # losses in a row above them
        self._told_worse = False

    def _look(self, record: StepRecord) -> list[Anomaly]:
        if record.sampled and not record.missing:
            elements = float(np.nansum(self._outputs.read(record, "numel")))
            if elements > 0:
                self._elements.add(elements, record.step)
        return super()._look(record)

    def _grown(self, since: float) -> float:
        """Return how many times as many elements as `since` the outputs have; at least 1."""
        return max(1.0, self._elements.mean / since) if since > 0 else 1.0

    def _judge(self, record: StepRecord, step: int, loss: float) -> Anomaly | None:
        if len(self._firsts) < FIRST_LOSSES:
            self._firsts.append((step, loss))
            self._first_elements = self._elements.mean
            self._loss.over |= self._firsts[0][1] < ZERO * loss
        if self._loss.over:
            return None
        ran_away = self._ran_away(record, step, loss, self._mean.add(loss, step))
        return ran_away or self._grew(record, step, loss)

    def _began(self) -> float:
        """Return the mean of the first losses."""
        return math.fsum(loss / len(self._firsts) for _, loss in self._firsts)

    def _grew(self, record: StepRecord, step: int, loss: float) -> Anomaly | None:
        began = self._began()
        limit = self._start * began * self._grown(self._first_elements)
        self._worse = self._worse + 1 if loss > limit else 0
        settled = step - self._firsts[0][0] >= self._settle
        if self._told_worse or self._told or not settled or self._worse < self._above:
            return None
        self._told_worse = True
        message = (
            f"each of the last {self._worse} losses is more than {self._start:.3g} x the mean "
            f"{began:.3g} of the first {FIRST_LOSSES}. If the data are as hard as at first, "
            "training makes the model worse: look at the learning rate, at gradients that explode, "
            "and at the sign of the loss"
        )
        mean = self._mean.mean
        values = {"loss": mean, "first": began, "ratio": mean / began}
        return self.anomaly(record, "warn", message, values, phase="forward", step=step)

    def _ran_away(self, record: StepRecord, step: int, loss: float, mean: float) -> Anomaly | None:
        self._seen += 1
        if self._seen <= self._least:
            return None
        if mean < self._best:
            self._best, self._told = mean, False
            self._best_elements = self._elements.mean
        began, grown = self._began(), self._grown(self._first_elements)
        far = max(
            self._ratio * self._best * self._grown(self._best_elements),
            self._small * self._loss.first * grown,
        )
        learned = self._best < self._learned * began
        first = self._chance * began * grown
        away = self._far.add(mean > far, loss > far, step)
        back = self._back.add(learned and mean >= first, loss >= first, step)
        lasting = [since for since in (away, back) if since is not None]
        if self._told or not lasting:
            return None
        self._told = True
        since = min(lasting)
        where = f", where it began ({began:.3g})" if back is not None else ""
        message = (
            f"the smoothed loss is {mean:.3g}{where}, {mean / self._best:.3g} x the best "
            f"{self._best:.3g}, and has stayed that far above it since step {since}. If the "
            "data are as hard as before, what was learned is lost: look at labels, data and "
            "learning rate of that step, and resume from before it"
        )
        values = {"loss": mean, "best": self._best, "ratio": mean / self._best, "since": since}
        level = "page" if mean > self._blown * max(self._best, began) else "warn"
        return self.anomaly(record, level, message, values, phase="forward", step=step)


class _Lasting:
    """Since when something holds of the running mean, once it has held for long.

    One enormous loss stays in the mean for a while. So half of the losses must be as far
    themselves, and it is over when none has been for as long.

    Args:
        steps: that is so many steps,
        losses: and at so many losses in a row.
    """

    def __init__(self, steps: int, losses: int) -> None:
        self._steps, self._losses = steps, losses
        self._end()

    def _end(self) -> None:
        self._since: int | None = None
        self._held = self._far = 0  # losses since then; of these, those that are far themselves
        self._last, self._near = 0, 0  # step of the last of those; losses after it

    def add(self, holds: bool, far: bool, step: int) -> int | None:  # noqa: FBT001
        """Take the next loss; return the step since which it holds, None if not for long.

        Args:
            holds: of the running mean, with this loss.
            far: it holds of this loss.
            step: of the loss.
        """
        self._last, self._near = (step, 0) if far else (self._last, self._near + 1)
        if not holds or self._is_long(step - self._last, self._near):
            self._end()
            return None
        if self._since is None:
            if not far:
                return None
            self._since = step
        self._held += 1
        self._far += far
        long = self._is_long(step - self._since, self._held)
        return self._since if long and 2 * self._far >= self._held else None

    def _is_long(self, steps: int, losses: int) -> bool:
        return losses >= self._losses and steps >= self._steps


class _RunningMean:
    """The running mean of a number that some steps have; NaN before."""

    def __init__(self) -> None:
        self.mean = math.nan
        self._seen = 0
        self._step: int | None = None  # the last one

    def add(self, value: float, step: int) -> float:
        """Take a number into the mean, and return it."""
        gap = 1 if self._step is None else max(1, step - self._step)
        self._step = step
        self._seen += 1
        share = 1.0 / max(SMOOTH_STEPS / gap, SMOOTH_SAMPLES)
        share = max(share, 1.0 / self._seen)
        before = value if math.isnan(self.mean) else self.mean
        self.mean = before + share * (value - before)
        return self.mean
