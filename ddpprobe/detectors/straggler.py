"""`straggler`: one rank takes longer before the collectives, and all others wait for it."""

from __future__ import annotations

from collections import Counter
from statistics import median
from typing import NamedTuple

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.spaced_looks import SpacedLooks
from ddpprobe.detectors.step_seconds import (
    Gap,
    gap_of,
    queued_by_rank,
    seconds_by_rank,
    trains_nothing,
)
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import Anomaly, StepRecord


class Straggler(SampledDetector):
    """Warns when the same rank is the last to reach the collectives, step after step.

    A rank's own time is that of its data, of its data and its forward, or of these and the backward
    without its reduction: whichever sets one rank furthest apart. Judged is how far the slowest
    rank lies behind the median of the others, as a share of the step. A pause of a rank, a
    checkpoint, a garbage collection is one long step; a straggler is slow in nearly all. On a
    machine with other work one rank may be starved for some steps: in a few of them its time counts
    without what it was queued for, ready and with no core, and a smaller share, or what it was
    queued for, must last for minutes. Who then comes no later than the others, with all that they
    were queued for, holds up nobody: it may have waited for them. Where ranks do not tell how long
    they were queued, a few steps must show a large share. Where its steps are longer than theirs
    nobody waits. Ranks are compared with those that train as many parameters: stages of a pipeline
    wait for each other in their forward. A model that trains nothing has no collectives.

    Args:
        share: of a step, by which the slowest rank must lie behind,
        untold_share: where they do not tell how long they were queued.
        seconds: by which it must lie behind at least; what is shorter is noise.
        steps: steps that are judged together, the newest ones.
        least: sampled steps among them; where there are fewer, older ones are judged with them.
        same: share of them in which it must be the same rank.
        lasting_share: the share that is enough where it lasts for minutes,
        minutes: which are so many,
        lasting_least: with so many sampled steps among them, as far apart as they can be.
        quiet_steps: steps without it after which it is told again.
    """

    name = "straggler"
    title = "One rank holds up the others"

    def __init__(
        self, *, share: float = 0.45, untold_share: float = 0.65, seconds: float = 0.005,
        steps: int = 15, least: int = 5, same: float = 0.9, lasting_share: float = 0.2,
        minutes: float = 10.0, lasting_least: int = 20, quiet_steps: int = 100,
    ) -> None:  # fmt: skip
        above_zero(
            share=share, untold_share=untold_share, seconds=seconds, same=same,
            lasting_share=lasting_share, minutes=minutes,
        )  # fmt: skip
        at_least(1, steps=steps, least=least, lasting_least=lasting_least)
        at_least(0, quiet_steps=quiet_steps)
        few = _Rule(share, untold_share, seconds, same)
        many = _Rule(lasting_share, lasting_share, seconds, same)
        self._few_of = steps - 1.0, least, few
        self._many_of = 60.0 * minutes, lasting_least, many
        self._quiet = quiet_steps
        self._reset()

    def _reset(self) -> None:
        self._few, self._many = _Window(*self._few_of), _Window(*self._many_of)
        self._telling: dict[int, Telling] = {}

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        told = None if record.missing or trains_nothing(record) else seconds_by_rank(record)
        if told is None:
            return []
        queued = queued_by_rank(record)
        at_work = gap_of(record, told, queued, without_queued=True)
        whole = gap_of(record, told, queued)
        if at_work is None or whole is None:
            return []
        self._few.add(at_work, record.step)
        self._many.add(whole, record.wall_time_ns / 1e9)
        lag = self._few.lag() or self._many.lag()
        if lag is None:
            return []
        due = self._telling.setdefault(lag.rank, Telling(self._quiet)).due(record.step)
        return [_anomaly(record, lag)] if due else []


class _Rule(NamedTuple):
    """By what share of a step, and seconds, a rank must lie behind, in what share of the gaps."""

    share: float
    untold_share: float
    seconds: float
    same: float


class _Lag(NamedTuple):
    """By how much a rank lies behind, of how long a step (medians, seconds), at so many steps.

    `queued`: what of it the rank was queued for; None where that is not told.
    """

    rank: int
    behind: float
    step: float
    points: int
    queued: float | None


class _Window:
    """The newest gaps: as many as lie within a span of steps or seconds, and `least` at least."""

    def __init__(self, span: float, least: int, rule: _Rule) -> None:
        self._rule = rule
        self._looks = SpacedLooks[Gap](span, least)
        self._gaps: list[Gap] | None = None  # None: too few yet

    def add(self, gap: Gap, place: float) -> None:
        """Take the next gap; its place is its step or its time."""
        self._looks.add(gap, place)
        self._gaps = self._looks.newest()

    def lag(self) -> _Lag | None:
        """Return who lies as far behind as the rule asks; None: nobody, or too few gaps yet."""
        rule, gaps = self._rule, self._gaps
        if gaps is None:
            return None
        rank, times = Counter(gap.rank for gap in gaps).most_common(1)[0]
        behind, step = median(gap.behind for gap in gaps), median(gap.step for gap in gaps)
        told = [gap.queued for gap in gaps if gap.queued is not None]
        share = rule.share if len(told) == len(gaps) else rule.untold_share
        if times < rule.same * len(gaps) or behind < rule.seconds or behind < share * step:
            return None
        return _Lag(rank, behind, step, len(gaps), median(told) if told else None)


def _anomaly(record: StepRecord, lag: _Lag) -> Anomaly:
    rank, behind, step, points, queued = lag
    look_at = "its data loader, host and clocks"
    if queued is not None and queued > behind / 2:
        look_at = f"what else runs on its host: for {queued:.3g} s of that it had no core"
    message = (
        f"rank {rank} reaches the collectives {behind:.3g} s behind the others, "
        f"{behind / step:.0%} of a step, at {points} sampled steps: they wait for it; look at "
        f"{look_at}"
    )
    values = {"behind": behind, "step_seconds": step, "share": behind / step, "points": points}
    if queued is not None:
        values["queued"] = queued
    return Straggler.anomaly(record, "warn", message, values, rank=rank, phase="forward")
