"""`collapse`: what the model returns, or is given, is the same for all samples of a batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ddpprobe.detectors.enough_looks import EnoughLooks
from ddpprobe.detectors.settings import at_least
from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import INPUT_SPREAD, OUTPUT_SPREAD, Anomaly, StepRecord

# Of the mean square: of equal numbers in float32 the rounding of their mean leaves up to 1e-14.
ALIKE = 1e-10
FEWEST_VARIED = 8  # looks at samples that differ before they are known to


@dataclass(slots=True)
class _Samples:
    """Whether the samples of one tensor of a rank are alike."""

    alike: int = 0  # looks in a row
    since: int = -1  # step of the first of them
    varied: int = 0  # looks in a row before, or up to now

    def take(self, step: int, spread: float) -> None:
        if spread < ALIKE:
            self.since = step if not self.alike else self.since
            self.alike += 1
        elif spread >= ALIKE:
            self.varied = 1 if self.alike else self.varied + 1
            self.alike = 0
        else:  # NaN: not finite, or not there
            self.alike = 0


@dataclass(slots=True)
class _Rank:
    output: _Samples = field(default_factory=_Samples)
    given: _Samples = field(default_factory=_Samples)
    step: int = -1  # of the last look


class Collapse(SoundStepsDetector):
    """Warns when a model returns the same for all samples of a batch, at many looks in a row.

    It answers without regard to its input: its units have died, a rate was far too high, its
    representation has collapsed, or the samples are copies of one. Compared are the samples of the
    first tensor that the model returns for training and of the first ones it is given. Where they
    were alike from the start, the model is judged only if its samples differ; of the input alone,
    only a rank whose samples used to differ.

    Args:
        looks: sampled steps in a row at which all samples are alike.
        beside: as `looks`, of a rank beside which the samples of another one differed at each.
        steps: as many looks as `beside` are enough where the first and the last lie so far apart.
        quiet_steps: steps without it after which it is told again.
    """

    name = "collapse"
    title = "The model returns the same for all samples"

    def __init__(
        self, *, looks: int = 8, beside: int = 5, steps: int = 40, quiet_steps: int = 100
    ) -> None:
        at_least(0, quiet_steps=quiet_steps)
        self._enough, self._quiet = EnoughLooks(looks, beside, steps), quiet_steps
        self._reset()

    def _reset(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._telling = Telling(self._quiet, worse=1.0)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.skipped:  # a head that begins as zeros still is
            return []
        for rank, scalars in record.scalars.items():
            if OUTPUT_SPREAD in scalars or INPUT_SPREAD in scalars:
                known = self._ranks.setdefault(rank, _Rank())
                known.output.take(record.step, float(scalars.get(OUTPUT_SPREAD, math.nan)))
                known.given.take(record.step, float(scalars.get(INPUT_SPREAD, math.nan)))
                known.step = record.step
        looked = {rank: of for rank, of in self._ranks.items() if of.step == record.step}
        given = self._alike(record.step, {rank: of.given for rank, of in looked.items()})
        given = [rank for rank in given if looked[rank].given.varied >= FEWEST_VARIED]
        output = [
            rank
            for rank in self._alike(record.step, {rank: of.output for rank, of in looked.items()})
            if looked[rank].output.varied >= FEWEST_VARIED
            or looked[rank].given.varied >= looked[rank].output.alike
        ]
        alike = sorted(given or output)
        if not alike or not self._telling.due(record.step, len(alike)):
            return []
        return [self._verdict(record, alike, looked[alike[0]], is_input=bool(given))]

    def _alike(self, step: int, ranks: dict[int, _Samples]) -> list[int]:
        """Return the ranks whose samples have been alike for long enough."""
        # Whoever differs has done so for as many looks as any other rank has not.
        differ = any(not of.alike and of.varied >= self._enough.beside for of in ranks.values())
        return [
            rank
            for rank, of in ranks.items()
            if self._enough.reached(of.alike, step - of.since, differ=differ)
        ]

    def _verdict(
        self, record: StepRecord, alike: list[int], first: _Rank, *, is_input: bool
    ) -> Anomaly:
        seen = first.given if is_input else first.output
        who = ranks_text(tuple(alike))
        message = (
            f"all samples of a batch given to {who} are alike, at each of the last {seen.alike} "
            "sampled steps, and were not before: look at the loader and the sampler"
            if is_input
            else f"the model returns the same for all samples of a batch on {who}, at each of the "
            f"last {seen.alike} sampled steps, whatever it is given: look for units that have "
            "died, a learning rate that is too high, and the scale of the input"
        )
        values = {"looks": seen.alike, "since": seen.since, "ranks": len(alike)}
        alone = alike[0] if len(alike) == 1 else None
        return self.anomaly(
            record, "warn", message, values, rank=alone, phase="forward",
            kind="input" if is_input else "output",
        )  # fmt: skip
