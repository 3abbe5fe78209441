"""What is lower, zero or alike after a NaN follows from it, and is not told as something else."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from ddpprobe.detectors.collapse import Collapse
from ddpprobe.detectors.dead_units import DeadUnits
from ddpprobe.detectors.detector import Detector
from ddpprobe.detectors.grad_none_or_zero import GradNoneOrZero
from ddpprobe.detectors.grad_zeros import GradZeros
from ddpprobe.detectors.groups import GroupNorms
from ddpprobe.detectors.level_shift import LevelShift
from ddpprobe.detectors.output_drop import OutputDrop
from ddpprobe.detectors.router import Router
from ddpprobe.detectors.saturated import Saturated
from ddpprobe.detectors.sound_steps import SoundSteps
from ddpprobe.detectors.vanishing import Vanishing
from ddpprobe.records.step import OUTPUT_SPREAD, Site, StepRecord
from tests.detectors.made_records import Row, record, run

AT = 100
WEIGHT, OTHER = Site("a.weight", "param"), Site("b.weight", "param")
FINE, PARTLY, WHOLLY = ({"rms": 1.0, "nan": bad} for bad in (0, 60, 100))
NO_TURN = {"observed": 0, "numel": 0}


def test_a_weight_is_bad_until_it_is_seen_to_be_finite_again() -> None:
    steps = SoundSteps()
    told = [FINE, PARTLY, NO_TURN, WHOLLY, NO_TURN, FINE, NO_TURN]
    found = [steps.take(record(i, rows={WEIGHT: row, OTHER: FINE})) for i, row in enumerate(told)]
    assert found == [True, False, False, False, False, True, True]


def test_a_gradient_is_bad_in_its_own_step_and_what_never_was_finite_is_left_alone() -> None:
    steps, gradient = SoundSteps(), Site("a.weight", "grad")
    never = {OTHER: PARTLY, Site("b.weight", "grad"): PARTLY, Site("a", "output"): PARTLY}
    told = [FINE, PARTLY, NO_TURN, WHOLLY, FINE]
    found = [steps.take(record(i, rows={gradient: r, **never})) for i, r in enumerate(told)]
    assert found == [True, False, True, False, True]


def test_a_loss_of_any_rank_is_bad_in_its_own_step() -> None:
    steps = SoundSteps()
    told = [(1.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (1.0, 1.0)]
    found = [
        steps.take(record(i, {r: {"loss": loss} for r, loss in enumerate(losses)}))
        for i, losses in enumerate(told)
    ]
    assert found == [True, False, False, True]


def outputs(bad: bool) -> dict[Site, Row]:
    """From where a NaN was replaced by zeros."""
    sizes = {"rms": 0.01, "zeros": 100} if bad else {"rms": 1.0}
    return {Site(f"l{i}", "output"): sizes for i in range(5)}


def gradients(bad: bool) -> dict[Site, Row]:
    share = {"rms": 0.5, "zeros": 60} if bad else {"rms": 0.5}
    gone = {"rms": 0.0, "zeros": 100} if bad else {"rms": 0.5}
    return {Site("x.weight", "grad"): share, Site("y.weight", "grad"): gone}


def experts(bad: bool) -> dict[Site, Row]:
    sizes = [99_999, 1, 1, 1] if bad else [100] * 4
    return {Site(f"experts.{i}", "output"): {"numel": n} for i, n in enumerate(sizes)}


def small(bad: bool) -> dict[Site, Row]:
    return {Site(f"l{i}.weight", "grad"): {"rms": 1e-9 if bad and i else 1.0} for i in range(2)}


def tanh(bad: bool) -> dict[Site, Row]:
    size = 0.999 if bad else 0.5
    return {Site("t", "output"): {"rms": size, "min": -size, "max": size, "numel": 10_000}}


@pytest.mark.parametrize(
    ("detector", "rows"),
    [
        (OutputDrop, outputs), (DeadUnits, outputs), (LevelShift, outputs), (Collapse, outputs),
        (GradNoneOrZero, gradients), (GradZeros, gradients), (Router, experts),
        (Vanishing, small), (Saturated, tanh),
    ],
)  # fmt: skip
@pytest.mark.parametrize("how", ["loss", "weight"])
def test_what_follows_from_a_nan_is_no_other_fault(
    detector: type[Detector], rows: Callable[[bool], dict[Site, Row]], how: str
) -> None:
    def stream(nan: bool) -> list[StepRecord]:
        out = []
        rng = np.random.default_rng(0)
        for step in range(2 * AT):
            bad = step >= AT
            noise = float(np.exp(0.01 * rng.standard_normal()))
            said = {"loss": math.nan if bad and nan and how == "loss" else noise}
            said[OUTPUT_SPREAD] = 0.0 if bad else 1.0
            weight = (PARTLY if step < 150 else WHOLLY) if bad and nan and how == "weight" else FINE
            out.append(record(step, {0: said}, {**rows(bad), WEIGHT: weight}))
        return out

    assert run(detector(), stream(nan=True)) == []
    assert run(detector(), stream(nan=False))  # it would have been told


def test_a_group_of_which_a_part_is_nan_is_not_compared() -> None:
    groups = GroupNorms(window=8, least=4)

    def made(step: int, a: float, bad: int = 0) -> StepRecord:
        rows = {Site(f"{name}.weight", "grad"): {"rms": 1.0} for name in "bde"}
        rows |= {Site("a.weight", "grad"): {"rms": a}}
        rows |= {Site("c.weight", "grad"): {"rms": 9.0 if bad else 1.0, "nan": bad}}
        return record(step, rows=rows)

    for step in range(4):
        groups.add(made(step, 1.0))
    groups.add(made(4, 1.0, bad=50))
    assert groups.largest(made(5, 5.0, bad=50)) == "a"
    assert groups.largest(made(5, 5.0)) == "a"
