"""`recompute`: activation checkpointing computes something else than the forward did."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from ddpprobe.detectors.settings import above_zero, at_least
from ddpprobe.detectors.sound_steps import SoundStepsDetector
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import RECOMPUTED, RECOMPUTED_AT, Anomaly, StepRecord, fqn_number

OF = 8  # looks


class _Look(NamedTuple):
    step: int
    share: float  # the largest difference
    module: float  # whose it is, as a number
    ranks: frozenset[int]  # on which something differs


class Recompute(SoundStepsDetector):
    """Warns when a checkpointed block computes in the backward what it did not in the forward.

    The gradients are then those of another function than the one whose loss is reported: dropout
    draws another mask, a mode or a buffer was changed between the two, an input was written into.
    What rounding and kernels that add in any order leave is far below the bound.

    Args:
        apart: share of an output's mean square that the difference's is, from which it is told.
        looks: sampled steps, of the last eight, at which an output must differ by as much: of the
            few that are compared at one all may come before the difference.
        quiet_steps: steps without it after which it is told again.
    """

    name = "recompute"
    title = "Checkpointing computes something else than the forward"

    def __init__(self, *, apart: float = 1e-3, looks: int = 3, quiet_steps: int = 1000) -> None:
        above_zero(apart=apart)
        at_least(1, looks=looks)
        at_least(0, quiet_steps=quiet_steps)
        self._apart, self._needed, self._quiet = apart, looks, quiet_steps
        self._reset()

    def _reset(self) -> None:
        self._looks: deque[_Look] = deque(maxlen=max(OF, self._needed))
        self._telling = Telling(self._quiet)

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        said = {rank: said for rank, said in record.scalars.items() if RECOMPUTED in said}
        if not said:
            return []  # nothing is computed again, or was compared at this step
        bad = frozenset(rank for rank, one in said.items() if one[RECOMPUTED] >= self._apart)
        most = max(said.values(), key=lambda one: one[RECOMPUTED])
        at = most.get(RECOMPUTED_AT, math.nan)
        self._looks.append(_Look(record.step, most[RECOMPUTED], at, bad))
        looks = [look for look in self._looks if look.ranks]
        if not bad or len(looks) < self._needed or not self._telling.due(record.step):
            return []
        worst = max(looks, key=lambda look: look.share)
        ranks = frozenset[int]().union(*(look.ranks for look in looks))
        module = next((s.fqn for s in record.sites if fqn_number(s.fqn) == worst.module), None)
        where = "a module" if module is None else module or "the model"
        message = (
            f"{where} computes something else in the backward, where checkpointing runs it again, "
            f"than in the forward: {100 * worst.share:.2g} % of its output's mean square, and at "
            f"{len(looks)} of the last {len(self._looks)} sampled steps of one that was compared. "
            "The gradients are those of another function: look at dropout (preserve_rng_state, "
            "other generators), at the mode, and at what is changed between the two"
        )
        values = {"share": worst.share, "looks": len(looks), "since": looks[0].step}
        rank = min(ranks) if len(ranks) == 1 and len(said) > 1 else None
        return [
            self.anomaly(
                record, "warn", message, values, module=module, phase="backward", rank=rank,
                kind="output" if module is not None else None,
            )
        ]  # fmt: skip
