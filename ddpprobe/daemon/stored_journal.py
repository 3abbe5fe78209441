"""What a daemon's journal has lost to retention: it is in the store, and read back from there.

A successor of a killed daemon feeds its detectors with the recorded stream. Where `max_bytes` took
the oldest segments of that journal away, their records, verdicts and events come from here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddpprobe.ends.end import ENDED, RUNNING, UNDECIDED
from ddpprobe.errors import StoreDamaged
from ddpprobe.records.events import EndEvent, Event, FinishedEvent
from ddpprobe.records.step import Anomaly, StepRecord
from ddpprobe.rundir import validate
from ddpprobe.rundir.paths import RunDir
from ddpprobe.store.format import attempt_key
from ddpprobe.store.manifest import Consumed
from ddpprobe.store.reader import StoredGroup


@dataclass(frozen=True, slots=True)
class StoredJournal:
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

    def events(self) -> list[Event]:
        """Return the events that are committed, in their order, but those that make no sense."""
        group = self._open(self.node)
        own = [said for name, _, said in group.events() if name == self.name] if group else []
        return list(filter(None, map(validate.known_event, own)))

    def state(self) -> str:
        """Return how the attempt ended, as this daemon said it last, as `ends.end.End`."""
        state = UNDECIDED
        for event in self.events():
            if isinstance(event, EndEvent):
                state = event.state
            elif isinstance(event, FinishedEvent) and state == UNDECIDED:
                state = ENDED  # of a good end nothing more is said
        return UNDECIDED if state == RUNNING else state

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
        except StoreDamaged:
            return None  # of a newer version, or damaged: what the journal holds is enough to go on
        return group if group.exists else None


def states_before(run: RunDir, attempt: int, node: str) -> Counter[str]:
    """Return how many earlier attempts that a node took part in ended in each state."""
    earlier = [n for n in run.attempts() if n < attempt and (run.attempt_dir(n) / node).is_dir()]
    name = run.daemon_journal(attempt, node).name
    return Counter(StoredJournal(run, n, node, name).state() for n in earlier)


def past_of(directory: Path) -> StoredJournal:
    """Return the past of the journal that lies in RUN/journal/ATTEMPT/NODE/NAME."""
    attempt, node, name = directory.parts[-3:]
    return StoredJournal(RunDir(directory.parents[3]), int(attempt), node, name)
