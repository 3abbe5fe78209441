"""Histograms of named sites: fixed bins, one per power of two and sign, so that merging is adding.

Bin 0 is the most negative, bin `BINS - 1` the most positive; `EDGES` are their borders. The two
bins beside zero hold all that is smaller as well, the outermost ones all that is larger. Zeros, NaN
and infinities are in no bin: the record's counts have them. So of every tensor that was read as a
whole, bins, zeros and non-finite elements add up to its elements, which `is_whole` asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import COUNTS, NONFINITE, NUMEL, VALUES, Counts, Floats, Values

Bins = NDArray[np.int64]  # [sites, BINS]

OCTAVES = 64  # bins of one sign
BINS = 2 * OCTAVES
LOWEST = -40  # exponent of the bin beside zero: |x| < 2**(LOWEST + 1)
HIGHEST = LOWEST + OCTAVES - 1
# |x| below this is near zero: the power of two next to the 0.05 of fastai's ActivationStats, as
# only the share below a power of two is exact here.
NEAR_ZERO = 2.0**-4
NEAR_ZERO_RATIO = "near_zero_ratio"  # statistic: share of all elements with |x| < NEAR_ZERO
# What a tensor's elements are counted by on its device: sign and exponent of a float32.
PATTERNS, _BIAS, _NO_NUMBER = 512, 127, 255
# Magnitudes by which the metrics count, of which each is a border of the bins: denser where outputs
# are, and down to where a gradient of float16 is lost.
BORDERS = tuple(2.0**n for n in (-36, -32, -28, -24, -20, -16, -14, -12, -10, -8, -6, -4, -2, 0, 2,
                                 4, 8, 16))  # fmt: skip
_ZEROS = COUNTS.index("zeros")
_LEAST = 1e-9  # of an element
_EXTREMES = [VALUES.index("min"), VALUES.index("max")]

_BORDERS = 2.0 ** np.arange(LOWEST + 1, HIGHEST + 2)
EDGES: Floats = np.concatenate((-_BORDERS[::-1], [0.0], _BORDERS))  # [BINS + 1], ascending


def no_histograms() -> tuple[NDArray[np.int64], Bins]:
    """Return the rows and bins of a record without histograms."""
    return np.zeros(0, np.int64), np.zeros((0, BINS), np.int64)


def fold(patterns: NDArray[np.float64], scale: float) -> Bins:
    """Return the bins of elements that were counted by sign and exponent.

    Args:
        patterns: float64 [sites, PATTERNS], whole numbers.
        scale: what all elements had been multiplied by; exact for a power of two, else they are
            moved by the one next to it.
    """
    power = round(np.log2(scale)) if 0.0 < scale < np.inf else 0
    exponents = np.arange(PATTERNS // 2) - _BIAS - power
    octave = np.clip(exponents - LOWEST, 0, OCTAVES - 1)
    bins = np.zeros((len(patterns), BINS), np.int64)
    counted = patterns.astype(np.int64)
    for sign, places in ((0, OCTAVES + octave), (1, OCTAVES - 1 - octave)):
        half = counted[:, sign * PATTERNS // 2 :][:, :_NO_NUMBER]
        np.add.at(bins.T, places[:_NO_NUMBER], half.T)
    return bins


def is_whole(counts: Counts, bins: Bins) -> NDArray[np.bool_]:
    """Return whether each histogram holds every element that its site's counts tell of [sites]."""
    rest: NDArray[np.int64] = counts[:, _ZEROS] + counts[:, NONFINITE].sum(1)
    whole: NDArray[np.bool_] = bins.sum(1) + rest == counts[:, NUMEL]
    return whole


def near_zero(counts: Counts, bins: Bins, below: float = NEAR_ZERO) -> Floats:
    """Return the share of elements with |x| < `below` [sites]; NaN without elements.

    Args:
        counts: int64 [sites, len(COUNTS)].
        bins: of the same sites.
        below: a power of two from 2**(LOWEST + 1) to 2**HIGHEST.

    Raises:
        ValueError: of any other number the share is not known.
    """
    power = np.log2(below) if isinstance(below, float | int) and below > 0 else np.nan
    if power != round(power, 0) or not LOWEST < power <= HIGHEST:
        raise ValueError(
            f"below must be a power of two from 2**{LOWEST + 1} to 2**{HIGHEST}, as the bins are; "
            f"got {below!r}. Write 2**-4."
        )
    width = int(power) - LOWEST
    small = bins[:, OCTAVES - width : OCTAVES + width].sum(1) + counts[:, _ZEROS]
    numel = counts[:, NUMEL].astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        share: Floats = np.where(numel > 0, small / numel, np.nan)
    return share


def count_below(counts: Counts, bins: Bins) -> NDArray[np.int64]:
    """Return how many elements are below each of `BORDERS`, and how many there are at all.

    Args:
        counts: int64 [sites, len(COUNTS)].
        bins: of the same sites.

    Returns:
        int64 [sites, len(BORDERS) + 1].
    """
    by_size = bins[:, OCTAVES:] + bins[:, OCTAVES - 1 :: -1]
    up_to = counts[:, [_ZEROS]] + np.cumsum(by_size, axis=1)
    places = [int(np.log2(border)) - LOWEST - 1 for border in BORDERS]
    return np.concatenate((up_to[:, places], counts[:, [NUMEL]]), axis=1)


def quantiles(counts: Counts, values: Values, bins: Bins, q: Sequence[float]) -> Floats:
    """Return quantiles of the finite elements [sites, len(q)]; NaN without any.

    Each lies in the right bin, so it is known to a factor of two; within the bin, and between the
    smallest and the largest element, it is taken as if the elements stood evenly.

    Args:
        counts: int64 [sites, len(COUNTS)].
        values: float64 [sites, len(VALUES)] of the same sites.
        bins: of the same sites.
        q: shares, each from 0 to 1.

    Raises:
        ValueError: they are none.
    """
    shares = np.asarray(q)
    if (
        shares.dtype.kind not in "fiu"
        or shares.ndim != 1
        or not ((shares >= 0) & (shares <= 1)).all()
    ):
        raise ValueError(f"q must be shares from 0 to 1, such as [0.05, 0.5, 0.95], got {q!r:.80}")
    # Zeros are a part of no width between the two halves.
    parts = np.insert(bins, OCTAVES, counts[:, _ZEROS], axis=1)
    edges = np.insert(EDGES, OCTAVES, 0.0)
    found = np.full((len(bins), len(q)), np.nan)
    for row, up_to in enumerate(np.cumsum(parts, axis=1)):
        total = up_to[-1]
        if total:
            wanted = shares * total
            # The first that reaches it and is not empty: of a share of 0 the first of all.
            part = np.searchsorted(up_to, np.maximum(wanted, _LEAST))
            inside = 1.0 - (up_to[part] - wanted) / parts[row, part]
            low, high = (np.clip(edges[part + i], *values[row, _EXTREMES]) for i in (0, 1))
            found[row] = low + inside * (high - low)
    return found
