"""What went wrong in an attempt: what the daemon wrote down, united with what the records show."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

from ddpprobe.detectors.settings import Settings
from ddpprobe.detectors.suite import default_suite
from ddpprobe.ends.anomalies import RANK_LOST
from ddpprobe.records import Anomaly
from ddpprobe.replay.completeness import is_partial
from ddpprobe.replay.endings import ending_of
from ddpprobe.replay.overlay import Overlay
from ddpprobe.replay.rank_losses import rank_losses
from ddpprobe.replay.under_way import has_daemon, is_live

Key = tuple[object, ...]


def verdicts(overlay: Overlay, attempt: int) -> list[Anomaly]:
    """Return the anomalies of an attempt, and its dead ranks.

    If the daemon saw all there is, what it wrote down is the verdict. Otherwise the detectors go
    over what is held as well: the daemon may have died before the end, and what it saw may be gone.
    """
    # How it ended is judged anew: of several nodes' daemons each has seen its own ranks only.
    told = [a for a in overlay.told_anomalies(attempt) if a.detector != RANK_LOST]
    found = told
    if not _is_told(overlay, attempt):
        seen: set[int] = set()
        found = united(told, judged(overlay, attempt, look=seen.add), seen)
    return found + losses(overlay, attempt, found)


def judged(
    overlay: Overlay,
    attempt: int,
    settings: Settings | None = None,
    advance: Callable[[int], None] = lambda _: None,
    look: Callable[[int], None] = lambda _: None,
) -> list[Anomaly]:
    """Return what the detectors make of the records that are held; `look` is told their steps.

    Where ranks are missing whose records nobody merged, none of it is called a first cause.
    """
    suite, found = default_suite(settings), []
    for record in overlay.merged_records(attempt):
        found += suite.update(record)
        look(record.step)
        advance(1)
    return _humble(overlay, attempt, found + suite.finish())


def losses(overlay: Overlay, attempt: int, found: list[Anomaly]) -> list[Anomaly]:
    """Return the end as anomalies, beside what was `found`; humble as `judged` is."""
    return _humble(overlay, attempt, rank_losses(ending_of(overlay, attempt), found))


def united(told: list[Anomaly], replayed: list[Anomaly], seen: Collection[int]) -> list[Anomaly]:
    """Return everything that was told, and of what was replayed that which was not.

    Where a told page does not come out again, either its record is gone: what comes out behind it
    is not known to be the first of anything. Or its record is here and says more than the daemon
    knew: then what comes out, at its step or before, comes first.

    Args:
        told: what the daemon wrote down.
        replayed: what the records show that are held.
        seen: the steps of these records.
    """
    left = Counter(event_of(a) for a in replayed)
    known = Counter(event_of(a) for a in told)
    changed = [a for a in told if a.level == "page" and not left[event_of(a)]]
    gone = [a.step for a in changed if a.step not in seen]
    causes = [a.step for a in replayed if a.first_cause]
    found = [
        replace(a, first_cause=False)
        if a in changed and a.step in seen and min(causes, default=a.step + 1) <= a.step
        else a
        for a in told
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


def _humble(overlay: Overlay, attempt: int, found: list[Anomaly]) -> list[Anomaly]:
    if not any(a.first_cause for a in found) or not is_partial(overlay, attempt):
        return found
    return [replace(a, first_cause=False) for a in found]


def _is_told(overlay: Overlay, attempt: int) -> bool:
    """Return whether the head's daemon has seen all that the ranks wrote, or still is at it."""
    newest = attempt == overlay.attempts()[-1]
    if newest and is_live(overlay.run) and has_daemon(overlay.run):
        return True
    if not any(e.what.get("event") == "finished" for e in overlay.events(attempt)):
        return False
    lost = any("anomalies" in x.where or "daemon" in x.where for x in overlay.lost)
    return not lost and not overlay.untold_steps(attempt)
