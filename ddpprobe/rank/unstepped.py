"""A loop that goes on without its optimizer: passes, and no step any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from ddpprobe.rundir.fuse import logger

STEPS = 8  # of an optimizer, without which a loop is not known
# Passes whose gradients are thrown away, times as many and one as a step ever had of them; passes
# in all, beside eight times as many as a step ever had. A gradient that is measured now and then
# takes fewer, and no accumulation grows so at once.
THROWN = PASSES = 32
TIMES = 8
UNHEARD = 64  # backwards of the training before any step, after which it is asked for one
_LEARNT = 4  # times these bounds, at most, that a step after such a time makes usual


@final
class Unstepped:
    """Learns how many passes a step takes, and knows when there is no step to come.

    From then on what would have been a step is one: as many passes as a step has, or such as a
    `zero_grad` follows. What becomes of the weights is then seen as in any other step.

    Args:
        may_come: whether an optimizer of torch lives that may step the model yet.
    """

    def __init__(self, may_come: Callable[[], bool] = lambda: True) -> None:
        self._may_come = may_come
        self._steps = 0
        self._most_passes, self._most_thrown = 1, 0
        self._goes_on = False
        self._begin()

    def _begin(self) -> None:
        self._passes = self._thrown = 0  # since an optimizer's step
        self._part = 0  # passes since then, or since the last end of a step that had none

    def another_steps(self) -> None:
        """Hear that another model's optimizer steps: the passes may be for that."""
        self._goes_on = False
        self._begin()

    def backward(self) -> None:
        """Hear that a backward of the training loop is over."""
        self._passes += 1
        self._part += 1
        if self._passes == UNHEARD and not (self._steps or self._may_come()):
            logger.warning(
                "ddpprobe: %d backwards of the model and no step, and no optimizer of torch has "
                "its parameters: all of it is one step, which is never over, so that no record of "
                "a step is made. In a loop that steps by hand, call probe.step() after each step.",
                self._passes,
            )

    def throw_away(self) -> None:
        """Hear that gradients are gone which no optimizer of this model took."""
        self._thrown += 1

    def step(self) -> None:
        """Hear of a step that an optimizer took, or a scaler gave up."""
        self._steps += 1
        self._most_passes = max(self._most_passes, min(self._passes, _LEARNT * self._enough))
        self._most_thrown = max(self._most_thrown, min(self._thrown, _LEARNT * self._too_many))
        self._goes_on = False
        self._begin()

    @property
    def goes_on(self) -> bool:
        """Whether the loop goes on without an optimizer's step."""
        if not self._goes_on and self._steps >= STEPS:
            self._goes_on = self._passes >= self._enough or self._thrown >= self._too_many
        return self._goes_on

    def end(self, *, gone: bool) -> bool:
        """Return whether a step is over, of a loop that goes on, now that a forward begins.

        Args:
            gone: whether the gradients of the last pass are.
        """
        over = self._part > 0 and (gone or self._part >= self._most_passes)
        if over:
            self._part = 0
        return over

    @property
    def _enough(self) -> int:
        return PASSES + TIMES * self._most_passes

    @property
    def _too_many(self) -> int:
        return THROWN * (1 + self._most_thrown)
