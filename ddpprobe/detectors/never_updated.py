"""`never_updated`: modules that have a gradient, and whose weights nobody has ever changed."""

from __future__ import annotations

import numpy as np

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.rank_scalars import largest
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Mask, SitesOfKind, grown
from ddpprobe.detectors.subtrees import named, named_alike, subtrees
from ddpprobe.detectors.weight_rows import WeightRows, WeightsOfStep, trained
from ddpprobe.records.step import LEARNING_RATE, Anomaly, StepRecord

_COARSE = ("bfloat16", "float16")
_HALF = 0.5  # of what lies between two numbers: less is rounded away


class NeverUpdated(SampledDetector):
    """Warns, once, of modules whose weights are what they were at the first look; or pages of all.

    All parameters of the module must be; one of them must have a gradient by which it would have
    moved if the optimizer did with it what it does with the others, by the smaller of two guesses:
    as far as the median of them (Adam), or as far in proportion to the gradient (SGD). So a bias in
    front of a norm, or an unused part is none. A gain of 1 in bfloat16, whose steps are less than
    half of what lies between two numbers of the dtype, is told as rounded away once the steps add
    up to one such spacing. A large part of the model that requires a gradient and has never had one
    is told, too: the graph does not reach it (but for one of many alike that is not always called,
    an expert). That nothing of the model was ever changed is a page; of a part of it that alone is
    observed, a warning.

    Args:
        steps: steps for which they must not have moved, from the first look on.
        looks: looks for which they must not have.
        spacings: of the numbers about the largest weight, by which one would have moved.
        part: share of the parameters that makes a large part of the model.
        rounded: spacings that it would have moved by in all its steps, had none been rounded.
    """

    name = "never_updated"
    title = "Weights that are never trained"

    def __init__(
        self, *, steps: int = 50, looks: int = 3, spacings: float = 8.0, part: float = 0.25,
        rounded: float = 1.0,
    ) -> None:  # fmt: skip
        at_least(1, steps=steps, looks=looks)
        above_zero(spacings=spacings, part=part, rounded=rounded)
        self._part, self._rounded = part, rounded
        self._steps, self._looks, self._spacings = steps, looks, spacings
        self._reset()

    def _reset(self) -> None:
        self._rows, self._outputs = WeightRows(), SitesOfKind("output")
        self._records = 0
        self._called = np.zeros(0, np.int64)  # of these, those in which each output came
        self._first = np.zeros((0, 4))  # the row at the first look
        self._since = np.zeros(0, np.int64)  # its step
        self._seen = np.zeros(0, np.int64)  # looks
        self._never = np.zeros(0, bool)
        self._would = np.zeros(0, bool)  # have moved
        self._pace = np.zeros(0)  # spacings by which a step would have moved it, at the last look
        self._told = np.zeros(0, bool)
        self._rounds = False  # it was told that steps are rounded away
        self._idle = False  # it was told that the learning rate is 0
        self._pulled = np.zeros(0, bool)  # had a gradient, if of zeros
        self._usual: tuple[float, float] | None = None  # change, and change over gradient

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.skipped or record.missing:
            return []
        if self._idle and largest(record, LEARNING_RATE) == 0:
            self._seen[:] = 0  # a rate of 0 says nothing of who has which tensors: look anew
            return []
        now = self._rows.read(record)
        self._grow(len(now.seen))
        here = self._outputs.read(record, "numel") > 0
        self._called = grown(self._called, len(here), 0) + here
        self._records += 1
        self._follow(now, record.step)
        old = (record.step - self._since >= self._steps) & (self._seen >= self._looks)
        found = self._never & old & ~self._told
        gradient = self._of_all(record, now, found)
        if gradient > 0:
            self._idle = largest(record, LEARNING_RATE) == 0
            if not self._idle:
                self._told |= found
            return [self._nothing(record, found, gradient)]
        cut = self._cut_off(record, found)
        if cut.any():
            self._told |= cut
            return [self._without_gradient(record, cut)]
        whole = self._whole_modules(found, now.seen)
        if whole.any():
            self._told |= whole
            return [self._verdict(record, now, whole)]
        lost = self._rounded_away(found, record.step)
        self._rounds |= bool(lost.any())
        return [self._too_coarse(record, lost)] if lost.any() else []

    def _follow(self, now: WeightsOfStep, step: int) -> None:
        new = now.seen & (self._seen == 0)
        self._first[new], self._since[new] = now.print[new], step
        self._seen[now.seen] += 1
        other = now.seen & (now.print != self._first).any(axis=1)
        self._never &= ~(now.moved | other)
        self._pulled |= np.isfinite(now.gradient)
        moved = np.flatnonzero(now.moved & (now.gradient_rms > 0))
        if len(moved):
            change = now.change[moved]
            ratio = np.median(change / now.gradient_rms[moved])
            self._usual = float(np.median(change)), float(ratio)
        if self._usual is not None:
            with np.errstate(invalid="ignore"):
                expected = np.minimum(self._usual[0], self._usual[1] * now.gradient_rms)
                self._would |= now.seen & (expected > self._spacings * now.spacing)
            looked = now.seen & (now.spacing > 0)
            self._pace[looked] = expected[looked] / now.spacing[looked]

    def _of_all(self, record: StepRecord, now: WeightsOfStep, found: Mask) -> float:
        """Return the norm of all gradients if an optimizer never changed anything; else 0."""
        trains = len(found) and np.isfinite(largest(record, LEARNING_RATE))
        if not trains or self._usual is not None or not found.all():
            return 0.0
        return float(np.sqrt(np.nansum(np.square(now.gradient))))

    def _cut_off(self, record: StepRecord, found: Mask) -> Mask:
        """Return those that never had a gradient, if they are many and require one."""
        without: Mask = found & ~self._pulled
        fewest = max(1.0, self._part * len(found))
        if without.sum() < fewest or not self._pulled.any():
            return without & False
        # One of many alike may be an expert that is never chosen; a layer is called at each step.
        without &= ~named_alike(self._rows.fqns, self._pulled) | self._is_always_called()
        spare = trained(record) - self._pulled.sum()
        return without & bool(without.sum() >= fewest and spare >= without.sum())

    def _is_always_called(self) -> Mask:
        """Return the parameters of modules whose outputs came at each look."""
        always = self._called == self._records
        modules = {self._outputs.fqns[i] for i in np.flatnonzero(always)}
        return np.array([fqn.rpartition(".")[0] in modules for fqn in self._rows.fqns], bool)

    def _whole_modules(self, found: Mask, seen: Mask) -> Mask:
        """Return those of `found` in whose module nothing has moved, and something would have."""
        if not (found & seen & self._would).any():
            return found & False
        owners = np.array([fqn.rpartition(".")[0] for fqn in self._rows.fqns], np.str_)
        moving = set(owners[~self._never])
        pulled = set(owners[found & self._would])
        whole: Mask = found & np.array([o in pulled and o not in moving for o in owners], bool)
        return whole

    def _rounded_away(self, found: Mask, step: int) -> Mask:
        """Return those of a coarse dtype that no step alone could move, if many would have one.

        None of them, once that was told.
        """
        if self._rounds or not found.any():
            return found & False
        coarse = np.array([dtype in _COARSE for dtype in self._rows.dtypes], bool)
        lost: Mask = found & coarse & (self._pace > 0) & (self._pace < _HALF)
        would = lost & (self._pace * (step - self._since) >= self._rounded)
        return lost & bool(would.any())

    def _grow(self, sites: int) -> None:
        self._first = grown(self._first, sites, np.nan)
        self._since = grown(self._since, sites, 0)
        self._seen = grown(self._seen, sites, 0)
        self._never = grown(self._never, sites, 1)
        self._would = grown(self._would, sites, 0)
        self._pace = grown(self._pace, sites, 0.0)
        self._told = grown(self._told, sites, 0)
        self._pulled = grown(self._pulled, sites, 0)

    def _without_gradient(self, record: StepRecord, found: Mask) -> Anomaly:
        fqns = self._rows.fqns
        cut = [fqns[i] for i in np.flatnonzero(found)]
        modules = subtrees(cut, [fqns[i] for i in np.flatnonzero(~found)])
        since = int(self._since[found].min())
        message = (
            f"{len(cut)} of {len(fqns)} parameters require a gradient and have never had one since "
            f"step {since}, in {named(modules)}; maybe the graph does not reach them (detach, "
            "no_grad, a checkpoint whose inputs require none), or requires_grad=False is missing"
        )
        values = {"parameters": len(cut), "since": since}
        return self.anomaly(record, "warn", message, values, module=modules[0], kind="grad")

    def _nothing(self, record: StepRecord, found: Mask, gradient: float) -> Anomaly:
        since, rate = int(self._since[found].min()), largest(record, LEARNING_RATE)
        in_all = trained(record)
        in_part = in_all > len(found)  # the others may move: nobody has rows of them
        what = f"the {len(found)} observed of {in_all:.0f} parameters" if in_part else "the model"
        why = (
            "the learning rate is 0"
            if rate == 0
            else "maybe the optimizer was not given them, or others in their place, or their "
            "learning rate is 0"
            if in_part
            else "maybe the optimizer has other tensors (it was made before fully_shard, or for "
            "another copy of the model), or no step is as large as the spacing of numbers"
        )
        message = (
            f"no bit of {what} has changed since step {since}, though an optimizer steps and "
            f"there are gradients (norm {gradient:.3g}); {why}"
        )
        values = {"parameters": len(found), "since": since, "gradient": gradient}
        level = "page" if rate > 0 and not in_part else "warn"  # which may be how it is meant
        return self.anomaly(record, level, message, values, module="", kind="update")

    def _verdict(self, record: StepRecord, now: WeightsOfStep, found: Mask) -> Anomaly:
        fqns = self._rows.fqns
        never = [fqns[i] for i in np.flatnonzero(found)]
        modules = subtrees(never, [fqns[i] for i in np.flatnonzero(~self._never)])
        since, gradient = int(self._since[found].min()), float(np.fmax.reduce(now.gradient[found]))
        known = not np.isnan(gradient)
        pulled = f"they have a gradient (norm {gradient:.3g}) and " if known else ""
        message = (
            f"no bit of {len(never)} of {len(fqns)} parameters has changed since step {since}, in "
            f"{named(modules)}, though {pulled}others move; "
            "maybe the optimizer was not given them, or others in their place, or their learning "
            "rate is 0, or their phase is yet to come; if that was meant, all is well"
        )
        values = {"parameters": float(len(never)), "since": float(since)}
        values |= {"gradient": gradient} if known else {}
        return self.anomaly(record, "warn", message, values, module=modules[0], kind="update")

    def _too_coarse(self, record: StepRecord, found: Mask) -> Anomaly:
        fqns = self._rows.fqns
        lost = np.flatnonzero(found)
        modules = subtrees([fqns[i] for i in lost], [fqns[i] for i in np.flatnonzero(~found)])
        since, pace = int(self._since[found].min()), float(self._pace[found].max())
        dtypes = sorted({self._rows.dtypes[i] for i in lost})
        message = (
            f"no bit of {len(lost)} of {len(fqns)} parameters has changed since step {since}, in "
            f"{named(modules)}: numbers of {' and '.join(dtypes)} beside their largest weight are "
            f"{1 / pace:.3g} x as far apart as a step would move them, so that it is rounded away; "
            "keep these weights, or what the optimizer steps, in float32"
        )
        values = {"parameters": len(lost), "since": since, "spacings": pace}
        return self.anomaly(record, "warn", message, values, module=modules[0], kind="update")
