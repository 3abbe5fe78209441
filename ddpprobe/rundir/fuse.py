"""The only place in ddpprobe that swallows errors.

A `Fuse` wraps the places where our code is *entered* from a stranger's (a hook, a step event, the
daemon's loop). Inside, everything simply raises. An error is logged once, counted, and blows the
fuse: from then on the component is off and costs one attribute look-up. `DDPPROBE_STRICT=1` turns
the containment off, for our own tests. Only `Exception` is contained: Ctrl-C and SystemExit are the
user's, and so is what the user's handler of a signal raises while we are at work: a time that is
up, a preemption.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ddpprobe.rundir import switches
from ddpprobe.rundir.signal_frames import is_out_of_a_handler
from ddpprobe.rundir.stopwatch import Caller, Stopwatch

P = ParamSpec("P")
R = TypeVar("R")


def harmless(log: logging.Logger) -> logging.Logger:
    """Make a logger contain what the handlers and filters of a user raise; return it.

    `logging` lets it through to whoever logs, which here is the training. What they do not take
    goes to stderr. `DDPPROBE_STRICT=1` lets it through, too.
    """
    handle = log.handle

    def taken(record: logging.LogRecord) -> bool:
        handle(record)
        return True

    def contained(record: logging.LogRecord) -> None:
        if not _Silent("log").guard(taken)(record) and logging.lastResort is not None:
            _Silent("log").guard(logging.lastResort.handle)(record)

    log.handle = contained  # type: ignore[method-assign]
    return log


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text that says something; "" if it has none."""
    # The standard library's own way survives a `__str__` that raises whatever it likes.
    said = "".join(traceback.format_exception_only(error)).partition(
        f"{type(error).__qualname__}: "
    )[2]
    return next((line.strip() for line in said.splitlines() if line.strip()), "")


def _in_one_line(error: Exception) -> str:
    """Name an exception, without the advice that CUDA's go on with."""
    return f"{type(error).__name__}: {first_line(error)}"


class Fuse:
    """Contains the failures of one component.

    Args:
        component: name in the log line and in `ddpprobe_component_up{component=...}`.
        allowed: errors in total after which the component is switched off.
        on_blow: called once when that happens; what it raises is contained as well.
        stopwatch: times what is entered, for what enters from the training; None: nobody does.
    """

    def __init__(
        self, component: str, allowed: int = 1, on_blow: Callable[[], None] | None = None,
        stopwatch: Stopwatch | None = None,
    ) -> None:  # fmt: skip
        self.component = component
        self.errors = 0
        self.blown = False
        self.last_error = ""
        self._allowed = allowed
        self._on_blow = on_blow
        self._stopwatch = stopwatch
        self._unsaid: Exception | None = None  # it blew where the stack was too deep to say so
        self._strict = switches.is_on(switches.STRICT)

    def guard(self, fn: Callable[P, R], caller: Caller = Caller.PYTHON) -> Callable[P, R | None]:
        """Wrap an entry point: it returns None once the fuse has blown, and never raises.

        Args:
            fn: what is entered.
            caller: who enters.
        """
        # The clock runs in here: where the stack has no frame left for it, this fuse must know.
        within = fn if self._stopwatch is None else self._stopwatch.timed(fn, caller)

        @functools.wraps(fn)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R | None:
            if self.blown:
                if self._unsaid is not None:
                    self._say_late()
                return None
            try:
                return within(*args, **kwargs)
            except Exception as error:
                if self._strict or is_out_of_a_handler(error):
                    raise
                try:
                    self._contain(error)
                except RecursionError:
                    # No frame is left even to say so: the next call that comes here has more room.
                    self.blown, self._unsaid = True, error
                return None

        return guarded

    def _say_late(self) -> None:
        error, self._unsaid = self._unsaid, None
        if error is not None:
            try:
                self.blown, self.errors = False, 0
                self._contain(error)
            except RecursionError:
                self.blown, self._unsaid = True, error

    def _contain(self, error: Exception) -> None:
        self.errors += 1
        self.last_error = _in_one_line(error)
        if self.errors == 1:
            logger.warning(
                "ddpprobe: %s failed and is contained; training goes on (%s). "
                "DDPPROBE_STRICT=1 raises instead.",
                self.component,
                self.last_error,
                exc_info=error,
            )
        if self.errors >= self._allowed and not self.blown:
            self.blown = True
            if self._on_blow is not None:
                # What broke the component may break its cleaning up as well.
                Fuse(f"switching {self.component} off").guard(self._on_blow)()


class _Silent(Fuse):
    """Contains what goes wrong in saying what has gone wrong: nobody is left to be told."""

    def _contain(self, error: Exception) -> None:
        self.last_error = _in_one_line(error)


logger = harmless(logging.getLogger("ddpprobe"))
