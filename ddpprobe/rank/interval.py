"""Which steps are sampled, kept within the budget: measured by every rank, decided by rank 0.

Rank 0 writes its order into a small file, like a heartbeat, a few steps before it holds; the other
ranks of the node look into it after each step. On another node one rank hears it from the job's
store (`rendezvous.StoreChannel`) and writes that node's file. There is no collective in this, and
nobody waits: a rank that hears nothing goes on as before.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import final

from ddpprobe.rank.budget import Budget, CostMeter
from ddpprobe.rank.rendezvous import StoreChannel
from ddpprobe.rank.schedule import IntervalChange, Pace, Schedule
from ddpprobe.records import events
from ddpprobe.rundir.fuse import logger
from ddpprobe.rundir.heartbeat import HeartbeatWriter
from ddpprobe.rundir.journal import JournalWriter
from ddpprobe.rundir.slot_file import SlotFile

LOOK_STEPS = 4  # between two looks at what was measured; after a sampled step at once
SURE_STEPS = 100  # of a watch that is dearer than the budget, before it is told
_BODY = struct.Struct("<qqq")


@final
class IntervalFile:
    """The file in which rank 0 tells the ranks of its node; one `pread` or `pwrite` of 28 bytes.

    Raises:
        OSError: it cannot be made. Afterwards nothing raises.
    """

    def __init__(self, path: Path) -> None:
        # Not wiped: rank 0 may have opened it, and spoken, before.
        self._slot_file = SlotFile(path, _BODY.size, clean=False)
        self._last = b""

    def write(self, order: IntervalChange) -> bool:
        """Replace what the file says; False if the disk refuses."""
        return self._slot_file.write(_BODY.pack(order.start, order.every, order.extra))

    def read(self) -> IntervalChange | None:
        """Return what the file says, if it is new and whole."""
        body = self._slot_file.read()
        if body is None or body == self._last:
            return None
        self._last = body
        start, every, extra = _BODY.unpack(body)
        return IntervalChange(start, every, extra) if every > 0 else None

    def close(self) -> None:
        """Close the file."""
        self._slot_file.close()


@final
@dataclass(frozen=True, slots=True)
class IntervalChannel:
    """How one rank says or hears orders.

    `interval_file` is the file of its node, None for a process that is alone. `line` leads to the
    other nodes: rank 0 speaks there, and on each of them one rank listens; None for the others.
    """

    interval_file: IntervalFile | None = None
    line: StoreChannel | None = None

    def say(self, order: IntervalChange) -> bool:
        """Tell all ranks, as rank 0; False if this node's cannot hear."""
        if self.interval_file is not None and not self.interval_file.write(order):
            return False
        if self.line is not None:
            self.line.say(f"{order.start} {order.every} {order.extra}")
        return True

    def hear(self, step: int) -> IntervalChange | None:
        """Return what rank 0 has said since, at the end of `step`."""
        if self.line is None:
            return self.interval_file.read() if self.interval_file is not None else None
        word = self.line.hear() if not step % LOOK_STEPS else None
        if word is None:
            return None
        order = IntervalChange(*map(int, word.split()))
        if self.interval_file is not None:
            self.interval_file.write(order)
        return order

    def close(self) -> None:
        """Close file and connection."""
        if self.interval_file is not None:
            self.interval_file.close()
        if self.line is not None:
            self.line.close()


@final
class Pacer:
    """Tells one rank which steps to sample, and measures what they cost.

    Args:
        schedule: what the user asked for.
        budget: share of a step's time that is ours at most; None: measured, nothing changed.
        channel: between the ranks.
        journal: hears of every change.
        heartbeat: shows interval and ratio.
        leads: this is rank 0.
        ahead: the model is on a device that the host runs ahead of.
    """

    def __init__(
        self, schedule: Schedule, budget: float | None, channel: IntervalChannel,
        journal: JournalWriter, heartbeat: HeartbeatWriter, *, leads: bool, ahead: bool = False,
    ) -> None:  # fmt: skip
        # With a budget there are always steps to compare the sampled ones with.
        self._pace = Pace(schedule, narrowest=1 if budget is None else 3 if ahead else 2)
        self._limit = budget
        self._meter = CostMeter(ahead=ahead)
        self._channel = channel
        self._budget = Budget(budget, self._pace.every(0)) if budget and leads else None
        self._journal = journal
        self._heartbeat = heartbeat
        self._at = (math.nan, 0.0)  # the readings at the end of the last step
        self._beside = 0.0  # the reading at the end of the last sampled one
        self._exceeded = 0
        heartbeat.every = self._pace.every(0)
        if budget is not None:
            self._say(IntervalChange(0, heartbeat.every))

    def sampled(self, step: int) -> bool:
        """Whether `step` is sampled: one under way, the next one, or one not long ago."""
        return self._pace.sampled(step)

    def add(self, start: int, stop: int) -> None:
        """Sample the steps from `start` up to `stop - 1` too; they stay out of the measurement."""
        self._pace.add(start, stop)

    def turn(self, step: int) -> int:
        """Return a number that goes up by one from a regular sampled step to the next."""
        return step // self._pace.every(step)

    def pause(self) -> None:
        """Leave the step under way out of the measurement."""
        self._at = (math.nan, 0.0)

    def end_step(
        self, step: int, seconds: float, own: float, beside: float = 0.0, *, sampled: bool
    ) -> None:
        """Take the clocks at the end of `step`.

        Args:
            step: the one that is over.
            seconds: host seconds of training.
            own: our part of them.
            beside: CPU seconds of our own threads.
            sampled: whether it was.
        """
        wall, before = seconds - self._at[0], self._at[1]
        self._at = (seconds, own)
        # Else there was no step before, a pause since, or more to do than in a sampled step.
        if wall > 0 and not self._pace.besides(step):
            self._meter.add(wall, own - before, beside - self._beside, sampled=sampled)
        if sampled:
            self._beside = beside
        if sampled or (self._limit is not None and not step % LOOK_STEPS):
            self._meter.settle()
            every = 1 if self._pace.schedule.dense(step) else self._pace.every(step)
            self._heartbeat.overhead_ratio = self._meter.ratio(every)
            if self._budget is not None:
                self._decide(self._budget, step, sampled=sampled)
        if self._budget is None and self._limit is not None:
            order = self._channel.hear(step)
            if order is not None:
                self._follow(order, step)
        self._heartbeat.every = self._pace.every(step)

    def close(self) -> None:
        """Close file and connection."""
        self._channel.close()

    def _decide(self, budget: Budget, step: int, *, sampled: bool) -> None:
        order = budget.decide(step, self._meter, sampled=sampled)
        # What the others cannot hear must not hold here either.
        if order is not None and self._channel.say(order):
            budget.follow(order)
            self._follow(order, step)
        if self._exceeded < SURE_STEPS:
            dear = budget.cannot_be_kept(self._meter)
            self._exceeded = self._exceeded + LOOK_STEPS if dear else 0
            if self._exceeded >= SURE_STEPS:
                logger.warning(
                    "ddpprobe: budget=%g cannot be kept: watching a step that is not sampled takes "
                    "%.2g of its %.3g ms, and sampled steps up to a quarter of the budget besides. "
                    "Give a larger budget=, or none and choose every=.",
                    budget.limit, 1e3 * self._meter.watch_seconds, 1e3 * self._meter.step_seconds,
                )  # fmt: skip

    def _follow(self, order: IntervalChange, step: int) -> None:
        changes = order.every != self._pace.every(order.start)
        self._pace.tell(order, step)
        if changes:
            self._say(order)

    def _say(self, order: IntervalChange) -> None:
        ratio = self._meter.ratio(order.every)
        known = None if math.isnan(ratio) else ratio
        self._journal.append_event(
            events.BudgetEvent(step=order.start, every=order.every, budget=self._limit, ratio=known)
        )
