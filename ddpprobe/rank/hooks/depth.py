"""Room on the stack for what hooks add to it: a model that is deep must not fail for being watched.

A call of a module takes three frames of Python: torch's `_wrapped_call_impl` and `_call_impl`, and
its own `forward`. With a hook on the module it takes a fourth, which is torch's, too (`inner` in
`_call_impl`), and a hook of ours takes some on top of the innermost one. So what fits below the
recursion limit without hooks fits below four thirds of it with them, whether modules lie in one
another or one calls itself: the limit is raised by as much, and given back at the end.
"""

from __future__ import annotations

import sys
from typing import final

FRAMES = 3  # of Python, in a call of a module without hooks; with a hook it is one more
OWN = 64  # on top, of a hook and of what it calls


@final
class Room:
    """Raises the recursion limit until it is given back; however many want it, it is raised once.

    Attributes:
        taken: how many rooms are not given back.
        before: the limit before the first of them.
    """

    taken = 0
    before = 0

    def __init__(self) -> None:
        if not Room.taken:
            Room.before = sys.getrecursionlimit()
            sys.setrecursionlimit(_raised(Room.before))
        Room.taken += 1
        self._mine = True

    def give_back(self) -> None:
        """Take it back; where the stack is deeper than that just now, it stays.

        A limit that somebody has set meanwhile is theirs.
        """
        if not self._mine:
            return
        if Room.taken == 1 and sys.getrecursionlimit() == _raised(Room.before):
            try:
                sys.setrecursionlimit(Room.before)
            except RecursionError:
                return
        self._mine = False
        Room.taken -= 1


def _raised(limit: int) -> int:
    return limit - (-limit // FRAMES) + OWN
