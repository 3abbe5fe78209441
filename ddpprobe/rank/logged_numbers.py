"""Which step a number given to `probe.log` belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Real
from typing import final

import numpy as np
import torch
from torch import Tensor

from ddpprobe.rank import torch_private
from ddpprobe.rank.held_record import HeldRecord
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.journal_writer import FrameWriter
from ddpprobe.rank.stats.dense import FLOATS, local
from ddpprobe.rank.step_clock import StepClock
from ddpprobe.rank.topology.placement import is_dtensor
from ddpprobe.rank.unsampled_losses import UnsampledLosses

_NO_STEP = "no step had begun; log it after the model's forward"
_WRITTEN = (
    "the record of its step had been written by then; log it before optimizer.step(), or right "
    "after it and before the next forward of the model, be it an evaluation's"
)
_NO_NUMBER = "it is no number, and no tensor of one element; log a number, such as loss.mean()"
_NO_WHOLE = (
    "this rank has a part of it only: it is a DTensor that is not replicated; log its full_tensor()"
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
        values = self._numbers(values)
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

    def _numbers(self, values: Mapping[str, object]) -> dict[str, float | Tensor]:
        """Return those that are numbers; says of the others that they are not kept."""
        numbers: dict[str, float | Tensor] = {}
        for name, value in values.items():
            number = as_number(value)
            if number is not None:
                numbers[name] = number
            else:
                why = _NO_WHOLE if is_dtensor(value) and value.numel() == 1 else _NO_NUMBER
                self._frame_writer.unkept(self._clock.step, [name], why)
        return numbers

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


def as_number(value: object) -> float | Tensor | None:
    """Return a number that a script logs, or a plain tensor that holds one; None: it is neither.

    Nothing waits for a device, and no rank for another: a DTensor is a number where this rank has
    all of it.
    """
    if isinstance(value, Tensor):
        return _as_plain(value)
    if isinstance(value, np.ndarray | np.generic) and value.size == 1:
        value = value.item()
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:  # of a whole number
        return None


def returned_loss(outputs: Iterable[Tensor]) -> Tensor | None:
    """Return the only number among what a model has returned.

    None if there is none, or several, or if this rank cannot read it: a sum that is still to be
    made over the ranks, or one inside `torch.func.grad`.
    """
    numbers = [tensor for tensor in outputs if tensor.dim() == 0 and tensor.is_floating_point()]
    return _as_plain(numbers[0]) if len(numbers) == 1 else None


def _as_plain(tensor: Tensor) -> Tensor | None:
    if is_dtensor(tensor) and all(p.is_replicate() for p in tensor.placements):
        tensor = local(tensor)
    unusual = tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided
    if unusual or tensor.is_quantized or tensor.is_complex() or tensor.numel() != 1:
        return None
    if is_dtensor(tensor) or torch_private.is_functorch(tensor):
        return None
    tensor = tensor.detach().reshape(())
    return tensor if tensor.dtype in FLOATS else tensor.double()
