"""One rank of this node, as its daemon knows it: its words, and how its process ended."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass

from ddpprobe.daemon.liveness import RAISED, STOPPED, UNKNOWN, Exit
from ddpprobe.daemon.tail import RankTail
from ddpprobe.heartbeat import Heartbeat

# A rank that has said its last word is about to exit, and its exit code says whether it ended well.
EXIT_SECONDS = 5.0
# An exception may be the cause of other deaths, or follow from one. Its goodbye is milliseconds
# behind the death of a peer, which is noticed only when the kernel has torn that process down, and
# 0.6 s (measured) ahead of its own process's end, which others follow: between the two.
GOODBYE_NS = 200_000_000
FOREIGN_SECONDS = 60.0


@dataclass(slots=True)
class LocalRank:
    """One rank of this node: its journal, its heartbeat, and how its process ended.

    `spent`: its process has ended and its journal was read to the end after that. `unrecorded`:
    sampled steps that it took and whose records are not in its journal; None before it is known.
    """

    tail: RankTail
    watched: bool = False
    seen_alive: bool = False
    exit: Exit | None = None
    closed_at: float | None = None
    spent: bool = False
    judged: bool = False
    beat: Heartbeat | None = None
    unrecorded: int | None = None
    _not_ours: int | None = None  # sampled steps whose records were deleted before this daemon

    def compare(self, beat: Heartbeat) -> None:
        """Compare what a heartbeat counts with the records, once the journal was read to its end.

        The heartbeat must have been read first: it is written behind the record that it counts, and
        can be written where the journal cannot (it is overwritten in place). What a GPU has not
        delivered yet is counted until it comes.

        A daemon that follows another one finds journals whose first segments are in the store. It
        counts what is lost from then on.
        """
        missing = max(0, beat.sampled - self.tail.facts.recorded)
        if self._not_ours is None:
            self._not_ours = missing if self.tail.first_segment > 0 else 0
        self.unrecorded = max(0, missing - self._not_ours)

    @property
    def ended(self) -> bool:
        """Nothing more will come from it."""
        return self.tail.facts.closed or self.spent

    @property
    def failed(self) -> bool:
        """Whether it ended badly, by the exit of its process.

        A rank that closed its journal had come to the end of its training: a signal behind that is
        none of it (torch's threads abort now and then when the interpreter ends), while an
        exception or an exit code that the script chose is.
        """
        facts, how = self.tail.facts, self.exit
        if how is None or not how.failed:
            return False
        return not facts.closed or facts.raised or how.chosen

    @property
    def how(self) -> str:
        """In which way its process ended: "SIGKILL", "exit:1"; "unknown" while it lives.

        One that ends by an uncaught exception may be stopped while it still tears itself down, by a
        launcher that saw another rank go first. What it died of is the exception.
        """
        how, facts = self.exit.how if self.exit else UNKNOWN, self.tail.facts
        return RAISED if how == STOPPED and facts.closed and facts.raised else how

    @property
    def elsewhere(self) -> bool:
        """Whether it seems to live on another machine, whose processes we cannot see."""
        meta, beat = self.tail.facts.meta, self.beat
        if meta is None or meta["hostname"] == socket.gethostname() or beat is None:
            return False
        return time.time_ns() - beat.time_ns < FOREIGN_SECONDS * 1e9

    @property
    def left(self) -> bool:
        """Whether its process has ended, and ended well."""
        return self.judged and self.exit is not None and not self.failed

    def is_over(self, now: float) -> bool:
        """Whether nothing more is to be learned of it: the way its process ended is known, too."""
        if not self.up or self.closed_at is None:
            return self.ended
        return now - self.closed_at > EXIT_SECONDS

    @property
    def up(self) -> bool | None:
        """Whether its process lives; None if it was never seen alive."""
        return None if not self.seen_alive else self.exit is None

    @property
    def died_at(self) -> int:
        """Unix time in ns of its death.

        Of one that was found dead that of its last heartbeat; of one that said goodbye soon after
        that: what an exception or sys.exit() tears down takes a while, in which others may die.
        """
        closed, last = self.tail.facts.closed, self.beat.time_ns if self.beat else 0
        noticed = self.exit.time_ns if self.exit and not closed else 0
        return noticed or (last + GOODBYE_NS if closed and last else last)
