"""`targets`: they are the inputs, or one number for all samples, or far from any output."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ddpprobe.detectors.rank_scalars import scalars
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.detectors.squared_error import squared_error
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import (
    CLASS_LABELLED,
    CLASS_RIGHT,
    COPIED,
    PULL,
    PULL_REST,
    PULLED_MEAN,
    PULLED_RMS,
    TARGET,
    Anomaly,
    StepRecord,
)

# Of the gradient's variance. Right pairs of outputs and targets left 0.27 or more in a regression;
# what bfloat16 rounds is below this once the mean of the residuals is gone.
STRAIGHT = 1e-3
SLOPE = 0.01  # relative: that of a squared error is the same number in every batch
# Of the largest output (rms). A target that is meant, as 0 or a discriminator's 1, stays there.
MOVES = 0.01
# A layer begins with outputs of about 1, and moves them by a part of that in a step. What is this
# far away (rms), and so many times the outputs, is hardly ever come to.
FAR, FAR_TIMES = 1000.0, 100.0


# Share of copies where so many rows have a label. Of a masked text, a sixth has one, and more is
# copied than of a text to be continued, of which no answer that is a copy is right.
MOST_COPIED, LABELLED = 0.9, 0.5


class _Pull(NamedTuple):
    slope: float
    target: float
    rms: float
    mean: float


_NO_PULL = _Pull(0.0, 0.0, 0.0, 0.0)


@dataclass(slots=True)
class _Streak:
    """Looks in a row at which something was so; of a pull the first slope, and its targets."""

    looks: int = 0
    since: int = -1
    slope: float = math.nan
    low: float = math.inf
    high: float = -math.inf
    rms: float = 0.0  # of the outputs, the largest
    up: int = 0  # looks at which the target was above the mean of the outputs

    def take(self, step: int, pull: _Pull) -> None:
        if not self.looks:
            self.since, self.slope = step, pull.slope
        self.looks += 1
        self.low, self.high = min(self.low, pull.target), max(self.high, pull.target)
        self.rms = max(self.rms, pull.rms)
        self.up += pull.target > pull.mean

    @property
    def moves(self) -> bool:
        """Whether the targets of different batches differ, and the outputs are in their midst.

        A logistic loss of one label is nearly a straight line, too: it always pulls one way.
        """
        return self.high - self.low > MOVES * self.rms and 0 < self.up < self.looks


class TrainingTargets(SoundStepsDetector):
    """Warns when the targets seem to be wrong: the inputs themselves, or one number for all.

    A language model that answers with the very token that it is given, wherever the next one is
    another, and is right by its loss, is trained on labels that nobody has shifted. And where the
    gradient of each output is a straight line over the outputs, with the same slope in every batch,
    all samples of a batch are pulled to one number, and to another one in the next, now above and
    now below their mean: predictions [n, 1] and targets [n] are broadcast to [n, n]. Targets of a
    mean squared error that are thousands, and the outputs about 1, are not normalized.

    Args:
        copied: share of the places at which the answer is the input, and of those that the loss
            says are right, from which it is told. Where half of the rows or more have a label, 0.9
            of the places are enough.
        looks: sampled steps in a row at which it is so.
        far_looks: the same, of targets that are far from all outputs.
        quiet_steps: steps without it after which it is told again.
    """

    name = "targets"
    title = "The targets are the inputs, one number for all samples, or not normalized"

    def __init__(
        self, *, copied: float = 0.99, looks: int = 8, far_looks: int = 5, quiet_steps: int = 1000
    ) -> None:
        above_zero(copied=copied)
        at_least(1, looks=looks, far_looks=far_looks)
        at_least(0, quiet_steps=quiet_steps)
        self._copied, self._quiet = copied, quiet_steps
        self._looks = {"copied": looks, "pulled": looks, "far": far_looks}
        self._reset()

    def _reset(self) -> None:
        self._copies, self._pulls, self._fars = _Streak(), _Streak(), _Streak()
        self._told = {kind: Telling(self._quiet) for kind in self._looks}

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; an anomaly for each of the three."""
        if record.skipped:  # its gradients are not finite
            return []
        return [
            *self._look_at_copies(record), *self._look_at_pulls(record),
            *self._look_at_distance(record),
        ]  # fmt: skip

    def _look_at_copies(self, record: StepRecord) -> Iterable[Anomaly]:
        shares = [share for share in scalars(record, COPIED) if share >= 0]
        if not shares:
            return
        # Before it is trained, one whose head is its embedding answers so as well, and wrongly.
        right = scalars(record, CLASS_RIGHT)
        # What the loss ignores (padding, and what looks like it) may be answered in any way.
        labelled = min(scalars(record, CLASS_LABELLED), default=0.0)
        copied = MOST_COPIED if labelled >= LABELLED else self._copied
        told = right and min(right) >= self._copied and min(shares) >= min(copied, self._copied)
        if not told:
            self._copies = _Streak()
            return
        self._copies.take(record.step, _NO_PULL)
        if self._is_due("copied", self._copies, record.step):
            message = (
                f"at each of the last {self._copies.looks} sampled steps the model answers with "
                f"the token that it is given, at {100 * min(shares):.0f} % of the places whose "
                "next token is another one: shift the labels by one, if it is to predict the next"
            )
            yield self._verdict(record, message, {"copied": min(shares)}, self._copies)

    def _look_at_pulls(self, record: StepRecord) -> Iterable[Anomaly]:
        pull = _pull(record)
        if pull is None:
            return
        first = self._pulls.slope if self._pulls.looks else pull.slope
        if abs(pull.slope - first) > SLOPE * first or pull.slope <= 0:
            self._pulls = _Streak()
        if pull.slope <= 0:
            return
        self._pulls.take(record.step, pull)
        if self._pulls.moves and self._is_due("pulled", self._pulls, record.step):
            message = (
                f"at each of the last {self._pulls.looks} sampled steps all samples of a batch are "
                "pulled to one and the same number, and in another batch to another: outputs "
                "[n, 1] and targets [n] make n x n pairs in a loss; give both one shape"
            )
            yield self._verdict(record, message, {"slope": pull.slope}, self._pulls)

    def _look_at_distance(self, record: StepRecord) -> Iterable[Anomaly]:
        found = squared_error(record, FAR)
        if found is None or found.error < FAR_TIMES * found.output:
            self._fars = _Streak()
            return
        self._fars.take(record.step, _NO_PULL)
        if self._is_due("far", self._fars, record.step):
            message = (
                f"at each of the last {self._fars.looks} sampled steps the model answers with "
                f"numbers of about {found.output:.2g} and is off by {found.error:.2g} (rms), by "
                f"{found.offset:+.2g} in the mean: normalize the targets, if they are as they were "
                "in a file"
            )
            values = {"output": found.output, "error": found.error, "offset": found.offset}
            yield self._verdict(record, message, values, self._fars, found.module)

    def _is_due(self, kind: str, streak: _Streak, step: int) -> bool:
        return streak.looks >= self._looks[kind] and self._told[kind].due(step)

    def _verdict(
        self, record: StepRecord, message: str, values: dict[str, float], streak: _Streak,
        module: str | None = None,
    ) -> Anomaly:  # fmt: skip
        values = {**values, "looks": streak.looks, "since": streak.since}
        return self.anomaly(
            record, "warn", message, values, phase="forward", kind="output", module=module
        )


def _pull(record: StepRecord) -> _Pull | None:
    """Return the line over the outputs, the target as the mean of the ranks; None: nobody tells.

    A slope of 0 stands for a look at which it was no line, or not the same on all ranks.
    """
    rests = scalars(record, PULL_REST)
    if not rests:
        return None
    straight = all(abs(rest) < STRAIGHT for rest in rests)  # NaN is not
    slopes, targets = scalars(record, PULL), scalars(record, TARGET)
    rms = max(scalars(record, PULLED_RMS), default=0.0)
    if not straight or not all(map(math.isfinite, (*slopes, *targets, rms))):
        return _NO_PULL
    low, high = min(slopes), max(slopes)
    if low <= 0 or high - low > SLOPE * low:  # ranks with batches of unlike sizes
        return _NO_PULL
    means = scalars(record, PULLED_MEAN)
    return _Pull(slopes[0], sum(targets) / len(targets), rms, sum(means) / max(1, len(means)))
