"""Parameters whose reduced gradient is larger than a mean of the ranks' own can be."""

from __future__ import annotations

import numpy as np

from ddpprobe.detectors.sites_of_kind import Beside, Floats, SitesOfKind, grown
from ddpprobe.records.step import StepRecord

MORE = 1.5  # times a bound that is exact: a hook that compresses may go a little beyond
FAR = 4.0  # where that makes all together larger, too


class Misplaced:
    """Follows each parameter's gradient, before the reduction and after it.

    For n ranks with gradients g_r: |mean g_r|^2 <= mean |g_r|^2 (Jensen), and a merged row of local
    gradients holds the sum of |g_r|^2. A sum over the ranks is larger for nearly all of them, and
    for all together: that is not judged here, unless those that are far beyond are fewer than half,
    and all others together are what a mean can be.

    Args:
        repeats: sampled steps in a row at which a parameter must be beyond.
    """

    def __init__(self, repeats: int) -> None:
        self._repeats = repeats
        self._reduced = SitesOfKind("grad")
        self._local = Beside(self._reduced, "grad_local")
        self._beyond = np.zeros(0, np.int64)  # sampled steps in a row, by reduced gradient

    def update(self, record: StepRecord) -> dict[str, float]:
        """Take the next whole sampled step of several ranks that reduced one micro-batch each.

        Returns:
            FQN -> how many times the largest norm that a mean can have.
        """
        reduced, own = (sites.read(record, "norm") for sites in (self._reduced, self._local))
        self._beyond = grown(self._beyond, len(reduced), 0)
        known = np.isfinite(own) & np.isfinite(reduced) & (own > 0)
        ranks = len(record.ranks) ** 0.5
        ratio = np.divide(ranks * reduced, own, out=np.zeros(len(own)), where=known)
        more = ratio > MORE
        others = known & ~more
        few = 2 * more.sum() < known.sum()
        beyond = more & _is_a_mean(ranks * reduced[known], own[known])
        beyond |= (ratio > FAR) & few & _is_a_mean(ranks * reduced[others], own[others])
        self._beyond = np.where(beyond, self._beyond + 1, 0)
        places = np.flatnonzero(self._beyond >= self._repeats)
        return {self._reduced.fqns[place]: float(ratio[place]) for place in places}


def _is_a_mean(reduced: Floats, own: Floats) -> bool:
    """Whether several gradients together may be one: norms, the reduced ones times its root."""
    return bool(np.square(reduced).sum() <= np.square(own).sum())
