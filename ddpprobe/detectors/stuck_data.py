"""`stuck_data`: a rank that is given the same batch again and again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.enough_looks import EnoughLooks
from ddpprobe.detectors.rank_scalars import digests_of
from ddpprobe.detectors.repeated_batches import LAST, Repeated, RepeatedBatches
from ddpprobe.detectors.same_epochs import SameEpochs
from ddpprobe.detectors.settings import at_least
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import Anomaly, StepRecord

FEWEST_CHANGES = 8  # from look to look before a rank's data are known to vary
MOST_STAYS = 0.1  # of the changes: an input that often stays the same (a mask) tells nothing
MOST_GAPS = 16  # bounds the state


@dataclass(slots=True)
class _Rank:
    """What is known of the first input of a rank."""

    digest: float = math.nan
    step: int = -1
    gap: int = 0  # steps between the last two looks
    same: int = 1  # looks in a row with this digest, at this gap
    fresh: int = 1  # looks in a row with another digest than the one before, at this gap
    # By gap: how often it changed, and how often it stayed, however long. A loader that goes round
    # without shuffling shows the same batch at one interval and others at another.
    seen: dict[int, list[int]] = field(default_factory=dict)

    def take(self, step: int, digest: float) -> None:
        gap, same = step - self.step, digest == self.digest
        if gap != self.gap or not same:
            if self.gap in self.seen:
                self.seen[self.gap][1] += self.same > 1
            self.same = 1
        self.fresh = 1 if same or gap != self.gap else self.fresh + 1
        if same:
            self.same += 1
        elif self.step >= 0 and (gap in self.seen or len(self.seen) < MOST_GAPS):
            self.seen.setdefault(gap, [0, 0])[0] += 1
        self.digest, self.step, self.gap = digest, step, gap

    @property
    def varied(self) -> bool:
        """Whether its data used to be others from look to look, at this gap."""
        changes, stays = self.seen.get(self.gap, (0, 0))
        return changes >= FEWEST_CHANGES and stays <= MOST_STAYS * changes


class StuckData(SampledDetector):
    """Warns when a rank's input is the same, to the bit, at many sampled steps in a row.

    What is compared is the first tensors that the model is given in a step. Only a rank whose data
    used to vary is judged: who trains on one batch from the start means to. Fewer looks are needed
    while the input of another rank varies, as then it is no schedule of the training, and where
    they are far apart. A whole epoch whose batches are those of the epoch before, each at its
    place, is told once, as information: nobody shuffles, or by the same seed, by design or not.

    Args:
        looks: sampled steps in a row with the same input.
        beside: as `looks`, of a rank beside which another one's input was a new one at each.
        steps: as many looks as `beside` are enough where the first and the last lie so far apart.
        again: of the last 20 sampled steps, so many with an input that was among the 20 before it.
        epoch: sampled steps in a row whose input came before, all of them as many steps before.
        quiet_steps: steps without it after which it is told again.
    """

    name = "stuck_data"
    title = "A rank is given the same data again and again"

    def __init__(
        self, *, looks: int = 20, beside: int = 5, steps: int = 40, again: int = 12,
        epoch: int = 16, quiet_steps: int = 100,
    ) -> None:  # fmt: skip
        at_least(0, quiet_steps=quiet_steps)
        at_least(1, epoch=epoch, again=again)
        self._enough, self._quiet = EnoughLooks(looks, beside, steps), quiet_steps
        self._again, self._epoch = again, epoch
        self._reset()

    def _reset(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        self._past: dict[int, RepeatedBatches] = {}
        self._telling = Telling(self._quiet, worse=1.0)
        # One rank's, as all ranks have the same loader; None: told.
        self._epochs: SameEpochs | None = SameEpochs(self._epoch)
        self._of = -1  # that rank

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        digests = digests_of(record)
        repeated = self._repeated(record, digests)
        return self._stuck(record, digests) or repeated or self._same_epochs(record, digests)

    def _repeated(self, record: StepRecord, digests: Mapping[int, float]) -> list[Anomaly]:
        """Return what is to be said of batches that come again and again."""
        found: dict[int, Repeated] = {}
        for rank, digest in digests.items():
            past = self._past.setdefault(rank, RepeatedBatches(self._again))
            repeated = past.look(record.step, digest)
            if repeated is not None:
                found[rank] = repeated
        if not found or not self._telling.due(record.step, len(found)):
            return []
        looks = max(of.looks for of in found.values())
        batches = max(of.batches for of in found.values())
        since = min(of.since for of in found.values())
        who = tuple(sorted(found))
        message = (
            f"{ranks_text(who)} {'reads' if len(who) == 1 else 'read'} batches again: at {looks} "
            f"of the last {LAST} sampled steps the input was to the bit one of the {LAST} before "
            f"it, {batches} different ones in all since step {since}, which it hardly ever was "
            "before: look at where the loader begins after each round, as after a resume, and "
            "whether its workers divide a stream"
        )
        alone = who[0] if len(who) == 1 else None
        values = {"looks": looks, "batches": batches, "since": since, "ranks": len(who)}
        return [self.anomaly(record, "warn", message, values, rank=alone, phase="forward")]

    def _stuck(self, record: StepRecord, digests: Mapping[int, float]) -> list[Anomaly]:
        for rank, digest in digests.items():
            self._ranks.setdefault(rank, _Rank()).take(record.step, digest)
        looked = {r: of for r, of in self._ranks.items() if of.step == record.step}
        # Whoever varied has done so for as many looks as any other rank has not.
        vary = any(of.same == 1 and of.fresh >= self._enough.beside for of in looked.values())
        stuck = [r for r, of in looked.items() if self._is_stuck(of, vary=vary) and of.varied]
        if not stuck or not self._telling.due(record.step, len(stuck)):
            return []
        beside = ", while that of others varied" if vary else ""
        looks = min(looked[rank].same for rank in stuck)
        message = (
            f"the first input of {ranks_text(tuple(sorted(stuck)))} has been the same to the bit "
            f"for {looks} sampled steps{beside}: look at the loader, its iterator and its sampler"
        )
        alone = stuck[0] if len(stuck) == 1 else None
        values = {"looks": looks, "ranks": len(stuck)}
        return [self.anomaly(record, "warn", message, values, rank=alone, phase="forward")]

    def _same_epochs(self, record: StepRecord, digests: Mapping[int, float]) -> list[Anomaly]:
        if not digests or self._epochs is None:
            return []
        if self._of not in digests:
            self._of, self._epochs = min(digests), SameEpochs(self._epoch)
        steps = self._epochs.look(record.step, digests[self._of])
        if steps is None:
            return []
        self._epochs = None
        message = (
            f"each input of the last {steps} steps was to the bit that of {steps} steps before: "
            "all epochs are read in one order, which may be meant; a DistributedSampler needs "
            "sampler.set_epoch(epoch), and a seed that is set in each epoch does the same"
        )
        return [self.anomaly(record, "info", message, {"steps": steps}, phase="forward")]

    def _is_stuck(self, rank: _Rank, *, vary: bool) -> bool:
        steps = (rank.same - 1) * rank.gap
        return self._enough.reached(rank.same, steps, differ=vary)
