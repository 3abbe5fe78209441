"""Training in evaluation mode is a warning, another mode an information."""

from __future__ import annotations

import math

from ddpprobe.detectors.mode_flip import ModeFlip
from ddpprobe.records.step import NOTED, OPTION, TRAINABLE, TRAINING, StepRecord
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


def test_a_teacher_that_trains_nothing_is_meant_to_evaluate() -> None:
    assert run(ModeFlip(), steps(0, 100, training=0.0, trainable=0.0)) == []


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


def of_options(number: int, *ranks: dict[str, float], **changes: object) -> StepRecord:
    """A step whose ranks each say options of their optimizers, and scalars under their own name."""
    said = {
        rank: {name if name == NOTED else f"{OPTION}{name}": x for name, x in options.items()}
        for rank, options in enumerate(ranks)
    }
    modes = {TRAINING: 1.0, TRAINABLE: 8.0}
    return record(number, {rank: modes | of for rank, of in said.items()}, **changes)


def eps(*values: float, every: int = 1) -> list[StepRecord]:
    """Two ranks that agree, at one sampled step after the other."""
    return [of_options(every * i, {"eps": x}, {"eps": x}) for i, x in enumerate(values)]


def test_an_option_that_becomes_another_is_warned_of_once() -> None:
    for every in (1, 10):
        (warn,) = run(ModeFlip(), eps(*[1e-8] * 20, *[1.0] * 20, every=every))
        assert (warn.level, warn.step, warn.rank) == ("warn", 21 * every, None)
        assert warn.values == {"since": 20 * every, "before": 1e-8, "now": 1.0, "ranks": 2}
        assert "option eps is 1 since step" in warn.message
        assert "and was 1e-08 before" in warn.message


def test_an_option_that_is_true_or_false_is_told_as_such() -> None:
    flips = [of_options(s, {"maximize": float(s >= 5), "eps": 1e-8}) for s in range(20)]
    (warn,) = run(ModeFlip(), flips)
    assert "maximize is True since step 5, and was False before" in warn.message


def test_each_of_two_options_that_change_at_once_is_told() -> None:
    both = [of_options(s, {"nesterov": s < 9, "dampening": float(s > 8)}) for s in range(20)]
    found = run(ModeFlip(), both)
    assert levels(found) == [("warn", 10), ("warn", 10)]
    assert [a.values["now"] for a in found] == [1.0, 0.0]  # in the order of the table


def test_an_option_must_have_lasted_three_looks_and_its_new_value_two() -> None:
    assert run(ModeFlip(), eps(1e-8, 1e-8, *[1.0] * 20)) == []
    assert levels(run(ModeFlip(), eps(1e-8, 1e-8, 1e-8, 1.0, 1.0))) == [("warn", 4)]
    assert run(ModeFlip(), eps(*[1e-8] * 9, 1.0, *[1e-8] * 9)) == []
    assert run(ModeFlip(), eps(*[1e-8] * 9, 1.0)) == []


def test_optimizers_that_step_in_turn_come_back_to_their_options() -> None:
    assert run(ModeFlip(), eps(*[1e-8, 1e-6] * 30)) == []
    assert run(ModeFlip(), eps(*[1e-8, 1e-8, 1e-8, 1e-8, 1e-6] * 5, *[1e-6] * 9)) == []
    blocks = [*[1e-8] * 10, *[1e-6] * 10] * 3
    assert levels(run(ModeFlip(), eps(*blocks))) == [("warn", 11)]


def test_an_option_that_the_script_moves_on_and_on_is_told_three_times() -> None:
    stairs = [10.0**power for power in range(-8, 8) for _ in range(5)]
    assert levels(run(ModeFlip(), eps(*stairs))) == [("warn", 6), ("warn", 11), ("warn", 16)]
    assert run(ModeFlip(), eps(*[1e-8 * (1 + i) for i in range(40)])) == []


def test_an_option_is_told_beside_another_mode() -> None:
    stream = eps(*[1e-8] * 20, *[1.0] * 20)
    for late in stream[21:]:
        for said in late.scalars.values():
            said[TRAINING] = 0.9
    assert levels(run(ModeFlip(), stream)) == [("info", 21), ("warn", 21)]


def test_an_optimizer_of_other_parameters_may_have_other_options() -> None:
    stream = eps(*[1e-8] * 20, *[1.0] * 20)
    for late in stream[20:]:
        for said in late.scalars.values():
            said[TRAINABLE] = 6.0
    assert levels(run(ModeFlip(), stream)) == [("info", 20)]


def test_an_option_that_is_announced_to_change_or_changes_with_an_attempt_is_no_warning() -> None:
    noted = [
        of_options(s, {"eps": 1.0 if s >= 9 else 1e-8, **({NOTED: 1.0} if s == 9 else {})})
        for s in range(30)
    ]
    assert run(ModeFlip(), noted) == []
    for each in noted:
        for said in each.scalars.values():
            del said[TRAINING]
    assert run(ModeFlip(), noted) == []
    again = [of_options(s, {"eps": 1.0 if s >= 9 else 1e-8}, attempt=s // 9) for s in range(18)]
    assert run(ModeFlip(), again) == []


def test_a_rank_whose_option_alone_changes_is_named_and_so_are_some() -> None:
    def of_four(step: int, *changed: int) -> StepRecord:
        said = [{"eps": 1.0 if rank in changed and step >= 9 else 1e-8} for rank in range(4)]
        return of_options(step, *said)

    (warn,) = run(ModeFlip(), [of_four(s, 2) for s in range(20)])
    assert (warn.step, warn.rank, warn.values["ranks"]) == (10, 2, 1)
    assert "option eps is 1 on rank 2 since step 9" in warn.message
    (warn,) = run(ModeFlip(), [of_four(s, 0, 1, 3) for s in range(20)])
    assert (warn.step, warn.rank, warn.values["ranks"]) == (10, None, 3)
    assert "option eps is 1 on ranks 0-1, 3 since step 9" in warn.message
    turns = [of_four(s, s % 2) for s in range(20)]  # no rank has the new value twice in a row
    assert run(ModeFlip(), turns) == []


def test_an_option_that_is_absent_or_no_number_for_some_looks_is_the_same_after_them() -> None:
    for gap in ([{}] * 5, [{"eps": math.nan}] * 5, [{"eps": math.inf}] * 5):
        told = [{"eps": 1e-8}] * 5 + gap + [{"eps": 1e-8}] * 5
        assert run(ModeFlip(), [of_options(s, said) for s, said in enumerate(told)]) == []
    told = [{"eps": 1e-8}] * 3 + [{}] + [{"eps": 1.0}, {}, {"eps": 1.0}]
    (warn,) = run(ModeFlip(), [of_options(s, said) for s, said in enumerate(told)])
    assert (warn.step, warn.values["since"]) == (6, 4)
