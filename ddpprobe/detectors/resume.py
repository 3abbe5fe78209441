"""`resume`: an attempt that does not go on where the run was."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import median

from ddpprobe.detectors.detector import Detector
from ddpprobe.detectors.loss import loss_of
from ddpprobe.detectors.rank_scalars import digests_of, largest, scalars
from ddpprobe.detectors.resumed_weights import ResumedWeights
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.subtrees import named
from ddpprobe.records.step import LEARNING_RATE, NOTED, Anomaly, StepRecord

_SAME_RATE = 1e-3  # relative: a rate is computed anew in another process
_FEWEST_LOSSES = 5  # before anything is said of them
_MOST_LOSSES = 20
_FIRST, _KEPT = 16, 256  # steps that are kept: the first ones, and all; bounds the state


@dataclass(frozen=True, slots=True)
class _Said:
    """What a sampled step says; NaN where it does not."""

    rate: float
    loss: float  # mean of the ranks; NaN also where one is not finite
    micro_batches: float  # of all ranks
    digests: Mapping[int, float]  # of the input, by rank


_Steps = list[tuple[int, _Said]]  # steps and what they say, ascending
_Verdict = tuple[str, str, dict[str, float]] | None  # level, message, values


class Resume(Detector):
    """Warns when a resumed attempt does not go on where the attempts before it were.

    A loader that begins anew reads the batches that the run has had. A schedule that begins anew
    has the learning rate of the first steps. A loss far above all that it was lately tells that
    weights were not loaded, or not all. Judged are the first sampled steps of an attempt that does
    not begin at the first step of the run, against what earlier attempts said of the same steps, of
    those before them, and of the first ones. Weights that do not go on from what they were are told
    by name, once: each is compared at its second look of the attempt. That all ranks together train
    on more micro-batches in a step, or fewer, is information. What `probe.note` announces at its
    first sampled step is meant. That the optimizer's state was lost is told by `optimizer_reset`.

    Args:
        looks: sampled steps in a row whose batches came before, all of them as many steps before,
            and at which the loss is too high.
        ratio: times the learning rate before, or less than one by it, that is no step of a schedule
            if it is the rate of the first steps.
        jump: times the range of the last losses by which a loss is above the largest of them.
        moved: times as far as a weight ever moved between two looks, above which it is another one.
    """

    name = "resume"
    title = "A resumed run does not go on where it was"
    across_attempts = True

    def __init__(
        self, *, looks: int = 2, ratio: float = 1.5, jump: float = 1.0, moved: float = 5.0
    ) -> None:  # fmt: skip
        at_least(1, looks=looks)
        above_zero(ratio=ratio, jump=jump, moved=moved)
        self._weights = ResumedWeights(moved)
        self._meant = False  # what was announced at the first sampled step, or told
        self._looks, self._ratio, self._jump = looks, ratio, jump
        self._before: dict[int, _Said] = {}  # what earlier attempts said, the newest of a step
        self._now: dict[int, _Said] = {}  # what this one says, until it is judged
        self._attempt: int | None = None
        self._judged = False

    def update(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; several anomalies, at one of the first sampled steps."""
        if record.attempt != self._attempt:
            self._attempt, self._judged = record.attempt, False
            self._before |= self._now
            self._now, self._meant = {}, False
            self._weights.begin()
        if not record.sampled or record.partial:
            return []
        self._meant |= not self._now and bool(scalars(record, NOTED))
        self._now[record.step] = _said(record)
        weights = self._of_weights(record)
        return weights + self._restored(record, explained=bool(weights))

    def _of_weights(self, record: StepRecord) -> list[Anomaly]:
        """Return what is to be said of weights, once."""
        found = None if record.missing else self._weights.read(record)
        if found is None or self._meant or self._is_from_scratch(min(self._now)):
            return []
        self._meant = True
        first, move = found.fqns[0], found.first
        knows = math.isfinite(move.times)
        far = (
            f"it is {move.times:.3g} x as far away as it ever moved between two looks"
            if knows
            else "it had never moved from look to look"
        )
        message = (
            f"the weights of {named(found.fqns)} are not those that the run had at step "
            f"{move.before}: the norm of {first} was {move.norm_before:.4g}, and is "
            f"{move.norm:.4g}; {far}. Maybe the checkpoint does not hold it, or by another name "
            "(load_state_dict(strict=False) passes over it), or it is another checkpoint"
        )
        values = {
            "parameters": float(len(found.fqns)), "compared": float(found.compared),
            "norm": move.norm, "before": move.norm_before,
        } | ({"times": move.times} if knows else {})  # fmt: skip
        return [
            self.anomaly(record, "warn", message, values, step=move.now, module=first, kind="param")
        ]

    def _restored(self, record: StepRecord, *, explained: bool) -> list[Anomaly]:
        """Take a sampled step; return what is to be said of batches, rate and losses.

        `explained`: weights were told, of which a loss that is too high is a consequence.
        """
        for kept in (self._before, self._now):
            while len(kept) > _KEPT:
                del kept[next(islice(kept, _FIRST, None))]
        if not self._before or self._judged:
            return []
        announced = bool(scalars(record, NOTED))
        if len(self._now) < self._looks and not announced:
            return []
        self._judged = True
        first = min(self._now)
        before = [(step, self._before[step]) for step in sorted(self._before) if step <= first]
        if announced or self._is_from_scratch(first):
            return []
        found = (
            self._batches(first), self._rate(first, before),
            None if explained else self._losses(first, before), self._share(first, before),
        )  # fmt: skip
        return [self.anomaly(record, *said) for said in found if said is not None]

    def _is_from_scratch(self, first: int) -> bool:
        """Whether an attempt begins at the first step of the run, as far as that is known."""
        return not self._before or first <= min(self._before)

    def _batches(self, first: int) -> _Verdict:
        """Return what is to be said of batches that the run has had."""
        ranks = set.intersection(*(set(said.digests) for said in self._now.values()))
        distances = {
            step - self._last_with(rank, said.digests[rank], step)
            for step, said in self._now.items()
            for rank in ranks
        }
        distance = distances.pop() if len(distances) == 1 and ranks else 0
        if distance <= 0 or self._is_epoch(distance):
            return None
        # Had this step been trained before, another batch would be known to have been its own.
        why = (
            "the loader has begun anew, or at the wrong place; the data in between are trained "
            "twice, and those after may never be"
            if first in self._before and self._before[first].digests
            else "maybe the loader has begun anew, or at the wrong place; or an epoch ended here, "
            "and nobody shuffles"
        )
        message = (
            f"the batches since step {first} are those of step {first - distance} and on, on every "
            f"rank: {why}"
        )
        return "warn", message, {"distance": float(distance), "looks": float(len(self._now))}

    def _last_with(self, rank: int, digest: float, step: int) -> int:
        """Return the last step up to this one whose batch it was; the step itself: of none."""
        had = [s for s, said in self._before.items() if said.digests.get(rank) == digest]
        return max((s for s in had if s <= step), default=step)

    def _is_epoch(self, distance: int) -> bool:
        """Whether batches came again at a part of this distance before: nobody shuffles."""
        last: dict[tuple[int, float], int] = {}
        for step in sorted(self._before):
            for digest in self._before[step].digests.items():
                length = step - last.get(digest, step)
                if length and distance % length == 0:
                    return True
                last[digest] = step
        return False

    def _rate(self, first: int, before: _Steps) -> _Verdict:
        """Return what is to be said of a schedule that begins anew."""
        (begun, _), (last, said_last) = before[0], before[-1]
        old, now = said_last.rate, self._now[first].rate
        if not (old > 0 and now > 0) or max(old / now, now / old) < self._ratio:
            return None
        if not all(self._is_of_first_steps(said.rate, begun + step - first)
                   for step, said in self._now.items()):  # fmt: skip
            return None
        message = (
            f"the learning rate is {now:.3g} since step {first}, as in the first steps of the run, "
            f"and was {old:.3g} at step {last}: the schedule has begun anew; load its "
            "state with the model's"
        )
        return "warn", message, {"rate": now, "before": old}

    def _is_of_first_steps(self, rate: float, step: int) -> bool:
        """Whether it is the rate of a step, or of one before the next that was sampled.

        A resume between two sampled steps begins the schedule anew at neither of them.
        """
        if step not in self._before:
            return False
        behind = min((s for s in self._before if s > step), default=step)
        known = [x for s in (step, behind) if not math.isnan(x := self._before[s].rate)]
        within = min(known, default=math.inf), max(known, default=-math.inf)
        return within[0] * (1 - _SAME_RATE) <= rate <= within[1] * (1 + _SAME_RATE)

    def _losses(self, first: int, before: _Steps) -> _Verdict:
        """Return what is to be said of a loss that is far above what it was."""
        later = before[len(before) // 2 :]  # a young run has begun to learn
        lately = [said.loss for _, said in later[-_MOST_LOSSES:]]
        now = [said.loss for said in self._now.values()]
        if len(lately) < _FEWEST_LOSSES or not all(map(math.isfinite, (*lately, *now))):
            return None
        highest = max(lately)
        if min(now) <= highest + self._jump * (highest - min(lately)):
            return None
        usual, begun = median(lately), before[0][1].loss
        as_new = min(now) >= usual + 0.7 * (begun - usual)
        what = "the weights were not loaded" if as_new else "not all that it needs was loaded"
        message = (
            f"the loss is {min(now):.3g} at least since step {first}, and was {usual:.3g} in the "
            f"median of the last {len(lately)} sampled steps before, never above {highest:.3g}: "
            f"maybe {what}, or it trains on other data"
        )
        return "warn", message, {"loss": min(now), "before": usual, "highest": highest}

    def _share(self, first: int, before: _Steps) -> _Verdict:
        """Return what is to be said of another number of micro-batches in a step."""
        old, now = before[-1][1].micro_batches, self._now[first].micro_batches
        if not (0 < old < math.inf and 0 < now < math.inf) or now == old:
            return None
        message = (
            f"micro-batches of all ranks together in a step: {now:.0f}, and {old:.0f} before the "
            "resume: unless each has another size, so has the batch, for which the "
            "learning rate was chosen"
        )
        return "info", message, {"micro_batches": now, "before": old}


def _said(record: StepRecord) -> _Said:
    micro_batches = sum(scalars(record, "micro_batches"))
    return _Said(largest(record, LEARNING_RATE), loss_of(record), micro_batches, digests_of(record))
