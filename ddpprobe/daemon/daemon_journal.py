"""The daemon's own journal of one attempt: what it merged, found and saw, once each, for good.

A daemon that was killed is followed by one that reads this journal back: it feeds the detectors
with the recorded stream, writes down the verdicts its predecessor had no time to write, and goes on
after the last merged step.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

from ddpprobe.daemon.stored_journal import StoredJournal, past_of
from ddpprobe.ends.anomalies import (
    RANK_LOST,
    code_of,
    last_words,
    retells,
    taken_back,
    takes_back,
)
from ddpprobe.ends.end import RUNNING, End
from ddpprobe.ends.evidence import Evidence
from ddpprobe.records import events
from ddpprobe.records.derived import NoiseScale
from ddpprobe.records.events import Beat, Event
from ddpprobe.records.site_memory import Magnitudes, Outliers, UpdateRatios
from ddpprobe.records.step import Anomaly, StepRecord
from ddpprobe.rundir import framing
from ddpprobe.rundir.framing import Frame
from ddpprobe.rundir.heartbeat import Heartbeat
from ddpprobe.rundir.journal import BACK_OFF_SECONDS, JournalTail, JournalWriter, segments_of
from ddpprobe.rundir.validate import MALFORMED
from ddpprobe.store.manifest import Consumed

WINDOW_STEPS = 64  # sampled steps before an anomaly that are evidence

logger = logging.getLogger("ddpprobe")


class Detectors(Protocol):
    """What the daemon's journal needs of `ddpprobe.detectors.suite.Suite`."""

    def update(self, record: StepRecord) -> list[Anomaly]:
        """Take the next merged record; return what it shows."""

    def finish(self) -> list[Anomaly]:
        """Return what only the end of the stream shows."""


class DaemonJournal:
    """Appends to the daemon journal of one attempt and remembers what is in it.

    Attributes:
        last_step: the newest merged step; -1 if there is none.
        pushed: the newest step the head acknowledged (on a node that is not the head).
        merged: the newest merged record of a sampled step.
        outliers, update_ratios, magnitudes: what the merged sampled steps so far say of the sites.
        noise_scale: what they say of the gradients' noise.
        window: the last merged sampled steps, oldest first.
        recovered: what a predecessor had found.
        settled: causes that an event names: of orders, pinned windows, and what was refused.
        evidence: of how the ranks of this node ended.
        deaths: ranks that ended badly, as is written down.
        lost: what was written down of the end so far, as anomalies; nothing of one taken back.
        causes: first causes that the detectors found; an end may follow from one.
        first_causes: pages that begin an episode, ends among them, as they were found; whoever
            follows them takes them out.
        first_cause: the one that was told last and holds (see `first_cause.FirstCause`).
        finished: the attempt came to its end and everything of it was merged.
        orders: of the head's to all ranks, their number by action.
        anomalies, exemplars: number and latest anomaly by (detector, level).
        blamed: number of anomalies by rank and level.
    """

    def __init__(self, directory: Path, meta: Mapping[str, Any], detectors: Detectors) -> None:
        self.directory = directory
        self.last_step = self.pushed = -1
        self.merged: StepRecord | None = None
        self.outliers, self.update_ratios = Outliers(), UpdateRatios()
        self.magnitudes, self.noise_scale = Magnitudes(), NoiseScale()
        self.window: deque[int] = deque(maxlen=WINDOW_STEPS)
        self.recovered: list[Anomaly] = []
        self.settled: set[str] = set()
        self.deaths: set[int] = set()
        self.evidence = Evidence()
        self.lost: list[Anomaly] = []
        self.causes: list[Anomaly] = []
        self.first_causes: list[Anomaly] = []
        self.first_cause: events.FirstCauseEvent | None = None
        self._found_cause: events.FirstCauseEvent | None = None  # the last that is no end
        self.finished = False
        self.orders: Counter[str] = Counter()
        self.anomalies: Counter[tuple[str, str]] = Counter()
        self.exemplars: dict[tuple[str, str], Anomaly] = {}
        self.blamed: defaultdict[int, Counter[str]] = defaultdict(Counter)
        self.dropped: Counter[str] = Counter()
        self._meta = dict(meta)
        self._detectors = detectors
        self._writer: JournalWriter | None = None
        self._next_seq = 0
        self._retry_at = 0.0
        self._recover()

    def take(self, record: StepRecord) -> list[Anomaly]:
        """Write a merged record down, show it to the detectors, and write down what they find."""
        writer = self._open()
        if writer is not None:
            writer.append_record(record)
        self._remember_record(record)
        found = self._detectors.update(record)
        for anomaly in found:
            self._write_anomaly(anomaly)
        return found

    def finish(self) -> list[Anomaly]:
        """End the stream of merged records; harmless if it ended before."""
        if self.finished:
            return []
        found = self._detectors.finish()
        for anomaly in found:
            self._write_anomaly(anomaly)
        self.say(events.FinishedEvent())
        return found

    def death(self, rank: int, signal: str, time_ns: int, step: int) -> None:
        """Write down that a rank ended badly; which one is the cause is `lose`'s to say."""
        self.say(events.DeathEvent(rank=rank, signal=signal, time_ns=time_ns, step=step))

    def lose(self, end: End, found: list[Anomaly]) -> None:
        """Write down how the attempt ended, as far as is known now; each anomaly once.

        What is told again with more words, such as a hang that has been ended, counts as one.
        """
        self.say(events.EndEvent(**end.to_json()))
        for anomaly in self.untold(found):
            self._write_anomaly(anomaly)

    def untold(self, found: list[Anomaly]) -> list[Anomaly]:
        """Return what of an end is not written down yet, each once; of thousands of ranks, too."""
        told = set(map(code_of, self.lost))
        new = {code_of(anomaly): anomaly for anomaly in found}
        return [anomaly for code, anomaly in new.items() if code not in told]

    @property
    def is_lost(self) -> bool:
        """Whether an end is written down that is a page."""
        return any(anomaly.level == "page" for anomaly in self.lost)

    def take_back(self) -> None:
        """Write down that the end that was told is none: the hang is over, the ranks went on.

        The first cause is the one before it again. What was counted was so, and stays counted.
        """
        for anomaly in self.lost:
            if anomaly.level == "page":
                self._append(framing.ANOMALY, framing.encode_anomaly(taken_back(anomaly)))
        self.say(events.EndEvent(**End(RUNNING, message="it is under way").to_json()))

    def correct(self, cause: Anomaly, first: Anomaly) -> None:
        """Write down that the first cause of an episode is another one, which came late.

        Args:
            cause: what was found before, and follows from it; told again as no first cause.
            first: the earlier one.
        """
        self._write_anomaly(replace(first, first_cause=True))
        demoted = replace(cause, first_cause=False)
        self._append(framing.ANOMALY, framing.encode_anomaly(demoted))
        self.causes = [known for known in self.causes if known is not cause]
        if cause.detector == RANK_LOST:
            self.lost.append(demoted)

    def last_beats(self, beats: Mapping[int, Heartbeat]) -> None:
        """Write down how far the ranks came by their heartbeats: a journal may end before that.

        The store has it then as well, of which a copy elsewhere holds no heartbeats.
        """
        if beats and not self.finished:
            names = [field.name for field in fields(Beat)]
            told = {r: Beat(**{n: getattr(b, n) for n in names}) for r, b in beats.items()}
            self.say(events.LastBeatsEvent(ranks=told))

    def acknowledged(self, step: int) -> None:
        """Write down that the head holds every step up to `step`."""
        if step > self.pushed:
            self.say(events.PushedEvent(step=step))

    def say(self, event: Event) -> None:
        """Append what happened, and take it in."""
        self._take_event(event)
        if (writer := self._open()) is not None:
            writer.append_event(event)

    def sample(self, host: Mapping[str, float], ranks: Mapping[int, Mapping[str, float]]) -> None:
        """Append readings of the node and of the ranks' processes."""
        by_name = {str(rank): values for rank, values in ranks.items()}
        value = {"time_ns": time.time_ns(), "host": host, "ranks": by_name}
        self._append(framing.SAMPLE, framing.encode_json(value))

    def losses(self) -> Counter[str]:
        """Frames that could not be written, by reason."""
        return self.dropped + (self._writer.dropped if self._writer else Counter())

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _recover(self) -> None:
        first = min(segments_of(self.directory), default=0)
        past = past_of(self.directory) if first > 0 else None
        told, stored = past.anomalies() if past is not None else ([], Consumed())
        # No detector finds an end again. What of these the events take back is behind them.
        for anomaly in told:
            if anomaly.detector == RANK_LOST:
                self._read_end(anomaly)
        written = Counter(code_of(a) for a in told if a.detector != RANK_LOST)
        found: list[Anomaly] = []
        latest = self._read_past(past)
        tail = JournalTail(self.directory)
        for frame in tail.poll():
            self._next_seq = frame.seq + 1
            if frame.type == framing.ANOMALY and stored.has(frame.seq):
                continue
            try:
                new = self._read_back(frame, tail, written)
            except MALFORMED:
                self.dropped["malformed"] += 1
                continue
            found += new
            latest = new if frame.type == framing.RECORD else latest
        tail.close()
        if past is not None:
            # Without the steps that expired the detectors may see what nobody saw, and not see
            # what was seen. What was written holds; only the last verdict may not have been.
            found = latest
        # No detector finds what came too late to be merged, and was written down all the same.
        late = written - Counter(map(code_of, found))
        found = last_words([*map(framing.decode_anomaly, late.elements()), *found])
        self.recovered = found
        for anomaly in found:
            code = code_of(anomaly)
            if written[code]:
                written[code] -= 1
                self._count(anomaly)
            else:  # its finder was killed between the record and the verdict
                self._write_anomaly(anomaly)

    def _read_past(self, past: StoredJournal | None) -> list[Anomaly]:
        """Take in what only the store holds of the journal; return the newest verdicts on it."""
        if past is None:
            return []
        for event in past.events():
            self._take_event(event)
        found: list[Anomaly] = []
        for record in past.records(self._first_step()):
            self._remember_record(record)
            found = self._detectors.update(record)
        return found

    def _first_step(self) -> int | None:
        """Return the first merged step that the journal itself holds."""
        tail = JournalTail(self.directory)
        try:
            for frame in tail.poll():
                with contextlib.suppress(*MALFORMED):
                    if frame.type == framing.RECORD:
                        return framing.decode_record(frame.payload, tail.tables).step
        finally:
            tail.close()
        return None

    def _read_back(self, frame: Frame, tail: JournalTail, written: Counter[bytes]) -> list[Anomaly]:
        """Take in one frame of the predecessor's; return what the detectors make of it."""
        if frame.type == framing.RECORD:
            record = framing.decode_record(frame.payload, tail.tables)
            self._remember_record(record)
            return self._detectors.update(record)
        if frame.type == framing.ANOMALY:
            anomaly = framing.decode_anomaly(frame.payload)
            if anomaly.detector == RANK_LOST:  # no detector finds that again
                self._read_end(anomaly)
            else:
                written[code_of(anomaly)] += 1
        if frame.type == framing.LIFE and (event := frame.event()) is not None:
            was_finished = self.finished
            self._take_event(event)
            if self.finished and not was_finished:
                return self._detectors.finish()
        return []

    def _read_end(self, anomaly: Anomaly) -> None:
        if not any(takes_back(anomaly, known) for known in self.lost):
            self._count(anomaly)

    def _forget_end(self) -> None:
        self.lost.clear()
        self.first_causes = [a for a in self.first_causes if a.detector != RANK_LOST]
        self.first_cause = self._found_cause

    def _take_event(self, event: Event) -> None:
        self.evidence.take_event(event, None, str(self._meta.get("node", "")))
        match event:
            case events.DeathEvent():
                self.deaths.add(event.rank)
            case events.PushedEvent():
                self.pushed = event.step
            case events.FinishedEvent():
                self.finished = True
            case events.FirstCauseEvent():
                self.first_cause = event
                if event.detector != RANK_LOST:
                    self._found_cause = event
            case events.EndEvent() if event.state == RUNNING:
                self._forget_end()
            case events.OrderEvent() | events.PinnedEvent() | events.OrderDroppedEvent() if (
                event.cause is not None
            ):
                self.settled.add(event.cause)
                if isinstance(event, events.OrderEvent):
                    self.orders[event.action] += 1

    def _remember_record(self, record: StepRecord) -> None:
        self.last_step = record.step
        if record.sampled:
            self.merged = record
            self.window.append(record.step)
            self.outliers.update(record)
            self.update_ratios.update(record)
            self.magnitudes.update(record)
            self.noise_scale.update(record)

    def _write_anomaly(self, anomaly: Anomaly) -> None:
        self._append(framing.ANOMALY, framing.encode_anomaly(anomaly))
        self._count(anomaly)

    def _count(self, anomaly: Anomaly) -> None:
        key = (anomaly.detector, anomaly.level)
        self.exemplars[key] = anomaly
        if not any(retells(anomaly, known) for known in self.lost):
            self.anomalies[key] += 1
            if anomaly.rank is not None:
                self.blamed[anomaly.rank][anomaly.level] += 1
        if anomaly.first_cause and anomaly.level == "page":
            self.first_causes.append(anomaly)
        if anomaly.detector == RANK_LOST:
            self.lost.append(anomaly)
        elif anomaly.first_cause:
            self.causes.append(anomaly)

    def _append(self, type_: int, payload: bytes) -> None:
        writer = self._open()
        if writer is not None:
            writer.append(type_, payload)

    def _open(self) -> JournalWriter | None:
        """Return the writer; None while the disk refuses even an empty journal."""
        if self._writer is None and time.monotonic() >= self._retry_at:
            segments = segments_of(self.directory)
            first = segments[-1] + 1 if segments else 0
            try:
                self._writer = JournalWriter(
                    self.directory, self._meta, first_segment=first, first_seq=self._next_seq
                )
            except OSError as error:
                logger.warning("ddpprobe: the daemon cannot write its journal: %s", error)
                self._retry_at = time.monotonic() + BACK_OFF_SECONDS
        if self._writer is None:
            self.dropped["journal"] += 1
        return self._writer
