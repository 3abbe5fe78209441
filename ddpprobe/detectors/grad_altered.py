"""`grad_altered`: the optimizer is given other gradients than the backward has left."""

from __future__ import annotations

import math

from ddpprobe.detectors.desync import ranks_text
from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import USED_NORM, Anomaly, StepRecord


class GradAltered(SampledDetector):
    """Warns when gradients begin to grow between the backward and the optimizer, and go on.

    Compared are the norm of a rank's gradients behind the reduction and that of those which its
    optimizers are given. Clipping makes the second one smaller; nothing usual makes it larger that
    did not from the start. So a rank is judged once its gradients were passed on unchanged, or
    clipped, at enough sampled steps. Gradients that are rounded, scaled twice or damaged there do
    not show in any row, as those are of what the backward has left.

    Args:
        share: by which the norm must be larger; two norms in bfloat16 differ by 0.002.
        least: sampled steps in a row at which it was not, without which there is no verdict.
        repeats: sampled steps in a row at which it is.
        quiet_steps: steps without it after which it is told again.
    """

    name = "grad_altered"
    title = "The optimizer is given other gradients"

    def __init__(
        self, *, share: float = 0.005, least: int = 8, repeats: int = 3, quiet_steps: int = 100
    ) -> None:
        above_zero(share=share)
        at_least(1, least=least, repeats=repeats)
        at_least(0, quiet_steps=quiet_steps)
        self._share, self._least, self._repeats = share, least, repeats
        self._quiet = quiet_steps
        self._reset()

    def _reset(self) -> None:
        self._kept: dict[int, int] = {}  # rank -> sampled steps in a row at which none were larger
        self._larger: dict[int, int] = {}  # rank -> those since then at which they were
        self._since: dict[int, int] = {}  # the first step of these
        self._telling = Telling(self._quiet)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.skipped:
            return []
        ratios = _ratios(record)
        for rank, ratio in ratios.items():
            self._follow(rank, larger=ratio > 1 + self._share, step=record.step)
        found = [rank for rank in sorted(ratios) if self._larger.get(rank, 0) >= self._repeats]
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

    def _follow(self, rank: int, *, larger: bool, step: int) -> None:
        if not larger:
            self._kept[rank] = 1 if rank in self._larger else self._kept.get(rank, 0) + 1
            self._larger.pop(rank, None)
        elif self._kept.get(rank, 0) < self._least:
            self._kept[rank] = 0
        else:
            if rank not in self._larger:
                self._since[rank] = step
            self._larger[rank] = self._larger.get(rank, 0) + 1


def _ratios(record: StepRecord) -> dict[int, float]:
    """Return by rank how many times as large the used gradient is; ranks that say both."""
    found = {}
    for rank, said in record.scalars.items():
        before, used = (float(said.get(name, math.nan)) for name in ("grad_norm", USED_NORM))
        if math.isfinite(before) and math.isfinite(used) and before > 0:
            found[rank] = used / before
    return found
