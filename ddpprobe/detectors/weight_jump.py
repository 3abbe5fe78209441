"""`weight_jump`: weights that are suddenly others, or grow or shrink all together step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.rank_scalars import largest
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Floats, Mask, SitesOfKind, SiteWindow, grown
from ddpprobe.detectors.subtrees import and_also
from ddpprobe.detectors.telling import Telling
from ddpprobe.detectors.weight_rows import WeightRows, WeightsOfStep
from ddpprobe.records.step import LEARNING_RATE, Anomaly, StepRecord

LEAST_MOVE = 0.005  # of the logarithm of a norm: one that hardly moves is not judged by less
FEW = 6  # parameters of which half are too few to be all together
WHOLE = 0.25  # of the rate at which they shrink slowly: that of the norm of all together
SEVERAL = 3  # parameters that move far together are no chance
COUNTED = 2.0  # times the largest rise between two looks, which a count that began anew has reached
# A weight with which nothing can be computed; and how many times what it was before. Where more
# than one parameter comes there at once, or from step to step, the run explodes: others tell that.
USELESS, SANE = 1e15, 1e12
_WORDS = {"param": "weight", "buffer": "buffer"}
_BESIDE = {
    "param": " beside the optimizer, and at its learning rate and weight decay", "buffer": ""
}  # fmt: skip


class WeightJump(SampledDetector):
    """Warns when the largest weight of a parameter is many times the largest of its last looks.

    It pages where that of one parameter alone is beyond 1e15, as a flipped bit of an exponent makes
    it.

    A flipped bit, a bad load, one layer written over. It warns as well when the norm of a parameter
    moves between two looks many times as far as it ever did, up or down (fewer times are enough
    for several parameters at one look, as of a layer that was loaded anew), and when half of the
    parameters or more change their norm, in one direction, faster than training does: a decay that
    is applied at each step, or is too strong. What has just begun to be trained may grow fast, from
    zero; a weight that stood still to the bit for a whole window, and that a step now moves, is
    looked at anew. But for the rule of all together buffers are judged as parameters are: the
    running variance of a batch norm, say, which only evaluation uses. A buffer that has only
    risen, and is down to what it gains between two looks, is a count that began anew, and one of
    zeros and ones a mask. What is resized is looked at anew.

    A largest weight below the learning rate is not judged: one step of Adam may set it (the bias
    of keys, whose gradient is rounding alone).

    Args:
        ratio: how many times the largest of the window.
        window: looks at a parameter that are compared with, and needed.
        moved: how many times the largest move of the norm in the window,
        share: and at least so much of the norm.
        together: as `moved`, where three parameters or more move so far between the same looks; at
            a learning rate that has risen, so many times further.
        rate: change of the norm in a step, as a share, over `over` steps.
        over: steps for which it must go on.
        shrink: as `rate`, for norms that shrink over `shrink_over` steps.
        shrink_over: steps for which that must go on.
        settle: steps since the first look at a parameter for which it may grow, or shrink slowly.
        quiet_steps: steps without a jump after which one is told again.
        worse: a jump so many times the reported one is told at once.
    """

    name = "weight_jump"
    title = "Weights jumped"

    def __init__(
        self, *, ratio: float = 4.0, window: int = 10, moved: float = 20.0, share: float = 0.1,
        together: float = 5.0, rate: float = 0.03, over: int = 10, shrink: float = 0.008,
        shrink_over: int = 20, settle: int = 50, quiet_steps: int = 100, worse: float = 10.0,
    ) -> None:  # fmt: skip
        above_zero(
            ratio=ratio, moved=moved, share=share, together=together, rate=rate, shrink=shrink,
            worse=worse,
        )  # fmt: skip
        at_least(1, window=window, over=over, shrink_over=shrink_over)
        at_least(0, settle=settle, quiet_steps=quiet_steps)
        self._window, self._rate, self._over = window, rate, over
        self._limits = _Limits(ratio, moved, math.log1p(share), together)
        self._shrink, self._shrink_over = shrink, shrink_over
        self._settle, self._repeat = settle, (quiet_steps, worse)
        self._reset()

    def _reset(self) -> None:
        self._rows, self._buffers = WeightRows(), SitesOfKind("buffer")
        self._own = {
            "param": _Past(self._window, self._limits),
            # Statistics of a batch norm all follow its input.
            "buffer": _Past(self._window, self._limits._replace(together=math.inf), may_count=True),
        }
        self._pace = _Pace(self._over, self._settle)
        self._slow_pace = _Pace(self._shrink_over, self._settle)
        # Apart, so that a buffer which leaps by design does not silence the weights.
        self._jumps = {kind: Telling(*self._repeat) for kind in self._own}
        self._drifts = Telling(*self._repeat)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one leap and one drift."""
        if record.skipped or record.missing:
            return []
        now = self._rows.read(record)
        lr, at = largest(record, LEARNING_RATE), record.step
        weights = self._own["param"]
        weights.forget_rest(now.moved, now.still)
        leaps = [("param", weights.read(now.numel, now.largest, now.norm, lr, at))]
        buffers = _of_buffers(self._buffers, record)
        if buffers is not None:
            leaps.append(("buffer", self._own["buffer"].read(*buffers, math.nan, at)))
        leapt_at = [place for leap in leaps[0][1] if leap for place in leap.places]
        self._slow_pace.forget(leapt_at)  # so far in one step is no slow decay
        leapt = [
            anomaly
            for kind, (jump, step) in leaps
            for anomaly in self._leapt(record, kind, jump) or self._leapt(record, kind, step)
        ]
        return [*_as_one(leapt), *self._drifted(record, now)]

    def _leapt(self, record: StepRecord, kind: str, leap: _Leap | None) -> list[Anomaly]:
        if leap is None or not self._jumps[kind].due(record.step, leap.times[0]):
            return []
        fqns = self._rows.fqns if kind == "param" else self._buffers.fqns
        mine = [fqns[place] for place in leap.places]
        what, also = _WORDS[kind], and_also(mine[1:])
        if leap.of_norm:
            names = ("norm", "before", "times")
            message = (
                f"norm of the {what}{_of_all(record, kind, mine[0])} went from {leap.before:.3g} "
                f"to {leap.now:.3g} between two looks, {leap.times[0]:.3g} x as far as at any of "
                f"the {self._window} before{also}: look at what wrote to it{_BESIDE[kind]}"
            )
        else:
            names = ("abs_max", "highest", "ratio")
            message = (
                f"largest {what} {leap.now:.3g} is {leap.times[0]:.3g} x the largest "
                f"{leap.before:.3g} of the last {self._window} looks at it{also}"
            )
        numbers = leap.now, leap.before, leap.times[0]
        values = {**dict(zip(names, numbers, strict=True)), "parameters": len(mine)}
        alone = kind == "param" and len(mine) == 1 and not leap.of_norm
        broken = alone and leap.now > USELESS > leap.before * SANE
        if broken:
            message += (
                ": maybe a flipped bit; nothing can be computed with it: resume from a checkpoint"
            )
        level = "page" if broken else "warn"
        return [self.anomaly(record, level, message, values, module=mine[0], kind=kind)]

    def _drifted(self, record: StepRecord, now: WeightsOfStep) -> list[Anomaly]:
        fast, slow = (pace.read(now, record.step) for pace in (self._pace, self._slow_pace))
        # What is young grows from zero, or shrinks from a start that was too large.
        rates = np.where(fast.young, np.minimum(fast.rates, 0.0), fast.rates)
        shrinks = np.where(slow.young, 0.0, np.minimum(slow.rates, 0.0))
        for moved, found, limit in ((fast, rates, self._rate), (slow, shrinks, self._shrink)):
            # What began at zero has a clock of its own: a few such are not half of the model.
            if len(found) < max(2, int(now.seen.sum()) / 2):
                continue
            rate = _usual(found)
            if moved is slow and moved.whole > -math.log1p(limit) * WHOLE:
                continue  # a few small ones, such as biases, wander so where there is only noise
            if abs(rate) > math.log1p(limit) and self._drifts.due(record.step, abs(rate)):
                return [self._drift(record, rate, len(found), moved.steps)]
        return []

    def _drift(self, record: StepRecord, rate: float, parameters: int, steps: int) -> Anomaly:
        way = "grown" if rate > 0 else "shrunk"
        share, whole = math.expm1(rate), math.expm1(rate * steps)
        message = (
            f"half of {parameters} parameters or more have {way} by {abs(whole):.3g} of their "
            f"norm within {steps} steps, {abs(share):.1%} a step in the mean: look at weight "
            "decay, at what is done to the weights beside the optimizer, and at the learning rate"
        )
        values = {"rate": share, "parameters": parameters}
        return self.anomaly(record, "warn", message, values, module="", kind="param")


def _as_one(leapt: list[Anomaly]) -> list[Anomaly]:
    """Return one verdict of what leapt at one look: that of weights names the buffer, too."""
    if len(leapt) < 2:
        return leapt
    first, other = leapt
    return [replace(first, message=f"{first.message}; buffer {other.module} leapt as well")]


def _of_all(record: StepRecord, kind: str, fqn: str) -> str:
    """Say that a norm is that of the tensors of all ranks, each its own: a buffer of DDP's."""
    own = any((s.kind, s.fqn, s.placement) == (kind, fqn, "local") for s in record.sites)
    return ", of all ranks together," if own and len(record.ranks) > 1 else ""


def _of_buffers(buffers: SitesOfKind, record: StepRecord) -> tuple[Floats, Floats, Floats] | None:
    """Return size, largest magnitude and norm of each buffer; NaN: not seen, or nothing to judge.

    None where the run has shown none. What holds zeros and ones alone is a mask (pruning), and
    has as many of them as it is given.
    """
    low = buffers.read(record, "min")
    if not len(low):
        return None
    high, whole, square = (buffers.read(record, stat) for stat in ("max", "sum", "sum_sq"))
    mask = (low >= 0) & (high <= 1) & (whole == square)  # of each element x - x * x >= 0
    numel, peak, norm = (
        np.where(mask, np.nan, buffers.read(record, stat)) for stat in ("numel", "abs_max", "norm")
    )
    return numel, peak, norm


def _usual(rates: Floats) -> float:
    """Return the median; of a few, what more than half of them reach in one direction."""
    if len(rates) >= FEW:
        return float(np.median(rates))
    middle = np.sort(rates)[[(len(rates) - 1) // 2, len(rates) // 2]]
    return float(middle[np.argmin(np.abs(middle))]) if middle.prod() > 0 else 0.0


@dataclass(frozen=True, slots=True)
class _Leap:
    """Tensors that leapt, the furthest first: places, how many times, and numbers of the first."""

    of_norm: bool
    places: list[int]
    times: list[float]
    now: float
    before: float


class _Limits(NamedTuple):
    """Of a leap, see `WeightJump`; `share` is of the logarithm of a norm."""

    ratio: float
    moved: float
    share: float
    together: float


class _Past:
    """The last looks at each tensor of a kind: its largest magnitude, and its norm."""

    def __init__(self, window: int, limits: _Limits, *, may_count: bool = False) -> None:
        self._window, self._limits, self._may_count = window, limits, may_count
        self._largest = SiteWindow(window)
        self._moves = SiteWindow(window)  # of the logarithm of the norm, from look to look
        self._rates = SiteWindow(window)  # the same in a step
        self._rises = SiteWindow(window)  # of the norm, from look to look
        self._learning = SiteWindow(window)  # the learning rate at the looks
        self._norm, self._numel = np.zeros(0), np.zeros(0)  # at the last look at each
        self._at = np.zeros(0, np.int64)  # which was at this step
        self._still = np.zeros(0, np.int64)  # looks in a row at which a step did not change it

    def forget_rest(self, moved: Mask, still: Mask) -> None:
        """Begin anew with those [n] that a step has moved after a window at which none did.

        What it was while it stood still says nothing of how far it moves when it is trained. One
        that no step moves, and that is another, was written to: that is judged.
        """
        self._still = grown(self._still, len(moved), 0)
        self._begin(moved & (self._still >= self._window))
        self._still[still] += 1
        self._still[moved] = 0

    def _begin(self, those: Mask) -> None:
        if those.any():
            self._norm = grown(self._norm, len(those), 0)
            self._norm[those] = 0
            for window in (
                self._largest, self._moves, self._rates, self._rises, self._learning
            ):  # fmt: skip
                window.forget(those)

    def read(
        self, numel: Floats, largest: Floats, norm: Floats, lr: float, step: int
    ) -> tuple[_Leap | None, _Leap | None]:
        """Look at the tensors [n] at a step; NaN: not seen. Return leaps of magnitude, and of norm.

        A magnitude that is not above the learning rate is not judged; NaN: all are.
        """
        sites, seen = len(numel), np.isfinite(numel)
        last = grown(self._numel, sites, np.nan)
        self._numel = np.where(seen, numel, last)
        self._norm = grown(self._norm, sites, 0)
        self._begin(seen & np.isfinite(last) & (numel != last))  # resized
        return self._jump(largest, lr), self._step(norm, lr, step)

    def _jump(self, now: Floats, lr: float) -> _Leap | None:
        sites = len(now)
        highest = self._largest.highest(sites)
        known = np.isfinite(now) & (self._largest.points(sites) >= self._window) & (highest > 0)
        known &= ~(now <= lr)
        ratio = np.divide(now, highest, out=np.zeros(sites), where=known)
        self._largest.add(now)
        return _leap(ratio, self._limits.ratio, now, highest, of_norm=False)

    def _step(self, now: Floats, lr: float, step: int) -> _Leap | None:
        sites = len(now)
        last, at = self._norm, grown(self._at, sites, step)
        steps = np.maximum(step - at, 1)
        known = (now > 0) & (last > 0)
        move = np.abs(np.log(now, out=np.zeros(sites), where=known)
                      - np.log(last, out=np.zeros(sites), where=known))  # fmt: skip
        # Where fewer steps are sampled than before, the same pace goes further between two looks.
        furthest = np.maximum(self._moves.highest(sites), self._rates.highest(sites) * steps)
        furthest = np.maximum(furthest, LEAST_MOVE)
        far = known & (self._moves.points(sites) >= self._window) & (move > self._limits.share)
        if self._may_count:
            far &= ~self._began_anew(now, last, known)
        times = np.divide(move, furthest, out=np.zeros(sites), where=far)
        risen = np.fmax(lr / self._learning.lowest(sites), 1.0)
        together = int((times > self._limits.together * risen).sum()) >= SEVERAL
        self._learning.add(np.where(known & (lr > 0), lr, np.nan))
        self._moves.add(np.where(known, move, np.nan))
        self._rates.add(np.where(known, move / steps, np.nan))
        self._norm = np.where(np.isfinite(now), now, last)
        self._at = np.where(np.isfinite(now), step, at)
        limit = self._limits.together if together else self._limits.moved
        return _leap(times, limit, now, last, of_norm=True)

    def _began_anew(self, now: Floats, last: Floats, known: Mask) -> Mask:
        """Return which are counts, by their past, that have begun anew since the last look."""
        sites = len(now)
        anew: Mask = known & (self._rises.lowest(sites) >= 0)
        anew &= (now < last) & (now <= COUNTED * self._rises.highest(sites))
        self._rises.add(np.subtract(now, last, out=np.full(sites, np.nan), where=known))
        return anew


def _leap(
    times: Floats, limit: float, now: Floats, before: Floats, *, of_norm: bool
) -> _Leap | None:
    """Return those that leapt by more than a limit; None if none did."""
    order = np.argsort(-times, kind="stable")[: int((times > limit).sum())]
    if not len(order):
        return None
    first = order[0]
    numbers = float(now[first]), float(before[first])
    return _Leap(of_norm, order.tolist(), times[order].tolist(), *numbers)


@dataclass(frozen=True, slots=True)
class _Rates:
    """Of parameters whose norm is known long enough: change of log(norm) in a step.

    `young`: the time began soon after the first look; `steps` is the shortest time. `whole`: the
    rate of the norm of all of them together.
    """

    rates: Floats
    whole: float
    young: Mask
    steps: int


class _Pace:
    """How fast the norm of each parameter changes, over so many steps or more."""

    def __init__(self, over: int, settle: int) -> None:
        self._over, self._settle = over, settle
        self._first = np.zeros(0, np.int64)  # step of the first look
        self._then = np.zeros(0, np.int64)  # look that the norm is compared with
        self._norm = np.zeros(0)  # at that look

    def forget(self, places: Sequence[int]) -> None:
        """Begin anew with parameters that have leapt: what a step did is no pace."""
        self._norm[[place for place in places if place < len(self._norm)]] = 0

    def read(self, now: WeightsOfStep, step: int) -> _Rates:
        sites = len(now.seen)
        self._first = grown(self._first, sites, step)
        self._then = grown(self._then, sites, step)
        self._norm = grown(self._norm, sites, 0)
        steps = step - self._then
        known = now.seen & (now.norm > 0) & (self._norm > 0) & (steps >= self._over)
        rates: Floats = np.log(now.norm[known] / self._norm[known]) / steps[known]
        young: Mask = (self._then - self._first)[known] < self._settle
        whole, shortest = 0.0, 0
        if known.any():
            larger = np.linalg.norm(now.norm[known]) / np.linalg.norm(self._norm[known])
            whole = float(np.log(larger) / np.median(steps[known]))
            shortest = int(steps[known].min())
        anew = now.seen & ((steps >= self._over) | ~(self._norm > 0))
        self._then[anew], self._norm[anew] = step, now.norm[anew]
        return _Rates(rates, whole, young, shortest)
