"""What a row weighs in a loss over classes, its labels, and who answers rightly."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ddpprobe
from ddpprobe.detectors.cross_entropy import CrossEntropy
from ddpprobe.detectors.suite import chosen
from ddpprobe.records.step import (
    CLASS_LABELLED,
    CLASS_LOOKED,
    CLASS_OF_ALL,
    CLASS_POWER,
    CLASS_RIGHT,
    CLASS_ROWS,
    CLASS_SEEN,
    CLASS_WEIGHT,
    EXTRA_ACTIVATION,
    EXTRA_ACTIVATIONS,
    LABEL_BITS,
    Anomaly,
    Site,
    StepRecord,
)
from tests.detectors.made_records import Row, hear, record, run

Look = dict[str, float]
ROWS = 32


def look(rows: int = ROWS, labelled: float = 1.0, **changes: float) -> Look:
    """What one rank tells of a mean over the rows with a label."""
    base = {
        CLASS_ROWS: rows, CLASS_LOOKED: rows, CLASS_LABELLED: labelled,
        CLASS_WEIGHT: 1 / (rows * labelled), CLASS_RIGHT: 0.8, CLASS_OF_ALL: -1, "micro_batches": 1,
    }  # fmt: skip
    return {**base, **changes}


def told(
    *ranks: Sequence[Look], every: int = 1, detector: CrossEntropy | None = None
) -> list[Anomaly]:
    """What is said of looks, a sequence for each rank."""
    records = [record(i * every, dict(enumerate(all_))) for i, all_ in enumerate(zip(*ranks))]  # noqa: B905
    return run(detector or CrossEntropy(), records)


def weighing(*weights: float, **changes: float) -> list[Look]:
    return [look(**changes, **{CLASS_WEIGHT: weight}) for weight in weights]


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize("ratio", [4.0, 1.6, 0.25])
def test_a_row_that_weighs_otherwise_is_told_at_the_second_look(every: int, ratio: float) -> None:
    looks = weighing(*[1 / 32] * 12, *[ratio / 32] * 40)
    (warn,) = told(looks, looks, every=every)
    assert (warn.level, warn.step, warn.rank, warn.module) == ("warn", 13 * every, None, None)
    assert (warn.phase, warn.kind) == ("backward", "output")
    assert warn.values == {"ratio": pytest.approx(ratio)}
    assert "divided by" in warn.message


def test_two_losses_in_one_output_with_looks_of_neither_between_are_no_other_weight() -> None:
    """FixMatch: labelled rows, and such as the model has labelled itself."""
    usual, other, mixed = 1 / 16, 1 / 48, math.nan
    assert told(weighing(*[usual] * 12, *[mixed] * 2, *[other] * 40)) == []
    assert told(weighing(*[usual] * 12, mixed, usual, mixed, *[other] * 40)) == []
    (warn,) = told(weighing(*[usual] * 12, mixed, usual, *[other] * 40))
    assert warn.step == 15


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("ratio", [5.0, 0.2])
def test_a_row_that_weighs_otherwise_on_one_rank_names_it(ranks: int, ratio: float) -> None:
    usual, other = weighing(*[1 / 32] * 52), weighing(*[1 / 32] * 12, *[ratio / 32] * 40)
    (warn,) = told(*[usual] * (ranks - 1), other)
    assert (warn.step, warn.rank) == (13, ranks - 1)
    assert warn.values == {"ratio": pytest.approx(ratio)}
    assert f"of the output of rank {ranks - 1} alone weighs {ratio:.3g} x" in warn.message


def test_of_two_ranks_among_many_none_is_named_and_a_new_set_of_ranks_begins_anew() -> None:
    usual, other = weighing(*[1 / 32] * 52), weighing(*[1 / 32] * 12, *[5 / 32] * 40)
    assert told(*[usual] * 6, other, other) == []  # their mean has moved too little
    (warn,) = told(usual, other, other)
    assert warn.rank is None
    looks = [record(i, dict(enumerate([look()] * (2 + (i >= 12))))) for i in range(12)]
    looks += [
        record(i, {r: look(**{CLASS_WEIGHT: 5 / 32}) for r in range(3)}) for i in range(12, 20)
    ]
    assert run(CrossEntropy(), looks) == []


@pytest.mark.parametrize(
    "looks",
    [
        weighing(*[1 / 32] * 12, *[1.4 / 32] * 40),
        weighing(*[1 / 32] * 7, *[1 / 8] * 7),  # too few before
        weighing(*([1 / 32] * 12 + [1 / 8]) * 4),  # one look
        weighing(*[1 / 32, 1 / 8] * 20),  # two losses in turn
        weighing(*[1.03**step / 32 for step in range(200)]),  # a ramp
        [look(64)] * 12 + [look(16)] * 20,  # another batch, a mean
        weighing(*[1.0] * 12, rows=64) + weighing(*[1.0] * 12, rows=16),  # and a sum
        [look(labelled=0.9)] * 12 + [look(labelled=0.3)] * 20,  # a mean of fewer
        weighing(*[1 / 64] * 12, micro_batches=2) + weighing(*[1 / 256] * 20, micro_batches=8),
        weighing(*[math.nan] * 20, *[1.0] * 5),
    ],
)
def test_what_the_batch_or_the_loop_explains_is_not(looks: list[Look]) -> None:
    assert told(looks) == []


def test_the_scale_of_a_grad_scaler_is_not_a_weight() -> None:
    scales = [2.0**16] * 12 + [2.0**14] * 20
    assert told([look(loss_scale=s, **{CLASS_WEIGHT: s / 32}) for s in scales]) == []
    (warn,) = told([look(loss_scale=s, **{CLASS_WEIGHT: 1.0}) for s in scales])
    assert warn.values["ratio"] == pytest.approx(4)


def test_a_mean_over_rows_with_a_label_is_as_steady_as_one_over_all() -> None:
    draw = random.Random(0)
    shares = [draw.uniform(0.4, 0.7) for _ in range(60)]
    steady = [look(labelled=share) for share in shares]
    assert told(steady) == []
    four = [{**one, CLASS_WEIGHT: 4 * one[CLASS_WEIGHT]} for one in steady]
    (warn,) = told(steady[:30] + four[30:])
    assert (warn.step, round(warn.values["ratio"])) == (31, 4)


def test_padding_that_counts_is_told_at_the_third_look() -> None:
    draw = random.Random(1)
    before = [look(labelled=draw.uniform(0.4, 0.6)) for _ in range(20)]
    (warn,) = told(before + [look()] * 30, before[::-1] + [look()] * 30)
    assert (warn.level, warn.step, warn.rank, warn.phase) == ("warn", 22, None, "forward")
    assert warn.values == {"labelled": pytest.approx(0.6, abs=0.02)}
    assert "were ignored" in warn.message


def test_rows_that_are_too_sure_to_tell_whether_they_have_a_label_are_no_padding_that_counts() -> (
    None
):
    """Logits that exploded: what the loss ignores has no gradient, as what it answers rightly."""
    before = [look(labelled=0.875, class_sure=0.0)] * 20
    assert told(before + [look(class_sure=0.125)] * 30) == []
    (warn,) = told(before + [look(class_sure=0.0)] * 30)
    assert warn.step == 22


@pytest.mark.parametrize(
    "shares",
    [
        [1.0] * 40,
        [1.0] * 20 + [0.5] * 20,
        [0.5] * 20 + [0.9] * 20,
        [0.5] * 20 + [1.0, 1.0, 0.9] * 7,
        [
            0.5 + 0.02 * min(step, 25) for step in range(40)
        ],  # a mask that lets more and more through
        [0.6, 0.8, 0.99] * 6 + [1.0] * 20,  # some batches have hardly any
        [0.995] * 20 + [1.0] * 20,
        [0.5] * 5 + [1.0] * 20,
    ],
)
def test_labels_that_come_in_another_way_are_not(shares: list[float]) -> None:
    assert told([look(labelled=share) for share in shares]) == []
    assert (
        told([look(labelled=share) for share in shares], [look(labelled=0.7)] * len(shares)) == []
    )


def sorted_by_class(*labels: int) -> list[Look]:
    return [look(**{CLASS_OF_ALL: label}) for label in labels]


@pytest.mark.parametrize("every", [1, 100])
def test_batches_of_one_label_each_are_told(every: int) -> None:
    looks = sorted_by_class(*[-1] * 4, *[0] * 20, *[1] * 20, *[2] * 20)
    (warn,) = told(looks, looks, every=every)
    assert (warn.level, warn.step, warn.phase) == ("warn", 24 * every, "forward")
    assert warn.values == {"looks": 6, "classes": 2}
    assert "nobody shuffles" in warn.message


def test_so_they_are_where_each_rank_has_a_class_or_a_batch_lies_between_two() -> None:
    (warn,) = told(sorted_by_class(*[0] * 9), sorted_by_class(*[1] * 9))
    assert warn.step == 4
    (warn,) = told(sorted_by_class(*[0, 0, 0, -1, 1, 1, 1, 1]))
    assert warn.step == 5


@pytest.mark.parametrize(
    "ranks",
    [
        [[0] * 60],  # MoCo's
        [[0, -1] * 30],
        [[0, -1, 1] * 20],
        [[0] * 60, [-1] * 60],
        [[-1] * 60],
    ],
)
def test_other_labels_are_not(ranks: list[list[int]]) -> None:
    assert told(*[sorted_by_class(*labels) for labels in ranks]) == []


def seeing(*looks: Sequence[int]) -> list[Look]:
    return [look(**{CLASS_SEEN: sum(2.0**label for label in labels)}) for labels in looks]


@pytest.mark.parametrize("every", [1, 100])
def test_a_label_that_does_not_come_any_more_is_told_once(every: int) -> None:
    looks = seeing(*[(0, 1, 51)] * 20, *[(0, 1)] * 40)
    (warn,) = told(looks, looks, every=every)
    assert (warn.level, warn.step, warn.rank, warn.phase) == ("warn", 24 * every, None, "forward")
    assert warn.values == {"labels": 1, "label": 51, "since": 20 * every}
    assert f"has had label 51 since step {20 * every} " in warn.message
    assert told(seeing(*[(0, 1, 51)] * 20, *[(0, 1)] * 40), seeing(*[(0, 1, 51)] * 60)) == []
    (alone,) = told(looks, every=every)
    assert alone.step == 28 * every


def test_a_label_is_not_gone_whose_rows_may_have_no_gradient() -> None:
    """Logits that exploded answer each row with one class: its own rows are right to the bit."""
    before = seeing(*[(0, 1, 51)] * 20)
    learned = [{**one, CLASS_LABELLED: 0.66} for one in seeing(*[(0, 1)] * 40)]
    assert told([*before, *learned]) == []
    padded = [{**one, CLASS_LABELLED: 0.66} for one in [*before, *seeing(*[(0, 1)] * 40)]]
    (warn,) = told(padded)  # as many rows without a label as ever
    assert warn.values["label"] == 51


def test_the_rarer_a_label_was_the_longer_it_must_be_away() -> None:
    draw = random.Random(0)
    looks = [{0, *(label for label in (1, 2) if draw.random() < label / 4)} for _ in range(200)]
    gone = told(seeing(*looks, *[{0}] * 200), detector=CrossEntropy(quiet_steps=0))
    assert [warn.values["label"] for warn in gone] == [2, 1]
    assert 20 < gone[0].step - gone[0].values["since"] < gone[1].step - gone[1].values["since"]
    many = seeing(*[range(6)] * 10, *[(5,)] * 20)
    (warn,) = told(many)
    assert warn.values["labels"] == 5
    assert "label 0, 1, 2, 3 and 1 more since" in warn.message


def test_labels_that_come_now_and_then_are_not_gone() -> None:
    draw = random.Random(1)
    rates = [draw.random() for _ in range(LABEL_BITS)]
    looks = [[i for i, rate in enumerate(rates) if draw.random() < rate] for _ in range(2000)]
    assert told(seeing(*looks)) == []
    in_turn = [(0, 1 + step // 10 % 3) for step in range(2000)]  # a task for each ten steps
    assert told(seeing(*in_turn)) == []
    assert told(seeing(*[(0, 1)] * 7, *[(0,)] * 100)) == []  # it has come too seldom
    assert told(seeing(*[(0, 1)] * 40, *[()] * 40)) == []  # nobody has labels


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 2.0**LABEL_BITS])
def test_a_number_without_labels_tells_of_none(value: float) -> None:
    looks = seeing(*[(0, 1)] * 20)
    assert told([*looks, *[look(**{CLASS_SEEN: value})] * 40, *looks]) == []


def favouring(*powers: float) -> list[Look]:
    return [look(**{CLASS_POWER: power}) for power in powers]


@pytest.mark.parametrize("every", [1, 100])
def test_frequent_labels_that_weigh_more_are_told_at_the_eighth_look(every: int) -> None:
    looks = favouring(*[0.3, 1.1] * 30)  # of the few rows of a rank, a rough estimate
    (warn,) = told(looks, favouring(*[0.8] * 60), every=every)
    assert (warn.level, warn.step, warn.rank, warn.phase) == ("warn", 7 * every, None, "backward")
    assert warn.values == {"power": pytest.approx(0.95)}
    assert "inverse of their shares" in warn.message


def test_a_rank_that_cannot_tell_how_labels_weigh_is_left_out() -> None:
    (warn,) = told(favouring(*[1.0] * 20), favouring(*[math.nan] * 20))
    assert (warn.step, warn.values) == (7, {"power": 1.0})


@pytest.mark.parametrize(
    "powers",
    [
        [-1.0] * 40,  # as they are meant
        [0.0] * 40,
        [0.9] * 7,
        [*[0.9] * 7, 0.1] * 5,  # by chance
        [math.nan] * 40,
    ],
)
def test_other_weights_of_labels_are_not(powers: list[float]) -> None:
    assert told(favouring(*powers)) == []
    assert (
        told(favouring(*[0.8 if power > 0.5 else power for power in powers]), favouring(*powers))
        == []
    )


def test_a_rank_that_favours_frequent_labels_while_another_one_does_not_is_named() -> None:
    (warn,) = told(favouring(*[-1.1] * 30), favouring(*[1.07] * 30))
    assert (warn.level, warn.step, warn.rank, warn.phase) == ("warn", 7, 1, "backward")
    assert warn.values == {"power": 1.07, "others": -1.1}
    (warn,) = told(favouring(*[-1.0] * 30), *[favouring(*[1.0] * 30)] * 2)[:1]
    assert warn.rank is None
    assert "on ranks 1-2, the more" in warn.message
    for few, other in (([1.0] * 7 + [0.4], -1.0), ([1.0] * 8, -0.4), ([1.0] * 8, math.nan)):
        quiet = told(favouring(*few * 4), favouring(*[other] * 4 * len(few)))
        assert not any("on another one" in warn.message for warn in quiet)


def answering(share: float, steps: int = 40, rows: int = ROWS) -> list[Look]:
    return [look(rows, **{CLASS_RIGHT: share})] * steps


def test_a_rank_that_numbers_its_classes_otherwise_is_told_and_named() -> None:
    (warn,) = told(answering(0.9), answering(0.2), answering(0.8))
    assert (warn.level, warn.step, warn.rank, warn.phase) == ("warn", 4, 1, "forward")
    assert warn.values == {"right": pytest.approx(0.2), "others": pytest.approx(0.8)}
    assert warn.message.startswith(
        "rank 1 answers 20 % of its samples with their label, all others"
    )


def test_of_two_ranks_none_is_blamed() -> None:
    (warn,) = told(answering(0.9), answering(0.2))
    assert warn.rank is None
    assert "rank 1 answers 20 %" in warn.message
    assert "rank 0 90 %" in warn.message


@pytest.mark.parametrize(
    "shares",
    [
        [0.9],
        [0.9, 0.5],
        [0.45, 0.1],
        [0.9, 0.2, 0.2],
        [0.0, 0.0],
        [math.nan, 0.9],
    ],
)
def test_ranks_that_differ_less_or_of_which_nobody_knows_are_not(shares: list[float]) -> None:
    assert told(*[answering(share) for share in shares]) == []


def test_a_rank_that_answers_wrongly_all_at_once_is_told_by_less_and_named_beside_one_other() -> (
    None
):
    for others in (1, 2):
        ranks = [answering(0.98)] * others
        (warn,) = told(answering(0.97, 12) + answering(0.7, 28), *ranks)
        assert (warn.step, warn.rank) == (13, 0)
        assert "86 % of its samples with their label, and 97 % before" in warn.message


@pytest.mark.parametrize(
    ("before", "now", "others"),
    [
        (0.7, 0.7, 0.98),  # harder data, as ever
        (0.97, 0.7, 0.7),  # so do all
        (0.97, 0.93, 0.98),
        (0.7, 0.5, 0.9),
    ],
)
def test_less_than_that_is_not(before: float, now: float, others: float) -> None:
    ranks = answering(before, 12) + answering(now, 28), answering(others)
    assert told(*ranks) == []


def test_few_rows_say_nothing_of_a_rank() -> None:
    assert told(answering(0.6, 7, 8), answering(0.25, 7, 8)) == []
    (warn,) = told(answering(0.9, 7, 8), answering(0.25, 7, 8))
    assert warn.step == 4


def test_one_rank_that_tells_nothing_a_skipped_step_and_a_missing_rank_are_no_look() -> None:
    unknown = [look(**{CLASS_WEIGHT: math.nan, CLASS_OF_ALL: math.nan})] * 40
    assert told(sorted_by_class(*range(40)), unknown) == []
    looks = sorted_by_class(*range(40))

    def made(**changes: object) -> list[StepRecord]:
        return [record(i, {0: one}, **changes) for i, one in enumerate(looks)]

    assert run(CrossEntropy(), made(skipped=True)) == []
    assert run(CrossEntropy(), made(missing=(1,))) == []
    assert len(run(CrossEntropy(), made())) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 0.0])
@pytest.mark.parametrize("name", [CLASS_ROWS, CLASS_LABELLED, CLASS_WEIGHT])
def test_what_is_no_number_of_rows_or_is_not_there_is_no_look(name: str, value: float) -> None:
    looks = [{**one, name: value} for one in sorted_by_class(*range(40))]
    assert told(looks) == []
    for one in looks:
        del one[name]
    assert told(looks) == []


def test_what_one_rank_says_in_part_only_is_no_look() -> None:
    """Nor does a number of rows below zero, or a weight beyond what a float can say, raise."""
    looks = sorted_by_class(*range(40))
    part = {name: one for name, one in look().items() if name != CLASS_ROWS}
    assert run(CrossEntropy(), [record(i, {0: one, 1: part}) for i, one in enumerate(looks)]) == []
    assert told([{**one, CLASS_LOOKED: -1.0} for one in looks]) == []
    (warn,) = told(weighing(*[1e-300] * 12, *[1e300] * 3))
    assert 1e300 < warn.values["ratio"] < math.inf
    (warn,) = told(weighing(*[1] * 12, *[2**70] * 3))  # an int that NumPy has no dtype for
    assert warn.values["ratio"] == pytest.approx(2.0**70)


def test_each_of_the_six_is_told_again_behind_a_quiet_time() -> None:
    looks = ([look()] * 12 + weighing(*[1 / 8] * 40)) * 2
    told_at = [warn.step for warn in told(looks, detector=CrossEntropy(quiet_steps=20))]
    assert told_at == [13, 53]  # and not at 65
    assert len(told(looks)) == 1
    both = [look(**{CLASS_OF_ALL: i // 20}) for i in range(60)]
    both[30:] = [{**one, CLASS_WEIGHT: 1.0} for one in both[30:]]
    assert [warn.step for warn in told(both)] == [20, 31]


def test_the_reward_of_a_row_is_no_weight_in_a_loss() -> None:
    assert chosen({}, "rl")["cross_entropy"] is None
    assert "cross_entropy" not in chosen({}, "gan")


def test_how_often_a_label_comes_is_not_known_from_a_few_looks() -> None:
    """At 18 of 18 looks it came, and then stayed away at 6: of many labels one does that."""
    seen = [look(**{CLASS_SEEN: 3.0})] * 18 + [look(**{CLASS_SEEN: 1.0})] * 6
    assert told(seen) == []
    (warn,) = told([*seen, *[look(**{CLASS_SEEN: 1.0})] * 20])
    assert 24 <= warn.step < 32
    assert warn.message.startswith("none of the 32 rows of a rank that are looked at in a sampled")


def returned(
    step: int, ranks: int = 2, micro: float = 1.0, gradient: Row | None = None, **row: float
) -> StepRecord:
    """What ranks return in all, of 10 classes, beside the looks of a cross-entropy."""
    rows = ranks * ROWS * micro
    given = {"numel": rows * 10, "min": 0.0, "max": 0.9, "sum": rows, **row}
    pull = {"numel": given["numel"], "rms": 0.1, **(gradient or {})}
    said = {rank: look(micro_batches=micro) for rank in range(ranks)}
    return record(step, said, {Site("", "output"): given, Site("", "grad_output"): pull})


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1.0), (2, 1.0), (3, 4.0)])
def test_probabilities_that_a_loss_takes_for_logits_are_told_once(ranks: int, micro: float) -> None:
    (warn,) = run(CrossEntropy(), [returned(s, ranks, micro) for s in range(0, 500, 10)])
    assert (warn.level, warn.step, warn.phase, warn.rank) == ("warn", 40, "forward", None)
    assert "leave out the softmax" in warn.message


@pytest.mark.parametrize("row", [{"min": -0.01}, {"max": 1.5}, {"sum": 60.0}, {"numel": 64.0}])
def test_outputs_that_are_no_probabilities_are_logits(row: dict[str, float]) -> None:
    assert run(CrossEntropy(), [returned(s, **{"min": 0.45, **row}) for s in range(50)]) == []


RELU: Row = {"max": 7.0, "sum": 300.0, "zeros": 100}
SIGMOID: Row = {"min": 0.1, "max": 0.95, "sum": 300.0}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (RELU, "leave out the ReLU after the last layer"),
        ({**RELU, "max": 0.4}, "leave out the ReLU"),  # in its first steps
        ({**RELU, "zeros": 33}, "leave out the ReLU"),  # of 640
        (SIGMOID, "leave out the sigmoid"),
        ({**SIGMOID, "min": 0.0, "max": 1.0, "zeros": 3}, "leave out the sigmoid"),
    ],
)
def test_logits_that_a_relu_or_a_sigmoid_returns_are_told_once(row: Row, words: str) -> None:
    (warn,) = run(CrossEntropy(), [returned(s, **row) for s in range(0, 500, 10)])
    assert (warn.level, warn.step, warn.phase, warn.rank) == ("warn", 40, "forward", None)
    assert (warn.kind, warn.values) == ("output", {"looks": 5})
    assert words in warn.message
    later = [returned(s, **row) for s in (*range(9), *range(40, 49))]
    assert [one.step for one in run(CrossEntropy(quiet_steps=20), later)] == [7, 40]


@pytest.mark.parametrize(
    "row",
    [
        {**RELU, "zeros": 0},  # cosines of what is not negative, times a temperature
        {**RELU, "zeros": 32},
        {**RELU, "min": -0.01},  # places that are masked with 0
        {**RELU, "min": -0.01, "max": 0.0},
        {**RELU, "max": 0.0, "sum": 0.0, "zeros": 640},  # a head that begins with zeros
        {**RELU, "neg_inf": 64},  # a mask
        {**RELU, "nan": 1},
        {**SIGMOID, "min": -0.01},
        {**SIGMOID, "max": 1.01},
        {**SIGMOID, "max": 0.55},  # first logits
    ],
)
def test_logits_of_no_sign_with_a_mask_or_a_temperature_are_not(row: Row) -> None:
    assert run(CrossEntropy(), [returned(s, **row) for s in range(50)]) == []


def test_it_must_be_so_at_each_of_eight_looks_of_one_kind() -> None:
    usual: Row = {"min": -3.0, "max": 3.0}
    now_and_then = [returned(s, **(usual if s % 8 == 7 else RELU)) for s in range(50)]
    assert run(CrossEntropy(), now_and_then) == []
    in_turn = [returned(s, **(SIGMOID if s % 8 == 7 else RELU)) for s in range(50)]
    assert run(CrossEntropy(), in_turn) == []


@pytest.mark.parametrize("row", [RELU, SIGMOID, {}])
def test_what_is_returned_beside_the_logits_is_none(row: Row) -> None:
    """Probabilities have no gradient, features one that does not sum to zero."""
    beside = {"numel": 640, "min": 0.0, "max": 0.9, "sum": 64.0, **row}
    logits: Row = {"numel": 640, "min": -3.0, "max": 3.0, "sum": 5.0, "zeros": 100}
    pull: Row = {"numel": 640, "rms": 0.1}
    said = dict.fromkeys(range(2), look())

    def told_of(rows: dict[Site, Row]) -> list[Anomaly]:
        return run(CrossEntropy(), [record(s, said, rows) for s in range(50)])

    first, second = (Site("", "output", leaf) for leaf in "01")
    g_first, g_second = (Site("", "grad_output", leaf) for leaf in "01")
    both = {first: beside, second: logits}
    assert told_of({**both, g_second: pull}) == []
    assert told_of({**both, g_first: {**pull, "sum": 0.2}, g_second: pull}) == []
    assert told_of({first: logits, second: beside, g_first: pull, g_second: pull}) == []
    assert told_of(both) == []
    never = {"numel": 0, "observed": 0, "min": math.inf, "max": -math.inf}
    assert told_of({**both, g_first: never, g_second: pull}) == []  # it has none in this loss
    assert told_of({**both, g_first: {"numel": 640}, g_second: pull}) == []
    few = {first: {**beside, "numel": 64, "zeros": 10}, second: logits}
    assert told_of({**few, g_first: {**pull, "numel": 64}, g_second: pull}) == []
    assert len(told_of({**both, g_first: pull})) == 1


@pytest.mark.parametrize("micro", [0.0, -1.0, math.nan, 3.0])
def test_an_output_that_has_no_whole_number_of_classes_is_not_the_logits(micro: float) -> None:
    said = {0: look(micro_batches=micro)}
    pull = {"numel": 640, "rms": 0.1}
    rows = {Site("", "output"): {"numel": 640, **RELU}, Site("", "grad_output"): pull}
    assert run(CrossEntropy(), [record(s, said, rows) for s in range(50)]) == []


def ignoring(
    step: int, *seen: Sequence[int], classes: int = 3, rows: int = 16, **changes: float
) -> StepRecord:
    """What ranks say of a batch of which some rows have no label."""
    said = {
        rank: look(
            rows, **{"labelled": 0.75, "input_elements": 64 * rows,
            CLASS_SEEN: sum(2.0**one for one in labels), **changes},
        )
        for rank, labels in enumerate(seen)
    }  # fmt: skip
    numel = rows * len(seen) * classes
    logits = {"numel": numel, "min": -3.0, "max": 3.0}
    sites = {Site("", "output"): logits, Site("", "grad_output"): {"numel": numel, "rms": 0.1}}
    return record(step, said, sites)


@pytest.mark.parametrize(("every", "step"), [(1, 7), (10, 40), (100, 400)])
@pytest.mark.parametrize(("classes", "label"), [(2, 0), (3, 1), (3, 2), (52, 51)])
def test_a_class_that_the_loss_ignores_is_told_once(
    every: int, step: int, classes: int, label: int
) -> None:
    others = [one for one in range(classes) if one != label]
    looks = [ignoring(s * every, others, others, classes=classes) for s in range(40)]
    (warn,) = run(CrossEntropy(), looks)
    assert (warn.level, warn.step, warn.rank, warn.phase) == ("warn", step, None, "forward")
    assert warn.values == {"label": label, "ignored": pytest.approx(0.25), "classes": classes}
    assert f"has had label {label}, each other one of {classes} classes" in warn.message
    assert "25 % of the rows have no label" in warn.message
    assert "`ignore_index`" in warn.message
    once = ignoring(3 * every, others, [*others, label], classes=classes)  # of one rank
    assert run(CrossEntropy(), [*looks[:3], once, *looks[4:]]) == []


def test_of_large_batches_it_is_told_at_the_eighth_look() -> None:
    looks = [ignoring(s, *[(0, 2)] * 4, rows=200) for s in range(40)]
    assert [warn.step for warn in run(CrossEntropy(), looks)] == [7]


@pytest.mark.parametrize(
    ("seen", "changes"),
    [
        (((0, 1, 2), (0, 1, 2)), {}),  # semi-supervised: rows without a label, of any class
        (((0, 2), (0, 1, 2)), {}),  # a rank without it
        (((0, 2), (0, 2)), {"labelled": 1.0}),  # a class that the data do not have
        (((0, 2), (0, 2)), {"labelled": 0.985}),
        (((0, 2), (0, 2)), {"labelled": 0.09}),
        (((0,), (0,)), {}),  # two classes do not come
        (((0, 2), (0, 2)), {"classes": 4}),
        (((0, 2, 3), (0, 2, 3)), {}),  # more labels than classes
        (((0, *range(2, 52)),) * 2, {"classes": 53}),
        (((0, 2), (0, 2)), {CLASS_LOOKED: 15}),  # a text, or an image, of many rows
        (((0, 2), (0, 2)), {"input_elements": 64}),  # up to four numbers for a row
        (((0, 2), (0, 2)), {"input_elements": math.nan}),
        (((0, 2), (0, 2)), {"copied_inputs": 0.1}),
        (((0, 2), (0, 2)), {CLASS_SEEN: math.nan}),
        (((0, 2), (0, 2)), {CLASS_SEEN: 2.0**LABEL_BITS}),
    ],
)
def test_rows_without_a_label_are_no_class(
    seen: tuple[tuple[int, ...], ...], changes: dict[str, float]
) -> None:
    assert run(CrossEntropy(), [ignoring(s, *seen, **changes) for s in range(60)]) == []


@pytest.mark.parametrize(("every", "step"), [(1, 7), (10, 40)])
@pytest.mark.parametrize("seen", [((0, 1, 4), (0, 1, 4)), ((0, 1, 4), (0, 1, 4), (0, 1))])
def test_a_few_classes_that_alone_come_are_told_once(
    every: int, step: int, seen: tuple[tuple[int, ...], ...]
) -> None:
    looks = [ignoring(s * every, *seen, classes=10, labelled=1.0) for s in range(40)]
    (warn,) = run(CrossEntropy(), looks)
    assert (warn.level, warn.step, warn.rank, warn.phase) == ("warn", step, None, "forward")
    assert warn.values == {"came": 3, "classes": 10}
    assert "of the 10 classes of the output 3 alone have come as labels in" in warn.message


@pytest.mark.parametrize(
    ("seen", "changes"),
    [
        ((0, 1, 2), {"classes": 5}),  # more than half of them
        ((0, 1), {"classes": 4}),  # of few classes two may be rare
        ((3,), {"classes": 9}),
        ((0, 1), {"classes": 52, "rows": 16}),  # 16 rows a look: too few for so many, at first
        ((0, 1), {"classes": 53}),
        ((0, 1, 12), {"classes": 10}),  # they are not these classes
        ((0, 1), {"classes": 10, CLASS_LOOKED: 15}),
        ((0, 1), {"classes": 10, "input_elements": 64}),
        ((0, 1), {"classes": 10, CLASS_SEEN: math.nan}),
    ],
)
def test_labels_that_may_be_all_there_are_are_not_few(
    seen: tuple[int, ...], changes: dict[str, float]
) -> None:
    looks = [ignoring(s, seen, seen, **{"labelled": 1.0, **changes}) for s in range(16)]
    assert run(CrossEntropy(), looks) == []


def test_of_classes_of_unlike_shares_no_few_are_told() -> None:
    """One that has come now and then is rare; so may those be that have not come yet."""
    seldom = [
        ignoring(s, (0, 1, *([2] if s % 9 == 4 else [])), (0, 1), classes=10, labelled=1.0)
        for s in range(200)
    ]
    found = run(CrossEntropy(), seldom[4:])
    assert found == []
    sorted_by_class = [
        ignoring(s, (s // 20 % 10,), (s // 20 % 10,), classes=10, labelled=1.0) for s in range(60)
    ]
    assert [a for a in run(CrossEntropy(), sorted_by_class) if "came" in a.values] == []


def test_each_rank_must_have_such_rows_and_all_other_classes_must_have_come_often() -> None:
    def made(labelled: Sequence[float], often: int = 3) -> list[StepRecord]:
        looks = [ignoring(s, (0, 2) if s % 3 < often else (0,), (0,)) for s in range(60)]
        for one in looks:
            said = zip(one.scalars.values(), labelled, strict=True)
            for facts, share in said:
                facts[CLASS_LABELLED] = share  # type: ignore[index]
        return looks

    assert run(CrossEntropy(), made((0.8, 1.0))) == []
    assert run(CrossEntropy(), made((0.8, 0.05))) == []
    assert [warn.step for warn in run(CrossEntropy(), made((0.8, 0.7)))] == [11]
    assert [warn.step for warn in run(CrossEntropy(), made((0.8, 0.7), often=1))] == [39]
    # 32 rows a look, of which 0.96 have none: 20 do at the 21st.
    assert [warn.step for warn in run(CrossEntropy(), made((0.97, 0.97)))] == [20]
    few = [ignoring(s, *[(0, 2)] * 3, rows=8) for s in range(60)]
    assert [warn.step for warn in run(CrossEntropy(), few)] == [7]  # 24 rows a look


def test_other_ranks_begin_anew_and_a_look_that_says_less_is_left_out() -> None:
    two = [ignoring(s, (0, 2), (0, 2)) for s in range(7)]
    three = [ignoring(s, *[(0, 2)] * 3) for s in range(9, 30)]
    assert [warn.step for warn in run(CrossEntropy(), two + three)] == [16]
    texts = [ignoring(s, (0, 1, 2), (0, 2), input_elements=16) for s in range(9, 30)]
    rest = [ignoring(s, (0, 2), (0, 2)) for s in range(30, 40)]
    assert [warn.step for warn in run(CrossEntropy(), two + texts + rest)] == [30]


class _Net(nn.Module):
    """Four features and four of noise to three classes; what it returns is by the case."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.body, self.head, self.case = nn.Linear(8, 16), nn.Linear(16, 3), case

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        features = self.body(x).relu()
        logits = self.head(features)
        if self.case == "beside":
            return features.detach(), logits, logits.softmax(1)
        if self.case == "cosine":
            rows, classes = (functional.normalize(t) for t in (features, self.head.weight.abs()))
            return 8 * (rows + 1e-3) @ classes.T
        return logits.relu() if self.case == "relu" else logits


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("relu", "leave out the ReLU"),
        ("ignored", "has had label 1,"),
        ("weight", "has had label 1,"),
        ("healthy", None),
        ("cosine", None),
        ("beside", None),
        ("semi-supervised", None),
    ],
)
def test_a_training_is_told_by_what_its_ranks_record(
    tmp_path: Path, case: str, words: str | None
) -> None:
    torch.manual_seed(0)
    model = _Net(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    weight = torch.tensor([1.0, 0.0, 1.0]) if case == "weight" else None
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for _ in range(24):
            label = torch.randint(0, 3, (32,))
            x = torch.cat((functional.one_hot(label, 4) * 2.0, torch.randn(32, 4)), 1)
            y = model(x)
            logits = y[1] if isinstance(y, tuple) else y
            if case == "semi-supervised":
                label = label.where(torch.rand(32) < 0.7, -100)
            ignored = 1 if case == "ignored" else -100
            loss = functional.cross_entropy(logits, label, weight, ignore_index=ignored)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    records = list(ddpprobe.open(tmp_path / "r").records())
    assert sum(CLASS_WEIGHT in one.scalars[0] for one in records) == 24
    found = hear(CrossEntropy(), records)
    assert len(found) == (words is not None)
    assert all(words is not None and words in one.message for one in found)


def extra(
    number: int, place: float, low: float = -3.0, high: float = 3.0, ranks: int = 2
) -> StepRecord:
    """A step whose gradients show a place in `EXTRA_ACTIVATIONS`, and of whose loss no more."""
    rows = {Site("", "output"): {"min": low, "max": high}, Site("", "grad_output"): {"rms": 0.1}}
    return record(number, {rank: {EXTRA_ACTIVATION: place} for rank in range(ranks)}, rows)


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("pair", EXTRA_ACTIVATIONS)
def test_an_activation_before_a_loss_that_has_its_own_is_told_once(
    pair: tuple[str, str], every: int
) -> None:
    place = EXTRA_ACTIVATIONS.index(pair) + 1
    inside = pair[0].endswith("inside")
    looks = [math.nan, math.nan, place, math.nan] + [place] * 60
    stream = [extra(i * every, x, 0.1, 0.7) for i, x in enumerate(looks)]
    (warn,) = run(CrossEntropy(quiet_steps=10**6), stream)
    assert (warn.level, warn.phase, warn.rank) == ("warn", "backward", None)
    assert warn.step == (70 if every == 10 else 52 if inside else 10)
    assert pair[0].split()[0] in warn.message
    assert ("binary" in warn.message) == (pair[1] == "binary")


def test_looks_that_show_none_or_another_one_begin_anew() -> None:
    for other in (0.0, 2.0):
        stream = [extra(s, other if s % 8 == 7 else 4.0) for s in range(64)]
        assert run(CrossEntropy(), stream) == []
    apart = [
        record(s, {0: {EXTRA_ACTIVATION: 4.0}, 1: {EXTRA_ACTIVATION: 0.0}}, {}) for s in range(64)
    ]
    assert run(CrossEntropy(), apart) == []
    unknown = [extra(s, x) for s, x in enumerate([99.0, -1.0] * 32)]
    assert run(CrossEntropy(), unknown) == []


def test_first_logits_that_lie_between_0_and_1_are_no_sigmoid_yet() -> None:
    place = EXTRA_ACTIVATIONS.index(("sigmoid inside", "binary")) + 1
    near = [extra(s, place, 0.3, 0.7) for s in range(64)]
    assert run(CrossEntropy(), near) == []
    early = [extra(s, place, 0.1, 0.9) for s in range(50)] + [extra(50, 0.0)]
    assert run(CrossEntropy(), early) == []


def test_ranks_with_texts_of_unlike_length_are_not_compared() -> None:
    """The short ones may be answered otherwise; of nearly as many rows a rank is told."""
    assert told(answering(0.9, rows=64), answering(0.2, rows=32)) == []
    in_turn = [look(rows, **{CLASS_RIGHT: 0.2}) for rows in (32, 64) * 20]
    assert told(in_turn, answering(0.9, rows=64)) == []
    (warn,) = told(answering(0.9, rows=45), answering(0.2, rows=32))
    assert "rank 1 answers 20 %" in warn.message
