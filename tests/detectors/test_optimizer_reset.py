"""An optimizer that counts from the start again is told; what rebuilds or rolls it back is not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from ddpprobe.detectors.optimizer_reset import OptimizerReset
from ddpprobe.records.step import NOTED, OPTIMIZER_STEPS, TRAINABLE, StepRecord
from tests.detectors.made_records import levels, record, run


def step(number: int, count: float | None, *, trained: float = 8, **more: object) -> StepRecord:
    said = {} if count is None else {OPTIMIZER_STEPS: count}
    noted = {NOTED: 1.0} if more.pop("noted", False) else {}
    return record(number, {0: {TRAINABLE: trained, "loss": 1.0, **said, **noted}}, **more)


def steps(of: Iterable[int], lost: int, **more: object) -> list[StepRecord]:
    """Sampled steps; the state is lost before step `lost`."""
    return [step(s, s if s < lost else s - lost, **more) for s in of]


@pytest.mark.parametrize("every", [1, 10])
def test_a_state_that_is_lost_is_told_once_at_the_next_look(every: int) -> None:
    (warn,) = run(OptimizerReset(), steps(range(0, 300, every), 155))
    assert (warn.level, warn.step, warn.rank, warn.module) == (
        "warn", 155 if every == 1 else 160, None, None
    )  # fmt: skip
    assert warn.values == {"count": warn.step - 155, "before": warn.step - every}
    assert "its state was cleared" in warn.message


def test_a_resume_without_the_state_is_told_and_one_with_it_is_not() -> None:
    first = steps(range(0, 200, 10), 999)
    lost = [step(s, s - 150, attempt=1) for s in range(150, 300, 10)]  # from a checkpoint of 150
    (warn,) = run(OptimizerReset(), first + lost)
    assert (warn.step, warn.attempt) == (150, 1)
    assert "the checkpoint that this attempt began with" in warn.message
    assert "older" not in warn.message
    kept = [step(s, s, attempt=1) for s in range(150, 300, 10)]
    assert run(OptimizerReset(), first + kept) == []


def test_a_resume_with_a_state_that_has_counted_less_may_be_of_an_older_checkpoint() -> None:
    older = [step(s, s - 110, attempt=1) for s in range(150, 300)]
    (warn,) = run(OptimizerReset(), steps(range(150), 999) + older)
    assert (warn.step, warn.values["count"]) == (150, 40)
    assert "or it is that of an older checkpoint" in warn.message


def test_an_attempt_that_begins_at_step_0_or_near_it_has_lost_nothing() -> None:
    first = steps(range(200), 999)
    assert run(OptimizerReset(), first + [step(s, s, attempt=1) for s in range(200)]) == []
    near = [step(s, s - 15, attempt=1) for s in range(15, 200)]
    assert run(OptimizerReset(), first + near) == []
    assert levels(run(OptimizerReset(least=15), first + near)) == [("warn", 15)]


def test_what_is_announced_and_what_trains_other_parameters_is_meant() -> None:
    stream = steps(range(300), 155)
    stream[155] = step(155, 0, noted=True)
    assert run(OptimizerReset(), stream) == []
    unfrozen = steps(range(155), 999) + [step(s, s - 155, trained=12) for s in range(155, 300)]
    assert run(OptimizerReset(), unfrozen) == []


def test_a_few_steps_that_were_taken_back_are_not_a_loss() -> None:
    back = steps(range(155), 999) + [step(s, s - 60) for s in range(155, 300)]
    assert run(OptimizerReset(), back) == []
    assert levels(run(OptimizerReset(left=0.9), back)) == [("warn", 155)]


def test_an_optimizer_that_counts_nothing_is_left_alone() -> None:
    assert run(OptimizerReset(), [step(0, 0)] + [step(s, None) for s in range(1, 300)]) == []
    unsampled = [record(s, {0: {OPTIMIZER_STEPS: 0.0}}, sampled=False) for s in range(100, 200)]
    assert run(OptimizerReset(), steps(range(100), 999) + unsampled) == []


def test_one_that_is_built_anew_in_each_cycle_is_told_once_and_again_behind_a_quiet_time() -> None:
    cycles = [step(s, s % 80) for s in range(400)]
    assert levels(run(OptimizerReset(), cycles)) == [("warn", 80)]
    again = [step(s, s - 155 if 155 <= s < 300 else s if s < 155 else s - 300) for s in range(400)]
    assert levels(run(OptimizerReset(), again)) == [("warn", 155), ("warn", 300)]
    attempts = steps(range(60), 50) + [step(s, s - 55, attempt=1) for s in range(55, 90)]
    stream = [*attempts, *(step(s, s - 90, attempt=1) for s in range(90, 140))]
    assert levels(run(OptimizerReset(), stream)) == [("warn", 50), ("warn", 90)]
