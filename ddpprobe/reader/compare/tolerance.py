"""How far two runs that do the same may be apart: what rounding does to a statistic.

**One element.** Two runs of one computation (another reduction order, kernel, batch split, number
of ranks) end with tensors `x` and `x + d`, with `|d| <= r * |x|`, where

    r = 2 * eps(dtype) + 64 * eps(accumulator)

Rounding to the dtype of the tensor costs `eps / 2` in each run, and the operand it was made of was
rounded as well: `2 * eps`. A sum of `n` products errs by about `sqrt(n)` roundings of what it is
accumulated in (Higham and Mary, A new approach to probabilistic rounding error analysis, SIAM J.
Sci. Comput. 41(5), 2019): 64 stands for 4096 products, in float64 for float64, in float32 for all
others. A gradient is a product of two such tensors, one from each pass: `2 * r`. What was rounded
stays rounded: within a step `r` never falls in execution order, so the float32 loss of a bfloat16
network is compared like a bfloat16 number.

**A statistic.** Errors of single elements partly cancel in a mean, but not as if all of them were
independent: a rounded weight is in all its outputs, a token's error in all its features. A tensor
of `n` elements that are not zero, with `sqrt(n)` independent errors, has `1 / sqrt(sqrt(n))` of `r`
left:

    min, max   one element moves                  r * abs_max
    mean, rms  `d` as a whole                     r * rms / n**0.25
    zeros      as many elements at most lie so close to 0 that they may fall on either side: r * n

and for mean and rms what their own summation loses (`rank/stats/native.cpp`: float32 over 1024
elements, then float64). Where elements round alike, nothing cancels, and mean and rms may be
`r * rms` apart (by Cauchy and Schwarz): in a constant tensor (a gain of ones), if the runs have it
in different dtypes, and in gradients, which are small sums of large terms. A given `rtol` is taken
as it is:
`rtol * abs_max`, `rtol * rms`. All else that is counted must be equal, and a site observed in both
or in neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import COLUMNS, OBSERVED, TENSORS, Counts, Site, Values, derive

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

ROUNDINGS = 2
PRODUCTS = 4096
_EPS = {
    "float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7,
    "complex128": 2.0**-52, "complex64": 2.0**-23, "complex32": 2.0**-10,
    "float8_e4m3fn": 2.0**-3, "float8_e4m3fnuz": 2.0**-3,
    "float8_e5m2": 2.0**-2, "float8_e5m2fnuz": 2.0**-2,
}  # fmt: skip
_WIDE = ("float64", "complex128")
_WHOLE = ("bool", "int", "uint")
_OWN = 2 * 1.3e-6  # of sum|x|: ours, in each run; measured in stats/native.cpp

_COUNTED = ("nan", "pos_inf", "neg_inf", "numel")
# In the order in which one explains the next.
STATISTICS = ("observed", *_COUNTED, "zeros", "min", "max", "mean", "rms")
# All that a record holds, but on how many tensors hooks were placed.
EXACT_STATISTICS = (
    "observed",
    *_COUNTED,
    *(c.name for c in COLUMNS if c.unit != TENSORS and c.name not in _COUNTED),
)  # fmt: skip


def rounding(dtype: str) -> float:
    """Return `r` of a dtype (without `torch.`): 0 for whole numbers, float32's if it is unknown."""
    if dtype.startswith(_WHOLE):
        return 0.0
    accumulator = _EPS["float64" if dtype in _WIDE else "float32"]
    return ROUNDINGS * _EPS.get(dtype, _EPS["float32"]) + math.sqrt(PRODUCTS) * accumulator


@dataclass(frozen=True, slots=True)
class ComparedRows:
    """What is known of the sites of one step in one run: counts and values, see `records`."""

    counts: Counts
    values: Values

    def of(self, rows: NDArray[np.intp]) -> ComparedRows:
        """Return some of them."""
        return ComparedRows(self.counts[rows], self.values[rows])


@dataclass(frozen=True, slots=True)
class RoundingLimits:
    """What rounding may do to each site: `r`, and whether all elements may round `alike`."""

    r: Floats
    alike: Mask

    def of(self, rows: NDArray[np.intp]) -> RoundingLimits:
        """Return the limits of some sites."""
        return RoundingLimits(self.r[rows], self.alike[rows])


@dataclass(frozen=True, slots=True)
class Tolerance:
    """What counts as equal.

    Attributes:
        rtol: replaces `r` of every dtype but whole numbers; None: by dtype.
        atol: added for each element, in the tensor's own unit.
        exact: every number must be equal, to the last bit.
    """

    rtol: float | None = None
    atol: float = 0.0
    exact: bool = False

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the columns of `excess`."""
        return EXACT_STATISTICS if self.exact else STATISTICS

    def limits(self, pairs: Sequence[tuple[Site, Site]]) -> RoundingLimits:
        """Return what follows from the dtypes in both runs, for all sites in execution order."""
        each = np.array([max(rounding(a.dtype), rounding(b.dtype)) for a, b in pairs], np.float64)
        grads = np.array([a.kind.startswith("grad") for a, _ in pairs], bool)
        recast = np.array([a.dtype != b.dtype for a, b in pairs], bool)
        if self.rtol is not None:
            r = np.full(len(pairs), self.rtol)
        else:
            r = np.maximum.accumulate(each) * np.where(grads, 2, 1)
        return RoundingLimits(np.where(each > 0, r, 0.0), grads | recast)

    def numbers(self, rows: ComparedRows) -> Floats:
        """Return the statistics [sites, len(statistics)]; NaN where there is no finite element."""
        columns = [derive(name, rows.counts, rows.values) for name in self.statistics[1:]]
        observed = (rows.counts[:, OBSERVED] > 0).astype(np.float64)
        return np.stack((observed, *columns), axis=1)

    def allowed(self, a: ComparedRows, b: ComparedRows, limits: RoundingLimits) -> Floats:
        """Return by how much the statistics may differ [sites, len(statistics)]."""
        r = limits.r
        out = np.zeros((len(r), len(self.statistics)))
        if self.exact:
            return out
        numel, peak, rms = (
            np.fmax(derive(name, a.counts, a.values), derive(name, b.counts, b.values))
            for name in ("numel", "abs_max", "rms")
        )
        zeros = np.fmin(derive("zeros", a.counts, a.values), derive("zeros", b.counts, b.values))
        own = numel * _EPS["float64"]  # additions in float64, at most numel roundings in each run
        left = np.ones(len(r))
        if self.rtol is None:
            own += np.where(r >= rounding("float32"), _OWN, 0.0)
            same = limits.alike | (_range(a) == 0) | (_range(b) == 0)
            rounded = np.fmax(numel - zeros, 1)  # a zero is what it is
            left = np.where(same, 1.0, rounded**-0.25)
        with np.errstate(invalid="ignore", over="ignore"):
            near_zero = numel if self.atol else np.ceil(r * numel)
            extreme = r * peak + self.atol
            average = (r * left + own) * rms + self.atol
        loose = {
            "zeros": near_zero,
            "min": extreme,
            "max": extreme,
            "mean": average,
            "rms": average,
        }
        for i, name in enumerate(self.statistics):
            out[:, i] = loose.get(name, 0.0)
        return out

    def excess(self, a: ComparedRows, b: ComparedRows, limits: RoundingLimits) -> Floats:
        """Return difference / allowed [sites, len(statistics)]: above 1 the two have parted.

        0 where both have no data; infinite where only one has, and where equality was asked for.
        """
        one, two = self.numbers(a), self.numbers(b)
        seen = one[:, :1] * two[:, :1] > 0
        same = (one == two) | (np.isnan(one) & np.isnan(two))
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            out = np.abs(one - two) / self.allowed(a, b, limits)
        # Without a number in one of them, or with an infinite allowance, the counts have the say.
        out = np.where(same | np.isnan(out), 0.0, out)
        out[:, 1:] = np.where(seen, out[:, 1:], 0.0)
        return np.nan_to_num(out, nan=0.0, posinf=np.inf)


def _range(rows: ComparedRows) -> Floats:
    low, high = (derive(name, rows.counts, rows.values) for name in ("min", "max"))
    with np.errstate(over="ignore"):
        return high - low
