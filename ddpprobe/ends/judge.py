"""How an attempt ended, and which rank's end was the cause: by evidence, never by a clock.

A rank that ended is a *cause* if it died of a fatal signal or of an exception of its own; it
*chose* an exit code, which may be the cause or the answer of a script to what befell another rank;
it is a *victim* if its communication broke; it was *stopped* if it was told to end. Who is named
is what is left when everything is taken away that may have followed from somebody else. If that is
more than one, all of them are named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ddpprobe.ends import hang
from ddpprobe.ends.candidates import candidates, is_killed, left_alike, unseen_of
from ddpprobe.ends.death_order import DeathOrder
from ddpprobe.ends.end import CRASHED, ENDED, HUNG, RUNNING, STOPPED, UNDECIDED, VANISHED, End
from ddpprobe.ends.evidence import UNKNOWN, Case
from ddpprobe.ends.rank_ends import (
    ABORTED,
    ABSENT,
    ALIVE,
    CAUSE,
    CHOSE,
    CLEAN,
    INSIDE,
    LEFT,
    LOST,
    OWN_STOP,
    SENT,
    SILENT,
    TOLD,
    VICTIM,
    RankEnds,
    asked_in_words,
    may_be_told,
)
from ddpprobe.ends.undecided import after_closing, last_resort, watched
from ddpprobe.ends.words import (
    CAUGHT,
    CAUGHT_OR_CHOSE,
    alike,
    broken_in_words,
    common_place,
    describe,
    describe_left,
    died_of,
    each_of,
    how_of,
    last_seen_in_words,
    last_step_of,
    left_in_words,
    memory_in_words,
    phase_of,
    place_of,
    raised_in_words,
    ranks_of,
    step_of,
    where_of,
)
from ddpprobe.records.fate import Fate
from ddpprobe.records.rank_names import ranks_joined


def judge(case: Case) -> End:
    """Return how an attempt ended, or that it is under way."""
    if case.live and case.fates and all(fate.trains for fate in case.fates):
        return End(RUNNING, message="it is under way")  # that is asked several times a second
    end = _judge(RankEnds(case))
    return replace(end, message=end.message + memory_in_words(case.fates))


def _judge(parts: RankEnds) -> End:
    if parts.has(CAUSE, CHOSE, ABORTED):
        pool = candidates(parts)
        open_ = _all_sent(parts) or _unseen_but_killed(parts) or _same_choice(parts)
        open_ = open_ or after_closing(parts) or _all_killed(parts) or watched(parts, pool)
        return open_ or last_resort(parts, pool) or _crashed(parts, pool)
    if parts.has(SILENT) and not parts.has(VICTIM):
        return _quiet(parts)
    early = hang.left_early(parts)
    if early:
        text = f"{'; '.join(map(describe_left, early))}; {hang.waiting_in_words(parts)}"
        return End(HUNG, tuple(f.rank for f in early), "hang", step_of(early), None, text)
    stuck = hang.stuck_in(parts)
    if stuck:
        return _hung(parts, stuck)
    left = [f for f in parts.all(LEFT) if may_be_told(f)]
    if left and parts.has(VICTIM) and not parts.has(LOST, SILENT, ABSENT):
        return _stopped(parts) if parts.has(TOLD) else _by_handler(parts, left)
    return _broken(parts) if parts.has(VICTIM) else _without_cause(parts)


def failed(case: Case) -> list[Fate]:
    """Return the ranks that ended otherwise than by the end of their training."""
    return RankEnds(case).all(CAUSE, CHOSE, ABORTED, VICTIM, TOLD, LOST)


def is_well(case: Case) -> bool:
    """Whether all ranks of which anything is known here ended well, be it by a handler."""
    parts = RankEnds(case)
    return parts.has(LEFT) and parts.only(LEFT, ABSENT)


def stuck_of(end: End, case: Case) -> dict[int, str]:
    """Return the ranks that the others wait or waited for, and in which phase they are."""
    named = set(end.ranks) if end.state == HUNG else set()
    return {f.rank: f.clock.phase if f.clock else "" for f in case.fates if f.rank in named}


def _unseen_but_killed(parts: RankEnds) -> End | None:
    """Ranks were seen to be killed, and of all the others nobody saw how they ended.

    Somebody may have killed all of them, one after the other.
    """
    killed = [f for f in parts.all(CAUSE) if is_killed(f)]
    unseen = unseen_of(parts)
    if not killed or not unseen or len(killed) + len(unseen) < len(parts.case.fates):
        return None
    step = last_step_of(parts.case.fates)
    where = "" if step is None else f"; the last step begun is {step}"
    text = f"{ranks_of(killed)} died (SIGKILL), and nobody saw how {ranks_of(unseen)} ended{where}"
    return End(VANISHED, (), UNKNOWN, step, None, text)


def _same_choice(parts: RankEnds) -> End | None:
    """All ranks ended by the same exit code and nothing says why: it may have been a signal's.

    A script's handler of a signal exits with whatever code it likes; and workers that nobody lets
    come to the end of their interpreter are ended by an exit code, or killed, when all is done.
    """
    unseen = unseen_of(parts)
    fates = [f for f in parts.seen if f not in unseen]
    quiet = all(parts.part(f) in {CHOSE, SILENT, CAUSE, TOLD} for f in fates)
    if not quiet or any(f.error for f in fates):
        return None
    hows = {f.how for f in fates}
    if not parts.has(CAUSE) and len(hows) == 1 and any(f.may_be_handled for f in fates):
        inside = any(f.clock and f.clock.phase in INSIDE for f in fates)
        who = ranks_of(fates) if unseen else "every rank"
        said = f"{who} ended with exit code {next(iter(hows))[5:]}"
        # There no script calls sys.exit(), but a signal's handler does, if one has run, or what
        # catches an exception. Of several nodes the launcher sends it because of the other, too.
        if inside and all(f.handles for f in fates) and not parts.has(ABSENT) and not unseen:
            return _stopped(parts, f"{said} out of a handler of SIGTERM or SIGINT")
        other = "after an exception that it caught" if inside else "by its own choice"
        why = f"by the script's handler of a signal, or {other}"
        text, grave = f"{said}: {why}{_besides(parts)}", bool(unseen)
        return End(UNDECIDED, (), next(iter(hows)), step_of(fates), None, text, grave)
    return _quiet(parts) if _is_between_steps(parts) else None


def _all_sent(parts: RankEnds) -> End | None:
    """All ranks died of one signal that somebody sends and no launcher: a scheduler's (Slurm's).

    Who was gone first makes no difference, as torchrun sends SIGTERM to the others.
    """
    fates, unseen = parts.seen, unseen_of(parts)
    seen = [f for f in fates if f not in unseen]
    hows = {f.how for f in seen}
    if len(fates) < 2 or len(hows) != 1 or not hows <= SENT or any(f.error for f in fates):
        return None
    how = hows.pop()
    if len(seen) > 1:
        return replace(_stopped(parts, f"{ranks_of(seen)} ended because of {how}"), how=how)
    text = f"{describe(seen[0])}, which somebody sends{_besides(parts)}"
    return End(UNDECIDED, (), how, step_of(fates), phase_of(fates), text, grave=True)


def _all_killed(parts: RankEnds) -> End | None:
    """Every rank was killed: no rank's end makes others die like that, but somebody outside can.

    Of ranks that torchrun started it makes no difference who was gone first, as it kills nobody
    whom SIGTERM ends: each of them was killed on its own.
    """
    fates, causes = parts.seen, parts.all(CAUSE)
    if len(fates) < 2 or len(causes) < len(fates) or {f.how for f in fates} != {"SIGKILL"}:
        return None
    ordered = any(map(DeathOrder(fates).after_any, fates))
    if any(f.error for f in fates) or (ordered and not _by_torchrun(fates)):
        return None
    text = f"{ranks_of(fates)} were all killed (SIGKILL), and nothing says by whom or which "
    text += f"was first{_besides(parts)}"
    return End(UNDECIDED, (), "SIGKILL", step_of(fates), phase_of(fates), text, grave=True)


def _is_between_steps(parts: RankEnds) -> bool:
    """Whether all ranks ended without a word in the same place, after a whole step."""
    fates, unseen = parts.seen, unseen_of(parts)
    places = {f.clock.key for f in fates if f.clock}
    quiet = all(not f.closed and f.is_between_steps for f in fates)
    # Workers may be killed by what started them, when all is done.
    killed = len(fates) > 1 and not _by_torchrun(fates)
    harmless = {"exit:0", "exit:1", *(["SIGKILL"] if killed else [])}
    hows = {f.how for f in fates if f not in unseen}
    return quiet and len(places) == 1 and hows <= harmless


def _by_torchrun(fates: Iterable[Fate]) -> bool:
    """Whether torchrun started some of these, and SIGTERM would have ended them."""
    return any(f.launcher and not f.may_be_handled for f in fates)


def _quiet(parts: RankEnds) -> End:
    fates = parts.all(SILENT, CHOSE, CAUSE)
    hows = sorted({f.how for f in fates})
    where = "" if (step := step_of(fates)) is None else f" after step {step}"
    said = f"{ranks_of(fates)} ended ({', '.join(hows)}){where} without a last word"
    hint = " (before os._exit(), probe.close() says so)" if hows == [CLEAN] else ""
    text = f"{said}: nothing says whether training was over{hint}{_besides(parts)}"
    return End(UNDECIDED, (), hows[0], step, None, text, grave=bool(unseen_of(parts)))


def _crashed(parts: RankEnds, pool: list[Fate]) -> End:
    leaving = left_alike(parts, pool)
    step, phase, how = step_of(pool), phase_of(pool), how_of(pool[0])
    text = f"{describe(pool[0])}{last_seen_in_words(pool[0])}"
    if leaving:
        text, pool = left_in_words(leaving, pool), leaving
    elif len(pool) > 1 and _raised_alike(pool):
        first = alike(pool)
        text = f"{ranks_of(pool)} died of the same exception ({died_of(first)}) {where_of(first)}"
    elif len(pool) > 1:
        each = each_of(map(describe, pool))
        text = f"{ranks_joined(f.rank for f in pool)} is the cause, and nothing says which: {each}"
    return End(CRASHED, tuple(f.rank for f in pool), how, step, phase, text)


def _raised_alike(fates: list[Fate]) -> bool:
    """Whether all of these raised an exception of their own at the same line, in the same step."""
    raised = {(f.error.type, f.error.where) if f.error else None for f in fates}
    return len(raised) == 1 and None not in raised and step_of(fates) is not None


def _hung(parts: RankEnds, stuck: list[Fate]) -> End:
    step, phase = step_of(stuck), phase_of(stuck)
    if parts.case.partial or parts.has(ABSENT):
        text = f"no rank seen here moved on ({place_of(stuck)} is behind)"
        text += "; the first may be elsewhere"
        return End(HUNG, (), "hang", step, phase, text)
    if all(f.suspended for f in parts.case.fates):
        stuck = list(parts.case.fates)  # nobody waits
    text, how = hang.in_words(parts, stuck)
    text += _besides(parts) if len(unseen_of(parts)) < len(parts.case.fates) else ""
    return End(HUNG, tuple(f.rank for f in stuck), how, step, phase, text)


def _broken(parts: RankEnds) -> End:
    """Communication broke: the one who is gone without a word did it, if there is one."""
    victims = parts.all(VICTIM)
    gone = parts.all(LOST) or parts.all(SILENT)
    gone = sorted([*gone, *hang.missed(parts)], key=lambda f: f.rank) if gone else parts.all(LEFT)
    said = broken_in_words(victims)
    if parts.has(ABSENT):  # who left, or ended unseen, is no better a candidate than those
        among = "may not be" if gone else "is not"
        text = f"{said}, and the cause {among} among the ranks that are known here"
        return End(CRASHED, (), how_of(victims[0]), step_of(victims), phase_of(victims), text)
    if gone and all(parts.part(f) == LEFT for f in gone):
        return _left_behind(gone, victims, said)
    if len(gone) == 1:
        text, how = f"{describe(gone[0])}; {said}", how_of(gone[0])
        return End(CRASHED, (gone[0].rank,), how, step_of(gone), phase_of(gone), text)
    if gone:
        ranks = tuple(f.rank for f in gone)
        text = f"{ranks_joined(ranks)} is gone without a last word, and {said}"
        return End(CRASHED, ranks, UNKNOWN, step_of(gone), phase_of(gone), text)
    if parts.has(ALIVE):
        return End(RUNNING, message=f"{said}; the other ranks live")
    return _broke_by_itself(parts)


def _left_behind(left: list[Fate], victims: list[Fate], said: str) -> End:
    """Ranks came to their end while another one communicated.

    They ended too early, if they are behind it. After as many steps it may as well have made a call
    too many.
    """
    text = f"{each_of(map(describe_left, left))}; {said}"
    last = max((f.clock.key for f in left if f.clock and f.clock.phase == "data"), default=None)
    level = last is not None and all(f.clock is not None and f.clock.key <= last for f in victims)
    if level:
        text += ", in a call that the others did not make: it is one too many, or they ended early"
    whom = sorted([*left, *victims], key=lambda f: f.rank) if level else left
    ranks, how = tuple(f.rank for f in whom), how_of(left[0])
    return End(CRASHED, ranks, how, step_of(whom), phase_of(whom), text)


def _broke_by_itself(parts: RankEnds) -> End:
    """Communication broke, and all others were told to end, because of that or before it."""
    victims, told = parts.all(VICTIM), parts.all(TOLD)
    first = _broke_first(parts)
    if told and not first:
        return _stopped(parts)
    victims = first or victims
    ranks, how = tuple(f.rank for f in victims), how_of(victims[0])
    said = broken_in_words(victims)
    if any(f.may_be_handled for f in told):
        text = (
            f"{said} before {ranks_of(told)} ended ({told[0].how}): it broke, and they were told "
            "to end because of that, or they were told to end, and closed it"
        )
        return End(UNDECIDED, ranks, how, step_of(first), phase_of(first), text, grave=True)
    lived = " while all others lived" if first else ""
    text = f"{said}{lived}, and no rank is known to have failed on its own"
    return End(CRASHED, ranks, how, step_of(victims), phase_of(victims), text)


def _broke_first(parts: RankEnds) -> list[Fate]:
    """Return whose communication broke before anybody ended who was told to: not because of that.

    Somebody else's handler of a signal, or Python's answer to SIGINT, may have closed it before.
    """
    told, order = parts.all(TOLD), DeathOrder(parts.all(TOLD))
    if not told or any(f.asked or f.error is not None for f in told):
        return []
    return [f for f in parts.all(VICTIM) if not f.handles and order.before_all(f)]


def _stopped(parts: RankEnds, said: str = "") -> End:
    case = parts.case
    told = parts.all(TOLD)
    if not told and not said:
        return _without_word(parts)
    own = [f for f in told if f.error is not None and f.error.type == OWN_STOP]
    if own:
        text = f"stopped: {ranks_of(own)} ended as on_anomaly='stop' asks for{_besides(parts)}"
        return End(STOPPED, (), OWN_STOP, step_of(own), phase_of(own), text)
    hows = sorted({_asked_by(f) for f in told}, key=lambda how: (how == "SIGKILL", how))
    text = said or f"{ranks_of(told)} ended because of {' and '.join(map(asked_in_words, hows))}"
    text += last_seen_in_words(told[0]) if len(told) == 1 else ""
    text += _besides(parts)
    broken = parts.all(VICTIM)
    text += f"; {broken_in_words(broken)}" if broken else ""
    by = f"; {case.scheduler}" if case.scheduler else ""
    fates = told or case.fates
    how = hows[0] if hows else case.fates[0].how
    return End(
        STOPPED, (), how, step_of(fates), phase_of(fates), f"stopped from outside: {text}{by}"
    )


def _asked_by(fate: Fate) -> str:
    if fate.error is not None and fate.error.asked:
        interrupt = fate.error.type == "KeyboardInterrupt"
        return "SIGINT" if interrupt else f"a handler of a signal ({fate.error.type})"
    return f"{fate.pool} ({fate.how or UNKNOWN})" if fate.pool else fate.how


def _without_cause(parts: RankEnds) -> End:
    """Nobody failed and nobody waited."""
    if parts.has(TOLD) and (not parts.has(LOST, ABSENT) or _is_first_told(parts)):
        return _stopped(parts)
    if parts.has(ALIVE):
        return End(RUNNING, message="it is under way")
    return _without_word(parts)


def _without_word(parts: RankEnds) -> End:
    case = parts.case
    if parts.only(LEFT) and case.fates:
        if any(map(may_be_told, case.fates)):
            return _by_handler(parts, case.fates)
        return _midway(case) or _ended(case)
    lost, step = parts.all(LOST), last_step_of(case.fates)
    where = "" if step is None else f"; the last step begun is {step}"
    # Without a heartbeat this is a copy of records, which tells of no process.
    quiet = parts.only(LOST) and not any(f.closed or f.beat_closed for f in lost)
    if quiet and step is not None and not case.partial:
        text = f"no rank left a last word, and nobody saw how they ended{where}"
        return End(VANISHED, (), UNKNOWN, step, None, text)
    who = ranks_of(lost or parts.all(ABSENT) or case.fates) if case.fates else "the run"
    hows = sorted({f.how for f in case.fates if f.how not in {"", CLEAN, UNKNOWN}})
    others = f"; of the others: {', '.join(hows)}" if hows else ""
    text = f"how {who} ended is not known{where}{others}"
    unread = [f for f in lost if f.beat_closed and not f.closed]
    if unread:
        text += f"; {ranks_of(unread)} closed, and the last words are not in the run directory"
    raised = next((f.error for f in lost if f.error is not None), None)
    text += "" if raised is None else f"; {raised_in_words(lost)}"
    return End(UNDECIDED, (), raised.type if raised else UNKNOWN, step, None, text)


def _ended(case: Case) -> End:
    """All ranks left; where that was in the middle of a step it is said, as it may be no end.

    Of a sys.exit() a rank knows nothing at the end of its interpreter: only its exit code tells.
    """
    inside = all(f.at_exit and f.is_within_step for f in case.fates)
    where = common_place(case.fates) if inside else ""
    said = f"every rank came to its end{where}"
    if where:
        said += ": the script left its loop there, or caught an exception"
    if any(f.at_exit and f.how in {"", UNKNOWN} for f in case.fates):
        said += "; nobody saw with which exit code"
    return End(ENDED, step=last_step_of(case.fates), message=said)


def _midway(case: Case) -> End | None:
    """Ranks left in the middle of a step, with nothing wrong by their codes.

    None of them had said that its training was over. An exception that a script swallows leaves no
    other trace. After a training forward a script may come to its end as well, but then all ranks
    do so in the same place.
    """
    places = {f.clock.key for f in case.fates if f.clock}
    inside = [f for f in case.fates if f.at_exit and f.is_within_step]
    within = [f for f in case.fates if f.clock and f.clock.phase in INSIDE]
    within = [f for f in within if f.at_exit or f.error is not None]
    if not within and (len(places) < 2 or not inside):
        return None
    inside = within or inside
    first = min((f.clock.key for f in inside if f.clock), default=())
    behind = [f for f in case.fates if f.clock and f.clock.key < first]
    step = last_step_of(inside)
    each = each_of(place_of([f]) for f in inside)
    who = "no rank" if len(inside) == len(case.fates) else "not every rank"
    text = f"{who} came to the end of its step ({each}), and "
    raised = raised_in_words(inside)
    text += f"{raised}: {CAUGHT}" if raised else f"none said why: {CAUGHT_OR_CHOSE}"
    text += f"; {each_of(map(describe_left, behind))}" if behind else ""
    return End(UNDECIDED, tuple(f.rank for f in behind), CLEAN, step, None, text)


def _by_handler(parts: RankEnds, left: Iterable[Fate]) -> End:
    """Ranks left without an error, and a handler of a signal may have made them."""
    left, victims = list(left), parts.all(VICTIM)
    step = last_step_of(left)
    text = (
        f"{ranks_of(left)} ended (exit code 0), by a handler of SIGTERM or SIGINT or at the end of "
    )
    text += "the script: probe.close() after its training would say which"
    text += f"; {broken_in_words(victims)}" if victims else ""
    return End(UNDECIDED, (), CLEAN if victims else UNKNOWN, step, None, text, grave=bool(victims))


def _is_first_told(parts: RankEnds) -> bool:
    """Whether a rank was told to end when all the others lived: because of no other one's end."""
    others = {f.rank for f in parts.all(LOST, ABSENT)}
    return any(others <= set(f.outlived_by) for f in parts.all(TOLD))


def _besides(parts: RankEnds) -> str:
    """Say of which ranks there is no evidence."""
    absent, unseen = parts.all(ABSENT), unseen_of(parts)
    text = f"; nobody saw how {ranks_of(unseen)} ended" if unseen else ""
    return text + (f"; of {ranks_of(absent)} nothing is known here" if absent else "")
