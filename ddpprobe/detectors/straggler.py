"""`straggler`: one rank takes longer before the collectives, and all others wait for it.

The time of a step cannot tell who is slow: where ranks wait for each other, all take as long. What
a rank does before it meets the others (reading data, the forward) is its own.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from statistics import median
from typing import NamedTuple

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import Anomaly, StepRecord

_OWN = ("data_seconds", "forward_seconds")
_ALL = (*_OWN, "backward_seconds", "optimizer_seconds")


class Gap(NamedTuple):
    """Who was the slowest at step `at`, by how much, and how long the step took; seconds."""

    at: int
    rank: int
    behind: float
    step: float


class Straggler(SampledDetector):
    """Warns when the same rank is the last to reach the collectives, step after step.

    A rank's own time is that of its data and its forward. Judged is how far the slowest rank lies
    behind the median of the others, as a share of the step. A pause of a rank, a checkpoint, a
    garbage collection is one long step; a straggler is slow in nearly all.

    Args:
        share: of a step, by which the slowest rank must lie behind.
        seconds: by which it must lie behind at least; what is shorter is noise.
        steps: steps that are judged together, the newest ones.
        least: sampled steps among them; where there are fewer, older ones are judged with them.
        same: share of them in which it must be the same rank.
        quiet_steps: steps without it after which it is told again.
    """

    name = "straggler"
    title = "One rank holds up the others"

    def __init__(
        self, *, share: float = 0.65, seconds: float = 0.005, steps: int = 15, least: int = 5,
        same: float = 0.9, quiet_steps: int = 100,
    ) -> None:  # fmt: skip
        above_zero(share=share, seconds=seconds, same=same)
        at_least(1, steps=steps, least=least)
        at_least(0, quiet_steps=quiet_steps)
        self._share, self._seconds, self._same = share, seconds, same
        self._steps, self._least, self._quiet = steps, least, quiet_steps
        self._reset()

    def _reset(self) -> None:
        self._gaps: deque[Gap] = deque()
        self._telling: dict[int, Telling] = {}

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.missing:
            return []
        gap = _gap(record)
        if gap is None:
            return []
        recent = self._gaps
        recent.append(gap)
        while len(recent) > self._least and record.step - recent[1].at + 1 >= self._steps:
            recent.popleft()
        rank, times = Counter(g.rank for g in recent).most_common(1)[0]
        long = len(recent) >= self._least and record.step - recent[0].at + 1 >= self._steps
        if not long or times < self._same * len(recent):
            return []
        behind, step = median(g.behind for g in recent), median(g.step for g in recent)
        if behind < self._seconds or behind < self._share * step:
            return []
        if not self._telling.setdefault(rank, Telling(self._quiet)).due(record.step):
            return []
        return [_anomaly(record, rank, behind, step, len(recent))]


def _gap(record: StepRecord) -> Gap | None:
    own, whole = {}, []
    for rank in record.ranks:
        scalars = record.scalars.get(rank, {})
        phases = {name: float(scalars.get(name, math.nan)) for name in _ALL}
        if not all(0 <= x < math.inf for x in phases.values()):
            return None
        own[rank] = sum(phases[name] for name in _OWN)
        whole.append(sum(phases.values()))
    if len(own) < 2:
        return None
    slowest = max(own, key=own.__getitem__)
    others = median(seconds for rank, seconds in own.items() if rank != slowest)
    return Gap(record.step, slowest, own[slowest] - others, median(whole))


def _anomaly(record: StepRecord, rank: int, behind: float, step: float, points: int) -> Anomaly:
    message = (
        f"rank {rank} reaches the collectives {behind:.3g} s behind the others, "
        f"{behind / step:.0%} of a step, at {points} sampled steps: they wait for it; look at its "
        "data loader, host and clocks"
    )
    values = {"behind": behind, "step_seconds": step, "share": behind / step, "points": points}
    return Straggler.anomaly(record, "warn", message, values, rank=rank, phase="forward")
