"""`grad_altered`: the optimizer is given other gradients than those of its step."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.rank_scalars import is_unwrapped, largest
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.rank_names import ranks_text
from ddpprobe.records.step import KEPT, LEARNING_RATE, USED_NORM, Anomaly, StepRecord

# Gradients that are clipped to 0.01 or more after the scaler have 40 or more, times the scale.
LEAST_SCALE, MOST_CLIPPED = 4096.0, 20.0
CUT_TO = 0.01  # of a gradient, which ordinary clipping comes to as well, but not to such a norm
# Gradients that are a little smaller, or larger, were neither passed on nor clipped: something is
# added to them, such as a weight decay by hand, whose share grows as gradients become small. Two
# norms in bfloat16 differ by 0.002; what is clipped by less than CLIPPED has the norm of others.
SLIGHT, CLIPPED = 0.003, 0.05
SAME = 0.01  # by which norms that were clipped to one number may differ
# Of the least share of the gradients that the optimizer got at the last looks, and of the least
# norm: what is clipped to a smaller number, or set to zero too early, comes to less.
LITTLE, LOOKS = 0.03, 64
# Norms of before, their median, over the number that all are clipped to now.
LOWER = 3.0


class GradAltered(SampledDetector):
    """Warns when gradients begin to grow between the backward and the optimizer, and go on.

    Compared are the norm of a rank's gradients after the reduction and that of those which its
    optimizers are given. Clipping makes the second one smaller; nothing usual makes it larger that
    did not from the start. So a rank is judged once its gradients were passed on unchanged, or
    clipped, at enough sampled steps in a row; a little more or less, that is not clipped, is
    neither. Gradients that are rounded, scaled twice or damaged there do
    not show in any row, as those are of what the backward has left. In one case it is told that
    little is left of them: if that norm, times the loss scale, is always the same, they were
    clipped before the scaler divided them. A gradient that is many times larger at one step is
    told at that step.

    Little is also left where the share of the gradients that the optimizer is given falls to a
    small part of what it was at all of the last looks, and their norm does: they are clipped to
    another number, or nothing is there any more when it steps. And where gradients are clipped to
    one number at some looks in a row, and most of those before had a much larger norm, it is
    another number than it was, however little that changes yet.

    And gradients of the step before that are still there when the backward of a step begins, and
    are added to: nobody has set them to zero.

    Args:
        share: by which the norm must be larger; two norms in bfloat16 differ by 0.002.
        least: sampled steps in a row at which it was not, without which there is no verdict.
        repeats: sampled steps in a row at which it is.
        quiet_steps: steps without it after which it is told again.
        cut: sampled steps in a row at which gradients were clipped to one number.
        jump: how many times as large a gradient of one step must be.
    """

    name = "grad_altered"
    title = "The optimizer is given other gradients"

    def __init__(
        self, *, share: float = 0.005, least: int = 8, repeats: int = 3, quiet_steps: int = 100,
        cut: int = 5, jump: float = 3.0,
    ) -> None:  # fmt: skip
        above_zero(share=share, jump=jump)
        at_least(1, least=least, repeats=repeats)
        at_least(2, cut=cut)
        at_least(0, quiet_steps=quiet_steps)
        self._share, self._least, self._repeats = share, least, repeats
        self._quiet, self._cut, self._jump = quiet_steps, cut, jump
        self._reset()

    def _reset(self) -> None:
        self._kept: dict[int, int] = {}  # rank -> sampled steps in a row at which none were larger
        self._larger: dict[int, int] = {}  # rank -> those since then at which they were
        self._since: dict[int, int] = {}  # the first step of these
        self._level: dict[int, float] = {}  # rank -> norm that was used when it was last smaller
        self._telling = Telling(self._quiet)
        self._norms: list[float] = []  # of clipped scaled gradients, at sampled steps in a row
        self._of_scaled = Telling(self._quiet)
        self._added = _InARow(self._repeats, self._quiet)  # whose gradients were added to others
        # Share and norm of what the optimizer was given, of the rank with the least, at the last
        # looks; and since when it has been little.
        self._given: deque[tuple[float, float]] = deque(maxlen=LOOKS)
        self._little = _InARow(self._repeats, self._quiet)
        # As `_given`, at each of the last looks, and its step.
        self._used: deque[tuple[int, float, float]] = deque(maxlen=LOOKS + self._cut)
        self._lower = Telling(self._quiet)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.skipped:
            return []
        ratios, given = _ratios(record), _least_given(record)
        said = self._added_to(record) or self._clipped_while_scaled(record, ratios)
        if said is None and given is not None:
            said = self._little_left(record, *given) or self._clipped_lower(record, *given)
        if said is not None:
            return [said]
        if is_unwrapped(record) and len(record.ranks) > 1:
            return []  # the script may average them by hand, between the two
        for rank, ratio in ratios.items():
            kept = self._is_kept(rank, ratio, float(record.scalars[rank][USED_NORM]))
            self._follow(rank, larger=ratio > 1 + self._share, kept=kept, step=record.step)
        found = [
            rank for rank in sorted(ratios)
            if self._larger.get(rank, 0) >= (1 if ratios[rank] >= self._jump else self._repeats)
        ]  # fmt: skip
        if not found or not self._telling.due(record.step):
            return []
        ratio = max(ratios[rank] for rank in found)
        since = min(self._since[rank] for rank in found)
        message = (
            f"{ranks_text(tuple(found))}: the optimizer has been given a gradient {ratio:.4g} x as "
            f"large as the backward left it since step {since}: look at what is done to `.grad` "
            "between the two (scaling, rounding, masks); no clipping makes it larger"
        )
        values = {"ratio": ratio, "since": since, "ranks": len(found)}
        alone = found[0] if len(found) == 1 else None
        return [self.anomaly(record, "warn", message, values, rank=alone, kind="grad")]

    def _added_to(self, record: StepRecord) -> Anomaly | None:
        """Return what is to be said of gradients that were there before their backward."""
        norm = largest(record, KEPT)
        if not norm > 0:  # NaN: there were none
            self._added.clear()
            return None
        since = self._added.due(record.step)
        if since is None:
            return None
        message = (
            f"at each sampled step since {since} the backward has added to the gradients of the "
            "step before, which the optimizer has used already: call optimizer.zero_grad() in each "
            "step, before the backward"
        )
        values = {"norm": norm, "since": since}
        return self.anomaly(record, "warn", message, values, phase="backward", kind="grad")

    def _little_left(self, record: StepRecord, share: float, norm: float) -> Anomaly | None:
        """Return what is to be said where next to nothing of gradients comes to the optimizer."""
        least = [min(each) for each in zip(*self._given, strict=True)]
        if len(self._given) < self._least or not (
            share < LITTLE * least[0] and norm < LITTLE * least[1]
        ):
            self._given.append((share, norm))
            self._little.clear()
            return None
        since = self._little.due(record.step)
        if since is None:
            return None
        was = "all of it" if least[0] >= 1 - CLIPPED else f"{least[0]:.2g} or more"
        message = (
            f"since step {since} the optimizer is given no gradients that are not zero, though the "
            "backward has made some: look whether zero_grad() stands between the two"
            if norm == 0
            else f"since step {since} the optimizer is given {share:.2g} of each gradient, and was "
            f"given {was} before: look at the norm that it is clipped to, and what else "
            "divides it"
        )
        values = {"share": share, "before": least[0], "since": since}
        return self.anomaly(record, "warn", message, values, kind="grad")

    def _clipped_lower(self, record: StepRecord, share: float, norm: float) -> Anomaly | None:
        """Return what is to be said of a smaller number that gradients are clipped to."""
        self._used.append((record.step, share, norm))
        if len(self._used) < self._least + self._cut or self._little.lasts:
            return None
        steps, shares, norms = zip(*self._used, strict=True)
        before, now = norms[: -self._cut], norms[-self._cut :]
        level, usual = min(now), statistics.median(before)
        clipped = level > 0 and _are_same(now) and max(shares[-self._cut :]) <= 1 - CLIPPED
        if not (clipped and usual >= LOWER * level and self._lower.due(record.step)):
            return None
        larger = [at for at, norm in enumerate(norms) if norm > level * (1 + SAME)]
        since = steps[larger[-1] + 1]
        message = (
            f"at each of the last {self._cut} sampled steps gradients are clipped to a norm of "
            f"{level:.3g}, and most of those that the optimizer was given before had {usual:.3g} "
            "or more: look which number they are to be clipped to, and whether a config has changed"
        )
        values = {"clipped_to": level, "before": usual, "since": since}
        return self.anomaly(record, "warn", message, values, kind="grad")

    def _clipped_while_scaled(
        self, record: StepRecord, ratios: Mapping[int, float]
    ) -> Anomaly | None:
        """Return what is to be said of a norm that clipping has set before it was unscaled."""
        rank = min(record.scalars, default=0)  # one stands for all
        said, ratio = record.scalars.get(rank, {}), ratios.get(rank, math.nan)
        scale = float(said.get("loss_scale", math.nan))
        norm = float(said.get(USED_NORM, math.nan)) * scale
        if not (scale >= LEAST_SCALE and ratio <= CUT_TO and 0 < norm <= MOST_CLIPPED):
            self._norms.clear()
            return None
        self._norms = [*self._norms[1 - self._cut :], norm]
        enough = len(self._norms) >= self._cut and _are_same(self._norms)
        if not enough or not self._of_scaled.due(record.step):
            return None
        message = (
            f"of each gradient the optimizer is given {ratio:.2g}: its norm, times the loss scale "
            f"({scale:.6g}), is always {norm:.4g}, as if gradients were clipped before the scaler "
            "divides them; call scaler.unscale_(optimizer) before clipping"
        )
        values = {"ratio": ratio, "clipped_to": norm, "loss_scale": scale}
        return self.anomaly(record, "warn", message, values, kind="grad")

    def _is_kept(self, rank: int, ratio: float, used: float) -> bool:
        """Whether a gradient was passed on unchanged, or clipped."""
        if ratio >= 1 - SLIGHT:
            return ratio <= 1 + SLIGHT
        level = self._level.get(rank, math.nan)
        self._level[rank] = used
        return ratio <= 1 - CLIPPED or abs(used - level) <= SAME * level

    def _follow(self, rank: int, *, larger: bool, kept: bool, step: int) -> None:
        if not larger:
            before = 0 if rank in self._larger else self._kept.get(rank, 0)
            self._kept[rank] = before + 1 if kept else 0
            self._larger.pop(rank, None)
        elif self._kept.get(rank, 0) < self._least:
            self._kept[rank] = 0
        else:
            if rank not in self._larger:
                self._since[rank] = step
            self._larger[rank] = self._larger.get(rank, 0) + 1


class _InARow:
    """Sampled steps in a row that show one thing, which is told after so many of them."""

    def __init__(self, needed: int, quiet: int) -> None:
        self._needed, self._telling = needed, Telling(quiet)
        self._first, self._many = 0, 0

    def clear(self) -> None:
        """Hear of a step that does not show it."""
        self._many = 0

    @property
    def lasts(self) -> bool:
        """Whether the last step showed it."""
        return self._many > 0

    def due(self, step: int) -> int | None:
        """Hear of one that does; return the first of them, if it is to be told now."""
        self._first = self._first if self._many else step
        self._many += 1
        return self._first if self._many >= self._needed and self._telling.due(step) else None


def _are_same(norms: Sequence[float]) -> bool:
    """Whether gradients of these norms were clipped to one number."""
    return max(norms) <= min(norms) * (1 + SAME)


def _least_given(record: StepRecord) -> tuple[float, float] | None:
    """Return the least share and norm of what any rank's optimizer was given; None: not known."""
    given = [one for said in record.scalars.values() if (one := _given(said)) is not None]
    if not given:
        return None
    shares, norms = zip(*given, strict=True)
    return min(shares), min(norms)


def _given(said: Mapping[str, float]) -> tuple[float, float] | None:
    """Return share and norm of the gradients that a rank's optimizer was given; None: not known."""
    before = float(said.get("grad_norm", math.nan))
    # An optimizer that steps has a learning rate, and without gradients no norm of them.
    used = float(said.get(USED_NORM, 0.0 if LEARNING_RATE in said else math.nan))
    known = math.isfinite(before) and math.isfinite(used) and before > 0
    return (used / before, used) if known else None


def _ratios(record: StepRecord) -> dict[int, float]:
    """Return by rank how many times as large the used gradient is; ranks that say both."""
    found = {}
    for rank, said in record.scalars.items():
        before, used = (float(said.get(name, math.nan)) for name in ("grad_norm", USED_NORM))
        if math.isfinite(before) and math.isfinite(used) and before > 0:
            found[rank] = used / before
    return found
