"""A step that changes the weights out of all proportion is told; a large but usual one is not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from ddpprobe.detectors.update_ratio import UpdateRatio
from ddpprobe.records.step import (
    CLASS_RIGHT,
    CLASS_SEEN,
    LEARNING_RATE,
    NAN,
    TRAINABLE,
    StepRecord,
)
from tests.detectors.made_records import levels, record, run
from tests.detectors.made_weights import Made, weights

USUAL = 2e-3


def stream(*later: float, usual: float = USUAL, first: int = 40) -> list[StepRecord]:
    shares = [usual] * first + list(later)
    return [
        weights(s, {"fc.weight": Made(1.0, share), "fc.bias": Made(1e-6, 1e-3 * share)})
        for s, share in enumerate(shares)
    ]


def test_a_step_twenty_times_as_large_as_usual_is_told() -> None:
    (warn,) = run(UpdateRatio(), stream(0.06, 0.06, USUAL))
    assert (warn.level, warn.step, warn.module, warn.kind) == ("warn", 40, None, "update")
    assert warn.values == pytest.approx({"share": 0.06, "median": USUAL, "highest": USUAL}, 1e-3)


@pytest.mark.parametrize(("first", "looks"), [(40, 40), (80, 64)])
def test_the_step_itself_is_not_among_the_looks_before(first: int, looks: int) -> None:
    (warn,) = run(UpdateRatio(), stream(0.06, first=first))
    assert f"of the last {looks} looks" in warn.message


@pytest.mark.parametrize(
    "records",
    [
        stream(0.04),  # below the share that matters
        stream(0.06, usual=4e-3),  # fifteen times
        stream(*[0.03] * 3, 0.08),  # below three times the largest
        stream(0.9, first=7),  # too early to know
        stream(*[0.0] * 20, USUAL),  # steps without a change
        stream(*[0.0] * 64, 0.06, usual=4e-3),  # which are not what is usual either
        [*stream(), weights(40, {"fc.weight": Made(0.0, 0.1)})],  # no share of nothing
    ],
)
def test_what_is_large_but_not_out_of_proportion_is_left_alone(records: list[StepRecord]) -> None:
    assert run(UpdateRatio(), records) == []


def test_a_bias_about_zero_does_not_count_for_more_than_it_is() -> None:
    records = stream()
    made = {"fc.weight": Made(1.0, USUAL), "fc.bias": Made(1e-6, 1e-4)}
    assert run(UpdateRatio(), [*records, weights(40, made)]) == []


def test_it_is_told_again_when_ten_times_worse_or_after_a_quiet_time() -> None:
    records = stream(0.2, 0.2, 3.0, *[USUAL] * 200, 9.1)
    assert levels(run(UpdateRatio(), records)) == [("warn", 40), ("warn", 42), ("warn", 243)]


@pytest.mark.parametrize("changes", [{"skipped": True}, {"missing": (1,)}])
def test_a_step_that_was_skipped_or_lacks_a_rank_is_neither_judged_nor_usual(
    changes: dict[str, object],
) -> None:
    made = {"fc.weight": Made(1.0, 0.9)}
    odd = [weights(s, made, **changes) for s in range(40, 80)]
    assert run(UpdateRatio(), [*stream(), *odd]) == []
    later = [weights(s, made) for s in range(80, 81)]
    assert levels(run(UpdateRatio(), [*stream(), *odd, *later])) == [("warn", 80)]


def rated(number: int, rate: float, trained: float = 4.0) -> StepRecord:
    return record(number, {0: {LEARNING_RATE: rate, TRAINABLE: trained}})


@pytest.mark.parametrize("every", [1, 10])
def test_a_rate_that_rises_behind_a_rest_is_told_once(every: int) -> None:
    rates = [1e-3 * 1.05 ** max(0, s - 100) for s in range(0, 300, every)]
    (warn,) = run(UpdateRatio(), [rated(i * every, rate) for i, rate in enumerate(rates)])
    assert (warn.level, warn.step, warn.kind) == ("warn", 123 if every == 1 else 130, "update")
    assert warn.values["highest"] == 1e-3
    assert 3 <= warn.values["lr"] / 1e-3 < 6


def test_rises_that_schedules_have_are_left_alone() -> None:
    warm = [1e-7 * 1.05 ** min(s, 200) for s in range(400)]
    restarts = [0.5 + 0.5 * math.cos(math.pi * (s % 100) / 100) for s in range(400)]
    one_cycle = [1e-4 + 1e-2 * math.sin(math.pi * s / 400) for s in range(400)]
    twice = [1e-3 if s < 200 else 2e-3 for s in range(400)]
    for rates in (warm, restarts, one_cycle, twice):
        assert run(UpdateRatio(), [rated(s, rate) for s, rate in enumerate(rates)]) == []


@pytest.mark.parametrize("every", [1, 10])
def test_a_rate_that_is_back_where_it_rested_before_it_fell_is_told_once(every: int) -> None:
    rates = [1e-3 if s % 160 < 100 else 1e-4 for s in range(0, 640, every)]
    (warn,) = run(UpdateRatio(), [rated(i * every, rate) for i, rate in enumerate(rates)])
    assert (warn.level, warn.step, warn.kind) == ("warn", 160, "update")
    assert warn.values == {"lr": 1e-3, "before": 1e-4}


def test_falls_and_returns_that_schedules_have_are_left_alone() -> None:
    steps = [10.0 ** -(2 + s // 100) for s in range(400)]
    warmed = [min(1e-2, 1e-4 * (1 + s % 200)) if s % 200 < 150 else 1e-4 for s in range(600)]
    in_turn = [1e-2 if s % 2 else 1e-4 for s in range(400)]
    halves = [1e-2 if s % 200 < 100 else 6e-3 for s in range(400)]
    brief = [1e-4 if 100 <= s < 120 else 1e-2 for s in range(400)]
    for rates in (steps, warmed, in_turn, halves, brief):
        assert run(UpdateRatio(), [rated(s, rate) for s, rate in enumerate(rates)]) == []


def test_a_rate_comes_back_with_other_parameters() -> None:
    trained = [4.0 if s < 160 else 8.0 for s in range(300)]
    pairs = [(1e-4 if 100 <= s < 160 else 1e-3, trained[s]) for s in range(300)]
    assert run(UpdateRatio(), [rated(s, *of) for s, of in enumerate(pairs)]) == []


def test_other_parameters_may_bring_a_rate_of_their_own() -> None:
    unfrozen = [rated(s, 1e-4, 2.0) if s < 100 else rated(s, 1e-2, 8.0) for s in range(300)]
    assert run(UpdateRatio(), unfrozen) == []
    same = [rated(s, 1e-4 if s < 100 else 1e-2) for s in range(300)]
    assert levels(run(UpdateRatio(), same)) == [("warn", 100)]


def test_weights_of_which_one_is_not_finite_are_not_compared() -> None:
    """Of the bias alone, about zero, a step changes far more than of all."""

    def step(number: int) -> StepRecord:
        made = weights(number, {"fc.weight": Made(1.0, USUAL), "fc.bias": Made(1e-3, USUAL)})
        row = next(i for i, s in enumerate(made.sites) if s.key == ("fc.weight", "param", ""))
        made.counts[row, NAN] = 10 if number >= 40 else 0
        return made

    assert run(UpdateRatio(), [step(s) for s in range(60)]) == []


def phases(*, others: bool) -> list[StepRecord]:
    """A rate that is ten times as high from step 60 on, at which other parameters move, or not."""
    records = []
    for step in range(120):
        late = step >= 60
        moved = {"a": not (late and others), "b": late or not others}
        made = {f: Made(1.0, 1e-3 if moves else 0.0) for f, moves in moved.items()}
        said = {0: {LEARNING_RATE: 1e-2 if late else 1e-3, TRAINABLE: 2.0}}
        records.append(weights(step, made, scalars=said))
    return records


def test_another_optimizer_that_steps_instead_has_a_rate_of_its_own() -> None:
    assert run(UpdateRatio(), phases(others=True)) == []
    assert levels(run(UpdateRatio(), phases(others=False))) == [("warn", 60)]


def slow(
    number: int, *, rate: float = 3e-6, share: float = 3e-6, loss: float = 2.9, right: float = 0.06,
    labels: int = 16, frozen: bool = False,
) -> StepRecord:  # fmt: skip
    """A step of two ranks that hardly moves, by a model that guesses among some labels."""
    facts = {LEARNING_RATE: rate, "loss": loss, CLASS_RIGHT: right}
    half = (1 << labels // 2) - 1  # each rank has seen one half of them
    scalars = {0: {**facts, CLASS_SEEN: half}, 1: {**facts, CLASS_SEEN: half << labels // 2}}
    made = {"fc.weight": Made(1.0, share)}
    if frozen:
        made |= {f"backbone.{i}.weight": Made(1.0, 0.0, None) for i in range(100)}
    one = weights(number, made)
    return replace(one, ranks=(0, 1), scalars=scalars)


@pytest.mark.parametrize("seen", [math.nan, math.inf, -1.0, 1e300])
def test_what_is_no_set_of_labels_is_passed_over(seen: float) -> None:
    records = [slow(i) for i in range(60)]
    odd = {rank: {**said, CLASS_SEEN: seen} for rank, said in records[9].scalars.items()}
    (warn,) = run(UpdateRatio(), [*records[:9], replace(records[9], scalars=odd), *records[10:]])
    assert "a guess among 16 labels" in warn.message


@pytest.mark.parametrize(("every", "at"), [(1, 50), (10, 50), (100, 400)])
def test_a_model_that_guesses_and_hardly_moves_is_told_once(every: int, at: int) -> None:
    (warn,) = run(UpdateRatio(), [slow(i * every) for i in range(120)])
    assert (warn.level, warn.step, warn.rank, warn.module) == ("warn", at, None, None)
    assert warn.values == pytest.approx({"share": 3e-6, "lr": 3e-6, "loss": 2.9, "since": 0}, 1e-3)
    assert "a guess among 16 labels has 2.77" in warn.message


@pytest.mark.parametrize(
    "records",
    [
        [slow(i, share=2e-5) for i in range(120)],
        [slow(i, rate=1e-8 * (1 + i)) for i in range(120)],  # a warm-up
        [slow(i, rate=math.nan) for i in range(120)],
        [slow(i, loss=2.7) for i in range(120)],  # a fine-tuning
        [slow(i, right=0.2) for i in range(120)],  # of tokens of which 52 bits tell too little
        [slow(i, right=math.nan) for i in range(120)],  # another loss than a cross-entropy
        [slow(i, share=2e-5 if i % 50 == 0 else 3e-6) for i in range(120)],
        [slow(i, labels=0) for i in range(120)],
        [slow(i, share=2e-5, frozen=True) for i in range(120)],  # a new head on what is frozen
        [slow(i) for i in range(49)],
    ],
)
def test_a_rate_that_is_low_for_a_reason_is_left_alone(records: list[StepRecord]) -> None:
    assert run(UpdateRatio(), records) == []


def test_a_warm_up_that_ends_far_too_low_is_told_behind_its_end() -> None:
    records = [slow(i, rate=3e-6 * min(1, (i + 1) / 30)) for i in range(120)]
    assert levels(run(UpdateRatio(), records)) == [("warn", 79)]
