"""The model whose steps others of its process follow: a student, while its teacher has none.

A frozen model has no optimizer, and mostly runs without grad. What it returns belongs to the step
of the model that learns from it, so its clock asks that model's.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol, final


class Clock(Protocol):
    """The clock of a model, as the others see it."""

    @property
    def next_step(self) -> int:
        """The step that a forward now belongs to."""

    @property
    def trains(self) -> bool:
        """Whether its model is in training mode: else this is an evaluation."""


@final
class Host:
    """Made before any of the models is observed; each clock comes when it begins to listen."""

    def __init__(self) -> None:
        self._clock: weakref.ref[Clock] | None = None
        self._followers: weakref.WeakKeyDictionary[Clock, Callable[[bool], object]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def clock(self) -> Clock | None:
        """The clock of the model that is followed; None: it has not begun, or is over."""
        return None if self._clock is None else self._clock()

    def hear(self, clock: Clock, follow: Callable[[bool], object] | None) -> None:
        """Take in a clock that begins; `follow`, of a follower, is called after each step."""
        if follow is None:
            self._clock = weakref.ref(clock)
        else:
            self._followers[clock] = follow

    def leave(self, clock: Clock) -> None:
        """Forget a clock that is over."""
        self._followers.pop(clock, None)
        if self.clock is clock:
            self._clock = None

    def stepped(self, clock: Clock, *, skipped: bool) -> None:
        """Tell the followers that a step of the model is over; a follower's own is nobody's."""
        if self.clock is clock:
            for follow in list(self._followers.values()):
                follow(skipped)
