"""One rank of this node, as its daemon knows it: its words, and how its process ended."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddpprobe.daemon.liveness import Exit
from ddpprobe.rundir.heartbeat import Heartbeat
from ddpprobe.rundir.journal_tail import RankTail
from ddpprobe.rundir.validate import MAX_RANKS

# A rank that has closed its journal may live on, for whatever its script does then. So long the
# attempt waits for its exit code; a later one is written down as well, while the daemon is there.
# Whose interpreter ends without anything wrong will be gone soon: torch takes 0.4 s of CPU for
# that, which were 12 s beside eight busy processes on two cores.
PATIENCE_SECONDS = 5.0
LEAVING_SECONDS = 120.0
FOREIGN_SECONDS = 60.0
# What a rank must have said of itself; a stranger's file may hold anything.
_NUMBERS = ("rank", "local_rank", "local_world_size", "world_size", "node_index", "attempt")
_TEXTS = ("node", "run_id", "hostname")
_LARGEST_PID = (1 << 31) - 1


@dataclass(slots=True)
class LocalRank:
    """One rank of this node: its journal, its heartbeat, and how its process ended.

    `spent`: its process has ended and its journal was read to the end after that. `judged`: its end
    is written down. `launcher`: process number of the torchrun that started it; None without.
    `unrecorded`: sampled steps that it took and whose records are not in its journal; None before
    it is known.
    """

    tail: RankTail
    watched: bool = False
    seen_alive: bool = False
    exit: Exit | None = None
    closed_at: float | None = None
    spent: bool = False
    judged: bool = False
    beat: Heartbeat | None = None
    launcher: int | None = None
    unrecorded: int | None = None
    _unread: tuple[tuple[int, int], float] | None = None  # up to where, and since when
    _not_ours: int | None = None  # sampled steps whose records were deleted before this daemon

    def compare(self, beat: Heartbeat) -> None:
        """Compare what a heartbeat counts with the records, once the journal was read to its end.

        The heartbeat must have been read first: it is written after the record that it counts, and
        can be written where the journal cannot (it is overwritten in place). Nothing of the journal
        may have been on its way from memory then. What a GPU has not delivered yet, or a disk does
        not take, is counted until it comes.

        A daemon that follows another one finds journals whose first segments are in the store. It
        counts what is lost from then on.
        """
        missing = max(0, beat.sampled - self.tail.facts.recorded)
        if self._not_ours is None:
            self._not_ours = missing if self.tail.first_segment > 0 else 0
        self.unrecorded = max(0, missing - self._not_ours)

    def note_unread(self, now: float) -> None:
        """Note since when something that it wrote has not been read.

        A rank that trains has always written something more. So what was there at some time is
        looked for: what came after it is younger. Half a frame may be taken back by its writer
        (a full disk); of one whose process has ended nothing more can be read.
        """
        read = self.tail.read_to
        written = read if self.spent else self.tail.written_to
        if written <= read or (self._unread is not None and self._unread[0] <= read):
            self._unread = None
        if self._unread is None and written > read:
            self._unread = written, now

    @property
    def last_to_read(self) -> tuple[float, int]:
        """Up to where a last reading goes: of who lives, what it has written by now.

        It may write faster than a daemon that was told to end reads, and would be followed for ever
        otherwise; what comes then is a later daemon's.
        """
        return self.tail.written_to if self.exit is None else (math.inf, 0)

    @property
    def unread_since(self) -> float | None:
        """Since when something that it wrote has not been read (monotonic s); None: nothing is."""
        return None if self._unread is None else self._unread[1]

    @property
    def meta(self) -> Mapping[str, Any] | None:
        """What it has said of itself; None as long as that is nothing, or makes no sense."""
        said = self.tail.facts.meta
        return said if said is not None and _is_whole(said) else None

    @property
    def ended(self) -> bool:
        """Nothing more will come from it."""
        return self.tail.facts.closed or self.spent

    @property
    def elsewhere(self) -> bool:
        """Whether it seems to live on another machine, whose processes we cannot see."""
        meta, beat = self.meta, self.beat
        if meta is None or meta["hostname"] == socket.gethostname() or beat is None:
            return False
        return time.time_ns() - beat.time_ns < FOREIGN_SECONDS * 1e9

    def is_over(self, now: float) -> bool:
        """Whether the attempt need not wait for it any more: nothing of it is missing."""
        if not self.up or self.closed_at is None:
            return self.ended
        patience = LEAVING_SECONDS if self.tail.facts.leaving else PATIENCE_SECONDS
        return now - self.closed_at > patience

    @property
    def up(self) -> bool | None:
        """Whether its process lives; None if it was never seen alive."""
        return None if not self.seen_alive else self.exit is None


def _is_whole(said: Mapping[str, Any]) -> bool:
    numbers = [said.get(name) for name in _NUMBERS]
    texts = [said.get(name) for name in _TEXTS]
    pid, began = said.get("pid"), said.get("pid_start", "")
    return (
        all(isinstance(number, int) and 0 <= number <= MAX_RANKS for number in numbers)
        and all(isinstance(text, str) for text in texts)
        and isinstance(pid, int) and 0 < pid <= _LARGEST_PID
        and (began is None or isinstance(began, int | float)) and "head" in said
    )  # fmt: skip
