"""Training in evaluation mode is a warning, another mode an information."""

from __future__ import annotations

from ddpprobe.detectors.mode_flip import ModeFlip
from ddpprobe.records.step import NOTED, TRAINABLE, TRAINING, StepRecord
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


def test_a_part_that_leaves_training_mode_and_is_not_frozen_is_warned_of_once() -> None:
    for every in (1, 10):
        stream = steps(0, 100, every) + steps(100, 300, every, training=0.7)
        found = run(ModeFlip(), stream)
        assert levels(found) == [("info", 100), ("warn", 120)]
        assert found[1].values == {"since": 100, "training": 0.7, "training_before": 1.0}


def test_a_part_that_is_frozen_at_once_or_comes_back_is_no_warning() -> None:
    frozen = steps(0, 100) + steps(100, 200, training=0.7, trainable=5.0)
    assert levels(run(ModeFlip(), frozen)) == [("info", 100)]
    brief = steps(0, 100) + steps(100, 119, training=0.7) + steps(119, 200)
    assert levels(run(ModeFlip(), brief)) == [("info", 100)]
    in_turn = [step(s, training=1.0 if s % 2 else 0.5) for s in range(300)]
    assert levels(run(ModeFlip(), in_turn)) == [("info", 1)]
    more = steps(0, 100, training=0.7) + steps(100, 200)
    assert levels(run(ModeFlip(), more)) == [("info", 100)]


def test_a_part_that_the_script_announces_to_stop_is_no_warning() -> None:
    note = record(100, {0: {TRAINING: 0.7, TRAINABLE: 8.0, "loss": 1.0, NOTED: 1.0}})
    assert run(ModeFlip(), [*steps(0, 100), note, *steps(101, 200, training=0.7)]) == []


def test_after_it_came_back_a_part_that_leaves_again_is_told_again() -> None:
    stream = steps(0, 100) + steps(100, 150, training=0.7) + steps(150, 300)
    stream += steps(300, 400, training=0.7)
    assert [a.step for a in run(ModeFlip(), stream) if a.level == "warn"] == [120, 320]


def test_networks_that_train_in_turn_are_told_once() -> None:
    turns = [step(s, trainable=4.0 + s % 2) for s in range(300)]
    assert levels(run(ModeFlip(), turns)) == [("info", 1)]


def test_records_without_the_numbers_are_left_alone() -> None:
    assert run(ModeFlip(), [record(s, {0: {"loss": 1.0}}) for s in range(50)]) == []
    assert run(ModeFlip(), [StepRecord(0, 1, (), 0)]) == []


def of_ranks(number: int, *training: float) -> StepRecord:
    modes = {r: {TRAINING: share, TRAINABLE: 8.0} for r, share in enumerate(training)}
    return record(number, modes)


def test_a_rank_that_evaluates_while_others_train_is_warned_of_and_named() -> None:
    for every in (1, 10):
        stream = [of_ranks(s, 1.0, 1.0 if s < 100 else 0.0, 1.0) for s in range(0, 200, every)]
        (warn,) = run(ModeFlip(), stream)
        assert (warn.level, warn.step, warn.rank) == ("warn", 100 + 2 * every, 1)
        assert warn.values["since"] == 100


def test_a_rank_that_evaluates_for_two_steps_is_let_be_and_each_of_two_is_told() -> None:
    stream = [of_ranks(s, 1.0, 0.0 if 100 <= s < 102 else 1.0) for s in range(200)]
    assert run(ModeFlip(), stream) == []
    both = run(ModeFlip(), [of_ranks(s, 1.0, 0.0, 0.0) for s in range(60)])
    assert [(a.level, a.step, a.rank) for a in both] == [("warn", 2, 1), ("warn", 3, 2)]
