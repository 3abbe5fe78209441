"""Passes of all models of this process in one order, by which it is known which was bad first.

Each model has a run with steps of its own, which no other model's steps can be compared with. What
they have in common is the order of their forwards and backwards, which the host knows: a pass has a
number, the same on all ranks that run the same loop.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import final

from ddpprobe.records.step import DROPPED, LENT, PASS, PASS_OF_BAD, FirstBad

_KEPT_STEPS = 64  # for rows that come late from a device
_MOST = 1024  # forwards, and backwards, that are kept of a step
_BEHIND = 0.25  # of a number: after its pass and all models of it, before the next
_SHARE = 2.0**-10  # of a number, between two models that one backward comes to


@final
class PassCount:
    """Numbers the passes of a process.

    Attributes:
        models: how many are probed now.
        token: what the runs of this process have in common, and no others.
    """

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Start anew: in a forked child, whose passes are its own."""
        self.models = 0
        self.token = secrets.token_hex(8)
        self.number = 0
        self._reached = 0  # models, by the backward under way; 0: none is

    def forward(self) -> float:
        """Return the number of the forward that begins."""
        self._reached = 0
        self.number += 1
        return float(self.number)

    def backward(self) -> float:
        """Return the number of the backward under way, larger for each model that it comes to."""
        self.number += not self._reached
        self._reached += 1
        return self.number + (self._reached - 1) * _SHARE

    def backward_over(self) -> None:
        """Hear that a backward is over."""
        self._reached = 0


OF_THE_PROCESS = PassCount()
os.register_at_fork(after_in_child=OF_THE_PROCESS.begin)


@final
class _Step:
    """The passes of a step."""

    __slots__ = ("backwards", "end", "forwards", "lent", "thrown")

    def __init__(self) -> None:
        self.forwards: list[float] = []  # by micro-batch
        self.backwards: list[tuple[int, float]] = []  # micro-batch, number
        self.lent = 0
        self.thrown = 0  # times that gradients were, before any optimizer stepped
        self.end: float | None = None  # the last pass of any model

    def backward_of(self, micro: int) -> float | None:
        """Return the number of the backward of a micro-batch; None: there may be several."""
        own = [number for m, number in self.backwards if m == micro]
        fit = own or [number for m, number in self.backwards if m > micro]
        return fit[0] if len(fit) == 1 else None


@final
class Passes:
    """The passes of one model, by step."""

    def __init__(self, count: PassCount = OF_THE_PROCESS) -> None:
        self._count = count
        self._several = False  # this model has not been the only one
        self._another_stepped = False  # since gradients were thrown away
        self._now = _Step()
        self._ended: dict[int, _Step] = {}  # by number, oldest first

    def begin(self) -> None:
        """Be one of the models of the process, until `close`."""
        self._count.models += 1

    def close(self) -> None:
        """Hear that there are no more."""
        self._count.models -= 1

    def forward(self) -> None:
        """Hear that a training forward begins."""
        self._several |= self._count.models > 1
        number = self._count.forward()
        if len(self._now.forwards) < _MOST:
            self._now.forwards.append(number)

    def backward(self, micro: int) -> None:
        """Hear that a backward has come into the model, after the forward of `micro`."""
        number = self._count.backward()
        if len(self._now.backwards) < _MOST:
            self._now.backwards.append((micro, number))

    def backward_over(self) -> None:
        """Hear that it is over."""
        self._count.backward_over()

    def lend(self, until: int) -> None:
        """Hear that the micro-batches below `until` were for another model's step."""
        self._now.lent = until

    def another_steps(self) -> None:
        """Hear that an optimizer of something else steps."""
        self._another_stepped = True

    def throw_away(self) -> None:
        """Hear that gradients are gone which no optimizer of this model took."""
        self._now.thrown += not self._another_stepped
        self._another_stepped = False

    def take(self, *, summed_by_hand: bool) -> None:
        """Hear that an optimizer is about to take gradients: those of a backward, or the script's.

        What is gone may be in these.
        """
        if summed_by_hand:
            self._now.thrown = 0

    def end_step(self, step: int) -> None:
        """Hear that a step is over."""
        self._now.end = float(self._count.number)
        self._ended[step] = self._now
        if len(self._ended) > _KEPT_STEPS:
            del self._ended[next(iter(self._ended))]
        self._now = _Step()

    def told(self, step: int, bad: FirstBad | None) -> Mapping[str, float]:
        """Return scalars of a step: what was lent, and if this model is not alone, its passes."""
        now = self._ended.get(step, self._now)
        told = {LENT: float(now.lent), DROPPED: float(now.thrown)}
        found = {name: number for name, number in told.items() if number}
        if not self._several:
            return found
        found[PASS] = float(self._count.number) if now.end is None else now.end
        if bad is not None:
            number = self._number_of(bad, now if bad.step == step else self._ended.get(bad.step))
            if number is not None:
                found[PASS_OF_BAD] = number
        return found

    def _number_of(self, bad: FirstBad, passes: _Step | None) -> float | None:
        """Return the number of the pass in which it was bad first; None: not known."""
        if passes is None:
            return None
        if bad.phase == "step":  # by the optimizer, after all passes of that step
            return None if passes.end is None else passes.end + _BEHIND
        if bad.phase == "forward":
            known = 0 <= bad.micro < len(passes.forwards)
            return passes.forwards[bad.micro] if known else None
        return passes.backward_of(bad.micro)
