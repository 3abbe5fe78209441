"""Frames of Python: who called whom, and how a line of code is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import CodeType, FrameType


def stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame, its caller, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType) -> str:
    """Return the name of the module that a frame's code is of."""
    return str(frame.f_globals.get("__name__"))  # of none, "None" is no module of torch's either


def line_in_words(code: CodeType, line: int) -> str:
    """Return `file:line in function`."""
    return f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"  # noqa: PTH119
