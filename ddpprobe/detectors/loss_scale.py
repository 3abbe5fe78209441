"""`loss_scale`: a GradScaler that skips and skips, or whose scale falls and falls.

A skipped step is the scaler at work: it starts far too high and halves until the gradients fit,
later it doubles now and then to see whether more would fit. What is no search any more, is an
overflow that no scale cures, and training stands still while every line of the log looks fine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddpprobe.detectors.detector import Detector
from ddpprobe.detectors.rank_scalars import scalars
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.records.step import Anomaly, FirstBad, StepRecord

FELL = 256.0  # as far as `streak` skips in a row, however they are spread
LOWEST = 2.0**-24  # 40 halvings of the default 65536: a gradient of 1e12 would fit


class LossScale(Detector):
    """Pages at chronic overflow, once until `quiet_steps` went by without a skipped step.

    Every skipped step delivers a record, so steps without one were taken.

    Args:
        warm_up: steps of the attempt in which the scaler may look for its scale.
        streak: more skips in a row than this are chronic, after the warm-up.
        warm_up_streak: more skips in a row than this are chronic within the warm-up.
        quiet_steps: steps without a skip after which it may page again.
        fell: after the warm-up, a scale below 1 and so many times below the highest is chronic.
        lowest: below this any scale is.
    """

    name = "loss_scale"
    title = "Loss scale"

    def __init__(
        self, *, warm_up: int = 100, streak: int = 8, warm_up_streak: int = 40,
        quiet_steps: int = 100, fell: float = FELL, lowest: float = LOWEST,
    ) -> None:  # fmt: skip
        at_least(0, warm_up=warm_up, quiet_steps=quiet_steps)
        at_least(1, streak=streak, warm_up_streak=warm_up_streak)
        above_zero(fell=fell, lowest=lowest)
        self._fell, self._lowest = fell, lowest
        self._warm_up, self._quiet = warm_up, quiet_steps
        self._most = {True: streak, False: warm_up_streak}
        self._attempt: int | None = None
        self._now = _Memory(0)

    def update(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.attempt != self._attempt:
            self._attempt, self._now = record.attempt, _Memory(record.step)
        now = self._now
        settled = record.step - now.first >= self._warm_up
        now.follow(record, settled=settled)
        if not record.skipped:
            return []
        if now.last is None or record.step - now.last > self._quiet:
            now.paged = False
        if now.last is None or record.step - now.last > 1:
            now.begin, now.witness = record.step, None
        now.last = record.step
        now.witness = record.first_bad or now.witness
        why = None if now.paged else self._why(record.step, settled=settled)
        if why is None:
            return []
        now.paged = True
        return [_anomaly(record, now, why)]

    def _why(self, step: int, *, settled: bool) -> str | None:
        """Return what is wrong; skips of the warm-up do not count towards those after it."""
        now = self._now
        begin = max(now.begin, now.first + self._warm_up) if settled else now.begin
        if step - begin + 1 > self._most[settled]:
            return f"{step - now.begin + 1} steps in a row were skipped"
        if now.scale < self._lowest:
            return "no scale is low enough"
        if now.scale < 1 and now.scale <= now.highest / self._fell:
            return f"the loss scale fell from {now.highest:g} since the warm-up"
        return None


@dataclass(slots=True)
class _Memory:
    """What is remembered of one attempt; scales are NaN until known.

    `first` is its first step, `last` the latest skipped one, `begin` the first of the latest skips
    in a row; `highest` the highest scale since the warm-up.
    """

    first: int
    last: int | None = None
    begin: int = 0
    scale: float = math.nan
    highest: float = math.nan
    witness: FirstBad | None = None
    paged: bool = False

    def follow(self, record: StepRecord, *, settled: bool) -> None:
        """Take the scale over; of several ranks' the lowest."""
        scales = scalars(record, "loss_scale")
        known = [s for s in scales if math.isfinite(s)]
        if not known:
            return
        self.scale = min(known)
        if settled:
            self.highest = max(self.scale, -math.inf if math.isnan(self.highest) else self.highest)


def _anomaly(record: StepRecord, now: _Memory, why: str) -> Anomaly:
    witness, world = now.witness, record.ranks + record.missing
    values = {
        "scale": now.scale,
        "highest": now.highest,
        "skipped_in_a_row": record.step - now.begin + 1,
    }
    return LossScale.anomaly(
        record, "page", _message(now, why), values,
        # In a common overflow the witness is only the first of many ranks.
        rank=world[0] if len(world) == 1 else None,
        module=witness.fqn if witness else None,
        kind=witness.kind if witness else None,
        phase=witness.phase if witness else "backward",
    )  # fmt: skip


def _message(now: _Memory, why: str) -> str:
    scale = "" if math.isnan(now.scale) else f" (loss scale now {now.scale:g})"
    cure = "look for an infinite gradient, or use bfloat16, which needs no scaler"
    if now.witness is not None and now.witness.phase == "forward":
        cure = "the forward itself is not finite, which no loss scale mends: see nonfinite"
    return f"{why}{scale}: this is no search for a scale any more, nothing is trained; {cure}"
