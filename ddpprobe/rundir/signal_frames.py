"""Frames of handlers of signals, which Python calls in the middle of any other code."""

from __future__ import annotations

from types import FrameType


def signal_of(frame: FrameType) -> int | None:
    """Return the signal for which a frame's function was called; None: it was not called for one.

    A handler is called with its number and with the frame that it interrupts. A script may call the
    same function itself, when its training is over.
    """
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]
    given = [frame.f_locals.get(name) for name in names]
    values = [v for g in given for v in (g if isinstance(g, tuple) else (g,))]
    if frame.f_back is None or not any(value is frame.f_back for value in values):
        return None
    return next((int(value) for value in values if isinstance(value, int)), None)


def is_out_of_a_handler(error: BaseException) -> bool:
    """Whether a handler of a signal raised an exception, wherever that came in."""
    trace = error.__traceback__
    while trace is not None:
        if signal_of(trace.tb_frame) is not None:
            return True
        trace = trace.tb_next
    return False
