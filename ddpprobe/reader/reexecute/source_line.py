"""The line of the user's source from which torch came to run an operator."""

from __future__ import annotations

import linecache
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import nn
from torch.autograd.graph import Node

from ddpprobe.rank.torch_private import anomaly

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)
DOOR = "execute"  # the function of this package that calls the module
_ENTRY = re.compile(r'\s*File "(?P<file>.+)", line (?P<number>\d+), in (?P<function>.+)')


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of source: its file, its number, the function it is in, and its text ("": unknown)."""

    file: str
    number: int
    function: str
    text: str

    def __str__(self) -> str:
        text = f": {self.text}" if self.text else ""
        return f"{self.file}:{self.number}, in {self.function}{text}"


class LineFinder:
    """Finds lines of the user's between this package's frames and torch's.

    Args:
        names: id of a module -> its FQN.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        self._names = names

    def here(self) -> tuple[SourceLine | None, str | None]:
        """Return the innermost line of the user's on this thread's stack, and the module it is in.

        If torch's own module was called directly, its line. (None, None) in a backward.
        """
        line = inner = module = None
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001  (the way to walk a stack)
        while frame is not None and not _is_door(frame):
            file, name = frame.f_code.co_filename, self._module(frame)
            module = name if module is None else module
            if not file.startswith((_TORCH, _OURS)) and line is None:
                line = _line_of(frame)
            elif file.startswith(_TORCH) and inner is None and name is not None:
                inner = _line_of(frame)
            frame = frame.f_back
        return line or inner, module

    def of_node(self, node: Node) -> SourceLine | None:
        """Return the user's line of the forward that made a node of the autograd graph."""
        inner = None
        for entry in reversed(anomaly.traceback_of(node)):
            head, _, text = entry.partition("\n")
            match = _ENTRY.match(head)
            if match is None or match["file"].startswith(_OURS):
                break
            line = SourceLine(match["file"], int(match["number"]), match["function"], text.strip())
            if not line.file.startswith(_TORCH):
                return line
            # The innermost of torch's modules, if none of the user's is between us and it.
            in_module = line.function == "forward" and inner is None
            inner = line if in_module else inner
        return inner

    def _module(self, frame: FrameType) -> str | None:
        owner = frame.f_locals.get("self")
        return self._names.get(id(owner)) if isinstance(owner, nn.Module) else None


def _is_door(frame: FrameType) -> bool:
    """Whether this is where the user's module was called; what is behind it is not theirs."""
    return frame.f_code.co_filename.startswith(_OURS) and frame.f_code.co_name == DOOR


def _line_of(frame: FrameType) -> SourceLine:
    code = frame.f_code
    text = linecache.getline(code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return SourceLine(code.co_filename, frame.f_lineno, code.co_name, text)
