"""How many looks in a row are enough: fewer beside a rank that differs, or where they are apart."""

from __future__ import annotations

from typing import final

from ddpprobe.detectors.settings import at_least


@final
class EnoughLooks:
    """Decides whether what has been the same at some sampled steps in a row is told.

    Args:
        looks: that are enough by themselves.
        beside: that are enough beside a rank of which another was seen at each of as many, as then
            it is no schedule of the training,
        steps: or where so many steps lie between the first and the last.

    Raises:
        ValueError: `looks` or `beside` is below 2, or `steps` below 1.
    """

    def __init__(self, looks: int, beside: int, steps: int) -> None:
        at_least(2, looks=looks, beside=beside)
        at_least(1, steps=steps)
        self.beside = beside
        self._looks, self._steps = looks, steps

    def reached(self, looks: int, steps: int, *, differ: bool) -> bool:
        """Whether so many looks over so many steps are enough; `differ`: another rank does."""
        return looks >= (self.beside if differ or steps >= self._steps else self._looks)
