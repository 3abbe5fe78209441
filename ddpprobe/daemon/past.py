"""What a daemon's journal has lost to retention: it is in the store, and read back from there.

A successor of a killed daemon feeds its detectors with the recorded stream. Where `max_bytes` took
the oldest segments of that journal away, their records, verdicts and events come from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpprobe.layout import RunDir
from ddpprobe.records import Anomaly, StepRecord
from ddpprobe.store.format import attempt_key
from ddpprobe.store.manifest import Consumed, StoreError
from ddpprobe.store.reader import StoredGroup


@dataclass(frozen=True, slots=True)
class Past:
    """The store's part of one daemon's journal.

    Args:
        run: the run directory.
        attempt, node: whose journal.
        name: of the journal.
    """

    run: RunDir
    attempt: int
    node: str
    name: str

    def events(self) -> list[Mapping[str, Any]]:
        """Return the LIFE frames that are committed, in their order."""
        group = self._open(self.node)
        found = group.events() if group else []
        return [event for name, _, event in found if name == self.name]

    def anomalies(self) -> tuple[list[Anomaly], Consumed]:
        """Return the verdicts that are committed, and which frames of the journal these were."""
        group = self._open("anomalies")
        if group is None:
            return [], Consumed()
        return group.anomalies(), group.consumed.get(self.name, Consumed())

    def records(self, before: int | None) -> Iterator[StepRecord]:
        """Yield the merged records of steps below `before` (None: all) that have not expired."""
        group = self._open("merged")
        for record in group.records(self.attempt) if group else ():
            if before is not None and record.step >= before:
                return
            yield record

    def _open(self, name: str) -> StoredGroup | None:
        try:
            group = StoredGroup(self.run, f"{attempt_key(self.attempt)}/{name}")
        except StoreError:
            return None  # of a newer version, or damaged: what the journal holds is enough to go on
        return group if group.exists else None


def past_of(directory: Path) -> Past:
    """Return the past of the journal that lies in RUN/journal/ATTEMPT/NODE/NAME."""
    attempt, node, name = directory.parts[-3:]
    return Past(RunDir(directory.parents[3]), int(attempt), node, name)
