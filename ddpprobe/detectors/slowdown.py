"""`slowdown`: a step takes all ranks much longer than it did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import NamedTuple

import numpy as np

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import SitesOfKind
from ddpprobe.detectors.slower_phase import Grown, SlowerPhase, phase_look
from ddpprobe.detectors.spaced_looks import SpacedLooks
from ddpprobe.detectors.step_seconds import (
    RankSeconds,
    gap_of,
    queued_by_rank,
    queued_of_others,
    seconds_by_rank,
    trains_nothing,
)
from ddpprobe.records.step import TRAINABLE, Anomaly, StepRecord

_SPANS = 6  # that are remembered before the newest one
_OUTER = 0.1  # of the looks on either side, which may be anywhere
_DEVICES = "clocks, temperature and neighbours of devices and hosts"
_SHARED = "the network between nodes, and at what else runs on them"
_PARTS = {  # of a step: how it is called, the phase, and what to look at
    "data": ("reading data", "forward", "the loader, what it reads from, the memory of the hosts"),
    "forward": ("the forward", "forward", _DEVICES),
    "backward": ("the backward", "backward", _DEVICES),
    "reduction": ("the reduction of gradients", "backward", _SHARED),
    "optimizer": ("the optimizer", "step", _DEVICES),
}


class StepLook(NamedTuple):
    """A sampled step, by its number: seconds of the median rank, and what set ranks apart.

    `reduced` is what the rank that waited least had to wait for its reduction; `unwaited`, the same
    with a core and without what it may have waited for a rank that had none; `queued`, what the
    rank that had no core for longest was queued for in the step, as far as that is told; `behind`,
    by how much one rank was later than the others; `work`, how many elements modules returned.
    """

    step: int
    parts: RankSeconds
    reduced: float
    unwaited: float
    queued: float
    behind: float
    work: float


Split = tuple[list[StepLook], list[StepLook]]  # before, and now


class Slowdown(SampledDetector):
    """Warns when a step takes all ranks longer than before, for minutes, or in one of its phases.

    A machine has other work for seconds, so a longer step must last for minutes: nearly all of its
    sampled steps must have taken longer than nearly all before them. A step of which modules return
    as many times more (longer sequences, more micro-batches) is none, nor one that waits for a
    single rank, which `straggler` names. The wait for the reduction is judged sooner: who waits
    least waits for nobody, so what lies behind that is the network, or who shares it. So is the
    forward, the backward or the optimizer where it alone takes each rank several times what it
    took at its shortest: clocks and neighbours slow all of them alike, hooks that pile up do not.
    In both what the rank was queued for, ready and with no core, does not count, nor as much as any
    other rank was, whom it may have waited for; nor does a phase count that is short again now and
    then, nor a wait in a step in which a rank was queued for as long as a step takes else. Of a
    model that trains nothing only the forward is judged: all else is another model's step. What is
    meant is announced (`probe.note`); that other parameters are trained is known. Once told, it is
    the past that later steps are compared with.

    Args:
        times: as long as before,
        minutes: for so many,
        least: with so many sampled steps among them.
        reduced_times: as long as before, of the rank that waits least for the reduction,
        reduced_share: where that is such a share of the step,
        reduced_seconds: and so much at least,
        reduced_step: and the step takes so many times as long,
        steps: for so many of them,
        looks: with so many sampled ones among them.
        phase_times: as long as at its shortest, of one phase where the others are not,
        phase_steps: for so many steps, with `looks` sampled ones among them.
    """

    name = "slowdown"
    title = "A step takes longer than it did"

    def __init__(
        self, *, times: float = 1.5, minutes: float = 10.0, least: int = 20,
        reduced_times: float = 1.5, reduced_share: float = 0.25, reduced_seconds: float = 0.005,
        reduced_step: float = 1.2, steps: int = 40, looks: int = 5,
        phase_times: float = 2.5, phase_steps: int = 20,
    ) -> None:  # fmt: skip
        above_zero(
            times=times, minutes=minutes, reduced_times=reduced_times,
            reduced_share=reduced_share, reduced_seconds=reduced_seconds,
            reduced_step=reduced_step, phase_times=phase_times,
        )  # fmt: skip
        at_least(1, least=least, steps=steps, looks=looks, phase_steps=phase_steps)
        self._times, self._many = times, (60.0 * minutes, least)
        self._reduced = reduced_times, reduced_share, reduced_seconds, reduced_step
        self._few = steps - 1.0, looks
        self._phase = phase_times, phase_steps, looks
        self._reset()

    def _reset(self) -> None:
        self._minutes, self._steps = _Past(*self._many), _Past(*self._few)
        self._phases = SlowerPhase(*self._phase)
        self._trains: list[float] | None = None  # parameters that require a gradient, by rank
        self._outputs = SitesOfKind("output")

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        told = None if record.missing or record.skipped else seconds_by_rank(record)
        if not told:
            return []
        trains = [float(record.scalars[rank].get(TRAINABLE, 0)) for rank in record.ranks]
        if trains != self._trains:
            self._reset()
        self._trains = trains
        work = float(np.nansum(self._outputs.read(record, "numel")))
        queued = queued_by_rank(record)
        look = _look_of(record, told, queued, work)
        grown = self._phases.take(phase_look(record.step, told, queued, work)) if queued else None
        if trains_nothing(record):
            grown = grown if grown and grown.phase == "forward" else None
            found = None
        else:
            self._minutes.add(look, record.wall_time_ns / 1e9)
            self._steps.add(look, record.step)
            found = self._in_reduction() or self._in_all()
        if found is not None:
            said = _anomaly(record, *found)
        elif grown is not None:
            said = _anomaly_of_phase(record, grown)
        else:
            return []
        self._reset()
        return [said]

    def _in_reduction(self) -> Split | None:
        """Return the looks before and now, if all ranks wait longer for the reduction."""
        split = self._steps.split()
        if split is None:
            return None
        before, now = split
        times, share, seconds, slower = self._reduced
        if now[-1].reduced < max(seconds, share * now[-1].parts.step):  # mostly
            return None
        usual, step = _usual_step(before), _usual_step(now)
        if usual <= 0 or step < slower * usual:
            return None
        # Of five looks, one may be anywhere.
        # Where a rank had no core for as long, its collectives, of which nobody knows, had none.
        unwaited = [look.unwaited if look.queued < usual else 0.0 for look in now]
        least = np.quantile(unwaited, 2 * _OUTER)
        most = np.quantile([look.reduced for look in before], 1 - _OUTER)
        return split if least >= max(seconds, share * step, times * most) else None

    def _in_all(self) -> Split | None:
        """Return the looks before and now, if a step takes longer for minutes."""
        split = self._minutes.split()
        if split is None:
            return None
        before, now = split
        usual, step = _usual_step(before), _usual_step(now)
        work_before, work = (median(look.work for look in looks) for looks in split)
        more_work = work / work_before if work_before else 1.0
        if usual <= 0 or step < self._times * max(1.0, more_work) * usual:
            return None
        late_before, late = (median(look.behind for look in looks) for looks in split)
        if late - late_before > (step - usual) / 2:
            return None
        least = np.quantile([look.parts.step for look in now], _OUTER)
        most = np.quantile([look.parts.step for look in before], 1 - _OUTER)
        return split if least > max((1 + self._times) / 2 * usual, most) else None


def _usual_step(looks: list[StepLook]) -> float:
    return median(look.parts.step for look in looks)


class _Past:
    """The newest looks, over a span of steps or seconds, and those before them.

    Args:
        span: of the newest ones.
        least: of them, and of those before.
    """

    def __init__(self, span: float, least: int) -> None:
        self._span, self._least = span, least
        self._looks = SpacedLooks[StepLook](span, least)

    def add(self, look: StepLook, place: float) -> None:
        """Take the next look; its place is its step or its time."""
        self._looks.add(look, place)
        held, longest = self._looks.held, (1 + _SPANS) * self._span
        while len(held) > 2 * self._least and held[-1][0] - held[0][0] > longest:
            held.popleft()

    def split(self) -> Split | None:
        """Return the looks before the newest ones, and these; None: of either too few yet."""
        held = self._looks.held
        if len(held) < 2 * self._least:
            return None
        since = held[-1][0] - self._span
        new = max(self._least, sum(place >= since for place, _ in held))
        looks = [look for _, look in held]
        return (looks[:-new], looks[-new:]) if len(looks) - new >= self._least else None


def _look_of(
    record: StepRecord, told: Mapping[int, RankSeconds],
    queued: Mapping[int, RankSeconds] | None, work: float,
) -> StepLook:  # fmt: skip
    reduced = min(seconds.reduction for seconds in told.values()) if len(told) > 1 else 0.0
    unwaited = reduced
    if queued is not None and reduced > 0:
        waits = queued_of_others(np.array([queued[rank].reduction for rank in told]))
        unwaited = min(
            seconds.reduction - queued[rank].reduction - wait
            for (rank, seconds), wait in zip(told.items(), waits.tolist(), strict=True)
        )
    gap = gap_of(record, told)
    behind = 0.0 if gap is None else gap.behind
    starved = max((of.step for of in queued.values()), default=0.0) if queued else 0.0
    usual = _medians(told.values())
    return StepLook(record.step, usual, reduced, unwaited, starved, behind, work)


def _medians(of: Iterable[RankSeconds]) -> RankSeconds:
    """Return the median of each part."""
    return RankSeconds(*(median(part) for part in zip(*of, strict=True)))


def _anomaly(record: StepRecord, before: list[StepLook], now: list[StepLook]) -> Anomaly:
    was, takes = (_medians(look.parts for look in looks) for looks in (before, now))
    more = {name: getattr(takes, name) - getattr(was, name) for name in _PARTS}
    longest = max(more, key=lambda name: more[name])
    step_before, step = _usual_step(before), _usual_step(now)
    what, phase, look_at = _PARTS[longest]
    longer = (look.step for look in now if look.parts.step > (step_before + step) / 2)
    since = next(longer, now[0].step)
    queued_before, queued = (median(look.queued for look in looks) for looks in (before, now))
    if queued - queued_before > (step - step_before) / 2:
        look_at = f"what else runs on the hosts: for {queued:.3g} s of a step a rank had no core"
    who = "all ranks" if len(record.ranks) > 1 else "the rank"
    message = (
        f"a step takes {who} {step:.3g} s, {step / step_before:.3g} x what it took "
        f"before, since about step {since}: {more[longest]:.3g} s more are in {what}; look at "
        f"{look_at}"
    )
    values = {
        "step_seconds": step, "before": step_before, "times": step / step_before,
        "more": more[longest], "since": since, "points": len(now),
    }  # fmt: skip
    return Slowdown.anomaly(record, "warn", message, values, phase=phase)


def _anomaly_of_phase(record: StepRecord, grown: Grown) -> Anomaly:
    what, phase, _ = _PARTS[grown.phase]
    who = "each rank" if len(record.ranks) > 1 else "the rank"
    times = grown.now / grown.before
    all_of_them = grown.many == grown.looks  # then it was so before the first of them, maybe
    since = f"step {grown.since} or before" if all_of_them else f"about step {grown.since}"
    message = (
        f"{what} takes {who} {grown.now:.3g} s, {times:.3g} x what it took at its shortest "
        f"({grown.before:.3g} s), at {grown.many} of the last {grown.looks} sampled steps, since "
        f"{since}; the other phases take at most {grown.others:.3g} x as long, a step "
        f"{grown.step_now / grown.step_before:.3g} x: look for what piles up from step to step "
        "(hooks, graphs and lists that are kept), and for work that was added to it"
    )
    values = {
        "step_seconds": grown.step_now, "before": grown.step_before, "phase_seconds": grown.now,
        "phase_before": grown.before, "times": times, "others": grown.others, "since": grown.since,
        "points": grown.many,
    }  # fmt: skip
    return Slowdown.anomaly(record, "warn", message, values, phase=phase)
