"""`mode_flip`: the model trains in another mode, or other parameters do, than before."""

from __future__ import annotations

from dataclasses import dataclass

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.settings import at_least
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import TRAINABLE, TRAINING, Anomaly, StepRecord

FEWEST_LOOKS = 3  # sampled steps that a mode must have lasted

_Modes = tuple[float, float]  # share of modules in training mode, parameters with a gradient


@dataclass(slots=True)
class _Apart:
    """A rank in evaluation mode: since which step, for how many looks, and whether it was told."""

    since: int
    looks: int = 0
    told: bool = False


@dataclass(slots=True)
class _Steady:
    """Modes that have lasted, and a part that left training mode since."""

    modes: _Modes
    looks: int = 1
    since: int | None = None
    apart: int = 0  # looks since
    told: bool = False


class ModeFlip(SampledDetector):
    """Warns when a model that trained in training mode goes on training in evaluation mode.

    Dropout is off then and batch norms use what they had learned: `model.train()` was forgotten
    behind an evaluation. So it does of a rank that is in evaluation mode while others are not, and
    of a part of the modules that is so, unless another number of parameters requires a gradient
    since: then it was frozen. Any such change is told as information at once; so is training in
    evaluation mode from the start, which may be meant.

    Args:
        steps: steps for which evaluation mode must last.
        quiet_steps: steps without a change after which the next one is told.
    """

    name = "mode_flip"
    title = "The model trains in another mode"

    def __init__(self, *, steps: int = 20, quiet_steps: int = 100) -> None:
        at_least(0, steps=steps, quiet_steps=quiet_steps)
        self._steps, self._quiet = steps, quiet_steps
        self._reset()

    def _reset(self) -> None:
        self._modes: _Modes | None = None
        self._steady: _Steady | None = None
        self._trained = False  # in training mode, at some step
        self._since: int | None = None  # all ranks have been in evaluation mode
        self._lasted = 0
        self._told = False
        self._apart: dict[int, _Apart] = {}  # ranks in evaluation mode while others are not
        self._telling = Telling(self._quiet, worse=1.0)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        told = [s for s in record.scalars.values() if TRAINING in s and TRAINABLE in s]
        if not told:
            return []
        modes = max(float(s[TRAINING]) for s in told), max(float(s[TRAINABLE]) for s in told)
        before, self._modes = self._modes, modes
        lasting = self._evaluates(record, training=modes[0] > 0)
        lasting = lasting or self._alone(record) or self._partly(record, modes)
        if lasting is not None:
            return [lasting]
        if before is None or before == modes or not self._telling.due(record.step, 1.0):
            return []
        message = (
            f"{modes[0]:.0%} of the modules are in training mode and {modes[1]:.0f} parameters "
            f"require a gradient; at the sampled step before it were {before[0]:.0%} and "
            f"{before[1]:.0f}"
        )
        values = {
            "training": modes[0], "trainable": modes[1],
            "training_before": before[0], "trainable_before": before[1],
        }  # fmt: skip
        return [self.anomaly(record, "info", message, values, phase="forward")]

    def _alone(self, record: StepRecord) -> Anomaly | None:
        """Return what is to be said of a rank that evaluates while others train."""
        share = {r: float(s[TRAINING]) for r, s in record.scalars.items() if TRAINING in s}
        still = [r for r, x in share.items() if x == 0] if any(share.values()) else []
        self._apart = {r: self._apart.get(r) or _Apart(record.step) for r in still}
        for rank, apart in self._apart.items():
            apart.looks += 1
            long = apart.looks >= FEWEST_LOOKS and record.step - apart.since >= self._steps
            if apart.told or not long or not self._trained:
                continue
            apart.told = True
            message = (
                f"no module of rank {rank} has been in training mode since step {apart.since}, "
                "while other ranks train: its dropout is off, and its batch norms do not learn; "
                "call model.train() on every rank"
            )
            values = {"since": apart.since, "ranks": len(still)}
            return self.anomaly(record, "warn", message, values, rank=rank, phase="forward")
        return None

    def _partly(self, record: StepRecord, modes: _Modes) -> Anomaly | None:
        """Return what is to be said of a part of the modules that left training mode."""
        steady, (share, trainable) = self._steady, modes
        left = steady is not None and 0 < share < steady.modes[0]
        if steady is None or trainable != steady.modes[1] or not (left or share):
            self._steady = _Steady(modes)
            return None
        if not left or steady.looks < FEWEST_LOOKS:
            same = modes == steady.modes
            self._steady = _Steady(modes, looks=steady.looks + 1 if same else 1)
            return None
        steady.since = record.step if steady.since is None else steady.since
        steady.apart += 1
        long = steady.apart >= FEWEST_LOOKS and record.step - steady.since >= self._steps
        if steady.told or not long:
            return None
        steady.told = True
        message = (
            f"only {share:.0%} of the modules have been in training mode since step "
            f"{steady.since}, {steady.modes[0]:.0%} before, and as many parameters require a "
            "gradient as before: batch norms among the others use what they had learned, and "
            "dropout is off; if that is not meant, call model.train() on the whole model"
        )
        values = {"since": steady.since, "training": share, "training_before": steady.modes[0]}
        return self.anomaly(record, "warn", message, values, phase="forward")

    def _evaluates(self, record: StepRecord, *, training: bool) -> Anomaly | None:
        if training:
            self._trained, self._since, self._lasted, self._told = True, None, 0, False
            return None
        self._since = record.step if self._since is None else self._since
        self._lasted += 1
        long = self._lasted >= FEWEST_LOOKS and record.step - self._since >= self._steps
        if self._told or not long:
            return None
        self._told = True
        message = (
            f"no module has been in training mode since step {self._since}: dropout is off, and "
            "batch norms use what they had learned; call model.train() behind an evaluation"
        )
        level = "warn" if self._trained else "info"
        return self.anomaly(record, level, message, {"since": self._since}, phase="forward")
