"""What went wrong in an attempt: what the daemon wrote down, united with what the records show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from ddpprobe.detectors.settings import Settings
from ddpprobe.detectors.suite import default_suite, over, recorded
from ddpprobe.ends.anomalies import is_end
from ddpprobe.reader.completeness import is_partial
from ddpprobe.reader.endings import ending_of
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.rank_losses import rank_losses
from ddpprobe.reader.under_way import has_daemon, is_live
from ddpprobe.records.events import FinishedEvent
from ddpprobe.records.step import Anomaly
from ddpprobe.store.earlier_attempts import earlier

Key = tuple[object, ...]


def verdicts(merged_reader: MergedReader, attempt: int) -> list[Anomaly]:
    """Return the anomalies of an attempt, and its dead ranks.

    If the daemon saw all there is, what it wrote down is the verdict. Otherwise the detectors go
    over what is held as well: the daemon may have died before the end, and what it saw may be gone.
    """
    # How it ended is judged anew: of several nodes' daemons each has seen its own ranks only.
    recorded = [a for a in merged_reader.daemon_anomalies(attempt) if not is_end(a)]
    found = recorded
    if not is_told(merged_reader, attempt):
        seen: set[int] = set()
        found = unite(recorded, run_detectors(merged_reader, attempt, look=seen.add), seen)
    return found + losses(merged_reader, attempt, found)


def run_detectors(
    merged_reader: MergedReader,
    attempt: int,
    settings: Settings | None = None,
    advance: Callable[[int], None] = lambda _: None,
    look: Callable[[int], None] = lambda _: None,
) -> list[Anomaly]:
    """Return what the detectors make of the records that are held; `look` is told their steps.

    They have the settings that the attempt was recorded with, but where `settings` says otherwise.
    Where ranks are missing whose records nobody merged, none of it is called a first cause.
    """
    own = recorded(merged_reader.rank_meta(attempt).get("detectors"))
    earlier_ones = partial(earlier, merged_reader.run)
    suite, found = default_suite(over(settings or {}, own), earlier_ones), []
    for record in merged_reader.merged_records(attempt):
        found += suite.update(record)
        look(record.step)
        advance(1)
    return _demoted(merged_reader, attempt, found + suite.finish())


def losses(merged_reader: MergedReader, attempt: int, found: list[Anomaly]) -> list[Anomaly]:
    """Return the end as anomalies, beside those that were `found`."""
    return _demoted(merged_reader, attempt, rank_losses(ending_of(merged_reader, attempt), found))


def unite(recorded: list[Anomaly], replayed: list[Anomaly], seen: Collection[int]) -> list[Anomaly]:
    """Return everything that was recorded, and of what was replayed that which was not.

    If a recorded page is not found again, its record may be gone: then nothing found after it is
    known to be the first of anything. Or its record is here and says more than the daemon knew:
    then what is found now, at its step or before, comes first.

    Args:
        recorded: what the daemon wrote down.
        replayed: what the records show that are held.
        seen: the steps of these records.
    """
    left = Counter(event_of(a) for a in replayed)
    known = Counter(event_of(a) for a in recorded)
    changed = [a for a in recorded if a.level == "page" and not left[event_of(a)]]
    gone = [a.step for a in changed if a.step not in seen]
    causes = [a.step for a in replayed if a.first_cause]
    found = [
        replace(a, first_cause=False)
        if a in changed and a.step in seen and min(causes, default=a.step + 1) <= a.step
        else a
        for a in recorded
    ]
    for anomaly in replayed:
        key = event_of(anomaly)
        if known[key]:
            known[key] -= 1
            continue
        first = anomaly.first_cause and (not gone or anomaly.step < min(gone))
        found.append(replace(anomaly, first_cause=first))
    return found


def event_of(a: Anomaly) -> Key:
    """Return what two anomalies share that tell of the same thing, whatever their numbers are."""
    return (a.detector, a.level, a.attempt, a.step, a.micro, a.rank, a.module, a.kind, a.phase)


def _demoted(merged_reader: MergedReader, attempt: int, found: list[Anomaly]) -> list[Anomaly]:
    """Return anomalies of which none is a first cause, if ranks of the attempt are not held."""
    if not any(a.first_cause for a in found) or not is_partial(merged_reader, attempt):
        return found
    return [replace(a, first_cause=False) for a in found]


def is_told(merged_reader: MergedReader, attempt: int) -> bool:
    """Return whether the head's daemon has seen all that the ranks wrote, or still is at it."""
    newest = attempt == merged_reader.attempts()[-1]
    if newest and is_live(merged_reader.run) and has_daemon(merged_reader.run):
        return True
    if not any(isinstance(e.what, FinishedEvent) for e in merged_reader.events(attempt)):
        return False
    lost = any("anomalies" in x.where or "daemon" in x.where for x in merged_reader.lost)
    return not lost and not merged_reader.unmerged_steps(attempt)
