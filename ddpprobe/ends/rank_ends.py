"""What each rank's end is on its own, before anybody asks whose doing the others' ends were."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from ddpprobe.ends.death_order import DeathOrder
from ddpprobe.ends.evidence import UNKNOWN, Case
from ddpprobe.records.fate import Fate

CLEAN = "exit:0"
_ASKED = ("SIGTERM", "SIGINT", "SIGHUP")
# By a convention of shells a process that ends because of a signal exits with 128 and its number.
_ASKED_CODES = {"exit:143": "SIGTERM", "exit:130": "SIGINT", "exit:129": "SIGHUP"}
# Signals that a process does not get by a fault, or a timer, of its own, and no launcher sends.
SENT = {"SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGPWR"}
OWN_STOP = "AnomalyStop"  # what `install(on_anomaly="stop")` raises, on every rank
INSIDE = {"forward", "optimizer"}  # phases that no script leaves but by an exception
# What each rank's end is on its own.
ALIVE, LEFT, SILENT, LOST, ABSENT = "alive", "left", "silent", "lost", "absent"
CAUSE, CHOSE, ABORTED, VICTIM, TOLD = "cause", "chose", "aborted", "victim", "told"


class RankEnds:
    """Each rank's end on its own."""

    def __init__(self, case: Case) -> None:
        self.case = case = replace(case, fates=tuple(sorted(case.fates, key=lambda f: f.rank)))
        everybody = _Everybody.of(case)
        self._of = {f.rank: _part(f, everybody) for f in case.fates}
        if _fell_midway(self.all(LEFT)):
            self._of |= {f.rank: TOLD for f in self.all(LEFT) if may_be_told(f)}
        well = [f for f in case.fates if self._of[f.rank] in {LEFT, SILENT, TOLD}]
        ranks = {f.rank for f in well}
        nodes = {f.node for f in well} - {f.node for f in case.fates if f.rank not in ranks}
        self._of |= {f.rank: TOLD for f in well if f.node in nodes and _followed_launcher(f)}

    def part(self, fate: Fate) -> str:
        """Return which one a rank's is."""
        return self._of[fate.rank]

    def all(self, *parts: str) -> list[Fate]:
        """Return the ranks whose end is one of these."""
        return [f for f in self.case.fates if self._of[f.rank] in parts]

    def has(self, *parts: str) -> bool:
        """Whether any rank's is one of these."""
        return any(part in parts for part in self._of.values())

    def only(self, *parts: str) -> bool:
        """Whether every rank's is one of these."""
        return all(part in parts for part in self._of.values())

    @property
    def seen(self) -> tuple[Fate, ...]:
        """The ranks that a rule of all ranks speaks of.

        Those of other nodes, of which nothing is known here, neither keep such a rule nor break it.
        One alone is not all.
        """
        seen = tuple(f for f in self.case.fates if self._of[f.rank] != ABSENT)
        return seen if self.case.partial and len(seen) > 1 else self.case.fates


@dataclass(frozen=True, slots=True)
class _Everybody:
    """What of all ranks decides on one of them, found once: a job may have thousands.

    Attributes:
        case: theirs.
        told: those that ended by a signal that asks; `order`: of their deaths.
        open: ranks that have not said their last word.
        unwell: ranks that have not, or did not end well.
        broken: of these, whose connection broke (`_heard_it`).
        suspended: whether any is.
    """

    case: Case
    told: tuple[Fate, ...]
    order: DeathOrder
    open: frozenset[int]
    unwell: frozenset[int]
    broken: frozenset[int]
    suspended: bool

    @classmethod
    def of(cls, case: Case) -> Self:
        """Look at each rank once."""
        unwell = [f for f in case.fates if not _is_well(f)]
        open_ = (f.rank for f in case.fates if f.heard and not (f.closed or f.beat_closed))
        told = tuple(f for f in case.fates if _is_asked(f.how))
        return cls(
            case, told, DeathOrder(told), frozenset(open_),
            frozenset(f.rank for f in unwell), frozenset(f.rank for f in unwell if _heard_it(f)),
            any(f.suspended for f in case.fates),
        )  # fmt: skip


def may_be_told(fate: Fate) -> bool:
    """Whether its end may be the doing of its script's handler of a signal, which exited with 0."""
    return fate.handles and fate.at_exit and fate.how in {"", CLEAN, UNKNOWN}


def asked_in_words(how: str) -> str:
    """Say what a rank that was told to end ended by.

    A code that shells give a signal is only said: a script's handler may give it to any of them.
    """
    if how == CLEAN:
        return "a handler of a signal (exit code 0)"
    return f"exit code {how[5:]} (in shells {_ASKED_CODES[how]})" if how in _ASKED_CODES else how


def _followed_launcher(fate: Fate) -> bool:
    """Whether it left with 0, perhaps by a handler of a signal, and its torchrun was told to end.

    A torchrun whose ranks all ended with 0 says 0 as well, unless a signal came to it, which it
    passes on.
    """
    asked = _is_asked(fate.launcher) or fate.launcher.startswith("exit:")
    silent = fate.may_be_handled and not fate.closed
    return asked and fate.launcher != CLEAN and fate.how == CLEAN and (silent or may_be_told(fate))


def _fell_midway(left: list[Fate]) -> bool:
    """Whether a handler of a signal is known to have ended ranks that ended well to all appearance.

    No script comes to its end within a forward or an optimizer's step. After a forward it may, but
    then all ranks do so in the same place.
    """
    asked = [f for f in left if may_be_told(f) and f.how == CLEAN and f.clock]
    phases = {f.clock.phase for f in asked if f.clock}
    places = {f.clock.key for f in left if f.clock}
    return bool(phases & INSIDE) or ("backward" in phases and len(places) > 1)


def _part(fate: Fate, everybody: _Everybody) -> str:
    how, case = fate.how, everybody.case
    if fate.asked or fate.failed or (fate.error and how not in {"", CLEAN, UNKNOWN}):
        return TOLD if fate.asked else _of_error(fate)
    chose = how.startswith("exit:") and how != CLEAN and not _was_over(fate)
    if fate.pool and fate.at_exit:
        return TOLD  # its script had not said that it was over: the pool did not wait for that
    if fate.closed and not fate.dead and not chose and not _was_killed_early(fate, everybody):
        return _of_closed(fate, case)
    if how == CLEAN:
        return LEFT if fate.beat_closed else SILENT  # its last word may have found no room
    if how in {"", UNKNOWN}:
        alive = not how and case.live
        return ALIVE if alive else LOST if fate.heard else ABSENT
    return _of_status(fate, everybody)


def _of_closed(fate: Fate, case: Case) -> str:
    """Return what the end is of one that said its last word.

    A signal after that is torch's threads, which abort now and then in its last moments. Without
    an exit code nobody knows why one closed in the middle of a step, or after an exception.
    """
    midway = fate.is_within_step or fate.error is not None
    if not midway or fate.how not in {"", UNKNOWN}:
        return LEFT
    return ALIVE if case.live and not fate.how else LOST


def _was_killed_early(fate: Fate, everybody: _Everybody) -> bool:
    """Whether it was killed after its last word, when another rank had not yet said its own.

    Where all of them have, it may be what started them, when all is done.
    """
    early = bool(everybody.open - {fate.rank})
    return fate.how == "SIGKILL" and not fate.pool and early


def _was_over(fate: Fate) -> bool:
    """Whether its script had said that it was over, and the exit code is not the script's choice.

    A pool ends its workers as it likes. Others were told to end between two steps, and no handler
    of a signal had run until then: the one that chose the code ran after it.
    """
    if fate.pool:
        return True
    told = _is_asked(fate.how) and fate.is_between_steps
    return told and not fate.at_exit and not fate.handles


def _of_status(fate: Fate, everybody: _Everybody) -> str:
    if _is_asked(fate.how):
        return TOLD
    return CHOSE if fate.how.startswith("exit:") else _of_signal(fate, everybody)


def _of_error(fate: Fate) -> str:
    error = fate.error
    if error is None:  # of a version that did not say which: it may be anybody's
        return TOLD if fate.how in _ASKED else CHOSE
    asked = error.asked or error.type == OWN_STOP
    return TOLD if asked else VICTIM if error.collective else CAUSE


def _of_signal(fate: Fate, everybody: _Everybody) -> str:
    asked, order, suspended = everybody.told, everybody.order, everybody.suspended
    stuck = suspended or (fate.stalled and not _has_time(fate, everybody))
    first = order.before_any(fate)
    first |= not (asked or suspended) and bool(everybody.broken - {fate.rank})
    if fate.how == "SIGKILL" and not first and (stuck or order.after_any(fate)):
        return TOLD  # by a launcher that got no answer
    if fate.how == "SIGABRT" and len(everybody.case.fates) > 1:
        return VICTIM if stuck else ABORTED
    return CAUSE


def _has_time(fate: Fate, everybody: _Everybody) -> bool:
    """Whether one that stands still keeps nobody waiting, so that nobody loses patience with it.

    That is one by itself, and one between two steps when others have come to their end.
    """
    others = everybody.unwell - {fate.rank}
    left = len(others) < len(everybody.case.fates) - 1
    return not others or (left and fate.is_between_steps)


def _is_well(fate: Fate) -> bool:
    """Whether it had said its last word, and ended well or not yet."""
    return fate.closed and not fate.raised and fate.how in {"", CLEAN}


def _heard_it(fate: Fate) -> bool:
    """Whether its connection broke, so that another one's process was gone while this one lived.

    Who ends a job that hangs kills all of it. A handler of a signal may have closed it as well.
    """
    error = fate.error
    broke = error is not None and error.collective and not (error.timed_out or error.is_retold)
    return broke and not fate.handles and not fate.asked


def _is_asked(how: str) -> bool:
    return how in _ASKED or how in _ASKED_CODES
