"""Deaths that may be the cause of an attempt's end, or follow from what is not a death."""

from __future__ import annotations

from ddpprobe.ends.candidates import is_killed, unseen_of
from ddpprobe.ends.death_order import DeathOrder
from ddpprobe.ends.end import UNDECIDED, End
from ddpprobe.ends.rank_ends import ABORTED, CAUSE, CHOSE, LEFT, LOST, SILENT, TOLD, RankEnds
from ddpprobe.ends.words import (
    common_place,
    describe,
    how_of,
    last_step_of,
    phase_of,
    place_of,
    ranks_of,
    step_of,
)
from ddpprobe.records.fate import Fate


def after_closing(parts: RankEnds) -> End | None:
    """All ranks had closed between the same two steps, by the script's word and without an error.

    What ended a process with a code after that need not be the training: it may be an evaluation,
    or another training. Who lives on for long is not seen to end at all.
    """
    fates, chose = parts.seen, parts.all(CHOSE)
    over = all(
        f.closed and f.is_between_steps and not (f.at_exit or f.raised or f.error or f.handles)
        for f in fates
    )
    places = {f.clock.key for f in fates if f.clock}
    if not over or len(places) != 1 or not chose or parts.has(CAUSE, ABORTED):
        return None
    who, whom = "every rank", f"{ranks_of(chose)} "
    if len(fates) == 1:
        who, whom = ranks_of(fates), ""
    text = (
        f"{who} had closed{common_place(fates)}, and then {whom}ended with exit code "
        f"{chose[0].how[5:]}: by what the script did after its training, or because that had failed"
    )
    return End(UNDECIDED, (), chose[0].how, last_step_of(fates), None, text)


def watched(parts: RankEnds, pool: list[Fate]) -> End | None:
    """Who aborted was further on than one that was told to stop: it may have waited for that one.

    NCCL's watchdog aborts those who wait; one that aborts on its own leaves others behind as well.
    Told to stop may also be who was killed (SIGKILL), if nothing says which of the two was first.
    For one that had come to its end an exit code may be the answer, too.
    """
    early = parts.all(LEFT, SILENT)
    answers = [f for f in pool if early and parts.part(f) == CHOSE]
    aborted = [f for f in pool if parts.part(f) == ABORTED] or answers
    killed = [f for f in parts.all(CAUSE) if is_killed(f)]
    killed = DeathOrder(aborted).unordered(killed)
    known = [*aborted, *killed, *unseen_of(parts)]
    if not aborted or any(f.clock is None or f not in known for f in pool):
        return None
    least = min(f.clock.key for f in aborted if f.clock)
    after = early if aborted == answers else [*parts.all(TOLD, LOST), *early, *killed]
    behind = [f for f in after if f.clock and f.clock.key < least]
    if not behind:
        return None
    both = sorted({f.rank: f for f in (*pool, *behind)}.values(), key=lambda f: f.rank)
    text = f"{describe(aborted[0])} while {place_of(behind)}, was behind: "
    text += "it failed, or had waited for it"
    ranks = tuple(f.rank for f in both)
    return End(UNDECIDED, ranks, how_of(aborted[0]), step_of(both), None, text, grave=True)


def last_resort(parts: RankEnds, pool: list[Fate]) -> End | None:
    """One was killed (SIGKILL), seen together with the others, who were told to stop.

    Its death may be why, or it had hung behind them and did not go when it was told to. A broken
    connection would say that it was gone before.
    """
    if len(pool) != 1 or not is_killed(pool[0]) or pool[0].clock is None:
        return None
    lost, others = pool[0], [f for f in parts.case.fates if f is not pool[0]]
    last = min((f.clock.key for f in others if f.clock), default=pool[0].clock.key)
    together = all(
        parts.part(f) == TOLD
        and f.order == lost.order >= 0
        and f.witness == lost.witness
        and not lost.died_before(f)
        for f in others
    )
    if not others or not together or last <= pool[0].clock.key:
        return None
    text = f"{describe(lost)}, behind the others, who were told to stop: because of that, or "
    text += "because it had hung, and it was killed as it did not go"
    return End(UNDECIDED, (lost.rank,), lost.how, step_of(pool), phase_of(pool), text, grave=True)
