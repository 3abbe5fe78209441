"""Whose end may have been the cause: all but those whose end followed from somebody else's."""

from __future__ import annotations

import re

from ddpprobe.ends.death_order import DeathOrder
from ddpprobe.ends.evidence import UNKNOWN
from ddpprobe.ends.rank_ends import ABORTED, CAUSE, CHOSE, LEFT, LOST, RankEnds
from ddpprobe.records.fate import Fate

# Exceptions, by their names, of a script's own connections: a peer's end may be behind them.
_OF_CONNECTIONS = re.compile(r"connection|time_?d?_?out|broken_?pipe|eof|disconnect", re.IGNORECASE)

_ON_ITS_WAY = {"SIGTERM", "", UNKNOWN}  # how one ends that had left, and was told to end then


def candidates(parts: RankEnds) -> list[Fate]:
    """Return whose end is not known to have followed from somebody else's."""
    causes, others = _without_killed(parts), parts.all(CHOSE, ABORTED)
    pool = causes or others
    if causes:
        first = min((f.clock.key for f in causes if f.clock), default=None)
        order, killed = DeathOrder(causes), all(map(is_killed, causes))
        pool = [*causes, *(f for f in others if _may_be_first(f, order, first, killed=killed))]
    order = DeathOrder(pool)
    proven = [f for f in pool if f.error is not None or not order.after_any(f)]
    pool = proven or pool
    if not causes and len(pool) > 1 and all(f.clock for f in pool):
        # An exit code may be a script's answer to a peer's end, but not of one who was further on.
        least = min(f.clock.key for f in pool if f.clock)
        pool = [f for f in pool if f.clock and f.clock.key == least]
    return sorted([*pool, *_unseen_before(parts, pool)], key=lambda f: f.rank)


def left_alike(parts: RankEnds, pool: list[Fate]) -> list[Fate]:
    """Return who left where these chose their exit code, and may have left by the same one.

    What a script does on all ranks (a check, a requeue) one of them does first, and its launcher
    then ends those that are on their way out. None, if no other one was.
    """
    if any(parts.part(f) != CHOSE or not _leaves(f) for f in pool):
        return []
    hows = {f.how for f in pool}
    places = {f.clock.key for f in pool if f.clock}
    found = [
        f for f in parts.all(CHOSE, LEFT)
        if _leaves(f) and f.clock and f.clock.key in places and f.how in {*hows, *_ON_ITS_WAY}
    ]  # fmt: skip
    return found if len(hows) == len(places) == 1 and len(found) > 1 else []


def _leaves(fate: Fate) -> bool:
    """Whether it left between two steps, at the end of its interpreter, and without an error."""
    return fate.is_between_steps and fate.closed and fate.at_exit and fate.error is None


def _unseen_before(parts: RankEnds, pool: list[Fate]) -> list[Fate]:
    """Return whose end nobody saw, and it may be the reason of all of these ends."""
    if any(parts.part(f) == CAUSE and not is_killed(f) for f in pool):
        return []
    order = DeathOrder(pool)
    least = min((f.clock.key for f in pool if f.clock and not is_killed(f)), default=None)

    def is_ahead(fate: Fate) -> bool:
        return fate.clock is not None and least is not None and fate.clock.key > least

    return [u for u in unseen_of(parts) if not (order.after_any(u) or is_ahead(u))]


def _without_killed(parts: RankEnds) -> list[Fate]:
    """Return the causes, without who was killed (SIGKILL) where that followed from another's end.

    A launcher kills those that are left, and a rank whose end a kill cannot bring about is the one
    that it followed from: of its own exception, or of a signal that nobody sends; or of an exit
    code, if it was behind those that were killed. All communication up to there they had passed, so
    that none of it can have been broken by their end.
    """
    causes = parts.all(CAUSE)
    killed = [f for f in causes if is_killed(f)]
    order = DeathOrder(killed)
    first = min((f.clock.key for f in killed if f.clock), default=None)

    def is_first(fate: Fate) -> bool:
        if is_killed(fate) or not order.before_all(fate, together=True):
            return False
        if parts.part(fate) == CAUSE:
            return not _may_follow(fate)
        behind = fate.clock is not None and first is not None and fate.clock.key < first
        return behind and not fate.may_be_handled

    found = any(is_first(f) for f in parts.all(CAUSE, CHOSE))
    return [f for f in causes if not is_killed(f)] if found else causes


def _may_follow(fate: Fate) -> bool:
    """Whether another rank's end may be behind an exception, other than by broken communication."""
    return fate.error is not None and bool(_OF_CONNECTIONS.search(fate.error.type))


def _may_be_first(
    fate: Fate, causes: DeathOrder, first: tuple[int, ...] | None, *, killed: bool
) -> bool:
    """Whether an exit code may be the cause beside these: they may have followed from it.

    `killed`: each of these was.
    """
    behind = fate.clock is not None and first is not None and fate.clock.key < first
    before = killed and causes.before_all(fate, together=True)
    return behind or before or causes.before_any(fate)


def is_killed(fate: Fate) -> bool:
    """Whether it died of SIGKILL, which comes from outside."""
    return fate.how == "SIGKILL" and fate.error is None


def unseen_of(parts: RankEnds) -> list[Fate]:
    """Return the ranks that ended without a word, and nobody saw how."""
    return [f for f in parts.all(LOST) if not f.closed]
