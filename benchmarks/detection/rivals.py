"""Published rules on the same records, each as its authors wrote it down: who says something."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from benchmarks.detection.reference import reference
from ddpprobe.detectors.loss import mean_losses
from ddpprobe.records.step import NONFINITE, StepRecord, derive

Rule = Callable[[Sequence[StepRecord]], list[int]]  # records -> steps at which it speaks


def isnan(records: Sequence[StepRecord]) -> list[int]:
    """Stop at a loss or a gradient norm that is not finite."""
    found = []
    for record in records:
        told = [s.get(name, 0.0) for s in record.scalars.values() for name in ("loss", "grad_norm")]
        bad = record.counts[:, NONFINITE].any() or not np.isfinite(told).all()
        found += [record.step] if bad else []
    return found


def zclip(records: Sequence[StepRecord]) -> list[int]:
    """ZClip: the gradient norm above 2.5 standard deviations of its EMA (0.97), warm-up 25."""
    found: list[int] = []
    first: list[float] = []
    mean = variance = 0.0
    for step, x in _series(records, "grad_norm"):
        if len(first) < 25:
            first.append(x)
            mean, variance = float(np.mean(first)), float(np.var(first))
            continue
        z = (x - mean) / math.sqrt(variance + 1e-12)
        if z > 2.5:
            found.append(step)
        clipped = min(x, mean + 2.5 * math.sqrt(variance))
        mean = 0.97 * mean + 0.03 * clipped
        variance = 0.97 * variance + 0.03 * (clipped - mean) ** 2
    return found


def seven_sigma(records: Sequence[StepRecord]) -> list[int]:
    """OLMo 2's spike score: loss or gradient norm 7 sigma from the mean of the last 1000."""
    found = set()
    for name in ("loss", "grad_norm"):
        past: list[float] = []
        for step, x in _series(records, name):
            if len(past) >= 25 and abs(x - np.mean(past)) > 7 * np.std(past) > 0:
                found.add(step)
            past = [*past, x][-1000:]
    return sorted(found)


def dead(records: Sequence[StepRecord]) -> list[int]:
    """AUTOTRAINER, DeepDiagnosis: 70 % of the outputs of a layer are zero."""
    found = []
    for record in records:
        outputs = [i for i, s in enumerate(record.sites) if s.kind == "output"]
        if (derive("zero_ratio", record.counts[outputs], record.values[outputs]) >= 0.7).any():
            found.append(record.step)
    return found


RIVALS: dict[str, Rule] = {
    "isnan": isnan, "ZClip, z > 2.5": zclip, "7 sigma": seven_sigma, "dead >= 0.7": dead,
    "reference, 9 rules": reference,
}  # fmt: skip


def _series(records: Sequence[StepRecord], name: str) -> list[tuple[int, float]]:
    out = []
    for record in records:
        if name == "loss":
            out += mean_losses(record)
            continue
        x = max((s[name] for s in record.scalars.values() if name in s), default=math.nan)
        if record.sampled and math.isfinite(x):
            out.append((record.step, float(x)))
    return out
