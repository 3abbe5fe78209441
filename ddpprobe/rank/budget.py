"""How much of a step is ours, and which interval keeps it under a budget. Arithmetic only.

Everything is told in host seconds: what a step took as a whole, and what our own code took in it.
The second is exact but not all (kernels on a device, caches that we have emptied); the first has it
all, under the noise of the machine. So the cost of a sampled step is its own seconds, unless it was
longer than the unsampled steps before it by more than that and what noise can do.

An unsampled step has no step without us to be compared with. But what the clock cannot see of it is
of the same kind: the code after ours finds the processor's caches full of ours. A sampled step
shows how much that is of each second seen, and the unsampled one is taken for no better.
"""

from __future__ import annotations

import math
from collections import deque
from statistics import median, median_low
from typing import final

from ddpprobe.rank.schedule import IntervalChange

PLAIN_STEPS = 15  # unsampled steps whose trimmed mean is the length of a step
TRIMMED = 3  # of them at either end: checkpoints, evaluations, a moment of somebody else's
NOISE_STEPS = 45  # unsampled steps whose change from one to the next is the noise
FEWEST_PLAIN = 5  # to begin with, and those next to a sampled step that it is compared with
SAMPLED_STEPS = 9
RECENT = 3  # of them tell a change: two make one, one alone is an accident
FEWEST_SAMPLED = 2
WITHOUT_PLAIN = 4  # steps after which an unsampled one is too far to compare a sampled one with
MOST_UNSEEN = 1.0  # of what our clock saw: what it did not see in an unsampled step
DOUBT, NEWS = 3.0, 4.0  # standard errors that an excess must have to count, and a change of it
NARROW_AT = 0.8  # of the budget: what a narrower interval would take at most
LEAST_ROOM = 0.25  # of the budget that goes to sampled steps, even if the watch leaves less
MOST_DOUBLINGS = 16
ROUNDING = 1e-9  # of an interval that just fits: its last bits must not double it
RELAPSE_STEPS = 1000  # a narrowing undone within so many was a mistake: noise, or a restless run
PATIENCE_STEPS = (50, 1600)  # that the next one then waits: at first, at most, doubled each time
LEAD_STEPS = 8  # from an order to its first step, in which the other ranks hear of it


@final
class CostMeter:
    """Measures one rank's steps.

    Args:
        ahead: the host runs ahead of its device: it may wait in the step after a sampled one for
            what was sampled, so that step counts as well. (On a CPU it would bring noise only.)

    Attributes:
        step_seconds: a step without us, a trimmed mean; NaN before enough steps were seen.
        watch_seconds: what an unsampled step is longer by because of us; NaN likewise.
    """

    def __init__(self, *, ahead: bool = False) -> None:
        self._ahead = ahead
        self.step_seconds = self.watch_seconds = self._watch_own = math.nan
        self._noise = 0.0
        self._plain: deque[float] = deque(maxlen=PLAIN_STEPS)
        self._watch: deque[float] = deque(maxlen=PLAIN_STEPS)
        self._changes: deque[float] = deque(maxlen=NOISE_STEPS)
        self._costs: deque[tuple[float, float]] = deque(maxlen=SAMPLED_STEPS)  # own, excess
        self._since = 0  # steps since the last one that a sampled one can be compared with
        self._sampled = False  # whether the last step was
        self._before = math.nan  # length of the steps before the last sampled one, if compared

    def add(self, wall: float, own: float, beside: float = 0.0, *, sampled: bool) -> None:
        """Take a step.

        Args:
            wall: its length in host seconds.
            own: our part of them.
            beside: CPU seconds of our own threads since the last sampled step. They carry what a
                sampled step has written, in the steps after it, so they are a part of its cost.
            sampled: whether it was.
        """
        behind, self._sampled = self._sampled, sampled
        self._since += 1
        if sampled:
            self._add_sampled(wall, own, beside)
        elif behind and self._ahead:
            if not math.isnan(self._before):
                part, excess = self._costs.pop()
                late = own - self._watch_own, wall - self._before
                self._costs.append((part + late[0], excess + late[1]))
        else:
            if self._plain:
                self._changes.append(abs(wall - self._plain[-1]))
            self._plain.append(wall)
            self._watch.append(own)
            self._since = 0

    def _add_sampled(self, wall: float, own: float, beside: float) -> None:
        self._before = math.nan
        if self._since > WITHOUT_PLAIN:
            self._plain.append(wall - own)
            self._costs.append((own + beside, beside))
        else:
            self.settle()
            if len(self._plain) >= FEWEST_PLAIN:
                self._before = median(list(self._plain)[-FEWEST_PLAIN:])
                part, excess = own - self._watch_own, wall - self._before
                self._costs.append((part + beside, excess + beside))

    def settle(self) -> None:
        """Bring the attributes up to date: 5 us, so not for every step."""
        if len(self._plain) < FEWEST_PLAIN:
            return
        ordered = sorted(self._plain)
        middle = ordered[len(ordered) // 2]
        kept = ordered[TRIMMED:-TRIMMED] if len(ordered) > 2 * TRIMMED else [middle]
        self._noise = 1.048 * median(self._changes) if self._changes else 0.0  # of a normal one
        self._watch_own = median(self._watch) if self._watch else 0.0
        self.watch_seconds = self._watch_own * (1 + self._unseen())
        mean = sum(kept) / len(kept)
        self.step_seconds = max(mean - self.watch_seconds, mean / 2)

    def cost(self, recent: int = RECENT) -> tuple[float, float]:
        """Return the seconds that a sampled step takes more than an unsampled one; NaN: unknown.

        The first number is what is sure: our own clock's, or the excess where noise cannot explain
        it; the second is the greater of the two, which may be noise. `recent` sampled steps that
        differ from those before by more than noise replace them.
        """
        costs = list(self._costs)
        if len(costs) < FEWEST_SAMPLED:
            return math.nan, math.nan
        own, excess = _medians(costs[-recent:])
        _, usual = _medians(costs)
        # The standard error of a median is 1.25 times that of a mean.
        error = 1.25 * self._noise * math.sqrt((1 + self._ahead) / recent)
        if abs(excess - usual) <= NEWS * error:
            excess, error = usual, error * math.sqrt(recent / len(costs))
        return excess if excess > own + DOUBT * error else own, max(excess, own)

    def _unseen(self) -> float:
        """Return what our clock does not see on a CPU, by what it sees: of sampled steps."""
        sure, _ = self.cost()
        if math.isnan(sure) or self._ahead:  # a device's part of a sampled step is its own
            return 0.0
        own, _ = _medians(list(self._costs)[-RECENT:])
        return min(sure / own - 1, MOST_UNSEEN) if own > 0 else 0.0

    def ratio(self, every: int) -> float:
        """Return our seconds by the step's own, sampling each `every`-th; NaN: not known yet.

        A floor where all steps are sampled: what is not ours of them counts as the step's own, and
        the caches that we have emptied make that longer.
        """
        return (self.watch_seconds + self.cost()[0] / every) / self.step_seconds


def _medians(costs: list[tuple[float, float]]) -> tuple[float, float]:
    own, excess = (max(median_low(column), 0.0) for column in zip(*costs, strict=True))
    return own, excess


@final
class Budget:
    """Chooses the interval: `narrowest`, or that doubled until the budget is kept.

    Doublings, so that the sampled steps of an interval are among those of all narrower ones: a rank
    that hears of a change late samples more than the others, never at other steps.

    Args:
        limit: our time by the step's, at most.
        narrowest: the least interval.
    """

    def __init__(self, limit: float, narrowest: int) -> None:
        self.limit = limit
        self.narrowest = self.every = narrowest
        self._settled = -1  # the step at which the last order holds
        self._extra = -1
        self._narrowed = -RELAPSE_STEPS  # when it last was
        self._patience = 0
        self._narrow_from = 0

    def decide(self, step: int, meter: CostMeter, *, sampled: bool) -> IntervalChange | None:
        """Return what changes after `step` (which was `sampled` or not), if anything does.

        One sampled step that contradicts those before it is followed by another one soon, if the
        next is far; the two of them make the change.
        """
        if step < self._settled or math.isnan(meter.ratio(1)):
            return None
        start, every = step + LEAD_STEPS, self._choose(meter, *meter.cost())
        if every > self.every or (every < self.every and step >= self._narrow_from):
            return IntervalChange(start, every)
        far = self.every - step % self.every > 2 * LEAD_STEPS
        if not (sampled and far) or step == self._extra:
            return None
        news = self._choose(meter, *meter.cost(1)) != every
        return IntervalChange(start, self.every, extra=start) if news else None

    def follow(self, order: IntervalChange) -> None:
        """Take one's own order as given: there is no other before it holds."""
        if order.every < self.every:
            self._narrowed = order.start
        elif order.every > self.every:
            relapse = order.start - self._narrowed < RELAPSE_STEPS
            first, most = PATIENCE_STEPS
            self._patience = min(max(2 * self._patience, first), most) if relapse else 0
            self._narrow_from = order.start + self._patience
        self.every, self._settled, self._extra = order.every, order.start, order.extra

    def cannot_be_kept(self, meter: CostMeter) -> bool:
        """Whether unsampled steps leave less of it than sampled ones are given all the same."""
        return meter.watch_seconds > (1 - LEAST_ROOM) * self.limit * meter.step_seconds

    def _choose(self, meter: CostMeter, sure: float, likely: float) -> int:
        """Return the interval for a cost: wider if it must be, narrower if that is easy."""
        whole = self.limit * meter.step_seconds
        room = max(whole - meter.watch_seconds, LEAST_ROOM * whole)
        needed, easy = self._least(sure / room), self._least(likely / (NARROW_AT * room))
        return max(needed, min(self.every, easy))

    def _least(self, interval: float) -> int:
        """Return the least interval to choose from that is not below `interval`."""
        doublings = math.ceil(math.log2(max(interval / self.narrowest, 1.0)) - ROUNDING)
        return self.narrowest << min(doublings, MOST_DOUBLINGS)
