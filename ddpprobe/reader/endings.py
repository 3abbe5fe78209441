"""How each attempt of a run ended, judged from what lies in its directory."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ddpprobe.ends.end import CRASHED, End
from ddpprobe.ends.evidence import Case, Evidence
from ddpprobe.ends.judge import failed, judge
from ddpprobe.ends.stalls import is_still
from ddpprobe.ends.words import how_of
from ddpprobe.reader.last_beats import last_beats
from ddpprobe.reader.merged_reader import MergedReader
from ddpprobe.reader.under_way import is_here, is_under_way
from ddpprobe.records.events import ExitEvent, SealedEvent
from ddpprobe.rundir import tmpfs
from ddpprobe.store.remote.cache import url_of


@dataclass(frozen=True, slots=True)
class Ending:
    """An attempt, what is known of its end, and what follows from that."""

    attempt: int
    case: Case
    end: End


@dataclass(frozen=True, slots=True)
class Death:
    """A rank that ended badly; `step` is the one it was in (-1: unknown), `time_ns` Unix ns.

    `signal` is "SIGKILL", "exit:3", "ValueError" or "unknown"; `first` marks the one that is known
    to be the cause of its attempt's end: none if that is not decided.
    """

    attempt: int
    rank: int
    signal: str
    time_ns: int
    step: int
    first: bool
    node: str = ""


def ending_of(merged_reader: MergedReader, attempt: int) -> Ending:
    """Judge the end of one attempt."""
    newest = attempt == merged_reader.attempts()[-1]
    case = _case(merged_reader, attempt, live=newest and is_under_way(merged_reader))
    return Ending(attempt, case, judge(case))


def deaths_of(ending: Ending) -> list[Death]:
    """Return the ranks that ended badly, the cause first, then in the order of being noticed."""
    case, cause = ending.case, ending.end.ranks if ending.end.state == CRASHED else ()
    found = [
        Death(
            ending.attempt, f.rank, how_of(f), f.time_ns, f.clock.step if f.clock else -1,
            cause == (f.rank,), f.node,
        )
        for f in failed(case)
        if f.how or f.raised
    ]  # fmt: skip
    return sorted(found, key=lambda d: (not d.first, d.rank not in cause, d.time_ns, d.rank))


def _case(merged_reader: MergedReader, attempt: int, *, live: bool) -> Case:
    evidence, found = Evidence(), last_beats(merged_reader.run, attempt)
    ranks = merged_reader.ranks(attempt)
    beats = {rank: found[rank] for rank in ranks if rank in found}
    for rank in ranks:
        evidence.take_rank(rank)
    events = merged_reader.events(attempt)
    for event in events:
        evidence.take_event(event.what, event.rank, event.node)
    for rank, (node, beat) in beats.items():
        evidence.take_beat(rank, node, beat)
    world = merged_reader.world_size(attempt)
    ended = {e.what.rank for e in events if isinstance(e.what, ExitEvent)}
    present = [beat for rank, (_, beat) in beats.items() if rank not in ended]
    # A copy, also of what was uploaded, tells of no process: what is not sealed may go on.
    open_ended = not any(isinstance(e.what, SealedEvent) for e in events)
    run, nodes = merged_reader.run, {node for node, _ in beats.values()}
    copied = open_ended and (
        url_of(run.path) is not None
        or any(tmpfs.is_copied(run.heartbeat(attempt, node, 0).parent) for node in nodes)
    )
    partial = bool(set(range(world)) - set(ranks) - evidence.told) or copied
    still = live and bool(present) and is_still(present, time.time_ns())
    if still:  # of another machine's ranks its daemon says so, by the clock that is theirs
        still = all(is_here(run, attempt, node) for node in nodes)
    return evidence.case(world, live=live, stalled=still, partial=partial)
