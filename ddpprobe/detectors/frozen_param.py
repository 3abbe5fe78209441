"""`frozen_param`: weights that always moved stand still to the bit, though they have a gradient."""

from __future__ import annotations

from collections import deque

import numpy as np

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.learning_rate import FadedRate
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Floats, Mask, grown
from ddpprobe.detectors.subtrees import named, subtrees
from ddpprobe.detectors.weight_rows import WeightRows, WeightsOfStep, trained
from ddpprobe.records.step import Anomaly, StepRecord

MOST = 1 << 20
# Times as long as the run took before it stopped, for which one must stand still that stopped when
# others began: of two phases that take turns one is rarely so many times as long as the other.
TURN = 4
AT_REST = 1e-3  # of the largest gradient of the attempt: what is left may be converged
MOST_BEGINS = 64  # bounds the state


class FrozenParam(SampledDetector):
    """Finds weights that moved at every look and do not change by a bit any more.

    A page if none of the model's does: what is computed from now on is lost. A warning, once for
    all that stopped together, if a part of it does not, or if no more than a part is observed. A
    gradient must be there, as it was when they last moved; an expert without tokens, or a frozen
    part, has none. Changes that had come down to the spacing of the numbers were stopped by
    rounding: the end of a schedule. What stopped when others began that had waited with a
    gradient of their own (two optimizers that take turns) is told only if it stands still for four
    times as long as all steps before it stopped. A learning rate that has come down to next to
    nothing, and goes on like that for longer than any schedule ends, is told by itself.

    Args:
        steps: steps for which they must have stood still.
        least: looks in a row at which a parameter must have moved.
        looks: looks for which they must have stood still.
        gradient: share that must still be there of the gradient's norm when it last moved.
        spacings: of the numbers about the largest weight, which the last change must have had.
        quiet_steps: steps in which nothing stops, after which a part is told again.
        rate: share of the highest learning rate that is next to nothing.
    """

    name = "frozen_param"
    title = "Weights do not move any more"

    def __init__(
        self, *, steps: int = 20, least: int = 8, looks: int = 2, gradient: float = 0.01,
        spacings: float = 16.0, quiet_steps: int = 100, rate: float = 1e-5,
    ) -> None:  # fmt: skip
        at_least(1, steps=steps, least=least, looks=looks)
        at_least(0, quiet_steps=quiet_steps)
        above_zero(gradient=gradient, spacings=spacings, rate=rate)
        self._steps, self._least, self._looks = steps, least, looks
        self._gradient, self._spacings, self._quiet = gradient, spacings, quiet_steps
        self._share_of_rate = rate
        self._reset()

    def _reset(self) -> None:
        self._rows = WeightRows()
        self._rate = FadedRate(self._share_of_rate, self._steps)
        self._print = np.zeros((0, 4))
        self._since = np.zeros(0, np.int64)  # first look at which it was what it is now
        self._active = np.zeros(0, np.int64)  # looks in a row at which it moved, before that
        self._away = np.zeros(0, np.int64)  # looks in a row at which it did not
        self._pull = np.zeros(0)  # norm of the gradient when it last moved
        self._change = np.zeros(0)  # the last change, in spacings
        self._told = np.zeros(0, bool)
        self._first = np.zeros(0, np.int64)  # step of the first look
        self._last = np.zeros(0, np.int64)  # step of the last look
        self._stop = np.zeros((0, 2), np.int64)  # looks between which it stopped
        self._waited = np.zeros(0, np.int64)  # looks in a row with a gradient at which it did not
        self._begins: deque[tuple[int, int]] = deque(maxlen=MOST_BEGINS)  # looks between which
        self._all: tuple[int, int] | None = None  # first step and looks at which nothing moved
        self._last_told: int | None = None
        self._highest = 0.0  # norm of the gradients of all that a look had

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.skipped or record.missing:
            return []
        faded = self._rate.update(record)
        if faded is not None:
            return [self._of_rate(record, *faded)]
        now = self._rows.read(record)
        self._grow(len(now.seen), record.step)
        self._highest = max(self._highest, _norm(now.gradient))
        self._take_turns(now, record.step)
        self._follow(now, record.step)
        judged = now.seen & (self._active >= self._least)
        with np.errstate(invalid="ignore"):
            alive = (now.gradient >= self._gradient * self._pull) & (now.gradient > 0)
        stopped = judged & now.still & alive & (self._change >= self._spacings)
        since = self._all_stopped(record.step, judged, now, stopped)
        if since is not None:
            new = not self._told[judged].all()
            self._told[:] = True
            return [self._verdict(record, now, stopped, since, whole=True)] if new else []
        long = (record.step - self._since >= self._steps) & (self._away >= self._looks)
        found = stopped & long & ~self._told
        found &= ~self._in_turn(found, record.step)
        if not found.any():
            return []
        if self._is_all(found):
            self._told[:] = True
            return [self._verdict(record, now, found, int(self._since[found].min()), whole=True)]
        self._told |= found
        due = self._last_told is None or record.step - self._last_told > self._quiet
        self._last_told = record.step
        first = int(self._since[found].min())
        return [self._verdict(record, now, found, first, whole=False)] if due else []

    def _all_stopped(
        self, step: int, judged: Mask, now: WeightsOfStep, stopped: Mask
    ) -> int | None:
        """Return since when nothing has moved, if that is so for long enough.

        Parameters take turns, so that for this one need not be seen twice.
        """
        if not judged.any():
            return None
        if now.moved.any() or (judged & ~now.still).any() or 2 * stopped.sum() < judged.sum():
            self._all = None
            return None
        first, looks = self._all or (step, 0)
        self._all = (first, looks + 1)
        return first if step - first >= self._steps and looks + 1 > self._looks else None

    def _is_all(self, found: Mask) -> bool:
        """Whether nothing moves any more of what did."""
        trained = self._active >= self._least
        moving = (self._active > 0) & (self._away == 0)
        return not moving.any() and 2 * found.sum() >= trained.sum()

    def _take_turns(self, now: WeightsOfStep, step: int) -> None:
        """Note when parameters stop, and when others begin that had waited."""
        stops = now.still & (self._away == 0)
        self._stop[stops, 0], self._stop[stops, 1] = self._last[stops], step
        began = now.moved & (self._waited >= self._looks)
        self._begins.extend((int(last), step) for last in np.unique(self._last[began]))
        self._waited[now.moved] = 0
        with np.errstate(invalid="ignore"):
            pulled = now.gradient > 0
        self._waited[now.still] = np.where(pulled, self._waited + 1, 0)[now.still]
        self._last[now.seen] = step

    def _in_turn(self, found: Mask, step: int) -> Mask:
        """Return those of `found` that stopped when others began, and may come back."""
        in_turn = found & (step - self._stop[:, 1] <= TURN * (self._stop[:, 1] - self._first))
        for place in np.flatnonzero(in_turn):
            low, high = self._stop[place]
            in_turn[place] = any(a < high and low < b for a, b in self._begins)
        return in_turn

    def _follow(self, now: WeightsOfStep, step: int) -> None:
        moved, still = now.moved, now.still
        # The first look behind the last change may be one at which nothing moves any more.
        other = now.seen & (now.print != self._print).any(axis=1)
        self._since[other] = step
        self._print[other] = now.print[other]
        back = moved & (self._away > 0)
        self._active[back] = self._away[back] = 0
        self._told[back] = False
        self._active[moved] = np.minimum(self._active[moved] + 1, MOST)
        self._pull[moved] = now.gradient[moved]
        self._change[moved] = now.largest_change[moved] / now.spacing[moved]
        self._away[still] += 1

    def _grow(self, sites: int, step: int) -> None:
        self._print = grown(self._print, sites, np.nan)
        self._since = grown(self._since, sites, 0)
        self._active = grown(self._active, sites, 0)
        self._away = grown(self._away, sites, 0)
        self._pull = grown(self._pull, sites, np.nan)
        self._change = grown(self._change, sites, np.nan)
        self._told = grown(self._told, sites, 0)
        self._first = grown(self._first, sites, step)
        self._last = grown(self._last, sites, step)
        self._stop = grown(self._stop, sites, 0)
        self._waited = grown(self._waited, sites, 0)

    def _of_rate(self, record: StepRecord, rate: float, since: int) -> Anomaly:
        highest = self._rate.highest
        message = (
            f"the learning rate is {rate:.3g}, {rate / highest:.2g} of its highest, and has been "
            f"next to nothing since step {since}: the weights hardly move any more; look for "
            "a schedule that is stepped per batch and was meant per epoch, or one for fewer steps"
        )
        values = {"lr": rate, "highest": highest, "since": since}
        return self.anomaly(record, "warn", message, values, kind="update")

    def _verdict(
        self, record: StepRecord, now: WeightsOfStep, found: Mask, since: int, *, whole: bool
    ) -> Anomaly:
        fqns = self._rows.fqns
        still, moving = self._away > 0, (self._active > 0) & (self._away == 0)
        gone = [fqns[i] for i in np.flatnonzero(found)]
        modules = [""] if whole else subtrees(gone, [fqns[i] for i in np.flatnonzero(moving)])
        none_moves = modules == [""]
        # Those count as well whose gradient is gone, or whose last change was small.
        count = int((found | still).sum()) if none_moves else len(gone)
        gradient = _norm(now.gradient[found])
        rests = none_moves and gradient < AT_REST * self._highest
        # Else others may move, of which nobody has rows.
        all_known = whole and trained(record) <= len(fqns)
        where = "all that is observed" if whole and not all_known else named(modules)
        why = (
            "it has converged, and an optimizer that sees it (L-BFGS) does nothing any more; else "
            if rests
            else ""
        )
        why += (
            "the learning rate is 0, or the optimizer's step is left out, or it was given others"
            if all_known
            else "their learning rate is 0, or the optimizer has lost them"
        )
        message = (
            f"no bit of {count} of {len(fqns)} parameters has changed since step {since}, in "
            f"{where}, though they have a gradient (norm {gradient:.3g}); maybe {why}"
        )
        values = {"parameters": count, "since": since, "gradient": gradient}
        level = "page" if all_known and not rests else "warn"
        return self.anomaly(record, level, message, values, module=modules[0], kind="update")


def _norm(norms: Floats) -> float:
    """Return the norm of several gradients together, of those that are known."""
    return float(np.sqrt(np.nansum(np.square(norms))))
