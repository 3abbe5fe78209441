"""Which part of a run is exported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.series import is_within
from ddpprobe.records.step import StepRecord

EVERY_RANK = -1


@dataclass(frozen=True, slots=True)
class Selection:
    """Attempts, ranks and steps to take.

    Attributes:
        rank: one rank's own; None: all ranks merged; `EVERY_RANK`: each rank's own.
        steps: slice over step numbers.
        attempt: one of them; None: all.
    """

    rank: int | None = None
    steps: slice = field(default_factory=lambda: slice(None))
    attempt: int | None = None

    @property
    def after(self) -> int:
        """The step behind which it begins."""
        return (self.steps.start or 0) - 1

    @property
    def open_ended(self) -> bool:
        """Whether it reaches to the end of the run."""
        return self.steps.stop is None

    def attempts(self, merged_reader: MergedReader) -> list[int]:
        """Return the numbers of its attempts, ascending."""
        found = merged_reader.attempts()
        return found if self.attempt is None else [n for n in found if n == self.attempt]

    def ranks(self, merged_reader: MergedReader, attempt: int) -> list[int]:
        """Return the ranks whose own records it needs, ascending."""
        found = merged_reader.ranks(attempt)
        return found if self.rank in (None, EVERY_RANK) else [n for n in found if n == self.rank]

    def merged(self, merged_reader: MergedReader, attempt: int) -> Iterator[StepRecord]:
        """Yield the merged records in it, ascending."""
        return self._within(merged_reader.merged_records(attempt, self.after))

    def of_rank(self, merged_reader: MergedReader, attempt: int, rank: int) -> Iterator[StepRecord]:
        """Yield one rank's own records in it, ascending."""
        return self._within(merged_reader.rank_records(attempt, rank, self.after))

    def _within(self, records: Iterator[StepRecord]) -> Iterator[StepRecord]:
        for record in records:
            if self.steps.stop is not None and record.step >= self.steps.stop:
                return
            if is_within(record.step, self.steps):
                yield record
