"""Records of weights, as a rank would make them: what the tests of their detectors feed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ddpprobe.records.step import Site, StepRecord
from tests.detectors.made_records import record


class Made(NamedTuple):
    """A parameter of 100 elements: its rms, that of what the step changed, that of its gradient.

    `change` None: it had no turn. `gradient` None: it has none.
    """

    weight: float
    change: float | None = 1e-3
    gradient: float | None = 0.1
    dtype: str = "float32"


def weights(
    number: int, made: Mapping[str, Made], called: Iterable[str] = (), **changes: object
) -> StepRecord:
    """A sampled step with rows of these parameters, in which all elements are the same.

    And outputs of the modules that are called.
    """
    rows = {Site(fqn, "output"): {"rms": 1.0} for fqn in called}
    for fqn, one in made.items():
        away = {"tapped": 0, "observed": 0, "numel": 0} if one.change is None else {}
        of = {"param": one.weight, "update": one.change or 0.0, "grad": one.gradient or 0.0}
        for kind, size in of.items():
            gone = {"tapped": 0, "observed": 0, "numel": 0}
            lost = away if kind != "grad" else (gone if one.gradient is None else {})
            row = {"rms": size, "max": size, "min": size, "sum": 100 * size, **lost}
            rows[Site(fqn, kind, placement="replicated", dtype=one.dtype)] = row
    return record(number, rows=rows, **changes)
