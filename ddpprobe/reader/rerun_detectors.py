"""The verdict on a run again, with other settings of the detectors, beside the recorded one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ddpprobe.detectors.settings import Settings
from ddpprobe.ends.anomalies import code_of
from ddpprobe.reader.run import Run
from ddpprobe.reader.verdicts import Key, event_of
from ddpprobe.records.step import Anomaly

SAME, NEW, GONE = "same", "new", "gone"


@dataclass(frozen=True, slots=True)
class RerunVerdict:
    """One anomaly, and whether both verdicts have it.

    Attributes:
        change: `same`, `new` (the recorded verdict has it not) or `gone` (only that one has it).
        anomaly: as it was replayed; as it was recorded if it is gone.
    """

    change: str
    anomaly: Anomaly


@dataclass(frozen=True, slots=True)
class RerunResult:
    """Both verdicts side by side.

    Attributes:
        verdicts: what was replayed in order of cause, then what is gone.
        identical: nothing is new or gone, and every number and text is the recorded one's.
    """

    verdicts: tuple[RerunVerdict, ...]
    identical: bool

    def count(self, change: str) -> int:
        """Return how many verdicts are `same`, `new` or `gone`."""
        return sum(v.change == change for v in self.verdicts)


def rerun(
    run: Run, settings: Settings | None = None, advance: Callable[[int], None] = lambda _: None
) -> RerunResult:
    """Feed the merged records of a run through the detectors again.

    Two anomalies are the same if they tell of the same thing at the same level; what the numbers
    behind it are (the length of a window, say) may differ.

    Args:
        run: live, ended or crashed.
        settings: by detector, what is not to be as by default.
        advance: told 1 for each record that was read.
    """
    recorded = run.anomalies()
    replayed = run.replayed(settings, advance)
    left = Counter(_event(a) for a in recorded)
    verdicts = []
    for anomaly in replayed:
        known = left[_event(anomaly)] > 0
        left[_event(anomaly)] -= known
        verdicts.append(RerunVerdict(SAME if known else NEW, anomaly))
    for anomaly in reversed(recorded):
        if left[_event(anomaly)] > 0:
            left[_event(anomaly)] -= 1
            verdicts.insert(len(replayed), RerunVerdict(GONE, anomaly))
    exact = [[code_of(a) for a in found] for found in (recorded, replayed)]
    return RerunResult(tuple(verdicts), exact[0] == exact[1])


def _event(a: Anomaly) -> Key:
    return (*event_of(a), a.first_cause)
