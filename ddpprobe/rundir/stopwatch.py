"""Our own part of the training's host time, by one stopwatch at every way into our code.

Whatever torch or the user calls of ours goes through a `Fuse`, and a fuse that has a stopwatch lets
it time the call: once, whatever of ours is called inside. What it takes to be called at all passes
before the first look at the clock and after the second one, in torch as in Python: the stopwatch
counts the calls, and whoever has measured what one of a kind takes sets `way`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from typing import ParamSpec, TypeVar, final

P = ParamSpec("P")
R = TypeVar("R")


class Caller(IntEnum):
    """Who calls: it decides what a call takes that no clock in it can see."""

    PYTHON = 0  # a plain call: of the user, of an optimizer's hook, of a callback
    MODULE = 1  # a module, by a hook that hangs on it alone
    TENSOR = 2  # autograd, by a hook of a tensor or a parameter


@final
class Stopwatch:
    """Adds up what passes in the calls that it has wrapped.

    A backward on a device calls from a thread of its own: two threads that are in here at the same
    time share the interpreter, so the time of the first one is counted, and not that of both.

    Args:
        now: the clock, in seconds.

    Attributes:
        calls: how many calls were timed, by `Caller`.
        way: what one takes besides, in seconds, by `Caller`; 0 until it was measured.
        beside: seconds that threads of our own took of a core, as they tell it.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.beside = 0.0
        self.calls = [0] * len(Caller)
        self.way = [0.0] * len(Caller)
        self._now = now
        self._spent = 0.0
        self._since: float | None = None  # when the call under way came in

    @property
    def seconds(self) -> float:
        """What was ours of the training's own time so far, the call under way included."""
        (a, b, c), (x, y, z) = self.calls, self.way  # at every heartbeat, so without a loop
        known, since = self._spent + a * x + b * y + c * z, self._since
        return known if since is None else known + self._now() - since

    def timed(self, fn: Callable[P, R], caller: Caller = Caller.PYTHON) -> Callable[P, R]:
        """Wrap an entry point, which `caller` calls."""
        now, calls = self._now, self.calls

        def entered(*args: P.args, **kwargs: P.kwargs) -> R:
            if self._since is not None:
                return fn(*args, **kwargs)
            since = self._since = now()
            try:
                return fn(*args, **kwargs)
            finally:
                self._spent += now() - since
                self._since = None
                calls[caller] += 1

        return entered
