"""By what the first bad tensors of several ranks are ordered.

Ranks that run side by side do the same things in the same order, so the place in a rank's own
execution compares. The stages of a pipeline run one after the other. Where the host computes, its
clock tells who was first. On a device it does not: the host only queues the work, of a later stage
as soon as of an earlier one. There it is the number of the stage, which goes forward with the
forward and back with the backward. It is read off what calls the model.
"""

from __future__ import annotations

import sys
from typing import final

from ddpprobe.rank import frames
from ddpprobe.records.step import UNORDERED

# What calls a stage's part of the model, and where it keeps the stage's number.
_CALLERS = ("torch.distributed.pipelining.", "deepspeed.")
_NUMBERS = ("stage_index", "stage_id")
_PLACES = 1 << 32  # in the execution of one step
_STAGES = 1 << 20


@final
class ExecutionOrder:
    """Gives what is bad on this rank its place among the ranks.

    Args:
        pipelined: ranks hold other parts of the model: stages.
        near: the host computes.

    Attributes:
        timed: the place is a time, Unix ns.
    """

    def __init__(self, *, pipelined: bool = False, near: bool = True) -> None:
        self.timed = pipelined and near
        self._by_stage = pipelined and not near
        self._stages: set[int] = set()

    def look(self) -> None:
        """At a training forward, below what calls it: which stage is it?"""
        if self._by_stage:
            stage = _stage_of_caller()
            if stage is not None:
                self._stages.add(stage)

    def number(self, phase: str, place: int) -> int:
        """Return what compares with other ranks: `FirstBad.order`.

        Args:
            phase: one of `PHASES`.
            place: in this rank's execution, or the time.
        """
        if not self._by_stage or phase == "step":
            return place
        if len(self._stages) != 1:  # nobody knows, or in several stages one after the other
            return UNORDERED
        stage = min(*self._stages, _STAGES - 1)
        return (stage if phase == "forward" else _STAGES - 1 - stage) * _PLACES + place


def _stage_of_caller() -> int | None:
    for frame in frames.stack(sys._getframe(1)):  # noqa: SLF001  (`inspect` does the same)
        if frames.module_of(frame).startswith(_CALLERS):
            known = getattr(frame.f_locals.get("self"), "__dict__", {})
            for name in _NUMBERS:
                if isinstance(number := known.get(name), int) and number >= 0:
                    return number
    return None
