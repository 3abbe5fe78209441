"""The nine rules of the reference: each speaks of its own case, and none of a calm run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.detection.reference import Reference, reference
from ddpprobe.records.step import Site, StepRecord
from tests.detectors.made_records import Row, record

WEIGHT, GRAD = Site("fc.weight", "param"), Site("fc.weight", "grad")
CHANGE, OUT = Site("fc.weight", "update"), Site("act", "output")
LAST = 60


def _calm(step: int) -> dict[str, float]:
    wave = 1 + step % 5 / 10
    return {"loss": wave, "norm": wave, "weight": 1.0, "change": 1e-3 * wave, "grad": wave,
            "zeros": 40.0}  # fmt: skip


def _record(step: int, **changes: float) -> StepRecord:
    now = {**_calm(step), **changes}
    rows: dict[Site, Row] = {
        WEIGHT: {"rms": now["weight"], "max": now["weight"]},
        GRAD: {"rms": now["grad"], "max": now["grad"]},
        CHANGE: {"rms": now["change"], "max": now["change"]},
        OUT: {"rms": 1.0, "max": 1.0, "zeros": now["zeros"]},
    }
    return record(step, {0: {"loss": now["loss"], "grad_norm": now["norm"]}}, rows)


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("nonfinite", {"loss": math.nan}),
        ("loss", {"loss": 9.0}),
        ("norm", {"norm": 90.0}),
        ("norm_collapse", {"norm": 1e-5}),
        ("weight", {"weight": 9.0}),
        ("update_ratio", {"change": 0.5}),
        ("parameter_norm", {"grad": 300.0}),
        ("dead_layer", {"zeros": 100.0}),
    ],
)
def test_a_rule_speaks_of_its_case_alone(rule: str, change: dict[str, float]) -> None:
    fold = Reference()
    assert [fold.rules(_record(step)) for step in range(LAST)] == [set()] * LAST
    assert fold.rules(_record(LAST, **change)) == {rule}


def test_weights_that_moved_and_stand_still_for_twenty_steps_are_frozen() -> None:
    fold = Reference()
    told = [fold.rules(_record(s, **({"change": 0.0} if s >= LAST else {}))) for s in range(90)]
    assert [s for s, rules in enumerate(told) if rules] == list(range(LAST + 20, 90))
    assert told[-1] == {"frozen"}


def test_what_a_scaler_skipped_is_no_fault() -> None:
    calm, bad = [_record(s) for s in range(LAST)], _record(LAST, norm=math.inf)
    assert reference([*calm, replace(bad, skipped=True)]) == []
    assert reference([*calm, bad]) == [LAST]


def test_a_short_history_is_not_judged_and_nothing_is_said_of_a_run_without_rows() -> None:
    assert reference([*(_record(s) for s in range(5)), _record(5, loss=9.0, norm=90.0)]) == []
    assert reference([record(s, {0: {}}) for s in range(40)]) == []
