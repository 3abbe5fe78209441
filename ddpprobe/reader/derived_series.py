"""Numbers of whole steps that follow from the merged records, over the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ddpprobe.reader.series import is_within
from ddpprobe.reader.text import over_steps
from ddpprobe.records.derived import DERIVED, NOISE_SCALE, DerivedNumbers
from ddpprobe.records.step import StepRecord

NAMES = tuple(each.name for each in (*DERIVED, NOISE_SCALE))


@dataclass(frozen=True, slots=True)
class DerivedSeries:
    """One number over the steps of which it is known.

    Attributes:
        name: one of `NAMES`; what each is and where its formula comes from: `records.derived`.
        unit: what it counts; "" for a ratio.
        attempts: int64 [rows].
        steps: int64 [rows].
        values: float64 [rows].
        absent: int64 [rows]; how many ranks were expected at the step and are not merged in.
    """

    name: str
    unit: str
    attempts: NDArray[np.int64]
    steps: NDArray[np.int64]
    values: NDArray[np.float64]
    absent: NDArray[np.int64]

    def __repr__(self) -> str:
        return f"DerivedSeries({self.name!r}, {over_steps(self.steps)})"


def read_derived(
    records: Iterable[StepRecord], wanted: Callable[[str], bool], steps: slice
) -> list[DerivedSeries]:
    """Return the wanted numbers that are known of any step.

    Args:
        records: merged, ascending within each attempt, from its first one on: some numbers are
            means over the steps before.
        wanted: whether a number of this name is.
        steps: over step numbers.
    """
    fold = DerivedNumbers()
    rows: dict[str, list[tuple[int, int, float, int]]] = {}
    for record in records:
        if record.sampled:
            for name, value in fold.update(record).items():
                if wanted(name) and is_within(record.step, steps):
                    where = record.attempt, record.step
                    rows.setdefault(name, []).append((*where, value, len(record.missing)))
    return [_series(each.name, each.unit, rows[each.name])
            for each in (*DERIVED, NOISE_SCALE) if each.name in rows]  # fmt: skip


def _series(name: str, unit: str, rows: list[tuple[int, int, float, int]]) -> DerivedSeries:
    attempts, steps, values, absent = zip(*rows, strict=True)
    places = np.array(attempts, np.int64), np.array(steps, np.int64)
    return DerivedSeries(name, unit, *places, np.array(values), np.array(absent, np.int64))
