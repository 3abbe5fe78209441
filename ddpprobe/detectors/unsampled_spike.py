"""`unsampled_spike`: a gradient between two sampled steps that was far larger than any sampled."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.rank_scalars import scalars
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Beside, Floats, SitesOfKind, SiteWindow, grown
from ddpprobe.detectors.subtrees import common_module
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import MOMENT_DECAY, Anomaly, StepRecord

_LEAST = 1e-3  # of the largest gradient among those that are compared
_EXACT = ("float32", "float64")  # in a coarser state the difference of two looks is rounding


class UnsampledSpike(SampledDetector):
    """Warns when the second moment says that a gradient no sample has seen was far larger.

    Adam and RMSprop keep a running mean of squared gradients, v' = d v + (1 - d) g^2, of every
    step. So two looks at it, k steps apart, give the weighted mean of |g|^2 over these k steps to
    the rounding, sampled or not: (V' - d^k V) / (1 - d^k), where V is the sum of v over a parameter
    (Kingma and Ba, arXiv:1412.6980, algorithm 1). It is compared with the largest sampled |g|^2 of
    the same parameters, and with what it was in the looks before. What is clipped before it comes
    to the optimizer has done no harm, and is not in v. Steps of the run are taken for steps of the
    optimizer. Where one left V as it was (a scaler's skip, no gradient) V did not decay either: so
    it is not enough that the mean is large: V' - V alone must be, by the same measure.

    Args:
        ratio: root of the mean of squares, by the largest sampled norm,
        worse: and by the largest such root before.
        window: sampled gradients, and looks, that are compared with.
        least: sampled gradients that a parameter must have shown.
        looks: looks before this one that must have been compared.
        quiet_steps: steps without one after which it is told again.
    """

    name = "unsampled_spike"
    title = "Gradient spike between sampled steps"

    def __init__(
        self, *, ratio: float = 4.0, worse: float = 4.0, window: int = 64, least: int = 8,
        looks: int = 4, quiet_steps: int = 100,
    ) -> None:  # fmt: skip
        above_zero(ratio=ratio, worse=worse)
        at_least(1, window=window, least=least, looks=looks)
        at_least(0, quiet_steps=quiet_steps)
        at_least(least, window=window)
        self._ratio, self._worse = ratio, worse
        self._window, self._least, self._looks = window, least, looks
        self._quiet = quiet_steps
        self._reset()

    def _reset(self) -> None:
        self._moments = SitesOfKind("optim_state")
        self._gradients = Beside(self._moments, "grad")
        self._exact = np.zeros(0, np.bool_)  # which have a dtype that is
        self._sampled = SiteWindow(self._window)  # norms of gradients
        self._past = SiteWindow(self._window)  # roots of the means, by the largest sampled norm
        self._sums, self._steps = np.zeros(0), np.zeros(0, np.int64)  # of the last look at each
        self._decay: float | None = None
        self._telling = Telling(self._quiet)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.skipped or record.missing:  # what lacks ranks is a part of the sum
            return []
        sums = self._moments.read(record, "sum")
        sites = len(sums)
        self._sampled.add(self._gradients.read(record, "norm"))
        decays = set(scalars(record, MOMENT_DECAY))
        decay = decays.pop() if len(decays) == 1 else None
        before, steps = grown(self._sums, sites, np.nan), grown(self._steps, sites, 0)
        if len(self._exact) < sites:
            self._exact = np.array([d in _EXACT for d in self._moments.dtypes], np.bool_)
        seen = np.isfinite(sums) & self._exact
        self._sums = np.where(seen, sums, before)
        self._steps = np.where(seen, record.step, steps)
        same, self._decay = decay == self._decay, decay
        if decay is None or not same or not 0 < decay < 1:
            return []
        between = record.step - steps
        known = seen & np.isfinite(before) & (self._sampled.points(sites) >= self._least)
        kept = np.power(decay, between[known])
        squares = np.maximum(sums[known] - kept * before[known], 0) / (1 - kept)
        risen = np.maximum(squares - before[known], 0)  # (V' - V) / (1 - d^k)
        alone = squares * (1 - kept) / (1 - decay)  # of one gradient, at the last of the steps
        places, steps = np.flatnonzero(known), between[known]
        return self._judge(record, places, squares, alone, risen, steps)

    def _judge(
        self, record: StepRecord, places: NDArray[np.intp], squares: Floats, alone: Floats,
        risen: Floats, between: NDArray[np.int64],
    ) -> list[Anomaly]:  # fmt: skip
        """Compare the mean squares of |g| since the last look at some parameters."""
        sites = len(self._sums)
        highest = self._sampled.highest(sites)[places]
        ratios = np.divide(np.sqrt(squares), highest, out=np.zeros(len(places)), where=highest > 0)
        usual, points = self._past.highest(sites)[places], self._past.points(sites)[places]
        now = np.full(sites, np.nan)
        now[places] = ratios
        self._past.add(now)
        due = (points >= self._looks) & (ratios > self._ratio) & (ratios > self._worse * usual)
        due &= np.sqrt(risen) > self._ratio * highest
        # A gradient that is rounding alone (the bias of keys) may do what it likes.
        due &= highest > _LEAST * highest.max(initial=0)
        if not due.any() or not self._telling.due(record.step):
            return []
        return [self._verdict(record, places[due], alone[due], highest[due], between[due])]

    def _verdict(
        self, record: StepRecord, places: NDArray[np.intp], alone: Floats, highest: Floats,
        between: NDArray[np.int64],
    ) -> Anomaly:  # fmt: skip
        """Return what is to be said of the parameters that show it; all of their gradients as one.

        A gradient of an earlier one of these steps must have been larger to leave as much.
        """
        fqns = [self._moments.fqns[place] for place in places]
        norm = math.sqrt(float(alone.sum()))
        largest = math.sqrt(float(np.square(highest).sum()))
        steps = int(between.max())
        what = fqns[0] if len(fqns) == 1 else f"{len(fqns)} parameters"
        message = (
            f"between steps {record.step - steps} and {record.step} the optimizer's second moment "
            f"took in as much as one gradient of {what} of norm {norm:.3g} or more leaves there; "
            f"the largest that was sampled is {largest:.3g}. Either an unsampled gradient was so "
            "large (clip gradients, sample more often), or the state was written to"
        )
        values = {
            "norm": norm, "highest": largest, "ratio": norm / largest, "parameters": len(fqns),
        }  # fmt: skip
        module = fqns[0] if len(fqns) == 1 else common_module(fqns) or None
        return self.anomaly(record, "warn", message, values, module=module, kind="optim_state")
