"""`rank_outlier`: one rank's loss, gradients or outputs are not like those of the others."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Mapping
from statistics import median

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.held_batches import HeldBatches
from ddpprobe.detectors.history import LARGEST_DEX
from ddpprobe.detectors.loss import losses_by_rank
from ddpprobe.detectors.rank_order import RankOrder
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import Anomaly, StepRecord

MOVED = 3.0  # times as far as the other one: then it is the one of two that moved
NOTHING_DEX = -30.0  # log10 of a zero beside ranks that have something
_JUDGED = {
    "loss": ("loss", "forward", "loss_dex"),
    "grad_norm_local": ("local gradient norm", "backward", "norm_dex"),
    "output_rms": ("rms of the outputs", "forward", "rms_dex"),
}

Away = dict[int, float]  # rank -> decades, mostly from the median of the others


class RankOutlier(SampledDetector):
    """Warns when one rank lies far from the others, at several of the last sampled steps.

    Judged in decades: loss (the mean of all steps since the sampled one before), local gradient
    norm and the geometric mean of the outputs' rms, each against the median of the other ranks. How
    far the rank lay away before is allowed for, so that ranks that differ by design (data of other
    kinds, a larger batch) are let be. Fewer decades are enough where no rank has ever been nearly
    so far away, and the rank stays there. Of two ranks, the one is meant whose own numbers have
    moved, unless that is a loss that fell: it may as well have learned. Several steps on one batch
    are one look.

    A rank whose loss was the largest of all, or the smallest, at so many sampled steps in a row is
    told once, as information: its data, its labels or what it computes with are not those of the
    others, from the first step on, by design or not.

    Args:
        loss_dex, norm_dex, rms_dex: decades, beyond those of the window.
        spread: how many times as far as any rank has been in the window is enough as well,
        spread_dex: if it is so many decades more than that,
        steady: after so many sampled steps in the window,
        settle: and so many steps of the attempt,
        stays: at so many of the last ones.
        window: sampled steps that tell how far a rank lay away before.
        least: sampled steps of them; before that, twice the decades are asked for.
        recent: sampled steps that are judged.
        repeats: of these, so many must be outliers.
        quiet_steps: steps without it after which it is told again.
        apart: sampled steps in a row in which a loss is the largest or the smallest of all,
        apart_dex: in the median by so many decades.
    """

    name = "rank_outlier"
    title = "One rank is not like the others"

    def __init__(
        self, *, loss_dex: float = 2.0, norm_dex: float = 2.0, rms_dex: float = 0.3,
        spread: float = 1.3, spread_dex: float = 0.12, steady: int = 12, settle: int = 50,
        stays: int = 4, window: int = 32, least: int = 8, recent: int = 5, repeats: int = 3,
        quiet_steps: int = 100, apart: int = 30, apart_dex: float = 0.05,
    ) -> None:  # fmt: skip
        above_zero(
            loss_dex=loss_dex, norm_dex=norm_dex, rms_dex=rms_dex, spread=spread,
            spread_dex=spread_dex, apart_dex=apart_dex,
        )  # fmt: skip
        at_least(
            1, least=least, recent=recent, repeats=repeats, steady=steady, stays=stays, apart=apart
        )
        at_least(least, window=window)
        at_least(0, quiet_steps=quiet_steps, settle=settle)
        self._dex = {"loss_dex": loss_dex, "norm_dex": norm_dex, "rms_dex": rms_dex}
        self._window, self._least = window, least
        self._spread, self._spread_dex, self._steady = spread, spread_dex, steady
        self._settle, self._stays = settle, stays
        self._recent, self._repeats, self._quiet = recent, repeats, quiet_steps
        self._apart, self._apart_dex = apart, apart_dex
        self._reset()

    def _reset(self) -> None:
        # How far each rank was away at the last sampled steps; the newest ones are judged.
        self._past: dict[str, deque[Away]] = {
            name: deque(maxlen=self._window + self._recent) for name in _JUDGED
        }
        self._logs: dict[str, deque[Away]] = {  # each rank's own numbers, of the same steps
            name: deque(maxlen=self._window + self._recent) for name in _JUDGED
        }
        self._telling: dict[int, Telling] = {}
        self._begun: int | None = None  # the first step
        self._held = HeldBatches()
        self._order = RankOrder(self._apart)
        self._is_apart = False  # that was told

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.skipped or len(record.ranks) < 2:
            return []
        self._begun = record.step if self._begun is None else self._begun
        if self._held.again(record):
            return []
        found: list[Anomaly] = []
        for name in _JUDGED:
            told = _told(record, name)
            logs = _logs(told)
            self._logs[name].append(logs)
            self._past[name].append(_away(logs))
            found = found or self._judge(record, name, told)
        return found or self._stands_apart(record)

    def _judge(self, record: StepRecord, name: str, told: Mapping[int, float]) -> list[Anomaly]:
        what, phase, setting = _JUDGED[name]
        recent = list(self._past[name])[-self._recent :]
        before = list(self._past[name])[: -self._recent]
        now = recent[-1]
        outliers = {r: x for r, x in now.items() if self._times(r, recent, before, setting)}
        times = self._repeats
        settled = record.step - (self._begun or 0) >= self._settle
        if not outliers and settled:
            outliers, times = self._left(recent, before), self._stays
        if not outliers:
            return []
        rank = self._guilty(outliers, now, name)
        blamed = -1 if rank is None else rank
        if not self._telling.setdefault(blamed, Telling(self._quiet)).due(record.step):
            return []
        away = max(now, key=lambda r: abs(now[r])) if rank is None else rank
        dex, two = now[away], len(now) == 2
        others = f"rank {next(r for r in now if r != away)}'s" if two else "that of the others"
        apart = _apart({r: told[r] for r in now}, away, dex, others)
        advice = (
            "look at the data that it reads, and at its device" if rank is not None else
            "which of the two is wrong is not known: look at the data that each reads, and at "
            "their devices"
        )  # fmt: skip
        message = (
            f"rank {away}'s {what} is {apart}, at {times} of the last {self._recent} sampled "
            f"steps: {advice}"
        )
        values = {"decades": dex, "points": len(before)}
        return [self.anomaly(record, "warn", message, values, rank=rank, phase=phase)]

    def _stands_apart(self, record: StepRecord) -> list[Anomaly]:
        logs = self._logs["loss"][-1]
        found = self._order.look(logs) if len(logs) == len(record.ranks) else None
        if found is None or self._is_apart or abs(found[1]) < self._apart_dex or self._telling:
            return []
        self._is_apart = True
        (rank, dex), two = found, len(logs) == 2
        others = (
            f"rank {next(r for r in logs if r != rank)}'s" if two else "that of each other rank"
        )
        message = (
            f"rank {rank}'s loss was {'above' if dex > 0 else 'below'} {others} at each of the "
            f"last {self._apart} sampled steps, {_times(dex):.3g} x in the median: its data, "
            "its labels or what it computes with are not the same, which may be meant"
        )
        values, known = {"decades": dex, "points": self._apart}, None if two else rank
        return [self.anomaly(record, "info", message, values, rank=known, phase="forward")]

    def _times(self, rank: int, recent: list[Away], before: list[Away], setting: str) -> bool:
        """Whether a rank was an outlier often enough, and is now."""
        past = [abs(a[rank]) for a in before if rank in a]
        limit = self._dex[setting] * (1 if len(past) >= self._least else 2) + max(past, default=0.0)
        far = [abs(a.get(rank, 0.0)) > limit for a in recent]
        return far[-1] and sum(far) >= self._repeats

    def _left(self, recent: list[Away], before: list[Away]) -> Away:
        """Return which ranks stay further away, on one side, than any rank has been.

        What any rank does by chance bounds all of them: in a large job somebody is always furthest,
        and leaves its own past now and then.
        """
        past = [abs(x) for away in before for x in away.values()]
        now = recent[-1]
        if len(past) < self._steady * max(1, len(now)):
            return {}
        limit = self._spread * max(past) + self._spread_dex
        return {
            rank: x
            for rank, x in now.items()
            if abs(x) > limit
            and sum(math.copysign(1, x) * a.get(rank, 0.0) > limit for a in recent) >= self._stays
        }

    def _guilty(self, outliers: Away, now: Away, name: str) -> int | None:
        """Return the one rank that left the others; of two, the one whose own numbers moved.

        A loss that falls is what training is for: the other one may have stopped to.
        """
        if len(now) > 2:
            return max(outliers, key=lambda r: abs(outliers[r]))
        zero = [r for r, x in outliers.items() if x <= NOTHING_DEX / 2]
        if zero:
            return zero[0] if len(zero) == 1 else None
        logs = list(self._logs[name])
        moved = {r: _moved(r, logs[-self._recent :], logs[: -self._recent]) for r in now}
        first, second = sorted(moved, key=lambda r: -abs(moved[r]))
        learned = name == "loss" and moved[first] < 0
        return first if not learned and abs(moved[first]) > MOVED * abs(moved[second]) else None


def _apart(told: Mapping[int, float], away: int, dex: float, others: str) -> str:
    """Return how far away a rank is, from what ranks said; beside a zero no ratio says it."""
    if told[away] == 0:
        return f"zero, {others} is not"
    if all(number == 0 for rank, number in told.items() if rank != away):
        return f"not zero, {others} is"
    return f"{_times(dex):.3g} x {'above' if dex > 0 else 'below'} {others}"


def _times(dex: float) -> float:
    """Return how many times so many decades are, up or down; it is finite."""
    return float(10.0 ** min(abs(dex), LARGEST_DEX))


def _moved(rank: int, recent: list[Away], before: list[Away]) -> float:
    """Return by how many decades a rank's own median has moved, up or down."""
    now, then = ([a[rank] for a in logs if rank in a] for logs in (recent, before))
    return median(now) - median(then) if now and then else 0.0


def _told(record: StepRecord, name: str) -> Mapping[int, float]:
    """Return the number of each rank that has one: of the loss, that of all steps since a look."""
    if name == "loss":
        return losses_by_rank(record)
    return {
        rank: float(record.scalars[rank][name])
        for rank in record.ranks
        if name in record.scalars.get(rank, {})
    }


def _logs(told: Mapping[int, float]) -> Away:
    """Return log10 of each number that is finite and not negative, `NOTHING_DEX` of a zero."""
    return {
        rank: math.log10(x) if x > 0 else NOTHING_DEX
        for rank, x in told.items()
        if math.isfinite(x) and x >= 0
    }


def _away(logs: Away) -> Away:
    """Return how far each rank is from the median of the others."""
    # Where all have nothing there is nothing to compare.
    if len(logs) < 2 or max(logs.values()) <= NOTHING_DEX:
        return {}
    ordered = sorted(logs.values())
    return {rank: max(NOTHING_DEX, x - _median_without(ordered, x)) for rank, x in logs.items()}


def _median_without(ordered: list[float], value: float) -> float:
    """Return the median of ascending numbers without one of them; there are two or more."""
    place, left = bisect_left(ordered, value), len(ordered) - 1
    low, high = ((i + (i >= place)) for i in ((left - 1) // 2, left // 2))
    return (ordered[low] + ordered[high]) / 2
