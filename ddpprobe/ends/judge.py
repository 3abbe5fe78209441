"""How an attempt ended, and which rank's end was the cause: by evidence, never by a clock.

A rank that ended is a *cause* if it died of a fatal signal or of an exception of its own; it
*chose* an exit code, which may be the cause or the answer of a script to what befell another rank;
it is a *victim* if its communication broke; it was *stopped* if it was told to end. Who is named
is what is left when everything is taken away that may have followed from somebody else. If that is
more than one, all of them are named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ddpprobe.ends.evidence import UNKNOWN, Case, Fate, named

RUNNING, ENDED, STOPPED = "running", "ended", "stopped"
CRASHED, HUNG, VANISHED, UNDECIDED = "crashed", "hung", "vanished", "unknown"
STATES = (RUNNING, ENDED, STOPPED, CRASHED, HUNG, VANISHED, UNDECIDED)
BAD = (CRASHED, HUNG, VANISHED)  # states that are a page

CLEAN = "exit:0"
_ASKED = ("SIGTERM", "SIGINT", "SIGHUP")
# By a convention of shells a process that ends because of a signal exits with 128 and its number.
_ASKED_CODES = {"exit:143": "SIGTERM", "exit:130": "SIGINT", "exit:129": "SIGHUP"}
# What each rank's end is on its own.
_ALIVE, _LEFT, _SILENT, _LOST, _ABSENT = "alive", "left", "silent", "lost", "absent"
_CAUSE, _CHOSE, _ABORTED, _VICTIM, _TOLD = "cause", "chose", "aborted", "victim", "told"


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended.

    Attributes:
        state: one of `STATES`.
        ranks: candidates for the cause, ascending; one if it is decided, none if nobody is to
            blame.
        how: of the first candidate: "SIGKILL", "exit:3", "ValueError"; "" if there is nothing.
        step: the optimizer step it happened in; None: not known, or not the same for all.
        phase: in which phase of it, as `heartbeat.STEP_PHASES`; None as `step`.
        message: one sentence.
        grave: it is a page, although its state is `unknown`.
    """

    state: str
    ranks: tuple[int, ...] = ()
    how: str = ""
    step: int | None = None
    phase: str | None = None
    message: str = ""
    grave: bool = False

    @property
    def is_telling(self) -> bool:
        """Whether there is more to say than that it goes on, is over, or not known."""
        return self.state not in {RUNNING, ENDED} and (self.state in BAD or self.how != UNKNOWN)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {
            "state": self.state, "ranks": list(self.ranks), "how": self.how, "step": self.step,
            "phase": self.phase, "message": self.message,
        }  # fmt: skip


def judge(case: Case) -> End:
    """Return how an attempt ended, or that it is under way."""
    parts = _Parts(case)
    if parts.has(_CAUSE, _CHOSE, _ABORTED):
        pool = _suspects(parts)
        return _same_choice(parts) or _all_killed(parts) or _watched(parts, pool) or _crashed(pool)
    if parts.has(_SILENT) and not parts.has(_VICTIM):
        return _quiet(parts)
    stuck = _stuck(parts)
    if stuck:
        return _hung(parts, stuck)
    return _broken(parts) if parts.has(_VICTIM) else _without_cause(parts)


def is_failed(fate: Fate, case: Case) -> bool:
    """Whether a rank ended otherwise than by the end of its training."""
    return _Parts(case).part(fate) in {_CAUSE, _CHOSE, _ABORTED, _VICTIM, _TOLD, _LOST}


def how_of(fate: Fate) -> str:
    """Return what a rank died of: an exception by its name, else how its process ended."""
    blames = fate.error is not None and (fate.raised or fate.how not in {"", CLEAN, UNKNOWN})
    return fate.error.type if blames and fate.error is not None else fate.how or UNKNOWN


class _Parts:
    """Each rank's end on its own."""

    def __init__(self, case: Case) -> None:
        self.case = case = replace(case, fates=tuple(sorted(case.fates, key=lambda f: f.rank)))
        told = [f for f in case.fates if _signal_asked(f)]
        self._of = {f.rank: _part(f, case, told) for f in case.fates}

    def part(self, fate: Fate) -> str:
        return self._of[fate.rank]

    def all(self, *parts: str) -> list[Fate]:
        return [f for f in self.case.fates if self._of[f.rank] in parts]

    def has(self, *parts: str) -> bool:
        return any(part in parts for part in self._of.values())

    def only(self, *parts: str) -> bool:
        return all(part in parts for part in self._of.values())

    @property
    def seen(self) -> tuple[Fate, ...]:
        """The ranks that a rule of all ranks speaks of.

        Those of other nodes, of which nothing is known here, neither keep such a rule nor break it.
        One alone is not all.
        """
        seen = tuple(f for f in self.case.fates if self._of[f.rank] != _ABSENT)
        return seen if self.case.partial and len(seen) > 1 else self.case.fates


def _part(fate: Fate, case: Case, told: Iterable[Fate]) -> str:
    how = fate.how
    if fate.raised or (fate.error is not None and how not in {"", CLEAN, UNKNOWN}):
        return _of_error(fate)
    if fate.closed and not fate.dead and not (how.startswith("exit:") and how != CLEAN):
        # A signal behind that is torch's threads, which abort now and then in its last moments.
        # Without an exit code nobody knows why one closed in the middle of a step.
        midway = fate.clock is not None and fate.clock.phase != "data" and how in {"", UNKNOWN}
        return _LEFT if not midway else _ALIVE if case.live and not how else _LOST
    if how in {"", UNKNOWN, CLEAN}:
        alive = not how and case.live
        return _SILENT if how == CLEAN else _ALIVE if alive else _LOST if fate.heard else _ABSENT
    if how in _ASKED or how in _ASKED_CODES:
        return _TOLD
    return _CHOSE if how.startswith("exit:") else _of_signal(fate, case, told)


def _of_error(fate: Fate) -> str:
    error = fate.error
    if error is None:  # of a version that did not say which: it may be anybody's
        return _TOLD if fate.how in _ASKED else _CHOSE
    return _TOLD if error.asked else _VICTIM if error.collective else _CAUSE


def _of_signal(fate: Fate, case: Case, told: Iterable[Fate]) -> str:
    stuck = fate.stalled or any(f.suspended for f in case.fates)
    asked = list(told)
    first = any(fate.died_before(t) for t in asked)
    if fate.how == "SIGKILL" and not first and (stuck or any(t.died_before(fate) for t in asked)):
        return _TOLD  # by a launcher that got no answer
    if fate.how == "SIGABRT" and len(case.fates) > 1:
        return _VICTIM if stuck else _ABORTED
    return _CAUSE


def _signal_asked(fate: Fate) -> bool:
    return fate.how in _ASKED or fate.how in _ASKED_CODES


def _suspects(parts: _Parts) -> list[Fate]:
    """Return whose end is not known to have followed from somebody else's."""
    causes, others = parts.all(_CAUSE), parts.all(_CHOSE, _ABORTED)
    pool = causes or others
    if causes:
        first = min((f.clock.key for f in causes if f.clock), default=None)
        pool = [*causes, *(f for f in others if _may_be_first(f, causes, first))]
    proven = [f for f in pool if f.error is not None or not any(d.died_before(f) for d in pool)]
    pool = proven or pool
    if causes or len(pool) < 2 or not all(f.clock for f in pool):
        return sorted(pool, key=lambda f: f.rank)
    # An exit code may be a script's answer to a peer's end, but not of one who was further on.
    least = min(f.clock.key for f in pool if f.clock)
    return sorted((f for f in pool if f.clock and f.clock.key == least), key=lambda f: f.rank)


def _may_be_first(fate: Fate, causes: list[Fate], first: tuple[int, ...] | None) -> bool:
    behind = fate.clock is not None and first is not None and fate.clock.key < first
    return behind or any(fate.died_before(c) for c in causes)


def _same_choice(parts: _Parts) -> End | None:
    """All ranks ended by the same exit code and nothing says why: it may have been a signal's.

    A script's handler of a signal exits with whatever code it likes; and workers that nobody lets
    come to the end of their interpreter are ended by an exit code, or killed, when all is done.
    """
    fates = parts.seen
    quiet = all(parts.part(f) in {_CHOSE, _SILENT, _CAUSE, _TOLD} for f in fates)
    if not quiet or any(f.error for f in fates):
        return None
    hows = {f.how for f in fates}
    if not parts.has(_CAUSE) and len(hows) == 1 and any(f.handles for f in fates):
        inside = any(f.clock and f.clock.phase in {"forward", "optimizer"} for f in fates)
        said = f"every rank ended with exit code {next(iter(hows))[5:]}"
        # Where no script calls sys.exit(), and a signal's handler may. Of several nodes the
        # launcher sends the signal because of the other one, too.
        if inside and not parts.has(_ABSENT):
            return _stopped(parts, f"{said} out of a handler of SIGTERM or SIGINT")
        why = "by the script's handler of a signal, or by its own choice"
        text = f"{said}: {why}{_unseen(parts)}"
        return End(UNDECIDED, (), next(iter(hows)), _step(fates), None, text)
    return _quiet(parts) if _is_between_steps(parts) else None


def _all_killed(parts: _Parts) -> End | None:
    """Every rank was killed: no rank's end makes others die like that, but somebody outside can."""
    fates, causes = parts.seen, parts.all(_CAUSE)
    if len(fates) < 2 or len(causes) < len(fates) or {f.how for f in fates} != {"SIGKILL"}:
        return None
    if any(f.error or d.died_before(f) for f in fates for d in fates):
        return None
    text = f"{_many(fates)} were all killed (SIGKILL), and nothing says by whom or which was first"
    text += _unseen(parts)
    return End(UNDECIDED, (), "SIGKILL", _step(fates), _phase(fates), text, grave=True)


def _watched(parts: _Parts, pool: list[Fate]) -> End | None:
    """Who aborted was further on than one that was told to stop: it may have waited for that one.

    NCCL's watchdog aborts those who wait; one that aborts on its own leaves others behind as well.
    """
    if any(parts.part(f) != _ABORTED or f.clock is None for f in pool):
        return None
    least = min(f.clock.key for f in pool if f.clock)
    behind = [f for f in parts.all(_TOLD, _LOST) if f.clock and f.clock.key < least]
    if not behind:
        return None
    both = sorted([*pool, *behind], key=lambda f: f.rank)
    text = (
        f"{describe(pool[0])} while {_where(behind)}, was behind: it failed, or had waited for it"
    )
    ranks = tuple(f.rank for f in both)
    return End(UNDECIDED, ranks, "SIGABRT", _step(both), None, text, grave=True)


def _is_between_steps(parts: _Parts) -> bool:
    """Whether all ranks ended without a word in the same place, behind a whole step."""
    fates = parts.seen
    places = {f.clock.key for f in fates if f.clock}
    quiet = all(not f.closed and f.clock and f.clock.phase == "data" for f in fates)
    harmless = {"exit:0", "exit:1", "SIGKILL"} if len(fates) > 1 else {"exit:0", "exit:1"}
    return quiet and len(places) == 1 and {f.how for f in fates} <= harmless


def _quiet(parts: _Parts) -> End:
    fates = parts.all(_SILENT, _CHOSE, _CAUSE)
    hows = sorted({f.how for f in fates})
    step = _step(fates)
    where = "" if step is None else f" behind step {step}"
    said = f"{_many(fates)} ended ({', '.join(hows)}){where} without a last word"
    text = f"{said}: nothing says whether training was over{_unseen(parts)}"
    return End(UNDECIDED, (), hows[0], step, None, text)


def _crashed(pool: list[Fate]) -> End:
    step, phase = _step(pool), _phase(pool)
    how = how_of(pool[0])
    if len(pool) == 1:
        text = describe(pool[0])
    else:
        each = "; ".join(describe(f) for f in pool[:4]) + ("; ..." if len(pool) > 4 else "")
        who = named((f.rank for f in pool), "or")
        text = f"{who} is the cause, and nothing says which: {each}"
    return End(CRASHED, tuple(f.rank for f in pool), how, step, phase, text)


def _stuck(parts: _Parts) -> list[Fate]:
    """Return the ranks that the others waited for, if they did."""
    case = parts.case
    suspended = [f for f in case.fates if f.suspended]
    if suspended and not parts.has(_LEFT):
        return _behind(suspended)
    victims = parts.all(_VICTIM)
    waited = [f for f in victims if f.how == "SIGABRT" or (f.error and f.error.timed_out)]
    if not any(f.stalled for f in case.fates) and not waited:
        return []
    if parts.has(_LEFT) and not waited:
        return []
    here = [f for f in case.fates if f.heard and not f.paused and f not in waited]
    here = [f for f in here if parts.part(f) != _LEFT] or waited
    return _behind(here) if any(f.clock for f in here) else here


def _behind(fates: list[Fate]) -> list[Fate]:
    known = [f.clock.key for f in fates if f.clock]
    return [f for f in fates if f.clock and f.clock.key == min(known)] if known else fates


def _hung(parts: _Parts, stuck: list[Fate]) -> End:
    step, phase = _step(stuck), _phase(stuck)
    ranks = tuple(f.rank for f in stuck)
    if parts.case.partial or parts.has(_ABSENT):
        text = f"no rank that is seen here moved on ({_where(stuck)} is behind), and the one that "
        text += "was first may be elsewhere"
        return End(HUNG, (), "hang", step, phase, text)
    if len(stuck) == 1 and stuck[0].suspended:
        text, how = f"{_where(stuck)}, was suspended (SIGSTOP) and did not go on", "SIGSTOP"
    elif len(stuck) == 1:
        text, how = f"{_where(stuck)}, did not move on", "hang"
    else:
        text, how = f"no rank moved on: {_where(stuck)}, and nothing says which was first", "hang"
    waiting = [f for f in parts.case.fates if f not in stuck and f.clock]
    if waiting:
        text += f"; {named((f.rank for f in waiting), 'and')} waited"
    ends = sorted({f.how for f in parts.case.fates if f.how and f.how != UNKNOWN})
    if ends and not parts.has(_ALIVE):
        text += f", until the job was ended ({', '.join(ends)})"
    return End(HUNG, ranks, how, step, phase, text)


def _broken(parts: _Parts) -> End:
    """Communication broke: the one who is gone without a word did it, if there is one."""
    victims = parts.all(_VICTIM)
    gone = parts.all(_LOST) or parts.all(_SILENT) or parts.all(_LEFT)
    said = f"{_many(victims)} lost the connection ({_message(victims[0])})"
    if parts.has(_ABSENT):  # who left, or ended unseen, is no better a candidate than those
        among = "may not be" if gone else "is not"
        text = f"{said}, and the cause {among} among the ranks that are known here"
        return End(CRASHED, (), how_of(victims[0]), _step(victims), _phase(victims), text)
    if len(gone) == 1:
        text = f"{describe(gone[0])}; {said}"
        how = how_of(gone[0])
        return End(CRASHED, (gone[0].rank,), how, _step(gone), _phase(gone), text)
    if gone:
        ranks = tuple(f.rank for f in gone)
        text = f"{named(ranks, 'or')} is gone without a last word, and {said}"
        return End(CRASHED, ranks, UNKNOWN, _step(gone), _phase(gone), text)
    if parts.has(_ALIVE):
        return End(RUNNING, message=f"{said}; the other ranks live")
    if parts.has(_TOLD):
        return _stopped(parts)
    ranks = tuple(f.rank for f in victims)
    text = f"{said}, and no rank is known to have failed on its own"
    return End(CRASHED, ranks, how_of(victims[0]), _step(victims), _phase(victims), text)


def _stopped(parts: _Parts, said: str = "") -> End:
    case = parts.case
    told = parts.all(_TOLD)
    if not told and not said:
        return _without_word(parts)
    hows = sorted({_asked_by(f) for f in told}, key=lambda how: (how == "SIGKILL", how))
    text = said or f"{_many(told)} ended because of {' and '.join(hows)}"
    by = f"; {case.scheduler}" if case.scheduler else ""
    fates = told or case.fates
    how = hows[0] if hows else case.fates[0].how
    return End(STOPPED, (), how, _step(fates), _phase(fates), f"stopped from outside: {text}{by}")


def _asked_by(fate: Fate) -> str:
    if fate.error is not None and fate.error.asked:
        interrupt = fate.error.type == "KeyboardInterrupt"
        return "SIGINT" if interrupt else f"a handler of a signal ({fate.error.type})"
    return _ASKED_CODES.get(fate.how, fate.how)


def _without_cause(parts: _Parts) -> End:
    """Nobody failed and nobody waited."""
    if parts.has(_TOLD) and not parts.has(_LOST, _ABSENT):
        return _stopped(parts)
    if parts.has(_ALIVE):
        return End(RUNNING, message="it is under way")
    return _without_word(parts)


def _without_word(parts: _Parts) -> End:
    case = parts.case
    if parts.only(_LEFT) and case.fates:
        step = max((f.clock.step for f in case.fates if f.clock), default=None)
        return End(ENDED, step=step, message="every rank came to its end")
    lost, step = parts.all(_LOST), _last_step(case.fates)
    where = "" if step is None else f"; the last step begun is {step}"
    # Without a heartbeat this is a copy of records, which tells of no process.
    quiet = parts.only(_LOST) and not any(f.closed for f in lost)
    if quiet and step is not None and not case.partial:
        text = f"no rank left a last word, and nobody saw how they ended{where}"
        return End(VANISHED, (), UNKNOWN, step, None, text)
    who = _many(lost or parts.all(_ABSENT) or case.fates) if case.fates else "no rank"
    hows = sorted({f.how for f in case.fates if f.how not in {"", CLEAN, UNKNOWN}})
    others = f"; of the others: {', '.join(hows)}" if hows else ""
    text = f"how {who} ended is not known{where}{others}"
    return End(UNDECIDED, (), UNKNOWN, step, None, text)


def _unseen(parts: _Parts) -> str:
    absent = parts.all(_ABSENT)
    return f"; of {_many(absent)} nothing is known here" if absent else ""


def describe(fate: Fate) -> str:
    """Say how one rank ended, and where."""
    clock = fate.clock
    where = f"in step {clock.step}" if clock else "before its first step"
    return f"rank {fate.rank} died ({_message(fate)}) {where}"


def _message(fate: Fate) -> str:
    how, error = how_of(fate), fate.error
    if error is None or how != error.type:
        return how
    text = f": {error.message}" if error.message else ""
    at = f" at {error.where}" if error.where else ""
    return f"{how}{text}{at}"


def _where(fates: list[Fate]) -> str:
    clocks = {(f.clock.phase, f.clock.step) for f in fates if f.clock}
    who = named((f.rank for f in fates), "and" if len(fates) > 2 else "or")
    if len(clocks) != 1:
        return who
    phase, step = next(iter(clocks))
    return f"{who}, in {phase} of step {step}"


def _many(fates: Iterable[Fate]) -> str:
    ranks = [f.rank for f in fates]
    return named(ranks, "and") if len(ranks) <= 4 else f"{len(ranks)} ranks"


def _step(fates: Iterable[Fate]) -> int | None:
    steps = {f.clock.step if f.clock else None for f in fates}
    return steps.pop() if len(steps) == 1 else None


def _last_step(fates: Iterable[Fate]) -> int | None:
    return max((f.clock.step for f in fates if f.clock), default=None)


def _phase(fates: Iterable[Fate]) -> str | None:
    phases = {f.clock.phase if f.clock else None for f in fates}
    return phases.pop() if len(phases) == 1 else None
