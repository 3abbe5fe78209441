"""`same_data`: ranks that compute the same numbers read the same data.

Data parallelism pays for the samples that each rank adds. Without a DistributedSampler, or with one
seed for all, they add none, and the loss looks as it should.
"""

from __future__ import annotations

import math

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.settings import at_least
from ddpprobe.detectors.statistics_of import placements_of
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import Anomaly, StepRecord

_JUDGED = ("loss", "grad_norm_local", "output_rms")
FEWEST = 2  # of these numbers; one alone may have been averaged over the ranks by the script

Numbers = tuple[float, ...]


class SameData(SampledDetector):
    """Warns when ranks report equal numbers, to the bit, at several sampled steps in a row.

    The numbers are the loss, the local gradient norm and the rms of the outputs, as far as a rank
    reports them; zero, NaN and infinities are none. Where an output is shared between ranks, as
    under tensor parallelism, ranks read the same data by design, and nothing is judged.

    Args:
        repeats: sampled steps in a row.
        quiet_steps: steps without it after which it is told again.
    """

    name = "same_data"
    title = "Ranks read the same data"

    def __init__(self, *, repeats: int = 3, quiet_steps: int = 100) -> None:
        at_least(1, repeats=repeats)
        at_least(0, quiet_steps=quiet_steps)
        self._repeats, self._quiet = repeats, quiet_steps
        self._reset()

    def _reset(self) -> None:
        self._together: dict[int, tuple[int, int]] = {}  # rank -> lowest equal rank, samples
        self._telling = Telling(self._quiet, worse=1.0)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if len(record.ranks) < 2:
            return []
        if placements_of(record, "output") - {"local"}:
            return []
        groups: dict[Numbers, int] = {}
        now: dict[int, tuple[int, int]] = {}
        for rank in record.ranks:
            numbers = _numbers(record, rank)
            if numbers is None:
                continue
            first = groups.setdefault(numbers, rank)
            if first != rank:
                before, samples = self._together.get(rank, (first, 0))
                now[rank] = (first, samples + 1 if before == first else 1)
        self._together = now
        held = {rank: first for rank, (first, n) in now.items() if n >= self._repeats}
        if not held or not self._telling.due(record.step, len(held)):
            return []
        return [_anomaly(record, held, self._repeats)]


def _numbers(record: StepRecord, rank: int) -> Numbers | None:
    scalars = record.scalars.get(rank, {})
    found = [float(scalars.get(name, math.nan)) for name in _JUDGED]
    known = [x for x in found if math.isfinite(x) and x != 0]
    # What is not known of one must not be known of the other.
    return tuple(x if x in known else 0.0 for x in found) if len(known) >= FEWEST else None


def _anomaly(record: StepRecord, held: dict[int, int], repeats: int) -> Anomaly:
    ranks = tuple(sorted({*held, *held.values()}))
    message = (
        f"{ranks_text(ranks)} report the same loss and norms to the bit, {repeats} sampled steps "
        "in a row, as ranks do that read the same samples: look for a missing DistributedSampler, "
        "or one seed for all ranks (if one batch is repeated on purpose, all is well)"
    )
    values = {"ranks": len(ranks), "repeats": repeats}
    return SameData.anomaly(record, "warn", message, values, phase="forward")
