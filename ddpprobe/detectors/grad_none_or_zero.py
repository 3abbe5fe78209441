"""`grad_none_or_zero`: parameters that had a gradient have none any more, or one of zeros.

Something cut the graph: a part that was frozen, detached or masked, a dead ReLU after it. The
optimizer's momentum may move the weights for a while yet.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.coverage import NEVER, patience
from ddpprobe.detectors.rank_gradients import LostGradients, RankGradients
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import SitesOfKind
from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.detectors.subtrees import (
    by_subtree,
    named,
    named_alike,
    nearest_loss,
    replaced,
    subtrees,
)
from ddpprobe.records.derived import is_in_expert
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import Anomaly, StepRecord

MOST_ACTIVE = 256  # sampled steps that are counted


class GradNoneOrZero(SoundStepsDetector):
    """Warns when gradients that were always there stay None or zero; once for all that stopped.

    A parameter whose gradient comes and goes (an expert, LayerDrop, a branch) is left alone: how
    long one must be away follows from how long it had been there without a break, as for
    `coverage`. Where a large part of the model stops at one step, `least_away` sampled steps do.
    So are those that only some ranks have lost, which the reduction hides; the rank is named. One
    that another of its module takes the place of, at that very step, was renamed (pruning). A
    module whose gradients have been exactly zero from the first look on, while others have theirs,
    is told once: weights of zeros or a dead activation after it.

    Args:
        steps: steps for which it must have been away.
        least: sampled steps in a row at which it must have been there.
        odds: how unlikely an absence by chance must be, one in so many.
        least_away: sampled steps for which it must have been away.
        part: share of the parameters that makes a large part of the model.
        never: steps from the first look on in which a module had a gradient of zeros.
        least_never: sampled steps of these.
    """

    name = "grad_none_or_zero"
    title = "Gradients stopped"

    def __init__(
        self, *, steps: int = 15, least: int = 8, odds: int = 20_000, least_away: int = 3,
        part: float = 0.25, never: int = 40, least_never: int = 5,
    ) -> None:  # fmt: skip
        at_least(0, steps=steps)
        at_least(1, least=least, odds=odds, least_away=least_away, never=never)
        at_least(1, least_never=least_never)
        above_zero(part=part)
        self._steps, self._least_away, self._part = steps, least_away, part
        self._least, self._never, self._least_never = least, never, least_never
        self._needed = np.array(
            [patience(n, odds, least, least_away) for n in range(MOST_ACTIVE + 1)]
        )
        self._reset()

    def _reset(self) -> None:
        self._gradients = SitesOfKind("grad")
        self._of_ranks = RankGradients(self._needed, self._least, self._steps)
        self._active = np.zeros(0, np.int64)  # sampled steps in a row with a gradient
        self._away = np.zeros(0, np.int64)  # sampled steps in a row without, since then
        self._since = np.zeros(0, np.int64)  # the first step of these
        self._told = np.zeros(0, bool)
        self._zeros = np.zeros(0, np.int64)  # sampled steps with one of zeros and without any other
        self._zeros_since = np.zeros(0, np.int64)  # the first step of these
        self._ever = np.zeros(0, bool)  # it had one that was not zero

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.skipped or record.missing:
            return []
        norm = self._gradients.read(record, "norm")
        known = len(self._told)
        self._grow(len(norm))
        nonfinite = self._gradients.read(record, "nonfinite") > 0
        here = (norm > 0) | nonfinite
        fresh = np.flatnonzero(here[known:]) + known
        self._let_go(fresh, ~here & (self._active > 0) & (self._away == 0))
        # A model that has no gradient at all is one that nobody trains just now.
        self._follow(here, record.step)
        long = record.step - self._since >= self._steps
        gone = ~here & long & (self._away >= self._wanted(here))
        found = gone & ~self._told
        lost = self._of_ranks.update(record)
        if found.any():
            self._told |= found
            return [self._verdict(record, found, here, norm)]
        if lost is not None:
            return [self._of_some_ranks(record, lost)]
        never = self._never_there(here, norm, record.step)
        self._told |= never
        return [self._of_the_start(record, never)] if never.any() else []

    def _let_go(self, fresh: NDArray[np.intp], gone: NDArray[np.bool_]) -> None:
        """Tell nothing of those that have gone as others of their modules came: renamed."""
        names, places = self._gradients.fqns, np.flatnonzero(gone)
        if len(fresh) and len(places):
            self._told[places] |= replaced([names[i] for i in places], [names[i] for i in fresh])

    def _never_there(
        self, here: NDArray[np.bool_], norm: NDArray[np.float64], step: int
    ) -> NDArray[np.bool_]:
        """Return the gradients of whole modules that were zero at each look there has been."""
        zero = norm == 0
        self._zeros_since[zero & (self._zeros == 0)] = step
        self._zeros[zero] += 1
        self._ever |= here
        long = (step - self._zeros_since >= self._never) & (self._zeros >= self._least_never)
        found = zero & long & ~self._ever & ~self._told
        if not found.any() or not here.any():
            return np.zeros(len(here), bool)
        # An expert may have none for ever while its likes are chosen.
        fqns = self._gradients.fqns
        owners = np.array([fqn.rpartition(".")[0] for fqn in fqns], np.str_)
        whole: NDArray[np.bool_] = ~np.isin(owners, owners[~found])
        dead: NDArray[np.bool_] = found & whole & ~named_alike(fqns, self._ever)
        return dead

    def _wanted(self, here: NDArray[np.bool_]) -> NDArray[np.int64]:
        wanted: NDArray[np.int64] = self._needed[self._active]
        away = ~here & (wanted < NEVER)
        for since in np.unique(self._since[away]):
            together = away & (self._since == since)
            if together.sum() >= self._part * len(here):
                wanted[together] = self._least_away
        return wanted

    def _follow(self, here: NDArray[np.bool_], step: int) -> None:
        back = here & (self._away > 0)
        self._active[back] = self._away[back] = 0
        self._told[back] = False
        self._active[here] = np.minimum(self._active[here] + 1, MOST_ACTIVE)
        gone = ~here & (self._active > 0)
        self._since[gone & (self._away == 0)] = step
        self._away[gone] += 1

    def _grow(self, sites: int) -> None:
        more = np.zeros(sites - len(self._active), np.int64)
        if len(more):
            self._active, self._away = np.append(self._active, more), np.append(self._away, more)
            self._since = np.append(self._since, more)
            self._told = np.append(self._told, more > 0)
            self._zeros = np.append(self._zeros, more)
            self._zeros_since = np.append(self._zeros_since, more)
            self._ever = np.append(self._ever, more > 0)

    def _verdict(
        self, record: StepRecord, found: NDArray[np.bool_], here: NDArray[np.bool_],
        norm: NDArray[np.float64],
    ) -> Anomaly:  # fmt: skip
        fqns = self._gradients.fqns
        gone = [fqns[i] for i in self._gradients.order() if found[i]]
        parts = by_subtree(gone, [fqns[i] for i in np.flatnonzero(here)])
        zero = int((norm[found] == 0).sum())
        what = "zero" if zero == len(gone) else "None" if zero == 0 else "None or zero"
        since = int(self._since[found].min())
        message = (
            f"the gradients of {len(gone)} of {len(fqns)} parameters have been {what} since step "
            f"{since}, in {named(list(parts))}; maybe frozen, detached or masked, or a dead "
            "activation is behind them; if that was meant, all is well"
        )
        values = {"parameters": len(gone), "zero": zero, "since": since}
        level = "info" if all(map(is_in_expert, gone)) else "warn"
        return self.anomaly(
            record, level, message, values, module=nearest_loss(parts), kind="grad",
            phase="backward",
        )  # fmt: skip

    def _of_the_start(self, record: StepRecord, found: NDArray[np.bool_]) -> Anomaly:
        fqns = self._gradients.fqns
        zero = [fqns[i] for i in self._gradients.order() if found[i]]
        modules = subtrees(zero, [fqns[i] for i in np.flatnonzero(~found)])
        last = zero[-1].rpartition(".")[0]
        since = int(self._zeros_since[found].min())
        message = (
            f"the gradients of {len(zero)} of {len(fqns)} parameters have been exactly zero since "
            f"the first look at step {since}, in {named(modules)}, though they are computed: they "
            f"do not learn; look at {last or 'the model'} and what is behind it (weights of zeros, "
            "a dead activation, a product with 0)"
        )
        values = {"parameters": len(zero), "zero": len(zero), "since": since}
        return self.anomaly(
            record, "warn", message, values, module=last, kind="grad", phase="backward"
        )

    def _of_some_ranks(self, record: StepRecord, lost: LostGradients) -> Anomaly:
        have = "has" if len(lost.ranks) == 1 else "have"
        where = f", in {named(list(lost.modules))}" if lost.modules else ""
        message = (
            f"{ranks_text(lost.ranks)} {have} had no gradient, or one of zeros, of "
            f"{lost.parameters} parameters since step {lost.since}{where}; the other ranks have "
            "theirs, and the mean over all hides it; maybe detached, masked or not called there"
        )
        values = {"parameters": lost.parameters, "ranks": len(lost.ranks), "since": lost.since}
        return self.anomaly(
            record, "warn", message, values, rank=lost.ranks[0] if len(lost.ranks) == 1 else None,
            module=lost.modules[0] if lost.modules else None, kind="grad_local", phase="backward",
        )  # fmt: skip
