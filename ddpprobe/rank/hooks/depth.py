"""Room on the stack for what hooks add to it: a model that is deep must not fail for being watched.

A module with a hook takes one frame of Python more while it runs, which is torch's own (`inner` in
`Module._call_impl`), and a hook of ours a few on top of the innermost. Where modules lie in one
another hundreds deep, the recursion limit is raised by as much, and given back at the end.
"""

from __future__ import annotations

import sys
from typing import final

from torch import nn

DEEP = 32  # modules in one another; with fewer there is room enough
FRAMES = 1  # of Python that a hook costs each of them
OWN = 64  # on top, of a hook and of what it calls


@final
class Room:
    """Raises the recursion limit for a model, until it is given back.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        depth = max(name.count(".") + bool(name) for name, _ in root.named_modules())
        self._more = FRAMES * depth + OWN if depth >= DEEP else 0
        if self._more:
            sys.setrecursionlimit(sys.getrecursionlimit() + self._more)

    def give_back(self) -> None:
        """Take it back; where the stack is deeper than that just now, it stays."""
        more, self._more = self._more, 0
        limit = sys.getrecursionlimit() - more
        if more and limit > OWN:
            try:
                sys.setrecursionlimit(limit)
            except RecursionError:
                self._more = more
