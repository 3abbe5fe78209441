"""`reduction`: the gradients that the optimizer gets are each rank's own.

Every rank then trains a model of its own on its own data, and every line of the log looks fine:
DDP has lost its hooks, or what should have reduced did nothing.
"""

from __future__ import annotations

import math

from ddpprobe.detectors.detector import SampledDetector
from ddpprobe.detectors.settings import at_least
from ddpprobe.detectors.telling import Telling
from ddpprobe.records.step import UNREDUCED, Anomaly, StepRecord

SAME = 1e-6  # relative: what one rank's norm differs by when it is computed twice
APART = 1e-3  # relative: norms of ranks that lie closer may be one and the same


class Reduction(SampledDetector):
    """Finds gradients that were not reduced over the ranks, several sampled steps in a row.

    They are not if each rank's norm behind the reduction is its own local one, and the ranks'
    differ. That pages where a reduction took place, and changed nothing. Where none took place
    (`no_sync` up to the optimizer, or hooks that DDP lost) it warns, and pages after `patience`
    sampled steps in a row if as many before had all been reduced: local SGD begins otherwise.

    Args:
        repeats: sampled steps in a row.
        patience: sampled steps in a row, behind as many with a reduction, that make it a page.
        quiet_steps: steps without it after which it is told again.
    """

    name = "reduction"
    title = "Gradients are not reduced"

    def __init__(self, *, repeats: int = 3, patience: int = 20, quiet_steps: int = 100) -> None:
        at_least(1, repeats=repeats, patience=patience)
        at_least(0, quiet_steps=quiet_steps)
        self._repeats, self._patience, self._quiet = repeats, patience, quiet_steps
        self._reset()

    def _reset(self) -> None:
        self._reduced = 0  # sampled steps in a row, up to the first that was not
        self._missing = 0  # sampled steps in a row that were not
        self._telling = {level: Telling(self._quiet) for level in ("warn", "page")}

    def _look(self, record: StepRecord) -> list[Anomaly]:
        """Take the next record; at most one anomaly."""
        if record.skipped or record.missing:
            return []
        alone = _stayed_local(record)
        if alone is None:
            return []
        if not alone:
            self._reduced = 1 if self._missing else self._reduced + 1
            self._missing = 0
            return []
        self._missing += 1
        if self._missing < self._repeats:
            return []
        level = self._level(record)
        if not self._telling[level].due(record.step):
            return []
        return [_anomaly(record, level, self._missing)]

    def _level(self, record: StepRecord) -> str:
        if not any(UNREDUCED in scalars for scalars in record.scalars.values()):
            return "page"
        lost = self._missing >= self._patience <= self._reduced
        return "page" if lost else "warn"


def _stayed_local(record: StepRecord) -> bool | None:
    """Whether all ranks kept their own gradients; None where that cannot be told."""
    if len(record.ranks) < 2:
        return None
    placements = {s.placement for s in record.sites if s.kind == "grad"}
    if placements & {"sharded", "partial", "unknown"}:
        return None
    norms = []
    for rank in record.ranks:
        scalars = record.scalars.get(rank, {})
        local = float(scalars.get("grad_norm_local", math.nan))
        reduced = float(scalars.get("grad_norm", math.nan))
        if (
            not (math.isfinite(local) and math.isfinite(reduced))
            or scalars.get("micro_batches") != 1
        ):
            return None
        norms.append((local, reduced))
    largest = max(local for local, _ in norms)
    apart = max(r for _, r in norms) - min(r for _, r in norms) > APART * largest
    return apart and all(abs(local - r) <= SAME * largest for local, r in norms)


def _anomaly(record: StepRecord, level: str, repeats: int) -> Anomaly:
    norms = [float(s["grad_norm"]) for s in record.scalars.values() if "grad_norm" in s]
    none_took_place = any(UNREDUCED in scalars for scalars in record.scalars.values())
    why = (
        "no reduction took place (no_sync up to the optimizer, or DDP lost its hooks: a model that "
        "was moved or cast behind the wrap)"
        if none_took_place
        else "a reduction took place and changed nothing (a communication hook, a process group)"
    )
    message = (
        f"on all {len(norms)} ranks the optimizer got the rank's own gradient, {repeats} sampled "
        f"steps in a row: {why}; the replicas train apart"
    )
    values = {"repeats": repeats, "lowest": min(norms), "highest": max(norms)}
    return Reduction.anomaly(record, level, message, values, kind="grad")
