"""How ranks ended, in words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from ddpprobe.ends.evidence import UNKNOWN
from ddpprobe.ends.rank_ends import CLEAN
from ddpprobe.records.fate import Fate, Progress, RaisedError, Reason, cut, placed
from ddpprobe.records.rank_names import ranks_joined

MOST_SAID = 4  # ranks that are named, or of which each is told
MOST_BESIDE = 150  # characters of a message that is not the first to be read
# Why a rank may leave within a step without a word.
CAUGHT = "an exception that the script caught"
CAUGHT_OR_CHOSE = f"{CAUGHT}, or its own choice"
# What gloo writes around what happened: its own line, and advice.
_AROUND = re.compile(r"^\[\S+\.(?:cc|h):\d+\] |\. This is typically caused by .*$", re.DOTALL)


def how_of(fate: Fate) -> str:
    """Return what a rank died of: an exception by its name, else how its process ended."""
    blames = fate.error is not None and (fate.failed or fate.how not in {"", CLEAN, UNKNOWN})
    return fate.error.type if blames and fate.error is not None else fate.how or UNKNOWN


def describe(fate: Fate) -> str:
    """Say how one rank ended, and where."""
    return f"rank {fate.rank} died ({died_of(fate)}) {where_of(fate)}"


def describe_left(fate: Fate) -> str:
    """Say where one rank had come to an end, and its exit code if that was 0.

    One that had closed, and did not end by itself, may have done something else since.
    """
    did = f"ended ({CLEAN})" if fate.how == CLEAN else "closed" if fate.closed else "ended"
    return f"rank {fate.rank} had {did} {where_of(fate)}"


def left_in_words(fates: list[Fate], chose: list[Fate]) -> str:
    """Say that ranks left in the same place, some of which are known to have chosen a code."""
    text = f"{ranks_of(fates)} left {where_of(fates[0])}"
    code = f"with exit code {chose[0].how[5:]}"
    if all(f.how == chose[0].how for f in fates):
        return f"{text}, each {code}: the script ended them alike"
    known = [f for f in fates if f.how == chose[0].how]
    return f"{text}, {ranks_of(known)} {code}: the script ended them alike, or that one failed"


def where_of(fate: Fate) -> str:
    """Say where one rank was. What fetches the next batch stands after the step before it.

    Of one that closed and whose last word is not there (a full disk), nobody knows which it was.
    """
    clock = fate.clock
    if clock is None or (clock.phase == "data" and not clock.steps):
        return "before its first step"
    if fate.beat_closed and not fate.closed and clock.phase == "data":
        return f"in or after step {clock.step}"
    return f"{'after' if clock.phase == 'data' else 'in'} step {clock.step}"


def closed_within(fate: Fate) -> str:
    """Say where a rank closed if that was within a step; "" if between two, or if nobody knows."""
    clock = fate.clock
    if not fate.closed or clock is None or clock.phase == "data":
        return ""
    return _within(clock)


def died_of(fate: Fate) -> str:
    """Say what a rank died of: a signal, an exit code, or an exception and where it was raised."""
    how, error = how_of(fate), fate.error
    if error is None or how != error.type:
        return how
    return f"{_in_words(error)}{_lingering(fate)}"


def broken_in_words(victims: list[Fate]) -> str:
    """Say whose communication broke, and by what; or who was told that another rank had failed."""
    told = all(f.error is not None and f.error.is_retold for f in victims)
    did = "failed because another rank did" if told else "lost the connection"
    return f"{ranks_of(victims)} {did} ({died_of(victims[0])})"


def raised_in_words(fates: Iterable[Fate]) -> str:
    """Say which of these ranks had an exception under way as they closed; "" if none had."""
    raised = [(f, f.error) for f in fates if f.error is not None]
    return (
        f"{ranks_of(f for f, _ in raised)} had raised {_in_words(raised[0][1])}" if raised else ""
    )


def memory_in_words(fates: Iterable[Fate]) -> str:
    """Say that the kernel was killing for want of memory when ranks were killed; "" if it was not.

    It counts whom it kills, and does not say whom: each of these may have been ended by others. Of
    a worker of its DataLoader a rank says that it was killed.
    """
    killed = [f for f in fates if f.memory_kills and _was_killed(f)]
    if not killed:
        return ""
    most = max(f.memory_kills for f in killed)
    whom = "1 process" if most == 1 else f"{most} processes"
    return f"; the kernel killed {whom} for want of memory just before {ranks_of(killed)} died"


def _was_killed(fate: Fate) -> bool:
    """Whether it was killed, or a worker of its."""
    if fate.how == "SIGKILL" or fate.error is None:
        return fate.how == "SIGKILL"
    said = (fate.error, fate.error.cause, fate.error.handled)
    return any(each is not None and "killed by signal: Killed" in each.message for each in said)


def _in_words(error: RaisedError) -> str:
    """Say an exception, after the one that it was raised because of: that is what to mend."""
    cause, handled = error.cause, error.handled
    text = _one(error, MOST_BESIDE if cause else None)
    if cause is not None:
        text = f"{_one(cause)}, because of which it raised {text}"
    behind = error.behind or ("" if handled is None else _one(handled, MOST_BESIDE))
    return f"{text}, while it handled {behind}" if behind else text


def _one(error: RaisedError | Reason, most: int | None = None) -> str:
    message = _AROUND.sub("", error.message)
    message = cut(message, most or len(message))
    if not message.endswith(".."):
        message = message.removesuffix(".")
    text = f": {message}" if message else ""
    group = f", one of {error.group}" if error.group else ""
    return f"{error.type}{text}{placed(error.where, error.script)}{group}"


def alike(fates: list[Fate]) -> Fate:
    """Return the first of ranks that raised alike, less what is not the same for all of them."""
    errors = [f.error for f in fates if f.error is not None]
    others = {
        name: getattr(RaisedError(), name)
        for name in ("script", "group", "cause", "handled")
        if len({_kind(getattr(error, name)) for error in errors}) > 1
    }
    return replace(fates[0], error=replace(errors[0], **others))


def _kind(said: Reason | str | None) -> object:
    """Return what is the same of one exception on several ranks: its text may name the rank."""
    return (said.type, said.where, said.script) if isinstance(said, Reason) else said


def _lingering(fate: Fate) -> str:
    """Say for which threads its process waited, unless it came to its end."""
    if not fate.threads or fate.how.startswith("exit:"):
        return ""
    ended = "" if fate.how in {"", UNKNOWN} else ", and its process did not end: it"
    many = "s" * (len(fate.threads) > 1)
    return f"{ended or ', after which it'} waited for thread{many} {', '.join(fate.threads)}"


def place_of(fates: list[Fate]) -> str:
    """Name ranks, and where they are if that is the same for all."""
    who = ranks_joined((f.rank for f in fates), "and" if len(fates) > 2 else "or")
    return who + common_place(fates)


def common_place(fates: Iterable[Fate]) -> str:
    """Say where ranks are, after their names; "" if that is not the same for all.

    Between two steps a rank may read data, evaluate, write a checkpoint, or stand at a barrier.
    """
    known = [f for f in fates if f.clock]
    calls = {within_of(f) for f in known}
    call = calls.pop() if len(calls) == 1 else ""
    places = {_place(f, f.clock, call) for f in known if f.clock}
    return places.pop() if len(places) == 1 else ""


def _place(fate: Fate, clock: Progress, call: str) -> str:
    if clock.phase != "data":
        return f", {_within(clock)}" + (f" ({call})" if call else "")
    return f", in {call} {where_of(fate)}" if call else f", {where_of(fate)}"


def _within(clock: Progress) -> str:
    """Say in which part of a step a rank was; of `backward` see `anomalies.is_past_forward`."""
    part = "after the forward" if clock.phase == "backward" else f"in {clock.phase}"
    return f"{part} of step {clock.step}"


def within_of(fate: Fate) -> str:
    """Return the call for a checkpoint in which a rank stands; "" if in none that is known."""
    return fate.stands.within if fate.stands is not None else ""


def standing_in_words(fate: Fate) -> str:
    """Say where a rank is that stands: in a call for a checkpoint, if it is, and at which line."""
    if fate.stands is None:
        return ""
    call = f"in {fate.stands.within}, " if fate.stands.within else ""
    return f"{call}at {fate.stands.where}"


def last_seen_in_words(fate: Fate) -> str:
    """Say where a rank stood that then died and left no word; "" if it had not stood for long."""
    unsaid = fate.stands is not None and fate.error is None
    return f"; it was last seen {standing_in_words(fate)}" if unsaid else ""


def all_wait(fates: list[Fate]) -> bool:
    """Return whether all of these, and there are some, are seen to wait for other ranks."""
    return bool(fates) and all(f.stands is not None and f.stands.waits for f in fates)


def ranks_of(fates: Iterable[Fate]) -> str:
    """Name ranks, or say how many they are."""
    ranks = [f.rank for f in fates]
    return ranks_joined(ranks, "and") if len(ranks) <= MOST_SAID else f"{len(ranks)} ranks"


def each_of(texts: Iterable[str]) -> str:
    """Say the first of what is said of one rank each."""
    said = list(texts)
    return "; ".join([*said[:MOST_SAID], *(["..."] if len(said) > MOST_SAID else [])])


def last_step_of(fates: Iterable[Fate]) -> int | None:
    """Return the last step that any of these was in; None if that is of none known."""
    return max((f.clock.step for f in fates if f.clock), default=None)


def step_of(fates: Iterable[Fate]) -> int | None:
    """Return the step that these were in; None if it is not known, or not the same for all."""
    steps = {f.clock.step if f.clock else None for f in fates}
    return steps.pop() if len(steps) == 1 else None


def phase_of(fates: Iterable[Fate]) -> str | None:
    """Return the phase that these were in; None as `step_of`."""
    phases = {f.clock.phase if f.clock else None for f in fates}
    return phases.pop() if len(phases) == 1 else None
