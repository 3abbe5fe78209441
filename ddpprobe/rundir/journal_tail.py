"""Reading one rank's journal while it is written: its records, and what it says of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ddpprobe.records.events import (
    ClosedEvent,
    DroppedEvent,
    Event,
    FuseEvent,
    HandlesEvent,
    JobEvent,
    PausedEvent,
    PeerExitEvent,
    ResumedEvent,
    SitesEvent,
    StandsEvent,
    TriggerEvent,
)
from ddpprobe.records.step import COUNTED_KINDS, NAN, NONFINITE, PHASE_OF_KIND, StepRecord
from ddpprobe.rundir import framing
from ddpprobe.rundir.framing import Frame
from ddpprobe.rundir.journal import JournalTail
from ddpprobe.rundir.validate import MALFORMED, count

# The every-step watch knows the phase, not always the site: where its witness is looked for.
_WATCHED_KIND = {"forward": "output", "backward": "grad_local", "step": "grad"}

_OF_ENDS = (
    ClosedEvent | HandlesEvent | JobEvent | PausedEvent | PeerExitEvent | ResumedEvent | StandsEvent
)


@dataclass(slots=True)
class JournalFacts:
    """What a rank's journal has said so far; counters since the rank's start.

    `nonfinite` counts elements by Site kind (of unsampled steps those of the first bad tensor).
    `triggers` are the captures its user asked for and that nobody has taken up yet.
    `recorded` are the sampled steps of which the whole record came.
    `closed`: it said that nothing more will come; `raised`: and that an exception was the reason;
    `leaving`: as its interpreter ended, without waiting for threads.
    `words` are the events that its end is judged by and that nobody has taken up yet.
    """

    meta: Mapping[str, Any] | None = None
    loss: float | None = None
    grad_norm: float | None = None
    loss_scale: float | None = None
    nonfinite: Counter[str] = field(default_factory=Counter)
    sites_expected: int = 0
    sites_observed: int = 0
    components: dict[str, bool] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    paused: bool = False
    closed: bool = False
    leaving: bool = False
    raised: bool = False
    last_step: int = -1
    recorded: int = 0
    triggers: list[TriggerEvent] = field(default_factory=list)
    words: list[Event] = field(default_factory=list)
    _alarm: tuple[int, Counter[str]] = (-1, Counter())

    def take_record(self, record: StepRecord) -> None:
        """Account for one record; the full record of a step replaces its alarm."""
        self.last_step = max(self.last_step, record.step)
        self.recorded += record.sampled and not record.partial
        for scalars in record.scalars.values():
            self.loss = scalars.get("loss", self.loss)
            self.grad_norm = scalars.get("grad_norm_local", self.grad_norm)
            self.loss_scale = scalars.get("loss_scale", self.loss_scale)
            self.sites_expected = count(scalars.get("sites_expected"), self.sites_expected)
            self.sites_observed = count(scalars.get("sites_observed"), self.sites_observed)
        nonfinite = count_nonfinite(record)
        step, counted = self._alarm
        self.nonfinite += nonfinite - counted if step == record.step else nonfinite
        self._alarm = (record.step, nonfinite | counted if step == record.step else nonfinite)

    def take_life(self, event: Event) -> None:
        """Account for one LIFE frame."""
        match event:
            case ClosedEvent():
                self.closed, self.raised = True, event.status != "ok"
                self.leaving = event.at_exit and not (self.raised or event.threads)
            case FuseEvent():
                self.components[event.component] = False
            case DroppedEvent():
                self.dropped[event.reason] += event.count
            case TriggerEvent():
                self.triggers.append(event)
            case PausedEvent() | ResumedEvent():
                self.paused = isinstance(event, PausedEvent)
            case SitesEvent():
                self.sites_expected, self.sites_observed = event.expected, event.observed
        if isinstance(event, _OF_ENDS):
            self.words.append(event)


class RankTail:
    """One rank's journal of one attempt.

    `facts` is what it said so far, `malformed` counts frames that are whole but make no sense,
    `closed_top` is the highest step in the segments that the rank will not write to any more,
    `first_segment` the number of the segment that was read first (-1: none yet): above 0 those
    before it were folded and deleted.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.rank = rank
        self.facts = JournalFacts()
        self.malformed = 0
        self.closed_top = self.first_segment = -1
        self._segment = -1
        self._tail = JournalTail(directory)
        self._frames = self._tail.poll()
        self._stopped = False  # the last call reached its limit

    def read(self, limit: int) -> list[StepRecord]:
        """Return up to `limit` records that were completed since the last call; never waits.

        Fewer than `limit` mean that there was no more when it was called.
        """
        out: list[StepRecord] = []
        # Of a call that reached its limit the rest goes over what was read then, not what is there.
        again, self._stopped = self._stopped, False
        while len(out) < limit:
            frame = next(self._frames, None)
            if frame is None:
                self._frames = self._tail.poll()
                if not again:
                    return out
                again = False
                continue
            if self._tail.segment != self._segment:
                self._segment, self.closed_top = self._tail.segment, self.facts.last_step
                if self.first_segment < 0:
                    self.first_segment = self._segment
            try:
                record = self._take(frame)
            # Of another version, or it refers to a site table that lies in a damaged part.
            except MALFORMED:
                self.malformed += 1
                continue
            if record is not None:
                out.append(record)
        self._stopped = True
        return out

    @property
    def segment(self) -> int:
        """Number of the segment that is being read; -1: none yet."""
        return self._segment

    @property
    def read_to(self) -> tuple[int, int]:
        """As of `JournalTail`."""
        return self._tail.read_to

    @property
    def written_to(self) -> tuple[int, int]:
        """As of `JournalTail`."""
        return self._tail.written_to

    @property
    def damaged(self) -> int:
        """Pieces of the journal that could not be used."""
        return len(self._tail.damage) + self.malformed

    def close(self) -> None:
        """Close the file."""
        self._tail.close()

    def _take(self, frame: Frame) -> StepRecord | None:
        if frame.type == framing.RECORD:
            record = framing.decode_record(frame.payload, self._tail.tables)
            self.facts.take_record(record)
            return record
        if frame.type == framing.META and self.facts.meta is None:
            self.facts.meta = frame.json()
        elif frame.type == framing.LIFE and (event := frame.event()) is not None:
            self.facts.take_life(event)
        return None


def count_nonfinite(record: StepRecord) -> Counter[str]:
    """Return the non-finite elements of a record by Site kind; at least 1 where one was seen.

    Infinities that the rank knows to do no harm (a mask) do not count: in its forward, where it
    calls nothing bad.
    """
    nonfinite: Counter[str] = Counter()
    counts, bad = record.counts[:, NONFINITE], record.first_bad
    if counts.any():
        per_row = counts.sum(axis=1)
        for row in np.flatnonzero(per_row):
            kind = record.sites[row].kind
            if kind not in COUNTED_KINDS:
                continue
            if bad is not None or PHASE_OF_KIND[kind] != "forward" or record.counts[row, NAN]:
                nonfinite[kind] += int(per_row[row])
    if bad is not None and not nonfinite:
        kind = bad.kind or _WATCHED_KIND.get(bad.phase, "grad")
        nonfinite[kind] = max(1, bad.nan + bad.pos_inf + bad.neg_inf)
    return nonfinite
