"""What is held of what was trained: how much of a run a verdict on it is about.

A run is `complete` if of every rank all sampled steps are held that it took, and its end is known.
How many it took is known from its last word in the journal, and, where the journal died, from its
heartbeat, which is a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddpprobe.ends.end import UNDECIDED
from ddpprobe.ends.evidence import clock_of
from ddpprobe.ends.rank_ends import CLEAN
from ddpprobe.reader.endings import Ending, ending_of
from ddpprobe.reader.last_beats import last_beats
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.rank_facts import Event, Steps
from ddpprobe.reader.rank_status import RUNNING, UNKNOWN, ends_of
from ddpprobe.records.events import (
    Beat,
    BlindEvent,
    ClosedEvent,
    FuseEvent,
    LastBeatsEvent,
)
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import STEP_PHASES
from ddpprobe.rundir.heartbeat import CLOSED, Heartbeat

# A rank counts a sampled step before its rows have arrived and are in the journal.
IN_FLIGHT = 2
_BEFORE = ("start", STEP_PHASES[0], CLOSED)  # states of a rank without a step, before its first
_OBSERVING = ("hooks", "steps")  # components without which nothing is recorded any more
NOTHING_SAMPLED = "nothing to judge: no step was sampled"
_UPLOADED = (
    "the daemon of each node uploads what it has committed, records about a minute late; what does "
    "not arrive lies on that node, where `ddpprobe info` says how to finish the upload"
)


@dataclass(frozen=True, slots=True)
class RankShare:
    """What is held of one rank in one attempt.

    Attributes:
        attempt, rank: which one.
        held: sampled steps that came to their end, of which its record is here, by itself or merged
            by the head.
        sampled: sampled steps that it took, at least.
        last_held: the newest of those held; None without any.
        reached: the step that it said last it was in; None if it said nothing.
        left: it was seen to exit with 0, and left no last word.
        began: the first step that it trained; None if it said of none, or not where in a step it
            was last.
        end: `closed`, `died`, `running` or `unknown`.
        elsewhere: none of its own journals is here.
        blind: its optimizer stepped, and it never saw a training forward of the model.
        blown: the part of the probe that switched itself off, and why; nothing came after that.
    """

    attempt: int
    rank: int
    held: int
    sampled: int
    last_held: int | None
    reached: int | None
    end: str
    elsewhere: bool = False
    blind: bool = False
    blown: str = ""
    began: int | None = None
    left: bool = False

    @property
    def missing(self) -> int:
        """Sampled steps that are not held, but for those that may still be on their way."""
        lacking = self.sampled - self.held
        return 0 if self.end == RUNNING and lacking <= IN_FLIGHT else max(0, lacking)

    @property
    def complete(self) -> bool:
        """Whether everything of it is held as far as it got, and its end is known."""
        return not (self.missing or self.end == UNKNOWN or self.blind or self.blown)


@dataclass(frozen=True, slots=True)
class Completeness:
    """What is held of a run.

    Attributes:
        shares: of every rank of every attempt.
        world: ranks by attempt.
        live: it is still under way.
        host: where rank 0 ran; "" if that is not known.
        url: the object store that it is read from; "" for a directory.
        undecided: what of the newest attempt's end is not known, although it is known how each rank
            ended; "" if all is.
    """

    shares: tuple[RankShare, ...]
    world: Mapping[int, int]
    live: bool
    host: str = ""
    url: str = ""
    undecided: str = ""

    @property
    def complete(self) -> bool:
        """Whether a verdict on what is held is a verdict on the run, as far as it got."""
        return self._whole and not self.unsampled and not self.undecided

    @property
    def unsampled(self) -> bool:
        """Whether the run is over and took no sampled step: then there is nothing to judge."""
        return not self.live and not self.sampled

    @property
    def empty(self) -> bool:
        """Whether all is held, and that is no sampled step: it is known that none was taken."""
        return self.unsampled and self._whole

    @property
    def _whole(self) -> bool:
        """Whether all of each rank is held, and it said its last word or goes on."""
        return bool(self.shares) and all(s.complete for s in self.shares)

    @property
    def sampled(self) -> int:
        """Sampled steps that were taken, over the attempts."""
        return sum(max(s.sampled for s in of) for of in self._by_attempt())

    @property
    def held(self) -> int:
        """Sampled steps that are held of all ranks, over the attempts."""
        return sum(min(min(s.held, s.sampled) for s in of) for of in self._by_attempt())

    def unknown(self) -> list[str]:
        """Say what is not held and what is therefore not known, ranks that lack the same in one."""
        if not self.shares:
            if self.url:
                return [f"nothing of any rank has arrived at {self.url}: {_UPLOADED}"]
            return [
                "nothing is held of any rank: none has begun, or its journals and store are gone"
            ]
        several = len(self.world) > 1
        texts: dict[tuple[int, str, str], list[RankShare]] = {}
        for share in self.shares:
            lacks = [(text, text) for text in self._lacks(share)]
            for of_one, of_several in [*lacks, *self._lacks_end(share)]:
                texts.setdefault((share.attempt, of_one, of_several), []).append(share)
        said = []
        for (attempt, of_one, of_several), shares in texts.items():
            where = f"attempt {attempt}, " if several else ""
            text = of_several if len(shares) > 1 else of_one
            said.append(f"{where}{ranks_text(s.rank for s in shares)}{text}")
        if self.unsampled and not said:
            said.append(
                "the run took no sampled step: it ended within the first one, or before the next "
                "that `every` samples, no optimizer of the model made a step (a loop that steps by "
                "hand calls probe.step() after each), or the loop trains "
                "without a call of the module that install() was given"
            )
        return [*said, *([self.undecided] if self.undecided else [])]

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "complete": self.complete, "held": self.held, "sampled": self.sampled,
            "unknown": self.unknown(),
            "ranks": [
                {
                    "attempt": s.attempt, "rank": s.rank, "held": s.held, "sampled": s.sampled,
                    "last_held": s.last_held, "reached": s.reached, "end": s.end,
                }
                for s in self.shares
            ],
        }  # fmt: skip

    def _by_attempt(self) -> Iterator[list[RankShare]]:
        for attempt in self.world:
            of = [s for s in self.shares if s.attempt == attempt]
            if of:
                yield of

    def _lacks(self, share: RankShare) -> Iterator[str]:
        of = self._of_all(share)
        if share.elsewhere and not share.held:
            at = f" (rank 0 ran on {self.host})" if self.host else ""
            if self.url:
                yield f"{of}: nothing of theirs has arrived at {self.url}: {_UPLOADED}{at}"
                return
            yield (
                f"{of}: nothing is held here; their records are on their own nodes{at}; to put "
                "the directories of all nodes together: ddpprobe collect DEST DIR ..."
            )
            return
        if share.blind:
            yield (
                f"{of}: the optimizer stepped, but no training forward of the model was seen, so "
                "nothing is recorded: install() on the module that the loop calls"
            )
        if share.blown:
            yield (
                f"{of}: a part of ddpprobe failed and switched itself off ({share.blown}), so what "
                f"came after that is not recorded; {_held(share)}"
            )
        if share.missing:
            reached = "" if share.reached is None else f"; it was last in step {share.reached}"
            held = f"{share.held} of {share.sampled} sampled steps are held{_last(share)}"
            yield f"{of}: {held}{reached}"

    def _lacks_end(self, share: RankShare) -> Iterator[tuple[str, str]]:
        """Yield what is not known of a rank's end: as it is said of one, and of several alike."""
        if share.end != UNKNOWN or (share.elsewhere and not share.held):
            return
        of, held = self._of_all(share), _held(share)
        if share.left:
            text = "left with exit code 0 and without a last word, so there may have been more"
            yield f"{of}: it {text}; {held}", f"{of}: each {text}; {held}"
            return
        known = "on its own node" if share.elsewhere else "not known"
        yield (
            f"{of}: how it ended is {known}; {held}",
            f"{of}: how each ended is {known}; {held}",
        )

    def _of_all(self, share: RankShare) -> str:
        return f" of {self.world[share.attempt]}" if share.elsewhere else ""


def is_partial(merged_reader: MergedReader, attempt: int) -> bool:
    """Return whether ranks are missing here that nobody merged: the first cause may be theirs."""
    return bool(_elsewhere(merged_reader, attempt)) and not merged_reader.has_head(attempt)


def completeness(
    merged_reader: MergedReader, *, live: bool, host: str = "", url: str = ""
) -> Completeness:
    """Find out what is held of a run.

    Args:
        merged_reader: the run.
        live: its newest attempt is under way.
        host: where rank 0 ran.
        url: the object store that it is read from.
    """
    shares: list[RankShare] = []
    world, undecided = dict[int, int](), ""
    for attempt in merged_reader.attempts():
        # Before the records, which only become more.
        ending = ending_of(merged_reader, attempt)
        found = _shares(merged_reader, ending)
        world[attempt] = max(merged_reader.world_size(attempt), len(found))
        shares += found
        unseen = any(share.end == UNKNOWN for share in found)  # that is said of each of these
        open_ = ending.end.state == UNDECIDED and not unseen and not live
        undecided = ending.end.message if open_ else ""
    return Completeness(tuple(shares), world, live, host, url, undecided)


def steps_taken(merged_reader: MergedReader, attempt: int, known: int) -> dict[int, int]:
    """Return how many sampled steps each rank of an attempt took, as `RankShare.sampled`.

    Args:
        merged_reader: the run.
        attempt: its number.
        known: sampled steps that any rank took; who did not say its last word may have taken them.
    """
    words = _last_words(merged_reader, attempt)
    return {rank: word.taken(known) for rank, word in words.items()}


def took_none(merged_reader: MergedReader, attempt: int) -> bool:
    """Return whether every rank of an attempt came to its end and said that it sampled nothing."""
    words = _last_words(merged_reader, attempt).values()
    return bool(words) and all(word.exact and not word.sampled for word in words)


def _elsewhere(merged_reader: MergedReader, attempt: int) -> set[int]:
    return set(range(merged_reader.world_size(attempt))) - set(merged_reader.ranks(attempt))


@dataclass(slots=True)
class _Word:
    """What a rank, or its daemon, said of it last; `exact`: it took so many and no more."""

    sampled: int = 0
    exact: bool = False
    reached: int | None = None
    began: int | None = None
    blind: bool = False
    blown: str = ""

    def taken(self, known: int) -> int:
        """Return how many it took, of `known` ones of all ranks: its own count, if it closed."""
        return self.sampled if self.exact else max(self.sampled, known)

    def take_place(self, step: int | None, steps: int | None, state: str | None) -> None:
        """Take where it is: the steps that it has after it, counted back, begin at its first."""
        if step is None or steps is None or state not in STEP_PHASES:
            return  # "closed" and "paused" may be said within a step, and between two
        clock = clock_of(steps, 0, state, step)
        first = step - steps + (state == STEP_PHASES[0])
        if clock is not None and clock.begun and 0 <= first <= step:
            self.began = first

    def take_beat(self, beat: Heartbeat | Beat) -> None:
        """Take a heartbeat; without a step begun, its `step` is the one that was to begin."""
        begun = beat.steps is None or beat.steps > 0 or beat.state not in _BEFORE
        if beat.step >= 0 and begun:
            self.reached = max(beat.step, self.reached or 0)
        self.sampled = max(self.sampled, beat.sampled)
        self.exact |= beat.state == CLOSED
        self.take_place(beat.step, beat.steps, beat.state)


def _shares(merged_reader: MergedReader, ending: Ending) -> list[RankShare]:
    attempt, ends = ending.attempt, ends_of(ending)
    left = {fate.rank for fate in ending.case.fates if fate.how == CLEAN}
    words = _last_words(merged_reader, attempt)
    held: dict[int, Steps] = {}
    for rank in merged_reader.ranks(attempt):
        held[rank] = merged_reader.whole_steps(attempt, rank)
    absent = _elsewhere(merged_reader, attempt)
    held |= merged_reader.delivered_steps(attempt, absent)
    everything = len(union(held.values()))
    found = []
    for rank, steps in sorted(held.items()):
        word, count, end = words[rank], len(steps), ends.get(rank, UNKNOWN)
        sampled_steps = word.taken(everything)
        found.append(
            RankShare(
                attempt, rank, count, max(sampled_steps, count),
                int(steps[-1]) if count else None, word.reached, end, rank in absent,
                blind=word.blind and not sampled_steps, blown=word.blown, began=word.began,
                left=end == UNKNOWN and rank in left,
            )
        )  # fmt: skip
    return found


def union(parts: Iterable[Steps]) -> Steps:
    """Return all steps that are in any of these ascending arrays."""
    steps = np.empty(0, np.int64)
    for part in parts:
        if not np.array_equal(part, steps):
            steps = np.union1d(steps, part)
    return steps


def _last_words(merged_reader: MergedReader, attempt: int) -> dict[int, _Word]:
    world = range(merged_reader.world_size(attempt))
    words = {rank: _Word() for rank in {*world, *merged_reader.ranks(attempt)}}
    for rank, (_, beat) in last_beats(merged_reader.run, attempt).items():
        if rank in words:
            words[rank].take_beat(beat)
    for event in merged_reader.events(attempt):
        _take_event(words, event)
    return words


def _take_event(words: dict[int, _Word], event: Event) -> None:
    match event.what:
        case ClosedEvent(sampled=sampled) as said if event.rank in words:
            word = words[event.rank]
            word.take_place(said.step, said.steps, said.state)
            if sampled >= 0:
                word.sampled, word.exact = max(word.sampled, sampled), True
        case BlindEvent(modules=None) if event.rank in words:
            words[event.rank].blind = True
        case FuseEvent(component=part, error=why) if event.rank in words and part in _OBSERVING:
            words[event.rank].blown = f"{part}: {why}" if why else part
        case LastBeatsEvent(ranks=ranks):
            for rank in ranks.keys() & words.keys():
                words[rank].take_beat(ranks[rank])


def _held(share: RankShare) -> str:
    are = "step is" if share.held == 1 else "steps are"
    return f"{share.held} sampled {are} held{_last(share)}"


def _last(share: RankShare) -> str:
    return "" if share.last_held is None else f", the last one step {share.last_held}"
