"""Merging what the ranks deliver, one step at a time, without waiting for anybody for ever.

Pure: records go in, with the time at which they arrived, merged records come out in ascending
order of their step. The same class serves a node, whose parts are single ranks, and the head,
whose parts are also other nodes' merged blocks: a part is a set of ranks.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ddpprobe.records.merge import disagreements, merge_all
from ddpprobe.records.step import Digests, StepRecord

GRACE_SECONDS = 5.0
REORDER_SECONDS = 1.0
OPEN_SECONDS = 60.0
# Ranks that went apart stay apart: from then on every parameter differs in every record.
MOST_CHECKSUMS = 4096
MOST_WITNESSES = 64

logger = logging.getLogger("ddpprobe")


@dataclass(slots=True)
class _Part:
    record: StepRecord
    final: bool

    @property
    def complete(self) -> bool:
        """Nothing fuller of this step can follow from these ranks."""
        return self.final or (self.record.sampled and not self.record.partial)

    @property
    def fullness(self) -> tuple[bool, bool, bool, int]:
        """Order by which one part replaces another of the same ranks."""
        record = self.record
        return (self.final, record.sampled, not record.partial, record.wall_time_ns)


@dataclass(slots=True)
class _Step:
    """The parts of one step, disjoint in their ranks; `of` finds the one that a rank is in.

    `awaited`: at least the ranks of which something is still to come. Looking at the last one again
    and again costs nothing; every rank is taken off once.
    """

    first_seen: float
    awaited: list[int]
    parts: dict[int, _Part] = field(default_factory=dict)  # by its id()
    of: dict[int, _Part] = field(default_factory=dict)
    open: dict[int, _Part] = field(default_factory=dict)  # those that announce a fuller one

    @property
    def sampled(self) -> bool:
        return any(p.record.sampled for p in self.parts.values())

    def open_for(self, alive: set[int]) -> bool:
        """One of the living ranks has announced that a fuller part is to come."""
        return any(alive.intersection(p.record.ranks) for p in self.open.values())

    def put(self, part: _Part) -> bool:
        """Take a part in; False if it cannot be told apart from what other parts say."""
        ranks = set(part.record.ranks)
        found = {id(p): p for p in map(self.of.get, part.record.ranks) if p is not None}
        rivals = list(found.values())
        if not all(p.fullness <= part.fullness and ranks >= set(p.record.ranks) for p in rivals):
            same = [p for p in rivals if ranks == set(p.record.ranks)]
            for rival in same:
                rival.record = _keep_witness(rival.record, part.record)
            return bool(same)
        for rival in rivals:
            part.record = _keep_witness(part.record, rival.record)
            del self.parts[id(rival)]
            self.open.pop(id(rival), None)
        self.parts[id(part)] = part
        if part.record.partial and not part.final:
            self.open[id(part)] = part
        self.of.update(dict.fromkeys(part.record.ranks, part))
        return True


class Gather:
    """Collects the records of one attempt and merges them step by step.

    A sampled step comes out when every rank that may still speak has delivered its complete record
    or one of a later step, or `grace_seconds` after its first record arrived; who did not deliver
    is listed in `missing`. A partial record (an alarm sent ahead) waits for its rank's full one up
    to `open_seconds` while the rank lives: only the end of the step tells whether a GradScaler gave
    it up, and a step may take long. A record of an unsampled step has no fuller
    successor: it comes out after `reorder_seconds`, so that a slower rank's alarm of an earlier
    step still comes first. A part that cannot be merged any more is dropped and counted in
    `late`, one that cannot be merged at all in `set_aside`.

    Args:
        expected: the ranks that deliver.
        grace_seconds: how long a sampled step waits for its slowest rank.
        reorder_seconds: how long an unsampled alarm waits for earlier ones.
        open_seconds: how long an alarm waits for the end of its step.
        judges: True: nobody merges after this one, so of the parameters' checksums those stay on
            which ranks disagree. False, on a node: all of them go to the head.
        after: steps up to here came out in an earlier life and are ignored, uncounted.

    Attributes:
        late: parts that were dropped; `late_witnesses` are the newest of them that saw something
            that is not finite, for whom they concern to take out.
        set_aside: parts that could not be merged.
    """

    def __init__(
        self,
        expected: Sequence[int],
        grace_seconds: float = GRACE_SECONDS,
        *,
        reorder_seconds: float = REORDER_SECONDS,
        open_seconds: float = OPEN_SECONDS,
        judges: bool = True,
        after: int = -1,
    ) -> None:
        self.expected = tuple(sorted(expected))
        self.late = self.set_aside = 0
        self.late_witnesses: deque[StepRecord] = deque(maxlen=MOST_WITNESSES)
        self.last_step = after
        self._floor = after
        self._grace = grace_seconds
        self._reorder = reorder_seconds
        self._open = open_seconds
        self._judges = judges
        self._alive = set(self.expected)
        self._reached = dict.fromkeys(self.expected, -1)
        self._steps: dict[int, _Step] = {}

    @property
    def waiting_for(self) -> frozenset[int]:
        """Ranks that may still deliver."""
        return frozenset(self._alive)

    @property
    def pending(self) -> int:
        """Steps held back."""
        return len(self._steps)

    def add(self, record: StepRecord, now: float, *, final: bool = False) -> None:
        """Take one rank's record, or (`final`) a merged one that will not be sent again.

        Args:
            record: of any ranks; unexpected ones are merged as well.
            now: seconds on a clock of the caller's that never goes back.
            final: the ranks in `record.ranks` and `record.missing` say no more about this step.
        """
        if len(set(record.ranks)) < len(record.ranks):
            self._put_aside(record.step, f"a rank stands twice in {record.ranks}")
            return
        part = _Part(record, final)
        if part.complete:
            for rank in (*record.ranks, *(record.missing if final else ())):
                self._reached[rank] = max(record.step, self._reached.get(rank, -1))
        if record.step <= self.last_step:
            self.late += record.step > self._floor
            if record.step > self._floor and record.first_bad is not None:
                self.late_witnesses.append(record)
            return
        if record.step not in self._steps:
            self._steps[record.step] = _Step(now, list(self._alive))
        step = self._steps[record.step]
        self.late += not step.put(part)

    def is_past(self, step: int) -> bool:
        """Whether every rank that may still deliver has delivered this step, or a later one."""
        return all(self._reached[rank] >= step for rank in self._alive)

    def mark_dead(self, rank: int) -> None:
        """Wait no longer for a rank: it ended, well or not, and all it wrote was added."""
        self._alive.discard(rank)

    def ready(self, now: float) -> list[StepRecord]:
        """Return the steps that need wait no longer at `now`, merged, ascending."""
        out = []
        for number in sorted(self._steps):
            if not self._is_ready(number, self._steps[number], now):
                break
            out += self._emit(number)
        return out

    def drain(self) -> list[StepRecord]:
        """Return everything that is left, merged, ascending."""
        return [record for number in sorted(self._steps) for record in self._emit(number)]

    def _is_ready(self, number: int, step: _Step, now: float) -> bool:
        waited = now - step.first_seen
        patience = self._grace if step.sampled else self._reorder
        if step.open_for(self._alive):
            patience = max(patience, self._open)
        if waited >= patience:
            return True
        awaited = step.awaited
        while awaited and (awaited[-1] not in self._alive or self._reached[awaited[-1]] >= number):
            awaited.pop()
        if not awaited or step.sampled or step.open:
            return not awaited
        # A rank that was heard on a step that nobody samples says no more of it.
        return all(self._reached[r] >= number or r in step.of for r in self._alive)

    def _emit(self, number: int) -> list[StepRecord]:
        """Return a step merged; nothing if none of its parts can be."""
        step = self._steps.pop(number)
        self.last_step = number
        merged = self._merge(number, list(step.parts.values()))
        if merged is None:
            return []
        # Nobody is expected to speak on a step that is not sampled: silence there is health.
        missing = _absent(self.expected, merged.ranks) if merged.sampled else ()
        digests = _disputed(merged.digests) if self._judges else merged.digests
        return [replace(merged, missing=missing, digests=digests)]

    def _merge(self, number: int, parts: list[_Part]) -> StepRecord | None:
        """Merge a step; a part that cannot be merged is set aside, not the others."""
        try:
            return merge_all([part.record for part in parts])
        except ValueError:
            merged: StepRecord | None = None
        for part in sorted(parts, key=lambda p: p.final):  # what was pushed comes last
            try:
                merged = part.record if merged is None else merge_all([merged, part.record])
            except ValueError as error:
                self._put_aside(number, str(error))
        return merged

    def _put_aside(self, step: int, why: str) -> None:
        if not self.set_aside:
            logger.warning(
                "ddpprobe: a part of step %d cannot be merged and is set aside (%s); said once, "
                "then only counted", step, why,
            )  # fmt: skip
        self.set_aside += 1


def _absent(expected: Iterable[int], present: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(expected) - set(present)))


def _disputed(digests: Digests) -> Digests:
    """Return what ranks disagree on, in order, up to `MOST_CHECKSUMS`; the first one always."""
    kept: dict[tuple[str, str], Mapping[int, int]] = {}
    room = MOST_CHECKSUMS
    for key, held in disagreements(digests).items():
        room -= len(held)
        if kept and room < 0:
            break
        kept[key] = held
    return kept


def _keep_witness(kept: StepRecord, other: StepRecord) -> StepRecord:
    """Return `kept`, with the first bad tensor of `other` if it has none itself."""
    if kept.first_bad is not None or other.first_bad is None:
        return kept
    return replace(kept, first_bad=other.first_bad)
