"""How the ranks of an attempt end, as the daemon of their node sees it and writes it down."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ddpprobe.daemon.daemon_journal import DaemonJournal
from ddpprobe.daemon.liveness import Exit
from ddpprobe.daemon.local_rank import LocalRank
from ddpprobe.ends.anomalies import anomalies_of
from ddpprobe.ends.end import CRASHED, HUNG, RUNNING, UNDECIDED, End
from ddpprobe.ends.evidence import Case
from ddpprobe.ends.judge import failed, is_well, judge, stuck_of
from ddpprobe.ends.rank_ends import CLEAN
from ddpprobe.ends.stalls import is_still
from ddpprobe.ends.words import how_of
from ddpprobe.records import events
from ddpprobe.records.events import Told
from ddpprobe.records.fate import Fate
from ddpprobe.records.node_view import FirstFailure
from ddpprobe.rundir.processes import own_start

# What is said of an end while ranks still live may change with what they say; when it has not for
# so long, it is written down. It decides when something is said, never what.
SETTLED_SECONDS = 5.0


class Ends:
    """Gathers what a node's ranks end by, and writes down what comes of it.

    The daemon of the head knows only by hearsay how the ranks of other nodes end: each node's tells
    what it knows of its own, as soon as there is something to tell, and again if that changes.

    Args:
        attempt: its number.
        node: this node.
        world_size: ranks of the job.
        daemon_journal: where it is written down.
        tell: takes what the head is to know; None: this is the head, or there is no way to it.

    Attributes:
        end: what is known now.
    """

    def __init__(
        self,
        attempt: int,
        node: str,
        world_size: int,
        daemon_journal: DaemonJournal,
        tell: Callable[[Told], None] | None = None,
    ) -> None:
        self.end = End(RUNNING)
        self._attempt, self._node, self._world = attempt, node, world_size
        self._daemon_journal = daemon_journal
        self._tell = tell
        self._said: dict[int, Fate] = {}  # to the head, or as the head's, written down
        self._heard: dict[int, Fate] = {}  # as the head's, from other nodes
        self._witness = f"{node}/{os.getpid()}/{own_start()}"
        self._case = Case(())
        self._judged: Case | None = None
        self._since = math.inf  # nothing has been looked at, of which anything could be said
        self._told = End(RUNNING)
        self._compared: Case | None = None  # the last one after whose end nothing was left to tell
        self._told_launcher = False
        self._beaten: dict[int, int] = {}  # when each rank gave its last sign of life

    def hear(self, fate: Fate) -> None:
        """Take what another node's daemon knows of one of its ranks."""
        self._heard[fate.rank] = fate
        self._daemon_journal.evidence.take_event(events.FateEvent(fate=fate), None)

    def look(
        self, ranks: Mapping[int, LocalRank], launcher: Exit | None = None, *, over: bool
    ) -> None:
        """Take what is new of the ranks, judge it, and write down what has settled.

        Args:
            ranks: of this node.
            launcher: how the torchrun that started them ended; None: it lives, or is not known.
            over: nothing more is to come of them.
        """
        evidence = self._daemon_journal.evidence
        for number, rank in ranks.items():
            evidence.take_rank(number, self._node)
            facts = rank.tail.facts
            words, facts.words = facts.words, []
            for word in words:
                evidence.take_event(word, number, self._node)
            if rank.beat is not None:
                evidence.take_beat(number, self._node, rank.beat)
        self._look_at_processes(ranks)
        if launcher is not None and not self._told_launcher:
            self._told_launcher = True
            self._daemon_journal.say(
                events.LauncherEvent(how=launcher.how, time_ns=launcher.time_ns)
            )
        gone = {n: r for n, r in ranks.items() if r.exit is not None and not r.judged}
        if gone and all(rank.spent for rank in gone.values()):
            self._note(gone)
        live = any(rank.exit is None for rank in ranks.values()) and not over
        partial = len({*ranks, *evidence.told}) < self._world
        self._case = evidence.case(self._world, live=live, partial=partial)
        ended = {fate.rank for fate in self._case.fates if fate.how}
        if not over and any(
            not r.spent and (r.exit is not None or (r.up and n in ended)) for n, r in ranks.items()
        ):
            return  # its last words, which decide, are still to be read
        self._report()
        if over:
            self._tell = None  # after a node's last word the head takes nothing of the attempt
        # After its end a job is looked at for minutes, and nothing is new.
        end = self.end if self._case == self._judged else judge(self._case)
        self._judged = self._case
        self._say(end, over=over)

    @property
    def is_well(self) -> bool:
        """Whether all ranks of this node ended well, whatever is known of the others."""
        return is_well(replace(self._case, fates=self._own))

    @property
    def awaits_launcher(self) -> bool:
        """Whether how the launcher ends may decide what is not decided."""
        own = [f for f in self._own if not f.launcher]
        left = any(f.may_be_handled and f.how in {"", CLEAN} for f in own)
        killed = len(own) > 1 and all(f.how == "SIGKILL" and not f.may_be_handled for f in own)
        return (left and self.end.state == UNDECIDED) or (
            killed and self.end.state in {UNDECIDED, CRASHED}
        )

    def how(self, number: int) -> str:
        """Return what a rank died of, as `End.how`; "" if it is not known to have ended badly."""
        if number not in self._daemon_journal.deaths:
            return ""
        return next((how_of(f) for f in self._case.fates if f.rank == number), "")

    @property
    def first_failure(self) -> FirstFailure | None:
        """The rank that is known to have failed first, if it is known; the head's may be any."""
        if self.end.state not in {CRASHED, HUNG} or len(self.end.ranks) != 1:
            return None
        fate = next(f for f in self._case.fates if f.rank == self.end.ranks[0])
        return FirstFailure(fate.rank, self.end.how, fate.time_ns) if fate.time_ns else None

    @property
    def stuck(self) -> dict[int, str]:
        """The ranks that the others wait for, while it lasts, and in which phase they are."""
        return stuck_of(self.end, self._case) if self._case.live else {}

    def _note(self, gone: Mapping[int, LocalRank]) -> None:
        """Write down which processes ended, once everything they wrote is known."""
        for number, rank in sorted(gone.items()):
            rank.judged = True
            exit_ = rank.exit
            if exit_ is None:
                continue
            when = exit_.time_ns or (rank.beat.time_ns if rank.beat else time.time_ns())
            place = ("step", "steps", "micro", "state") if rank.beat is not None else ()
            told = {name: getattr(rank.beat, name) for name in place}
            self._daemon_journal.say(
                events.ExitEvent(
                    rank=number, how=exit_.how, order=exit_.order, witness=self._witness,
                    time_ns=when, memory_kills=exit_.memory_kills, **told,
                )
            )  # fmt: skip
        case = self._daemon_journal.evidence.case(self._world, live=True)
        fates = {fate.rank: fate for fate in failed(case)}
        for number in sorted(gone):
            fate = fates.get(number)
            if fate is not None and number not in self._daemon_journal.deaths:
                step = fate.clock.step if fate.clock else -1
                self._daemon_journal.death(number, how_of(fate), fate.time_ns, step)

    def _say(self, end: End, *, over: bool) -> None:
        now = time.monotonic()
        self._since = min(self._since, now) if end == self.end else now
        self.end = end
        settled = over or now - self._since > SETTLED_SECONDS
        journal = self._daemon_journal
        new, was_lost = end != self._told and end.state != RUNNING, journal.is_lost
        # While a job trains, at each look, there is nothing to find.
        looked_at = new or was_lost or over
        found = anomalies_of(end, self._case, self._attempt, journal.causes) if looked_at else []
        is_none = was_lost and not any(a.level == "page" for a in found)
        new |= is_none
        if over and self._case != self._compared:  # it is looked at for minutes
            self._compared = self._case
            # Of a rank that raised, and ended long after, it was not known whom it outlived.
            new |= bool(journal.untold(found))
        if over or (settled and new):
            self._write_heard()  # not earlier: a node that says it again and again fills no disk
        if settled and new:
            self._told = end
            if is_none:  # the ranks of a hang went on, whatever came after it
                journal.take_back()
            if end.state != RUNNING:
                journal.lose(end, found)

    def _write_heard(self) -> None:
        """Write down what other nodes have told of their ranks, for a successor and for readers."""
        for rank, fate in self._heard.items():
            if self._said.get(rank) != fate:
                self._said[rank] = fate
                self._daemon_journal.say(events.FateEvent(fate=fate))

    @property
    def _own(self) -> tuple[Fate, ...]:
        """What is known of the ranks of this node."""
        return tuple(fate for fate in self._case.fates if fate.node == self._node)

    def _report(self) -> None:
        """Tell the head of this node's ranks, once any of them ended or stands still."""
        if self._tell is None:
            return
        if not self._said and not any(map(_is_telling, self._own)):
            return
        for fate in self._own:
            if not _is_same(fate, self._said.get(fate.rank)):
                self._said[fate.rank] = fate
                self._tell(Told(self._attempt, fate))

    def _look_at_processes(self, ranks: Mapping[int, LocalRank]) -> None:
        """Write down who is suspended, and that nobody moves although everybody lives."""
        evidence, now = self._daemon_journal.evidence, time.time_ns()
        said_at = max(now, evidence.last_turn + 1)  # a clock may be set back
        living = {n: r for n, r in ranks.items() if r.up and not r.ended}
        for number, rank in living.items():
            beaten = rank.beat.time_ns if rank.beat else 0
            moved = beaten != self._beaten.get(number, 0)
            self._beaten[number] = beaten
            # One that is killed runs once more before it is dead: only a beat says that it goes on.
            known = evidence.is_suspended(number)
            if known != (not moved and (known or _is_suspended(rank))):
                turn = events.ContinuedEvent if known else events.SuspendedEvent
                self._daemon_journal.say(turn(rank=number, time_ns=said_at))
        left = {f.rank for f in self._own if f.closed and f.how in {CLEAN, ""}}
        if not living or not ranks.keys() - living.keys() <= left:
            return  # who waits for one that died does not wait for these
        beats = [rank.beat for rank in living.values() if rank.beat is not None]
        still = len(beats) == len(living) and is_still(beats, now)
        if still != evidence.is_stalled(self._node):
            self._daemon_journal.say(
                (events.StalledEvent if still else events.MovingEvent)(time_ns=said_at)
            )


def _is_telling(fate: Fate) -> bool:
    """Whether the head has to know of a rank for its verdict: it trains no more."""
    return bool(fate.how or fate.closed or fate.suspended or fate.stalled)


def _is_same(fate: Fate, said: Fate | None) -> bool:
    """Whether nothing new is to be told of a rank; that one which trains went on is nothing new."""
    if said is None:
        return False
    return fate == (said if _is_telling(fate) else replace(said, clock=fate.clock))


def _is_suspended(rank: LocalRank) -> bool:
    """Whether a process is stopped by a signal (T in proc(5)), not by a debugger (t)."""
    pid = int((rank.meta or {}).get("pid", 0))
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat[stat.rfind(")") + 2 :][:1] == "T"
