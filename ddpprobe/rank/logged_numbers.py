"""Which step a number given to `probe.log` belongs to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor

from ddpprobe.rank.held_record import HeldRecord
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.journal_writer import FrameWriter
from ddpprobe.rank.step_clock import StepClock
from ddpprobe.rank.unsampled_losses import UnsampledLosses

_NO_STEP = "no step had begun; log it behind the model's forward"
_WRITTEN = (
    "the record of its step had been written by then; log it before optimizer.step(), or right "
    "behind it and before the next forward of the model, be it an evaluation's"
)
_NEXT_SCALE = "gradients are divided by it and it may be a new one; log it before backward()"


@final
class LoggedNumbers:
    """Keeps all numbers of a sampled step, and the loss of every other.

    Args:
        clock: tells the step.
        frame_writer: tells what cannot be kept.

    Attributes:
        names: of what was logged in the last sampled step before it ended.
        told_scale: the script has logged a loss scale, in whatever step.
        held: the record of the sampled step that is over.
        losses: of the steps since then.
    """

    def __init__(self, clock: StepClock, frame_writer: FrameWriter) -> None:
        self.names: set[str] = set()
        self.told_scale = False
        self.held, self.losses = HeldRecord(), UnsampledLosses()
        self._clock, self._frame_writer = clock, frame_writer
        frame_writer.loss_of = self.losses.of
        self._rested = False  # the step is over, and something else has begun since then

    def take(
        self, values: Mapping[str, float | Tensor], rows: StepRows | None, *, sampling: bool
    ) -> None:
        """Take numbers of the script's.

        Args:
            values: by name.
            rows: where those of a sampled step go; None before the first forward.
            sampling: the step under way is sampled.
        """
        self.told_scale |= "loss_scale" in values
        if rows is None:
            self._frame_writer.unkept(-1, values, _NO_STEP)
        elif sampling:
            for name, value in values.items():
                rows.add_scalar(name, value)
                self.names.add(name)
        elif self.held.is_behind:
            self._take_behind(values, rows)
        elif "loss" in values and not self._rested:
            self.losses.add(self._clock.step, values["loss"], logged=True)

    def forward_begins(self) -> None:
        """At a training forward: what is logged from now on belongs to its step."""
        self.held.forward_begins()
        self._rested = False

    def has_any(self, step: int, *, sampling: bool) -> bool:
        """Whether the user has logged something in the step under way."""
        return bool(self.names) if sampling else self.losses.has_logged(step)

    def rest(self) -> None:
        """At an evaluation or a pause: it may take long, and its loss is not that of a step."""
        self.held.send()
        self._rested = not self._clock.is_inside_a_step

    def _take_behind(self, values: Mapping[str, float | Tensor], rows: StepRows) -> None:
        step = self._clock.step
        if not self.held.waits:
            self.held.take(values)
            self._frame_writer.unkept(step, values, _WRITTEN)
            return
        for name, value in values.items():
            if name != "loss_scale":
                rows.add_scalar(name, value)
        if "loss_scale" in values:
            self._frame_writer.unkept(step, ["loss_scale"], _NEXT_SCALE)
        self.held.take(values)
