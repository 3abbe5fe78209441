"""The statistics of a record, each computed once for all detectors that ask for it."""

from __future__ import annotations

from typing import final

from ddpprobe.records.step import Floats, StepRecord, derive


@final
class _Derived:
    """What has been asked of one record: never of another, whoever asks meanwhile."""

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self._columns: dict[str, Floats] = {}

    def column(self, stat: str) -> Floats:
        known = self._columns.get(stat)
        if known is None:
            known = derive(stat, self.record.counts, self.record.values)
            known.flags.writeable = False
            self._columns[stat] = known
        return known


_newest: _Derived | None = None


def statistic_of(record: StepRecord, stat: str) -> Floats:
    """Return a statistic of `STATS` of each row [sites], as `derive` does; not to be changed.

    Two dozen detectors ask for the same ones, one record after the other: those of the record that
    was asked for last are kept.
    """
    global _newest  # noqa: PLW0603  (a memory of one)
    derived = _newest
    if derived is None or derived.record is not record:
        _newest = derived = _Derived(record)
    return derived.column(stat)
