"""How each rank of an attempt ended, in one word and in few, by the judgement of the attempt."""

from __future__ import annotations

from ddpprobe.ends.evidence import UNKNOWN as UNSEEN
from ddpprobe.ends.rank_ends import ABSENT, ALIVE, LEFT, LOST, SILENT, RankEnds
from ddpprobe.ends.words import closed_within, how_of
from ddpprobe.reader.endings import Ending
from ddpprobe.records.fate import Fate

CLOSED, DIED, RUNNING, UNKNOWN = "closed", "died", "running", "unknown"
NO_WORD = "no last word"
_OPEN = {LOST: UNKNOWN, ABSENT: UNKNOWN, SILENT: UNKNOWN, LEFT: CLOSED, ALIVE: RUNNING}


def ends_of(ending: Ending) -> dict[int, str]:
    """Return rank -> `CLOSED`, `DIED`, `RUNNING` or `UNKNOWN`."""
    parts = RankEnds(ending.case)
    return {fate.rank: _end(fate, parts.part(fate)) for fate in ending.case.fates}


def statuses_of(ending: Ending) -> dict[int, str]:
    """Return rank -> how it ended, and where if it closed within a step."""
    parts = RankEnds(ending.case)
    return {fate.rank: _status(fate, parts.part(fate)) for fate in ending.case.fates}


def _end(fate: Fate, part: str) -> str:
    if part == LOST and (fate.dead or fate.closed or fate.beat_closed):  # nobody saw its exit code
        return DIED if fate.dead else CLOSED
    return _OPEN.get(part, DIED)


def _status(fate: Fate, part: str) -> str:
    if part == ALIVE:
        return RUNNING
    how = how_of(fate)
    if part not in _OPEN and how not in {"", UNSEEN}:
        return f"died ({how})"
    if fate.raised:
        return "closed by an exception"
    if fate.closed or fate.beat_closed:
        return f"{CLOSED} {closed_within(fate)}".rstrip()
    return NO_WORD
