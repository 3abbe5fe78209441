"""Who it was that all others waited for."""

from __future__ import annotations

from collections.abc import Iterable

from ddpprobe.ends.evidence import UNKNOWN
from ddpprobe.ends.rank_ends import ALIVE, CLEAN, LEFT, TOLD, VICTIM, RankEnds
from ddpprobe.ends.words import (
    all_wait,
    common_place,
    place_of,
    ranks_of,
    standing_in_words,
    within_of,
)
from ddpprobe.records.fate import Fate
from ddpprobe.records.rank_names import ranks_joined

_MOST_SHOWN = 4  # places at which ranks stand


def stuck_in(parts: RankEnds) -> list[Fate]:
    """Return the ranks that the others waited for, if they did."""
    case = parts.case
    suspended = [f for f in case.fates if f.suspended]
    if suspended and not parts.has(LEFT):
        return _behind(suspended)
    victims = parts.all(VICTIM)
    waited = [f for f in victims if f.how == "SIGABRT" or (f.error and f.error.timed_out)]
    past = any(_is_past(parts, f) for f in case.fates)  # one may have something else to do
    if not waited and (past or parts.has(LEFT) or not any(f.stalled for f in case.fates)):
        return []
    # Who waited in vain was waited by somebody: also one that said it does something else.
    in_vain = {f.rank for f in waited}
    here = [f for f in case.fates if f.heard and f.rank not in in_vain and (waited or not f.paused)]
    here = [f for f in here if parts.part(f) != LEFT]
    if not here and missed(parts):
        return []  # who was waited for had ended
    stuck = _behind(here or waited)
    least = min((f.clock.key for f in stuck if f.clock), default=None)
    # One that waits further behind may be waited for as well: each for the other.
    # So may one in the same place that had raised before, and waits while it handles that.
    ahead = [
        f for f in waited
        if f.clock and least is not None
        and (f.clock.key < least or (f.clock.key == least and _handled(f)))
    ]  # fmt: skip
    stuck = [*stuck, *(f for f in _behind(ahead) if f not in stuck)]
    # One whose communication broke in the same place had waited there as well.
    places = {f.clock.key for f in stuck if f.clock and parts.part(f) == VICTIM}
    known = {f.rank for f in stuck}
    also = [f for f in waited if f.rank not in known and f.clock and f.clock.key in places]
    return _handling(_not_waiting(sorted([*stuck, *also], key=lambda f: f.rank)))


def left_early(parts: RankEnds) -> list[Fate]:
    """Return who came to its end, its exit code seen, while all others stand in a later step.

    They train together, so each step has a call to the others that these will never make. One that
    has closed and lives may train on unseen: then each of the others is seen in such a call.
    """
    left = [f for f in parts.case.fates if f.clock and _is_past(parts, f)]
    gone = {f.rank for f in left}
    others = [f for f in parts.case.fates if f.rank not in gone]
    if not left or parts.case.partial or not any(f.stalled for f in others):
        return []
    if not all_wait(others) and any(f.how != CLEAN for f in left):
        return []
    if any(parts.part(f) not in {ALIVE, TOLD} or f.paused or not _is_within(f) for f in others):
        return []
    first = min(f.clock.key for f in others if f.clock)
    return [f for f in left if f.clock and f.clock.key < first]


def _is_past(parts: RankEnds, fate: Fate) -> bool:
    """Whether it came to its end, its exit code seen, or had closed, whatever it did since."""
    seen = parts.part(fate) == LEFT and fate.how == CLEAN
    return seen or (fate.closed and parts.part(fate) in {LEFT, ALIVE})


def _is_within(fate: Fate) -> bool:
    """Whether it stands within a step, and not seen to wait for nobody."""
    elsewhere = fate.stands is not None and fate.stands.waits is False
    return fate.is_within_step and not elsewhere


def waiting_in_words(parts: RankEnds) -> str:
    """Say of those that did not come to their end where they wait, or waited."""
    others = [f for f in parts.case.fates if parts.part(f) != LEFT and not _is_past(parts, f)]
    verb = "waited" if not parts.has(ALIVE) else "waits" if len(others) == 1 else "wait"
    return f"{ranks_of(others)} {verb} for it{common_place(others)}"


def missed(parts: RankEnds) -> list[Fate]:
    """Return who left behind one whose communication broke: that one may have waited for it."""
    furthest = max((f.clock.key for f in parts.all(VICTIM) if f.clock), default=None)
    return [f for f in parts.all(LEFT) if f.clock and furthest and f.clock.key < furthest]


def in_words(parts: RankEnds, stuck: list[Fate]) -> tuple[str, str]:
    """Return what is said of ranks that the others waited for, and how they stood still."""
    text, how = _first_words(stuck)
    stuck_ranks = {f.rank for f in stuck}
    waiting = [f for f in parts.case.fates if f.rank not in stuck_ranks and f.clock]
    if waiting:
        text += f"; {ranks_joined((f.rank for f in waiting), 'and')} waited"
    if _by_micro(stuck, waiting):
        text += ", if all ranks have equally many micro-batches"
    text += _where_they_stand(stuck, waiting)
    for fate in parts.case.fates:
        if _handled(fate) and stuck != [fate]:
            text += f"; rank {fate.rank} waited while it handled {_handled(fate)}"
    ends = sorted({f.how for f in parts.case.fates if f.how and f.how != UNKNOWN})
    if ends and not parts.has(ALIVE):
        text += f", until the ranks ended ({', '.join(ends)})"
    explained = any(map(_handled, stuck))
    apart = len(_by_place([*stuck, *waiting])) > 1
    if apart and not explained and all_wait([*stuck, *waiting]):
        text += (
            ". They waited for each other in calls that do not meet: one makes a call that others "
            "leave out or make in another order, or what was sent did not arrive"
        )
    return text, how


def _first_words(stuck: list[Fate]) -> tuple[str, str]:
    where = place_of(stuck)
    if len(stuck) > 1 and all(f.suspended for f in stuck):
        place = common_place(stuck)
        them = ranks_joined((f.rank for f in stuck), "and") + (f"{place}," if place else "")
        return f"{them} were suspended (SIGSTOP) and did not go on", "SIGSTOP"
    if len(stuck) > 1:
        return f"no rank moved on: {where}, and nothing says which was first", "hang"
    if stuck[0].suspended:
        return f"{where}, was suspended (SIGSTOP) and did not go on", "SIGSTOP"
    if stuck[0].paused:
        return f"{where}, was paused (probe.pause) and did not come back", "hang"
    handled = _handled(stuck[0])
    if handled:
        return f"{where}, waited for the others while it handled {handled}", "hang"
    did = "waited for the others" if all_wait(stuck) else "did not move on"
    return f"{where}, {did}", "hang"


def _behind(fates: list[Fate]) -> list[Fate]:
    least = min((f.clock.key for f in fates if f.clock), default=None)
    return fates if least is None else [f for f in fates if f.clock and f.clock.key == least]


def _not_waiting(stuck: list[Fate]) -> list[Fate]:
    """Return, of ranks in the same place, those that are seen to wait for no other rank.

    All of them, where of one it is not known where it stands, or each is seen to wait.
    """
    waits = [f.stands.waits if f.stands is not None else None for f in stuck]
    others = [f for f, one in zip(stuck, waits, strict=True) if not one]
    return others if others and None not in waits else stuck


def _handling(stuck: list[Fate]) -> list[Fate]:
    """Return, of ranks that all waited, those that had raised before, on their own.

    One that waits in a `finally` came to it by its exception.
    """
    waited = all((f.stands and f.stands.waits) or (f.error and f.error.collective) for f in stuck)
    raised = [f for f in stuck if _handled(f)]
    return raised if raised and waited else stuck


def _handled(fate: Fate) -> str:
    """Return the exception of its own that it handled as it waited, in words; "" if none."""
    return fate.error.behind if fate.error is not None else ""


def _by_micro(stuck: list[Fate], waiting: list[Fate]) -> bool:
    """Whether only the number of its micro-batch puts somebody in front of who is stuck."""
    at, others = (
        {(f.clock.steps, f.clock.micro) for f in fates if f.clock and f.clock.phase != "data"}
        for fates in (stuck, waiting)
    )
    return any(a[0] == b[0] and a[1] != b[1] for a in at for b in others)


def _where_they_stand(stuck: list[Fate], waiting: list[Fate]) -> str:
    """Say at which lines those stand, the fewest at one line first, and most of those that wait."""
    told = within_of(stuck[0]) in common_place(stuck)  # it is said once, before
    places = [
        (where, fates, "" if told else standing_in_words(fates[0]))
        for where, fates in _by_place(stuck)[:_MOST_SHOWN]
    ]
    places += [(where, fates, "") for where, fates in _by_place(waiting)[-1:]]
    return "".join(
        f"; {ranks_of(fates)} stood {said or f'at {where}'}" for where, fates, said in places
    )


def _by_place(fates: Iterable[Fate]) -> list[tuple[str, list[Fate]]]:
    """Return who stands where, the fewest first."""
    places: dict[str, list[Fate]] = {}
    for fate in fates:
        if fate.stands is not None:
            places.setdefault(fate.stands.where, []).append(fate)
    return sorted(places.items(), key=lambda place: (len(place[1]), place[1][0].rank))
