"""Frames of Python: who called whom, how a line of code is named, and whose its file is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import CodeType, FrameType

OURS = ("torch.", "ddpprobe.")  # beginnings of the names of modules that are no script's
_STDLIB = os.path.dirname(os.__file__) + os.sep  # noqa: PTH120  (compared as text)
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


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


def is_of_a_package(file: str) -> bool:
    """Whether a file was installed with a package."""
    return any(name in file for name in _PACKAGES)


def is_of_python(file: str) -> bool:
    """Whether a file is of Python's own library, below which packages may be installed."""
    return file.startswith(_STDLIB) and not is_of_a_package(file)


def is_of_the_script(frame: FrameType) -> bool:
    """Whether a frame is of neither Python's own library nor torch's; it may be of a package's."""
    file = frame.f_code.co_filename
    return not (
        is_of_python(file) or file.startswith("<frozen") or module_of(frame).startswith(OURS)
    )
