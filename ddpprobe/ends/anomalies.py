"""The end of an attempt as anomalies: the cause, and who was taken along."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ddpprobe.detectors.suite import DETECTORS, follows
from ddpprobe.ends.death_order import DeathOrder
from ddpprobe.ends.end import BAD, CRASHED, HUNG, STOPPED, UNDECIDED, End
from ddpprobe.ends.evidence import Case
from ddpprobe.ends.judge import failed
from ddpprobe.ends.words import CAUGHT_OR_CHOSE, closed_within, describe
from ddpprobe.records.events import FirstCauseEvent
from ddpprobe.records.fate import Fate
from ddpprobe.records.step import PHASES, Anomaly
from ddpprobe.rundir import framing

RANK_LOST = "rank_lost"
WENT_ON = "went_on"  # value, 1 of a hang that was over
# What `Anomaly.detector` can be, and what a report calls it, in root-cause order.
TITLES = {detector.name: detector.title for detector in DETECTORS} | {RANK_LOST: "The job was lost"}


def anomalies_of(
    end: End, case: Case, attempt: int, causes: Iterable[Anomaly] = ()
) -> list[Anomaly]:
    """Return what an end is worth telling: a page for a bad one, and the ranks that it took along.

    Args:
        end: what `judge` made of the case.
        case: of one attempt.
        attempt: its number.
        causes: first causes that the detectors found in it: what follows from one is none itself.
    """
    known = list(causes)
    return [
        replace(a, first_cause=a.level == "page" and not any(follows(a, c) for c in known))
        for a in _found(end, case, attempt)
    ]


def retells(anomaly: Anomaly, known: Anomaly) -> bool:
    """Whether an anomaly says of the same end what is known by now: the one told last counts."""
    return _event(anomaly) == _event(known)


def code_of(anomaly: Anomaly) -> bytes:
    """Return bytes that are equal for equal anomalies, NaN included; the store has floats only."""
    values = {name: float(value) for name, value in anomaly.values.items()}
    return framing.encode_anomaly(replace(anomaly, values=values))


def last_words(written: Iterable[Anomaly]) -> list[Anomaly]:
    """Return what holds of what a daemon has written down, in its order.

    A first cause that is told again as none has turned out to follow from an earlier one, of which
    the head heard late: the second word holds. So it does of an end that was taken back. What was
    told of one hang in several messages is over once: in the last of them.
    """
    every = _without_taken_back(written)
    again = {code_of(replace(a, first_cause=True)) for a in every if not a.first_cause}
    return [a for a in every if not a.first_cause or code_of(a) not in again]


def taken_back(anomaly: Anomaly) -> Anomaly:
    """Return what is left of the page of an end that is none: the hang is over, the ranks went on.

    It is history, which no reader counts as a fault.
    """
    message = f"{anomaly.message}; the ranks went on later"
    values = {**anomaly.values, WENT_ON: 1.0}
    return replace(anomaly, level="info", first_cause=False, message=message, values=values)


def is_end(anomaly: Anomaly) -> bool:
    """Whether an anomaly is of how an attempt ended, and not of a hang that was over."""
    return anomaly.detector == RANK_LOST and WENT_ON not in anomaly.values


def is_vague(anomaly: Anomaly) -> bool:
    """Whether its phase, `step`, says of a lost rank only: at its data, or in the optimizer."""
    return anomaly.detector == RANK_LOST and anomaly.phase == "step"


def is_past_forward(anomaly: Anomaly) -> bool:
    """Whether all that its phase says is that a lost rank's forward was over.

    A heartbeat says `backward` from there on: at the loss, and at the data of the next micro-batch.
    """
    return anomaly.detector == RANK_LOST and anomaly.phase == "backward"


def takes_back(anomaly: Anomaly, known: Anomaly) -> bool:
    """Whether an anomaly says that an end, which is known by now, is none."""
    if not anomaly.detector == known.detector == RANK_LOST or known.level == "info":
        return False
    of_before = replace(known, level="info", first_cause=False)  # as it was until version 0.1
    return code_of(anomaly) in {code_of(taken_back(known)), code_of(of_before)}


def first_cause_of(anomaly: Anomaly) -> FirstCauseEvent:
    """Return what is told of the first cause of an episode."""
    return FirstCauseEvent(
        detector=anomaly.detector, step=anomaly.step, micro=anomaly.micro, rank=anomaly.rank,
        module=anomaly.module, kind=anomaly.kind, phase=anomaly.phase,
        time_ns=anomaly.wall_time_ns,
    )  # fmt: skip


def _without_taken_back(written: Iterable[Anomaly]) -> list[Anomaly]:
    kept: list[Anomaly] = []
    for anomaly in written:
        if anomaly.detector == RANK_LOST:  # few
            kept = [
                known
                for known in kept
                if not (takes_back(anomaly, known) or _is_over_again(anomaly, known))
            ]
        kept.append(anomaly)
    return kept


def _is_over_again(anomaly: Anomaly, known: Anomaly) -> bool:
    """Whether both say of the same hang that it is over: it was told again with more words."""
    return WENT_ON in anomaly.values and WENT_ON in known.values and retells(anomaly, known)


def _event(a: Anomaly) -> tuple[object, ...]:
    return a.detector, a.level, a.attempt, a.step, a.micro, a.rank, a.phase


def _found(end: End, case: Case, attempt: int) -> list[Anomaly]:
    fates = {f.rank: f for f in case.fates}
    if end.state in BAD:
        found = [_of_end(end, fates, attempt, "page")]
    elif end.state == STOPPED:
        return [_of_end(end, fates, attempt, "info")]
    elif end.state == UNDECIDED and end.is_telling:
        return [_of_end(end, fates, attempt, "page" if end.grave else "warn")]
    else:
        return []
    if end.state in {CRASHED, HUNG} and end.ranks:
        named = {*end.ranks}
        others = [f for f in failed(case) if f.rank not in named and (f.how or f.raised)]
        order = DeathOrder(fates[rank] for rank in end.ranks if rank in fates)
        found += [_beside(f, describe(f) + _order_words(f, end, order), attempt) for f in others]
        quiet = [f for f in case.fates if f.rank not in named and _left_midway(f, case)]
        quiet = [f for f in quiet if f not in others]
        found += [_beside(f, _left(f, _order_words(f, end, order)), attempt) for f in quiet]
    return found


def _left_midway(fate: Fate, case: Case) -> bool:
    """Whether its interpreter came to its end within a step, and nothing of it says why."""
    over = bool(fate.how) or not case.live
    return over and fate.at_exit and fate.error is None and bool(closed_within(fate))


def _left(fate: Fate, when: str) -> str:
    where = f"{closed_within(fate)}{when}{',' * bool(when)}"
    return f"rank {fate.rank} left {where} and did not say why: {CAUGHT_OR_CHOSE}"


def _of_end(end: End, fates: dict[int, Fate], attempt: int, level: str) -> Anomaly:
    whom = [fates[rank] for rank in end.ranks if rank in fates] or list(fates.values())
    return _anomaly(
        level, end.message, attempt, end.ranks[0] if len(end.ranks) == 1 else None,
        end.step, end.phase, whom,
    )  # fmt: skip


def _beside(fate: Fate, text: str, attempt: int) -> Anomaly:
    """Return what is told of a rank that is not the cause."""
    step, phase = (fate.clock.step, fate.clock.phase) if fate.clock else (None, None)
    return _anomaly("info", text, attempt, fate.rank, step, phase, [fate])


def _order_words(fate: Fate, end: End, order: DeathOrder) -> str:
    """Return when a rank died, beside those of the end; "" where nothing proves it."""
    who = f"rank {end.ranks[0]}" if len(end.ranks) == 1 else "others"
    if order.before_any(fate):
        return f", before {who}"
    return f", after {who}" if order.after_any(fate) else ""


def _anomaly(
    level: str, message: str, attempt: int, rank: int | None, step: int | None,
    phase: str | None, whom: list[Fate],
) -> Anomaly:  # fmt: skip
    clocks = [f.clock for f in whom if f.clock]
    if step is None:
        step = max((clock.step for clock in clocks), default=0)
    micro = clocks[0].micro if len(clocks) == 1 else 0
    return Anomaly(
        detector=RANK_LOST, level=level, step=step, micro=micro, rank=rank, module=None, kind=None,
        phase=phase if phase in PHASES else "step", first_cause=False, message=message, values={},
        sampled=False, attempt=attempt, wall_time_ns=max((f.time_ns for f in whom), default=0),
    )  # fmt: skip
