"""`mode_flip`: the model trains in another mode, or with other options, than before."""

from __future__ import annotations

from dataclasses import dataclass

from ddpprobe.detectors.changed_options import ChangedOption, ChangedOptions
from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.settings import at_least
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import TRAINABLE, TRAINING, Anomaly, StepRecord

FEWEST_LOOKS = 3  # sampled steps that a mode must have lasted

_Modes = tuple[float, float]  # share of modules in training mode, parameters with a gradient


@dataclass(slots=True)
class _Lasting:
    """A mode that goes on: since which step, for how many looks, and whether it was told."""

    since: int
    looks: int = 0
    told: bool = False

    def is_due(self, step: int, steps: int) -> bool:
        """Count a look; return whether it has lasted for so many steps, and is not told yet."""
        self.looks += 1
        long = self.looks >= FEWEST_LOOKS and step - self.since >= steps
        return long and not self.told


@dataclass(slots=True)
class _Steady:
    """Modes, for how many looks they lasted, and a part that left training mode after them."""

    modes: _Modes
    looks: int
    left: _Lasting | None = None


class ModeFlip(SampledDetector):
    """Warns when a model that trained in training mode goes on training in evaluation mode.

    Dropout is off then and batch norms use what they had learned: `model.train()` was forgotten
    after an evaluation. So it does of a rank that is in evaluation mode while others are not, and
    of a part of the modules that is so, unless another number of parameters requires a gradient
    since: then it was frozen. Any such change is told as information at once; so is training in
    evaluation mode from the start, which may be meant. It warns, too, of an option of the optimizer
    that no schedule changes, such as `eps` or `maximize`, and that has another value than before.

    Args:
        steps: steps for which evaluation mode must last, unless other ranks train meanwhile.
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
        self._evaluation: _Lasting | None = None  # of all ranks
        self._apart: dict[int, _Lasting] = {}  # ranks in evaluation mode while others are not
        self._telling = Telling(self._quiet, worse=1.0)
        self._options = ChangedOptions()

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly of its mode, and one of each change."""
        trainable = self._modes and self._modes[1]
        found = self._of_mode(record)
        if self._modes and self._modes[1] != trainable:  # their optimizer may have other options
            self._options = ChangedOptions()
        changes = self._options.update(record)
        return [*found, *(self._of_option(record, change) for change in changes)]

    def _of_option(self, record: StepRecord, change: ChangedOption) -> Anomaly:
        alone = change.ranks[0] if len(change.ranks) == 1 < len(record.ranks) else None
        return self.anomaly(record, "warn", change.message(record), change.values, rank=alone)

    def _of_mode(self, record: StepRecord) -> list[Anomaly]:
        told = [s for s in record.scalars.values() if TRAINING in s and TRAINABLE in s]
        if not told:
            return []
        modes = max(float(s[TRAINING]) for s in told), max(float(s[TRAINABLE]) for s in told)
        before, self._modes = self._modes, modes
        # A teacher has nothing to train, and is meant to evaluate.
        lasting = self._evaluates(record, training=modes[0] > 0 or modes[1] == 0)
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
        self._apart = {r: self._apart.get(r) or _Lasting(record.step) for r in still}
        for rank, apart in self._apart.items():
            if not (apart.is_due(record.step, 0) and self._trained):  # no evaluation is of one rank
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
        if (
            steady is None
            or steady.looks < FEWEST_LOOKS
            or trainable != steady.modes[1]
            or not 0 < share < steady.modes[0]
        ):
            same = steady is not None and modes == steady.modes
            self._steady = _Steady(modes, looks=steady.looks + 1 if steady and same else 1)
            return None
        left = steady.left = steady.left or _Lasting(record.step)
        if not left.is_due(record.step, self._steps):
            return None
        left.told = True
        message = (
            f"only {share:.0%} of the modules have been in training mode since step "
            f"{left.since}, {steady.modes[0]:.0%} before, and as many parameters require a "
            "gradient as before: batch norms among the others use what they had learned, and "
            "dropout is off; if that is not meant, call model.train() on the whole model"
        )
        values = {"since": left.since, "training": share, "training_before": steady.modes[0]}
        return self.anomaly(record, "warn", message, values, phase="forward")

    def _evaluates(self, record: StepRecord, *, training: bool) -> Anomaly | None:
        if training:
            self._trained, self._evaluation = True, None
            return None
        lasting = self._evaluation = self._evaluation or _Lasting(record.step)
        if not lasting.is_due(record.step, self._steps):
            return None
        lasting.told = True
        message = (
            f"no module has been in training mode since step {lasting.since}: dropout is off, and "
            "batch norms use what they had learned; call model.train() after an evaluation"
        )
        level = "warn" if self._trained else "info"
        return self.anomaly(record, level, message, {"since": lasting.since}, phase="forward")
