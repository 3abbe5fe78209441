"""The reference: the union of nine rules, each a textbook one with a guard, none tuned here.

It judges what a monitor of one process sees: loss, gradient norms, and per parameter and module
what `ddpprobe` has recorded; it compares no ranks. A history is judged from `WARM` values on. Of
weights and their changes, which take turns in the records, `LOOKS` are enough.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.loss import mean_losses
from ddpprobe.detectors.sites_of_kind import SitesOfKind
from ddpprobe.detectors.weight_rows import WeightRows, WeightsOfStep
from ddpprobe.records.step import NONFINITE, StepRecord

Floats = NDArray[np.float64]
WINDOW, WARM, LOOKS = 64, 32, 8
_LEAST_DEX = 0.05  # of the spread: below it, a history is taken for smooth


class Robust:
    """A number in log10 against the median of its last `WINDOW`, in robust deviations.

    z = (x - median) / max(1.4826 * MAD, 0.05), as Iglewicz and Hoaglin 1993 define it but for the
    floor.
    """

    def __init__(self, z: float, ratio: float, over_highest: float = 1.0) -> None:
        self._limits = z, ratio, over_highest
        self._past: deque[float] = deque(maxlen=WINDOW)

    def speaks(self, x: float) -> bool:
        """Take the next number; return whether it is out of proportion to those before."""
        if not (np.isfinite(x) and x > 0):
            return False
        new, past = float(np.log10(x)), np.array(self._past)
        self._past.append(new)
        if len(past) < WARM:
            return False
        middle = float(np.median(past))
        spread = max(1.4826 * float(np.median(abs(past - middle))), _LEAST_DEX)
        z, ratio, over = self._limits
        return bool(
            (new - middle) / spread > z
            and new - middle > np.log10(ratio)
            and new > past.max() + np.log10(over)
        )


class Reference:
    """Folds records, in ascending order; says at which steps any of its rules speaks."""

    def __init__(self) -> None:
        self._norm, self._loss = Robust(8, 4), Robust(8, 2)
        self._share: deque[float] = deque(maxlen=WINDOW)
        self._norms: deque[float] = deque(maxlen=WINDOW)
        self._rows = WeightRows()
        self._gradients, self._outputs = SitesOfKind("grad"), SitesOfKind("output")
        self._moves: dict[int, int] = {}  # parameter -> looks at which it moved
        self._still: dict[int, int] = {}  # ... -> the step since which it stands still
        self._largest: dict[int, deque[tuple[int, float]]] = {}
        self._own: dict[int, Robust] = {}
        self._zeros: dict[int, deque[float]] = {}

    def rules(self, record: StepRecord) -> set[str]:
        """Take the next record; return the names of the rules that speak."""
        found = set()
        if self._is_bad(record):
            found.add("nonfinite")
        spoke = [self._loss.speaks(loss) for _, loss in mean_losses(record)]
        if any(spoke):
            found.add("loss")
        if not record.sampled or record.skipped or record.partial:
            return found
        weights = self._rows.read(record)
        norm = max((s["grad_norm"] for s in record.scalars.values() if "grad_norm" in s), default=0)
        checks: Iterable[tuple[str, bool]] = (
            ("norm", self._norm.speaks(norm)),
            ("norm_collapse", self._collapsed(norm)),
            ("frozen", self._froze(weights, record.step)),
            ("weight", self._jumped(weights, record.step)),
            ("update_ratio", self._went_far(weights)),
            ("parameter_norm", self._own_norm(record)),
            ("dead_layer", self._died(record)),
        )
        return found | {name for name, speaks in checks if speaks}

    def _is_bad(self, record: StepRecord) -> bool:
        """Anything that is not finite, but for a step that a GradScaler skipped."""
        if record.skipped:
            return False
        told = [s.get(name, 0.0) for s in record.scalars.values() for name in ("loss", "grad_norm")]
        watched = record.first_bad is not None or record.counts[:, NONFINITE].any()
        return bool(watched or not np.isfinite(told).all())

    def _collapsed(self, norm: float) -> bool:
        """The gradient norm is a thousandth of its median."""
        past = list(self._norms)
        if np.isfinite(norm):
            self._norms.append(norm)
        return len(past) >= WARM and norm < 1e-3 * float(np.median(past))

    def _froze(self, now: WeightsOfStep, step: int) -> bool:
        """A parameter that moved at 8 looks stands still to the bit for 20 steps."""
        for i in np.nonzero(now.moved)[0].tolist():
            self._moves[i] = self._moves.get(i, 0) + 1
            self._still.pop(i, None)
        still = np.nonzero(now.still)[0].tolist()
        for i in still:
            self._still.setdefault(i, step)
        return any(step - self._still[i] >= 20 and self._moves.get(i, 0) >= LOOKS for i in still)

    def _jumped(self, now: WeightsOfStep, step: int) -> bool:
        """The largest weight of a parameter is eight times what it was in the last ten steps."""
        found = False
        for i in np.nonzero(now.seen)[0].tolist():
            past = self._largest.setdefault(i, deque(maxlen=10))
            recent = [x for at, x in past if step - at <= 10] or [x for _, x in past][-1:]
            found |= len(past) >= LOOKS and 0 < 8 * max(recent) < now.largest[i]
            past.append((step, float(now.largest[i])))
        return found

    def _went_far(self, now: WeightsOfStep) -> bool:
        """The step changed the weights by > 5 %, 20 times the median, 3 times the maximum."""
        both = now.seen & np.isfinite(now.change)
        size = float(np.square(now.rms[both]).sum())
        if not size > 0:
            return False
        share = (float(np.square(now.change[both]).sum()) / size) ** 0.5
        past = list(self._share)
        self._share.append(share)
        return len(past) >= LOOKS and share > max(0.05, 20 * float(np.median(past)), 3 * max(past))

    def _own_norm(self, record: StepRecord) -> bool:
        """The gradient norm of one parameter: z > 10, 30 times its median, 3 times its maximum."""
        norms = self._gradients.read(record, "norm").tolist()
        spoke = [self._own.setdefault(i, Robust(10, 30, 3)).speaks(x) for i, x in enumerate(norms)]
        return any(spoke)

    def _died(self, record: StepRecord) -> bool:
        """A layer's outputs become zero: 99 % of them now, less than 90 % in all of its past."""
        found = False
        zeros: Floats = self._outputs.read(record, "zero_ratio")
        for i in np.nonzero(np.isfinite(zeros))[0].tolist():
            past = self._zeros.setdefault(i, deque(maxlen=WINDOW))
            found |= len(past) >= WARM and zeros[i] >= 0.99 and max(past) < 0.9
            past.append(float(zeros[i]))
        return found


def reference(records: Sequence[StepRecord]) -> list[int]:
    """The nine rules together: non-finite, loss, norm, collapse, frozen, weight, update, dead."""
    fold = Reference()
    return [record.step for record in records if fold.rules(record)]
