"""Training in evaluation mode is a warning, another mode an information."""

from __future__ import annotations

from ddpprobe.detectors.mode_flip import ModeFlip
from ddpprobe.records.step import TRAINABLE, TRAINING, StepRecord
from tests.detectors.made_records import levels, record, run


def step(number: int, training: float = 1.0, trainable: float = 8.0) -> StepRecord:
    return record(number, {0: {TRAINING: training, TRAINABLE: trainable, "loss": 1.0}})


def steps(first: int, last: int, every: int = 1, **modes: float) -> list[StepRecord]:
    return [step(s, **modes) for s in range(first, last, every)]


def test_evaluation_mode_that_lasts_is_warned_of_once() -> None:
    for every in (1, 10):
        found = run(ModeFlip(), steps(0, 100, every) + steps(100, 200, every, training=0.0))
        assert levels(found) == [("info", 100), ("warn", 120)]
        assert found[1].values["since"] == 100


def test_a_few_steps_of_it_are_an_information() -> None:
    stream = steps(0, 100) + steps(100, 110, training=0.0) + steps(110, 150)
    assert levels(run(ModeFlip(), stream)) == [("info", 100)]


def test_from_the_start_it_may_be_meant() -> None:
    assert levels(run(ModeFlip(), steps(0, 100, training=0.0))) == [("info", 20)]


def test_a_part_that_is_frozen_is_an_information_and_a_frozen_batch_norm_is_nothing() -> None:
    assert levels(run(ModeFlip(), steps(0, 50) + steps(50, 90, trainable=2.0))) == [("info", 50)]
    assert run(ModeFlip(), steps(0, 100, training=0.9)) == []


def test_networks_that_train_in_turn_are_told_once() -> None:
    turns = [step(s, trainable=4.0 + s % 2) for s in range(300)]
    assert levels(run(ModeFlip(), turns)) == [("info", 1)]


def test_records_without_the_numbers_are_left_alone() -> None:
    assert run(ModeFlip(), [record(s, {0: {"loss": 1.0}}) for s in range(50)]) == []
    assert run(ModeFlip(), [StepRecord(0, 1, (), 0)]) == []
