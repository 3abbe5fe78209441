"""`reduction`: the gradients that the optimizer gets are not the mean of the ranks' own.

They are each rank's own: every rank then trains a model of its own on its own data, and every line
of the log looks fine. DDP has lost its hooks, or what should have reduced did nothing. Or they are
another multiple of the mean than they were, a sum, or less than it: divided twice.
"""

from __future__ import annotations

import math

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.misplaced import Misplaced
from ddpprobe.detectors.rank_scalars import (
    SAME,
    is_held_back,
    is_local_sgd,
    is_unwrapped,
    largest,
    norm_used_by_all,
    scalars,
)
from ddpprobe.detectors.reduction_factor import Factor, ReductionFactor
from ddpprobe.detectors.settings import at_least
from ddpprobe.detectors.statistics_of import placements_of
from ddpprobe.detectors.subtrees import and_also, common_module
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.reduction_law import reduction_law, same_factor
from ddpprobe.records.step import KEPT, UNREDUCED, USED_NORM, Anomaly, StepRecord

Norms = tuple[float, float]  # local, reduced
APART = 1e-3  # relative: norms of ranks that lie closer may be one and the same


class Reduction(SampledDetector):
    """Finds gradients that were not reduced over the ranks, several sampled steps in a row.

    They are not if each rank's norm after the reduction is its own local one, and the ranks'
    differ, unless the optimizers of all ranks got gradients of one norm: a script reduced them.
    That pages where a reduction took place, and changed nothing. Where none took place (hooks that
    DDP lost) it warns, and pages after `patience` sampled steps in a row if as many before had all
    been reduced. Of `no_sync` up to the optimizer nothing is said: `desync` says what it does, and
    local SGD is meant to.
    It warns, with the module, where that of single parameters is larger than a mean can be and
    that of all others together is not: they got another one's gradient.
    It warns where all gradients, sharded ones too, are another multiple of the mean of the ranks'
    own than they were (see `reduction_law`), or no multiple of it any more; whoever sums from the
    start means to. And it warns where they are less than it at each of the first `young` sampled
    steps.

    Args:
        repeats: sampled steps in a row.
        patience: sampled steps in a row, after as many with a reduction, that make it a page.
        usual: sampled steps in a row with one multiple, without which another may be meant.
        young: first sampled steps of an attempt.
        quiet_steps: steps without it after which it is told again.
    """

    name = "reduction"
    title = "Gradients are not reduced as they should be"

    def __init__(
        self, *, repeats: int = 3, patience: int = 20, usual: int = 8, young: int = 5,
        quiet_steps: int = 100,
    ) -> None:  # fmt: skip
        at_least(1, repeats=repeats, patience=patience, usual=usual, young=young)
        at_least(0, quiet_steps=quiet_steps)
        self._repeats, self._patience, self._quiet = repeats, patience, quiet_steps
        self._needed, self._young = usual, young
        self._begin()
        self._reset()

    def _begin(self) -> None:
        self._factor = ReductionFactor(repeats=self._repeats, usual=self._needed, young=self._young)

    def _reset(self) -> None:
        self._used: float | None = None  # the norm that all optimizers got at the last step
        self._reduced = 0  # sampled steps in a row, up to the first that was not
        self._missing = 0  # sampled steps in a row that were not
        self._telling = {
            level: Telling(self._quiet) for level in ("warn", "page", "factor", "parts")
        }
        self._last_used = math.nan  # the norm that the optimizers took at the last step
        self._factor.forget()
        self._parameters = Misplaced(self._repeats)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        kept = largest(record, KEPT) > 0  # then it is the sum of several steps
        meant = is_local_sgd(record) or is_held_back(record)
        if record.skipped or record.missing or kept or meant:
            return []
        norms = _norms(record)
        if norms and self._is_reduced_by_hand(record, norms):
            return []
        if norms and _stayed_local(norms):
            return self._unreduced(record)
        if norms:
            self._reduced = 1 if self._missing else self._reduced + 1
            self._missing = 0
        if not self._is_taken(record):
            return []
        return self._of_factor(record) or (self._of_parameters(record) if norms else [])

    def _unreduced(self, record: StepRecord) -> list[Anomaly]:
        self._missing += 1
        if self._missing < self._repeats:
            return []
        level = self._level(record)
        if not self._telling[level].due(record.step):
            return []
        return [_anomaly(record, level, self._missing)]

    def _is_reduced_by_hand(self, record: StepRecord, norms: list[Norms]) -> bool:
        """Whether the script reduced the gradients, after where the others are read."""
        before, self._used = self._used, _one_norm_used(record, norms)
        by_hand = self._used is not None and (is_unwrapped(record) or self._used != before)
        if by_hand:
            self._missing = 0
        return by_hand

    def _is_taken(self, record: StepRecord) -> bool:
        """Whether the optimizers took all that was reduced, or clipped it, as far as is known.

        What is left by them nobody may set to zero: it is the sum of all steps since.
        """
        used, before = scalars(record, USED_NORM), self._last_used
        self._last_used = math.hypot(*used) if used else math.nan
        if len(used) != len(record.ranks):
            return True
        alike = math.hypot(*scalars(record, "grad_norm")), before
        return any(abs(self._last_used - norm) <= APART * norm for norm in alike)

    def _of_factor(self, record: StepRecord) -> list[Anomaly]:
        law = reduction_law(record)
        found = None if law is None else self._factor.update(record, law)
        if found is None or not self._telling["factor"].due(record.step):
            return []
        message = _in_words(found, len(record.ranks), self._repeats, self._young)
        values = {"factor": found.now, "before": found.before, "since": found.since}
        told = {name: value for name, value in values.items() if math.isfinite(value)}
        return [self.anomaly(record, "warn", message, told, kind="grad")]

    def _of_parameters(self, record: StepRecord) -> list[Anomaly]:
        found = self._parameters.update(record)
        if not found or not self._telling["parts"].due(record.step):
            return []
        fqns = list(found)
        worst = max(found, key=lambda fqn: found[fqn])
        also = and_also([f for f in fqns if f != worst])
        message = (
            f"the reduced gradient of {worst} is {found[worst]:.3g} x as large as any mean of the "
            f"ranks' own can be, at {self._repeats} sampled steps in a row{also}, and that of all "
            "others together is not; maybe they got what belongs to others (a bucket that is in "
            "another order on one rank, a communication hook)"
        )
        values = {"ratio": found[worst], "parameters": len(fqns)}
        module = common_module(fqn.rpartition(".")[0] for fqn in fqns) or None
        return [self.anomaly(record, "warn", message, values, module=module, kind="grad")]

    def _level(self, record: StepRecord) -> str:
        if not scalars(record, UNREDUCED):
            return "page"
        lost = self._missing >= self._patience <= self._reduced
        return "page" if lost else "warn"


def _norms(record: StepRecord) -> list[Norms]:
    """Return each rank's local and reduced norm; nothing where they cannot be compared."""
    if len(record.ranks) < 2:
        return []
    if placements_of(record, "grad") & {"sharded", "partial", "unknown"}:
        return []
    norms = []
    for rank in record.ranks:
        said = record.scalars.get(rank, {})
        local = float(said.get("grad_norm_local", math.nan))
        reduced = float(said.get("grad_norm", math.nan))
        if not (math.isfinite(local) and math.isfinite(reduced)) or said.get("micro_batches") != 1:
            return []
        norms.append((local, reduced))
    return norms


def _one_norm_used(record: StepRecord, norms: list[Norms]) -> float | None:
    """Return the norm that the optimizers of all ranks got, of gradients that were not alike.

    None: not all got the same, or the reduced ones were the same as well.
    """
    if not _are_apart(norms):
        return None
    used = norm_used_by_all(record)
    # What is clipped has the same norm at every step.
    return None if used is None else float(f"{used:.3g}")


def _are_apart(norms: list[Norms]) -> bool:
    reduced = [r for _, r in norms]
    return max(reduced) - min(reduced) > APART * max(local for local, _ in norms)


def _stayed_local(norms: list[Norms]) -> bool:
    """Whether all ranks kept their own gradients."""
    largest = max(local for local, _ in norms)
    return _are_apart(norms) and all(abs(local - r) <= SAME * largest for local, r in norms)


def _in_words(found: Factor, ranks: int, repeats: int, young: int) -> str:
    means = f"the mean of the {ranks} ranks' own"
    if math.isnan(found.before):
        twice = same_factor(found.now, 1 / ranks)
        why = "it was divided by the number of ranks twice" if twice else "it was scaled, too"
        return (
            f"the reduced gradient is {found.now:.3g} x {means}, at each of the first {young} "
            f"sampled steps: {why}"
        )
    before = f"{found.before:.3g} x that before"
    since = f"since step {found.since:.0f}, {repeats} sampled steps in a row"
    if math.isnan(found.now):
        return (
            f"the reduced gradients are no multiple of {means} {since}, and were {before}: a rank "
            "may be left out, or gradients of another step or parameter taken (a communication "
            "hook, a process group, a damaged link)"
        )
    summed = same_factor(found.now, ranks)
    why = "they are summed" if summed else "they are scaled in the reduction, or after it"
    return f"the reduced gradient is {found.now:.3g} x {means} {since}, and was {before}: {why}"


def _anomaly(record: StepRecord, level: str, repeats: int) -> Anomaly:
    norms = scalars(record, "grad_norm")
    none_took_place = bool(scalars(record, UNREDUCED))
    why = (
        "no reduction took place (no wrapper around the model, or DDP lost its hooks: a model that "
        "was moved or cast after the wrap)"
        if none_took_place
        else "a reduction took place and changed nothing (a communication hook, a process group)"
    )
    message = (
        f"on all {len(norms)} ranks the optimizer got the rank's own gradient, {repeats} sampled "
        f"steps in a row: {why}; the replicas train apart"
    )
    values = {"repeats": repeats, "lowest": min(norms), "highest": max(norms)}
    return Reduction.anomaly(record, level, message, values, kind="grad")
