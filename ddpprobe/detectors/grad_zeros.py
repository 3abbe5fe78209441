"""`grad_zeros`: a large part of a gradient is exactly zero that never was."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sites_of_kind import Floats, SitesOfKind, SiteWindow, grown
from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.detectors.subtrees import named, subtrees
from ddpprobe.records.step import Anomaly, StepRecord


class GradZeros(SoundStepsDetector):
    """Warns when far more elements of a gradient are exactly zero than ever before, and stay so.

    A sum over a batch is not exactly zero by chance: small gradients underflow (a loss scale that
    is too small), a mask takes them away, many units died at once, or rows of a table are not used
    any more. What is sparse in good health, as the table of rare words or an expert with few
    tokens, has been so before. A gradient of zeros only is what `grad_none_or_zero` finds.

    Args:
        rise: of the share of zeros above the highest of the window.
        repeats: sampled steps in a row.
        window: sampled steps before these, that tell what is usual.
        least: of them, those at which the parameter must have had a gradient.
    """

    name = "grad_zeros"
    title = "Gradients became zero in part"

    def __init__(
        self, *, rise: float = 0.25, repeats: int = 4, window: int = 64, least: int = 8
    ) -> None:
        above_zero(rise=rise)
        at_least(1, repeats=repeats, least=least)
        at_least(least, window=window)
        self._rise, self._repeats, self._least, self._size = rise, repeats, least, window
        self._reset()

    def _reset(self) -> None:
        self._gradients = SitesOfKind("grad")
        self._recent: deque[tuple[int, Floats]] = deque()  # (step, share of zeros of each site)
        self._window = SiteWindow(self._size)  # the shares before these
        self._told = np.zeros(0, bool)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.skipped or record.missing:
            return []
        now = self._gradients.read(record, "zero_ratio")
        self._recent.append((record.step, now))
        if len(self._recent) > self._repeats:
            self._window.add(grown(self._recent.popleft()[1], len(now), np.nan))
        if len(self._recent) < self._repeats:
            return []
        recent = np.stack([grown(shares, len(now), np.nan) for _, shares in self._recent])
        usual, known = self._window.highest(len(now)), self._window.points(len(now)) >= self._least
        # NaN, where there was no gradient, is in no order with anything.
        high = known & (recent > usual + self._rise).all(axis=0) & (recent < 1).all(axis=0)
        told = grown(self._told, len(now), 0)
        found = high & ~told
        self._told = found | (told & (now > usual))
        return [self._verdict(record, found, now, usual)] if found.any() else []

    def _verdict(
        self, record: StepRecord, found: NDArray[np.bool_], now: Floats, usual: Floats
    ) -> Anomaly:
        fqns = self._gradients.fqns
        names = [fqns[i] for i in np.flatnonzero(found)]
        modules = subtrees(names, [fqns[i] for i in np.flatnonzero(~found)])
        worst = int(np.argmax(np.where(found, now - usual, -np.inf)))
        since = self._recent[0][0]
        message = (
            f"{now[worst]:.0%} of the gradient of {fqns[worst]} has been exactly zero since step "
            f"{since}, at most {usual[worst]:.0%} was before; {len(names)} of {len(fqns)} "
            f"parameters, in {named(modules)}; maybe underflow, a mask, units that died, or inputs "
            "that use less of a table; if that was meant, all is well"
        )
        values = {
            "zero_ratio": float(now[worst]), "usual": float(usual[worst]),
            "parameters": len(names), "since": since,
        }  # fmt: skip
        return self.anomaly(
            record, "warn", message, values, module=modules[0], kind="grad", phase="backward"
        )
