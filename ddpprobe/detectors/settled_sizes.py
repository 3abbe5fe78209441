"""Sizes of outputs that stay as they are for a while, and then are others: what a loop changes."""

from __future__ import annotations

from typing import final

import numpy as np

from ddpprobe.detectors.level_window import LevelWindow
from ddpprobe.detectors.sites_of_kind import Floats

LEAST = 4  # looks that a size stays, at least, to be one that the loop has chosen
MOVED = 0.1  # decades between two such sizes; less explains little
_SAME = 1e-6  # decades: the same size


@final
class SettledSizes:
    """The last sizes of each site; what all elements together hide is seen at single sites.

    Fewer samples of more pixels are as many elements; the rows of the logits tell. Texts of any
    length, and a last batch that is smaller, have sizes that do not stay.

    Args:
        length: looks that are remembered.
    """

    def __init__(self, length: int) -> None:
        self._sizes = LevelWindow(length)

    def push(self, logs: Floats, step: int) -> None:
        """Remember log10 of how many elements each site has [sites]; NaN where nobody knows."""
        self._sizes.push(logs, step)

    def have_moved(self, since: float = -np.inf, least_now: int = LEAST) -> bool:
        """Whether some site went from one size that stayed to another one, at a step or after it.

        Args:
            since: that step.
            least_now: looks for which the last size must have stayed.
        """
        moves = np.diff(self._sizes.values_since(-np.inf), axis=0)  # NaN: of a size not known
        changed = np.abs(moves) > _SAME
        if not changed.any():
            return False
        settled = ~changed[len(changed) - least_now + 1 :].any(axis=0)
        often = np.cumsum(changed.astype(np.int64), axis=0)
        often[LEAST:] -= often[:-LEAST].copy()  # of the last few looks, at each
        settled &= (often <= 1).all(axis=0)
        late = len(self._sizes.values_since(since)) - 1
        lately = np.abs(moves[len(moves) - late :]) > MOVED
        return bool((lately & settled).any())
