"""Whether the script's own handlers of signals have run, seen without touching them.

Python keeps no trace of a handled signal. But it keeps one of a function that was called: until its
code has run, it is as it was compiled. Python 3.11 counts the first calls (`co_warmup`), 3.13
replaces the first instruction by a faster one. Since 3.12 `sys.monitoring` also tells of every call
of one function's code while all other code runs as ever: so it is known who called, and whether the
handler was left by an exception, such as that of `sys.exit()`. What `signal.getsignal()` returns,
and what the handler is given, stays the script's own.
"""

from __future__ import annotations

import ctypes
import functools
import signal
import sys
from dataclasses import dataclass
from types import CodeType, FunctionType, MethodType
from typing import Any, final

from ddpprobe.rank.frames import stack
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.signal_frames import signal_of

ASKING = (signal.SIGTERM, signal.SIGINT)
_WARMUP_OFFSET = 52  # bytes into the PyCodeObject of Python 3.11, to a short
_MONITORING: Any = getattr(sys, "monitoring", None)
_TOOLS = (4, 3)  # numbers of `sys.monitoring` that are meant for nobody in particular


@dataclass(slots=True)
class _Seen:
    """A handler's code. `unused`: it had never run when it was seen; calls are counted since."""

    code: CodeType
    unused: bool
    calls: int = 0
    signals: int = 0  # of the calls, those that a signal made
    returns: int = 0
    caught: int = 0  # of those that have not returned: the exception was caught, training went on


@final
class Handlers:
    """The script's handlers of SIGTERM and SIGINT, as far as they were seen."""

    def __init__(self) -> None:
        self._forget()

    def look(self) -> None:
        """Take note of the handlers that are set now: two look-ups, if none is new."""
        for number in ASKING:
            handler = signal.getsignal(number)
            if self._set.get(number) is not handler:
                self._set[number] = handler
                self._take(handler)

    def step_ended(self) -> None:
        """Look, where a step ends: whatever a handler has raised, training went on after it."""
        self.look()
        for seen in self._seen.values():
            seen.caught = seen.calls - seen.returns

    @property
    def present(self) -> bool:
        """Whether there is one, or was."""
        return self._opaque or bool(self._seen)

    @property
    def may_have_run(self) -> bool:
        """Whether one of them has run, or it is not known that none has."""
        self.look()
        return (
            self._opaque or self._fuse.blown or not all(map(self._is_unused, self._seen.values()))
        )

    @property
    def codes(self) -> frozenset[CodeType]:
        """The code of those that are functions of Python."""
        self.look()
        return frozenset(seen.code for seen in self._seen.values())

    @property
    def left_by_an_exception(self) -> bool:
        """Whether a signal is known to have called one that has not returned, nor been survived."""
        return any(
            seen.signals == seen.calls > seen.returns + seen.caught for seen in self._seen.values()
        )

    def release(self) -> None:
        """Watch none of them any more."""
        if self._tool is not None:
            for seen in self._seen.values():
                _MONITORING.set_local_events(self._tool, seen.code, 0)
            _MONITORING.free_tool_id(self._tool)
        self._forget()

    def _forget(self) -> None:
        self._set: dict[int, object] = {}  # by signal: the handler that was seen last
        self._seen: dict[int, _Seen] = {}  # by the code's id: equal codes are not the same
        self._opaque = False  # one of them is no function of Python
        self._tool: int | None = None
        self._fuse = Fuse("signal handlers")

    def _take(self, handler: object) -> None:
        if not callable(handler) or handler is signal.default_int_handler:
            return
        code = _code(handler)
        if code is None:
            self._opaque = True
        elif id(code) not in self._seen:
            self._seen[id(code)] = _Seen(code, unused=is_as_compiled(code))
            self._watch(code)

    def _is_unused(self, seen: _Seen) -> bool:
        # Who watches a code changes it.
        return (
            seen.unused and not seen.calls and (self._tool is not None or is_as_compiled(seen.code))
        )

    def _watch(self, code: CodeType) -> None:
        if _MONITORING is None:
            return
        events = _MONITORING.events
        if self._tool is None:
            self._tool = next((t for t in _TOOLS if _MONITORING.get_tool(t) is None), None)
            if self._tool is None:
                return
            _MONITORING.use_tool_id(self._tool, "ddpprobe")
            for event, told in ((events.PY_START, self._began), (events.PY_RETURN, self._returned)):
                _MONITORING.register_callback(self._tool, event, self._fuse.guard(told))
        _MONITORING.set_local_events(self._tool, code, events.PY_START | events.PY_RETURN)

    def _began(self, code: CodeType, _offset: int) -> None:
        seen = self._seen[id(code)]
        seen.calls += 1
        frame = next(f for f in stack(sys._getframe()) if f.f_code is code)  # noqa: SLF001  (its documented name)
        seen.signals += signal_of(frame) is not None

    def _returned(self, code: CodeType, _offset: int, _value: object) -> None:
        self._seen[id(code)].returns += 1


def is_as_compiled(code: CodeType) -> bool:
    """Whether a code is known never to have run."""
    return _traces() and _trace(code) == _trace(code.replace())


@functools.cache
def _traces() -> bool:
    """Whether this Python leaves a trace in the code that it runs, which 3.12 need not do."""
    code = _once.__code__
    before = _trace(code) == _trace(code.replace())
    _once()
    return before and _trace(code) != _trace(code.replace())


def _once() -> None:
    """Be called by nobody else."""


def _trace(code: CodeType) -> object:
    if sys.version_info >= (3, 12):
        return getattr(code, "_co_code_adaptive", None)
    if sys.implementation.name != "cpython" or CodeType.__basicsize__ <= _WARMUP_OFFSET:
        return None
    return ctypes.c_short.from_address(id(code) + _WARMUP_OFFSET).value


def _code(handler: object) -> CodeType | None:
    """Return the code that runs first when a handler is called; None if that is not Python's."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    if not isinstance(handler, FunctionType | MethodType):
        handler = getattr(type(handler), "__call__", None)  # noqa: B004  (the function itself)
    function = handler.__func__ if isinstance(handler, MethodType) else handler
    return function.__code__ if isinstance(function, FunctionType) else None


OF_THE_SCRIPT = Handlers()  # signals and the numbers of `sys.monitoring` are the process's
