"""Whether the reduced gradients are what they should be made of: the ranks' own, by their sums.

A mean is linear, so that the sum of a reduced gradient's elements, times the ranks, is the sum of
the ranks' local ones, up to rounding; and the same factor of it for all parameters where gradients
are summed over the ranks, or divided once more. No norm says that: gradients cancel each other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.paired_rows import paired_rows
from ddpprobe.records.step import (
    JOINED,
    KEPT,
    LOCAL_SGD,
    NONFINITE,
    OBSERVED,
    SUM,
    SUM_SQ,
    TAPPED,
    UNREDUCED,
    Floats,
    Site,
    StepRecord,
)

_TABLES = 8  # of sites: of the last attempts, and of steps that lack ranks
# Elements that cancel each other to less than that, by a rank's norm, say nothing of the factor. So
# do the gradients of what feeds a normalization or a softmax.
CANCELLED = 0.1
CLOSE = 0.01  # relative: factors that are one and the same; a reduction in bfloat16 rounds by less
_OWN = "grad_local"
_PARTED = (UNREDUCED, JOINED, LOCAL_SGD)  # steps whose gradients are no mean over all ranks


class ReductionLaw(NamedTuple):
    """What a step says of its reduction.

    Attributes:
        factor: the reduced gradients as a multiple of the means of the ranks' own: 1 if they are
            these, n if they are the sums over n ranks. The median over the parameters, by how much
            the sum of each says of it.
        rows: of the reduced gradients [n] that are compared.
        own, reduced: what the ranks' own add up to, and n times what the reduced one does [n], by
            the root of the mean square of the ranks' norms.
    """

    factor: float
    rows: NDArray[np.intp]
    own: Floats
    reduced: Floats

    def off(self, factor: float) -> Floats:
        """Return how far each reduced gradient is from a multiple of the mean [n].

        Rounding: 4e-6 in float32 and 6e-3 in bfloat16 at most in all that was measured, on 2 to 4
        ranks; it grows with the root of their number. It is about 1 where one rank has no part in
        the mean, however many there are.
        """
        found: Floats = np.abs(self.reduced - factor * self.own) / max(1.0, abs(factor))
        return found

    @property
    def tells(self) -> NDArray[np.bool_]:
        """Which gradients say anything of a factor [n]: their elements do not cancel each other."""
        return np.abs(self.own) > CANCELLED


def same_factor(one: float, other: float) -> bool:
    """Whether two factors are one and the same, up to rounding."""
    return abs(one - other) <= CLOSE * abs(other)


def reduction_law(record: StepRecord) -> ReductionLaw | None:
    """Compare each parameter's gradient before and after the reduction.

    Returns:
        None unless all of at least two ranks delivered a whole step that was reduced over all of
        them, with a gradient of a parameter before and after that which tells. Nor if what was
        reduced is less than the mean over several micro-batches: it may be that of the last one
        alone, as after a closure (LBFGS) that sets gradients to zero between them.
    """
    return _laws(record)


def _find(record: StepRecord) -> ReductionLaw | None:
    if record.missing or record.partial or record.skipped:
        return None
    micros = _micro_batches(record)
    law = _law(record, micros) if micros else None
    of_some = law is not None and micros > 1 and law.factor < 1 - CLOSE
    return None if of_some else law


def _micro_batches(record: StepRecord) -> float:
    """Return how many each of several ranks had; 0 where a reduction is no mean over all."""
    said = [record.scalars.get(rank, {}) for rank in record.ranks]
    if any(s.get(KEPT, 0.0) > 0 or any(name in s for name in _PARTED) for s in said):
        return 0.0
    many = {s.get("micro_batches", 1.0) for s in said}
    return many.pop() if len(many) == 1 and len(said) > 1 else 0.0


def _law(record: StepRecord, micros: float) -> ReductionLaw | None:
    _, before, after = _pairs(record.sites)
    ranks, counts = len(record.ranks), record.counts
    # On every rank; pipeline stages and tensor parallelism reduce over some of them.
    known = counts[before, TAPPED] == ranks * micros
    known &= (counts[before, OBSERVED] > 0) & (counts[after, OBSERVED] > 0)
    known &= ~(counts[before][:, NONFINITE].any(axis=1) | counts[after][:, NONFINITE].any(axis=1))
    before, after = before[known], after[known]
    with np.errstate(all="ignore"):
        norm = np.sqrt(record.values[before, SUM_SQ] / ranks)
        own = record.values[before, SUM] / norm
        reduced = ranks * record.values[after, SUM] / norm
    told = np.isfinite(own) & np.isfinite(reduced)  # not of a gradient that is zero
    after, own, reduced = after[told], own[told], reduced[told]
    law = ReductionLaw(np.nan, after, own, reduced)
    tells = law.tells
    if not tells.any():
        return None
    factor = _weighted_median(reduced[tells] / own[tells], np.abs(own[tells]))
    return law._replace(factor=factor)


def _weighted_median(values: Floats, weights: Floats) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])


def _is_of_a_mean(site: Site) -> bool:
    return site.placement in (("local",) if site.kind == _OWN else ("replicated", "sharded"))


_pairs = IdentityCache(lambda sites: paired_rows(sites, _OWN, "grad", _is_of_a_mean), _TABLES)
_laws = IdentityCache(_find, 1)  # the detector and several numbers of a step ask for it
