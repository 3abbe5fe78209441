"""How often one thing is told: once, until it was quiet for a while or became much worse."""

from __future__ import annotations

import math


class Telling:
    """Decides whether what is seen again is told again.

    Args:
        quiet_steps: steps without it, after which it is told again.
        worse: told at once when it is so many times what was told.
    """

    def __init__(self, quiet_steps: int, worse: float = math.inf) -> None:
        self._quiet, self._worse = quiet_steps, worse
        self._last: int | None = None
        self._told = 0.0

    def due(self, step: int, size: float = 1.0) -> bool:
        """Take note that it is seen at a step; return whether to tell it."""
        again = self._last is None or step - self._last > self._quiet
        self._last = step
        if again or size > self._worse * self._told:
            self._told = size
            return True
        return False
