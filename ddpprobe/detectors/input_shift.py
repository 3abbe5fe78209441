"""`input_shift`: a rank is given other numbers at once, or others than all ranks beside it."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

import numpy as np

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.rank_scalars import digests_of
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Floats
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import (
    INPUT_ELEMENTS,
    INPUT_MAX,
    INPUT_MEAN,
    INPUT_MIN,
    INPUT_RMS,
    INPUT_ZEROS,
    Anomaly,
    StepRecord,
)

REMEMBERED = 64  # looks
_NAMES = (INPUT_RMS, INPUT_MEAN, INPUT_MIN, INPUT_MAX, INPUT_ZEROS, INPUT_ELEMENTS)
_RMS, _ZEROS, _SIZE = map(_NAMES.index, (INPUT_RMS, INPUT_ZEROS, INPUT_ELEMENTS))
_EXTREMES = slice(_NAMES.index(INPUT_MIN), _NAMES.index(INPUT_MAX) + 1)
_IN_WORDS = ("rms", "mean", "smallest number", "largest number", "share of zeros")
# What the looks before lie apart by, at least: as a share of their rms, and of all numbers. An
# image whose largest number is always 1 has been seen at few of its numbers.
LEAST, LEAST_ZEROS = 0.1, 0.05
SAME_SIZE = 0.01  # relative: batches of as many elements


class _Shift(NamedTuple):
    """Which number has shifted most, of some ranks: its extremes before, and its median now."""

    ranks: tuple[int, ...]
    name: str
    low: float
    high: float
    now: float


class _Apart(NamedTuple):
    """The rms that a rank is given, as a median, and that of the others, the next one to it."""

    rank: int
    own: float
    others: float


class InputShift(SampledDetector):
    """Warns when rms, mean, extremes or zeros of what the model is given move at once, and stay.

    Or when the rms of what one rank is given is another one than that of all ranks beside it.

    The data are normalized, clipped, padded, decoded or drawn otherwise. At the last looks one of
    these numbers of a rank lies beyond all that it was before, further than those lie apart, and
    its batches have as many elements as they had. What drifts, as states that a policy meets, goes
    through what lies between, and is not told. A batch that is read again, as where several steps
    are taken on each, is no other look. Extremes that vary, and are at most looks those of the look
    before, are not judged: windows of a series that overlap share theirs. Nor are those that have
    never varied before 64 looks: that the largest token of all stood in each of ten batches tells
    little of the next three (at 64 looks, each lacks it in 3 of 64 cases at most: the rule of
    three, Hanley and Lippman-Hand 1983).

    Args:
        looks: sampled steps, each with another batch, at which it is so.
        least: such steps before them.
        times: how many times further than the numbers before lie apart.
        ratio: how many times as large as that of any other rank, or as small, an rms is at each of
            `least` looks, while those of the others lie half as far apart at most.
        quiet_steps: steps without it after which it is told again.
    """

    name = "input_shift"
    title = "The model is given other numbers"

    def __init__(
        self, *, looks: int = 3, least: int = 10, times: float = 1.0, ratio: float = 4.0,
        quiet_steps: int = 1000,
    ) -> None:  # fmt: skip
        above_zero(times=times, ratio=ratio)
        self._far = math.log(ratio)
        at_least(1, looks=looks, least=least)
        at_least(0, quiet_steps=quiet_steps)
        self._looks, self._least, self._times, self._quiet = looks, least, times, quiet_steps
        self._reset()

    def _reset(self) -> None:
        self._ranks: tuple[int, ...] = ()
        self._seen: deque[Floats] = deque(maxlen=REMEMBERED + self._looks)  # [ranks, 6] each
        self._steps: deque[int] = deque(maxlen=self._looks)
        self._digests: deque[dict[int, float]] = deque(maxlen=REMEMBERED)
        self._telling, self._telling_apart = Telling(self._quiet), Telling(self._quiet)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        ranks = tuple(rank for rank, of in sorted(record.scalars.items()) if INPUT_RMS in of)
        if not ranks:
            return []
        if ranks != self._ranks:
            self._ranks = ranks
            self._seen.clear()
        each = [[record.scalars[rank].get(name, np.nan) for name in _NAMES] for rank in ranks]
        now = np.array(each, np.float64)
        if not np.isfinite(now).all() or self._has_been_seen(record):
            return []
        self._seen.append(now)
        self._steps.append(record.step)
        shift = self._shift()
        if shift is None:
            return self._told_apart(record)
        if not self._telling.due(record.step):
            return []
        self._telling_apart.due(record.step)  # it is the same thing
        self._seen.clear()  # from now on this is what it is given
        some = shift.ranks if len(shift.ranks) < len(ranks) else ()
        who = f"{ranks_text(some)} {'is' if len(some) == 1 else 'are'}" if some else "the model is"
        low, high = f"{shift.low:.3g}", f"{shift.high:.3g}"
        before = f"was {low}" if low == high else f"lay between {low} and {high}"
        message = (
            f"since step {self._steps[0]} {who} given other numbers, in batches of the same size: "
            f"their {shift.name} is {shift.now:.3g}, and {before} before; look at what "
            "reads, normalizes, augments and pads the data"
        )
        values = {
            "since": self._steps[0], "now": shift.now, "low": shift.low, "high": shift.high,
            "ranks": len(shift.ranks),
        }  # fmt: skip
        alone = some[0] if len(some) == 1 else None
        return [
            self.anomaly(record, "warn", message, values, rank=alone, phase="forward", kind="input")
        ]

    def _told_apart(self, record: StepRecord) -> list[Anomaly]:
        apart = self._apart()
        if apart is None or not self._telling_apart.due(record.step):
            return []
        alone = apart.rank if len(self._ranks) > 2 else None  # of two nobody knows which is right
        others = "the others" if alone is not None else ranks_text([*{*self._ranks} - {apart.rank}])
        message = (
            f"rank {apart.rank} is given other numbers than {others}, at each of the last "
            f"{self._least} sampled steps: their rms is {apart.own:.3g}, beside "
            f"{apart.others:.3g}; look at what reads, normalizes and decodes the data there"
        )
        values = {"rms": apart.own, "others": apart.others}
        return [
            self.anomaly(record, "warn", message, values, rank=alone, phase="forward", kind="input")
        ]

    def _apart(self) -> _Apart | None:
        """Return the rank whose rms stands apart from that of all others at each look."""
        if len(self._ranks) < 2 or len(self._seen) < self._least:
            return None
        rms = np.stack(list(self._seen)[-self._least :])[..., _RMS]  # [looks, ranks]
        if not (rms > 0).all():
            return None
        logs = np.log(rms)
        middle = np.median(logs, 0)
        order = middle.argsort()
        for sign, own, rest in ((1, order[-1], order[:-1]), (-1, order[0], order[1:])):
            others = logs[:, rest]
            gap = sign * (logs[:, [own]] - others)
            if gap.min() >= self._far and np.ptp(others, 1).max() <= self._far / 2:
                next_to = rest[-1] if sign > 0 else rest[0]
                sizes = (float(np.exp(middle[place])) for place in (own, next_to))
                return _Apart(self._ranks[own], *sizes)
        return None

    def _has_been_seen(self, record: StepRecord) -> bool:
        """Whether all ranks are given what they were at one of the last looks; without digests not.

        Of one batch, however often, nobody knows how far others lie apart.
        """
        known = digests_of(record)
        digests = {rank: known[rank] for rank in self._ranks if rank in known}
        seen = len(digests) == len(self._ranks) and digests in self._digests
        if not seen:
            self._digests.append(digests)
        return seen

    def _shift(self) -> _Shift | None:
        """Return what has shifted; None: nothing, or nobody can tell yet."""
        if len(self._seen) < self._least + self._looks:
            return None
        seen = np.stack(self._seen)  # [looks, ranks, 6]
        before, now = seen[: -self._looks], seen[-self._looks :]
        low, high = before.min(0), before.max(0)
        beyond = np.maximum(low - now.max(0), now.min(0) - high)
        if not (beyond > 0).any():
            return None
        least = np.repeat(LEAST * np.median(before[..., _RMS], 0)[:, None], len(_NAMES), 1)
        least[:, _ZEROS] = LEAST_ZEROS
        apart = np.maximum(high - low, least)
        sizes = now[..., _SIZE]  # [looks, ranks]
        same = sizes >= low[:, _SIZE] * (1 - SAME_SIZE)
        same &= sizes <= high[:, _SIZE] * (1 + SAME_SIZE)
        ratio = beyond / np.where(apart > 0, apart, np.inf)
        ratio[:, _SIZE] = 0.0
        ratio[~same.all(0)] = 0.0
        turns = np.count_nonzero(np.diff(before[..., _EXTREMES], axis=0), axis=0)
        enough = np.where(turns > 0, turns >= len(before) / 2, len(before) == REMEMBERED)
        ratio[:, _EXTREMES][~enough] = 0.0
        found = np.flatnonzero((ratio > self._times).any(1))
        if not len(found):
            return None
        at, name = np.unravel_index(int(ratio.argmax()), ratio.shape)
        ranks = tuple(self._ranks[place] for place in found)
        extremes = float(low[at, name]), float(high[at, name])
        return _Shift(ranks, _IN_WORDS[name], *extremes, float(np.median(now[:, at, name])))
