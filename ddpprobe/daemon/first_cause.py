"""What the head says is the first cause of the newest episode, once that has settled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from ddpprobe.daemon.daemon_journal import DaemonJournal
from ddpprobe.detectors.nonfinite import NonFinite
from ddpprobe.detectors.suite import follows, when
from ddpprobe.ends.anomalies import RANK_LOST, first_cause_of
from ddpprobe.records.events import FirstCauseEvent
from ddpprobe.records.gather import Gather
from ddpprobe.records.step import Anomaly, StepRecord

# So long the head waits for a node (`attempt.HEAD_GRACE_SECONDS`), and so long for a late witness.
SETTLE_SECONDS = 5.0
MOST_LATE = 64
MOST_TOLD = 2  # in an episode: an alert is told anew for every change


@final
class FirstCause:
    """Follows the first causes of an attempt, and writes each one down when it has settled.

    The merge of a step that nobody samples waits for nobody: most ranks have nothing to say of it,
    and which ones have is not known. So a witness on another node may come when the step is merged,
    and the verdict names whom the fault reached next. That is why a cause is told only when every
    rank that lives has gone by its step, or after 5 s; who came late until then, and saw the fault
    earlier, is told in its place. One that comes even later corrects it, once in an episode. The
    verdict that is written down is corrected with it: readers of the run say the same.

    How an attempt ended has settled before it is written down (`ends`), and may be told anew. A
    hang that is over is taken back there, and the cause before it is the newest one again.

    Args:
        daemon_journal: whose causes these are, and where they are written down. What it holds of a
            predecessor is not told again.
        everybody: the ranks of the job.
    """

    def __init__(self, daemon_journal: DaemonJournal, everybody: Sequence[int]) -> None:
        self._daemon_journal = daemon_journal
        self._everybody = frozenset(everybody)
        self._late: deque[Anomaly] = deque(maxlen=MOST_LATE)
        self._cause: Anomaly | None = None
        self._since = 0.0
        self._told = 0  # times in this episode
        self._went_on = False
        if daemon_journal.first_cause is not None:
            self._go_on(daemon_journal.first_cause)

    def look(self, now: float, gather: Gather, *, running: bool, over: bool) -> None:
        """Take what is new, and write down what has settled.

        Args:
            now: monotonic seconds.
            gather: of the attempt.
            running: nothing is known of an end of it.
            over: nothing more is to come.
        """
        self._went_on |= running
        if self._cause is not None and self._cause.detector == RANK_LOST:
            self._cause = self._cause if self._daemon_journal.lost else None
        found = self._daemon_journal.first_causes
        while found:
            self._take(found.pop(0), now)
        while gather.late_witnesses:
            self._late.extend(self._judge(gather.late_witnesses.popleft()))
        if self._cause is None or self._told >= MOST_TOLD:
            return
        first = self._first(self._cause)
        told = first_cause_of(first)
        if self._told and _labels(told) == _labels(self._daemon_journal.first_cause):
            return
        waited = now - self._since >= SETTLE_SECONDS
        if over or waited or first.detector == RANK_LOST or gather.is_past(first.step):
            if first is not self._cause:
                self._daemon_journal.correct(self._cause, first)
            # An end has no time of its own: it is seen when it is told.
            seen = told.time_ns or time.time_ns()
            self._daemon_journal.say(replace(told, time_ns=seen))
            self._told += 1

    def _take(self, anomaly: Anomaly, now: float) -> None:
        if self._cause is None or not self._is_of_episode(anomaly, self._cause):
            self._told, self._since = 0, now
        self._cause, self._went_on = anomaly, False

    def _is_of_episode(self, anomaly: Anomaly, cause: Anomaly) -> bool:
        """Whether a first cause is a better word for the episode that another one has begun."""
        if anomaly.detector == cause.detector == RANK_LOST:
            return not self._went_on
        return when(anomaly) <= when(cause) and follows(cause, anomaly)

    def _first(self, cause: Anomaly) -> Anomaly:
        """Return the earliest of a cause and the late witnesses that explain it."""
        late = [a for a in self._late if when(a) < when(cause) and follows(cause, a)]
        return min([cause, *late], key=when)

    def _judge(self, record: StepRecord) -> list[Anomaly]:
        """Return what a part shows that came too late to be merged."""
        missing = tuple(sorted(self._everybody.difference(record.ranks)))
        found = NonFinite().update(replace(record, missing=missing))
        return [anomaly for anomaly in found if anomaly.level == "page"]

    def _go_on(self, told: FirstCauseEvent) -> None:
        """Go on after what a predecessor has told: only what it had not come to is new."""
        found = self._daemon_journal.first_causes
        found.sort(key=lambda a: a.wall_time_ns)
        known = 0
        same = [a for a in found if _labels(first_cause_of(a)) == _labels(told)]
        if not same:
            return  # a damaged journal: what is left of it is told anew
        self._cause, self._told = same[-1], 1
        for number, anomaly in enumerate(found, 1):
            if anomaly in same or follows(anomaly, same[-1]):
                known = number
        del found[:known]


def _labels(told: FirstCauseEvent | None) -> FirstCauseEvent | None:
    """Return what distinguishes one cause from another one, which is not when it was seen."""
    return None if told is None else replace(told, time_ns=0)
