"""Whether a sampled step is another one on the batch of the one before."""

from __future__ import annotations

from ddpprobe.detectors.rank_scalars import digests_of
from ddpprobe.records.step import StepRecord

LONGEST = 32  # steps; a batch that stays for longer is what is trained on


class HeldBatches:
    """Follows what ranks are given, where several steps are taken on each batch.

    What is odd about a batch is so at each of its steps: they are one look and no more. Where one
    batch is all that there is, each step counts.
    """

    def __init__(self) -> None:
        self._digests: dict[int, float] = {}
        self._since = 0  # step

    def again(self, record: StepRecord) -> bool:
        """Take the next look; return whether all ranks are given what they were at the last one."""
        digests = digests_of(record)
        same = bool(digests) and digests == self._digests
        self._since = self._since if same else record.step
        self._digests = digests
        return same and record.step - self._since < LONGEST
