"""One rank that is not like the others is named; ranks that differ by design are let be."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ddpprobe.detectors.loss import losses_by_rank
from ddpprobe.detectors.rank_outlier import RankOutlier, _away
from ddpprobe.records.every_loss import name_of
from ddpprobe.records.step import StepRecord
from tests.detectors.made_records import levels, record, run


def step(number: int, name: str, values: list[float], **changes: object) -> StepRecord:
    return record(number, {r: {name: v} for r, v in enumerate(values)}, **changes)


def noisy(steps: int, name: str, scales: list[float], spread: float) -> list[StepRecord]:
    rng = np.random.default_rng(0)
    return [
        step(s, name, list(scales * np.exp(spread * rng.standard_normal(len(scales)))))
        for s in range(steps)
    ]


@pytest.mark.parametrize(("name", "factor"), [("loss", 1e-3), ("grad_norm_local", 1e4),
                                              ("output_rms", 0.2)])  # fmt: skip
def test_a_rank_that_leaves_the_others_is_named_at_the_third_step(name: str, factor: float) -> None:
    stream = noisy(50, name, [1.0] * 4, 0.1)
    stream += [step(s, name, [1.0, 1.0, factor, 1.0]) for s in range(50, 60)]
    (warn,) = run(RankOutlier(), stream)
    assert (warn.level, warn.step, warn.rank) == ("warn", 52, 2)
    assert ("above" if factor > 1 else "below") in warn.message


def test_a_rank_that_contributes_nothing_is_named_from_the_start() -> None:
    (warn,) = run(RankOutlier(), [step(s, "loss", [1.0, 0.0]) for s in range(20)])
    assert (warn.step, warn.rank) == (2, 1)
    assert "is zero" in warn.message


def test_a_rank_beside_others_that_have_nothing_is_told_without_a_ratio() -> None:
    (warn,) = run(RankOutlier(), [step(s, "loss", [0.0, 0.0, 3.0]) for s in range(20)])
    assert (warn.step, warn.rank) == (2, 2)
    assert "rank 2's loss is not zero, that of the others is" in warn.message


def test_what_is_next_to_nothing_is_not_called_zero() -> None:
    (warn,) = run(RankOutlier(), [step(s, "loss", [1.0, 1e-16]) for s in range(20)])
    assert "is 1e+16 x below rank 0's" in warn.message


def test_losses_further_apart_than_a_float_can_say_are_told() -> None:
    (warn,) = run(RankOutlier(), [step(s, "loss", [1e300, 1e-20, 1e-20]) for s in range(20)])
    assert "1e+300 x" in warn.message


@pytest.mark.parametrize("level", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("away", [30.0, 0.2])
def test_of_two_ranks_that_part_the_one_is_named_whose_own_numbers_moved(
    away: float, level: float
) -> None:
    stream = noisy(50, "output_rms", [level, level], 0.02)
    stream += [step(s, "output_rms", [level, level * away]) for s in range(50, 60)]
    (warn,) = run(RankOutlier(), stream)
    assert (warn.step, warn.rank) == (52, 1)


def test_of_two_ranks_that_both_moved_none_is_named() -> None:
    stream = noisy(50, "output_rms", [1.0, 1.0], 0.02)
    stream += [step(s, "output_rms", [0.2, 5.0]) for s in range(50, 60)]
    (warn,) = run(RankOutlier(), stream)
    assert (warn.step, warn.rank) == (52, None)


def test_of_two_ranks_a_loss_that_rises_is_named_and_one_that_falls_may_have_learned() -> None:
    for away, rank in ((0.1, None), (10.0, 1)):
        stream = noisy(50, "loss", [1.0, 1.0], 0.02)
        stream += [step(s, "loss", [1.0, away]) for s in range(50, 60)]
        warn = run(RankOutlier(loss_dex=0.5), stream)[0]
        assert (warn.step, warn.rank) == (52, rank)
        assert ("which of the two is wrong is not known" in warn.message) == (rank is None)


@pytest.mark.parametrize("name", ["loss", "grad_norm_local"])
def test_a_rank_that_stays_a_little_away_from_others_that_lie_close_is_named(name: str) -> None:
    stream = noisy(50, name, [1.0] * 3, 0.03)
    stream += [step(s, name, [1.0, 1.0, 2.0]) for s in range(50, 60)]
    (warn,) = run(RankOutlier(), stream)
    assert (warn.level, warn.step, warn.rank) == ("warn", 53, 2)
    assert "2 x above" in warn.message
    assert "at 4 of the last 5" in warn.message


def test_what_any_rank_does_by_chance_bounds_all_of_them() -> None:
    stream = noisy(50, "loss", [1.0] * 4, 0.03)
    stream[30] = step(30, "loss", [2.0, 1.0, 1.0, 1.0])  # once, another rank
    stream += [step(s, "loss", [1.0, 1.0, 2.0, 1.0]) for s in range(50, 55)]
    assert run(RankOutlier(), stream) == []


def test_a_rank_that_lies_away_on_both_sides_in_turn_is_let_be() -> None:
    stream = noisy(50, "loss", [1.0] * 3, 0.03)
    stream += [step(s, "loss", [1.0, 1.0, (2.0, 0.5)[s % 2]]) for s in range(50, 60)]
    assert run(RankOutlier(), stream) == []


def test_twelve_sampled_steps_must_say_how_far_ranks_lie_apart() -> None:
    for before, found in ((11, 0), (12, 1)):
        stream = [step(s, "loss", [1.0, 1.01, 1.02]) for s in range(before)]
        stream += [step(s, "loss", [1.0, 1.0, 2.0]) for s in range(before, before + 5)]
        assert len(run(RankOutlier(settle=0), stream)) == found


def test_what_is_far_only_against_the_past_waits_for_fifty_steps() -> None:
    for far, begins, told in ((2.0, 44, []), (2.0, 46, [50]), (300.0, 20, [22])):
        stream = [step(s, "loss", [1.0, 1.01, 1.02]) for s in range(begins)]
        stream += [step(s, "loss", [1.0, 1.0, far]) for s in range(begins, begins + 5)]
        assert [a.step for a in run(RankOutlier(), stream)] == told


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_how_far_a_rank_lies_away_is_from_the_median_of_the_others(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    for _ in range(50):
        logs = dict(enumerate(rng.integers(-3, 3, ranks).astype(float).tolist()))
        expected = {r: x - float(np.median([y for q, y in logs.items() if q != r]))
                    for r, x in logs.items()}  # fmt: skip
        assert _away(logs) == expected


def test_a_job_of_a_thousand_ranks_is_judged_without_comparing_all_with_all() -> None:
    many = noisy(18, "loss", [1.0] * 1000, 0.03)
    stream = [*many, *(step(s, "loss", [1.0] * 999 + [3.0]) for s in range(18, 23))]
    (warn,) = run(RankOutlier(settle=0), stream)
    assert warn.rank == 999


def test_ranks_that_differ_by_design_are_let_be() -> None:
    for name in ("loss", "grad_norm_local", "output_rms"):
        said = run(RankOutlier(), noisy(400, name, [1.0, 1.3, 0.7, 2.0], 0.2))
        assert {a.level for a in said} <= {"info"}
    assert run(RankOutlier(), noisy(400, "grad_norm_local", [1.0, 30.0, 1.0], 0.7)) == []


@pytest.mark.parametrize(("ranks", "factor", "named"), [(4, 1.5, 2), (4, 0.5, 2), (2, 1.5, None)])
def test_a_rank_whose_loss_is_always_the_largest_or_smallest_is_information(
    ranks: int, factor: float, named: int | None
) -> None:
    odd = ranks // 2
    scales = [factor if r == odd else 1.0 for r in range(ranks)]
    (info,) = run(RankOutlier(), noisy(300, "loss", scales, 0.02))
    assert (info.level, info.step, info.rank) == ("info", 29, named)
    word = "above" if factor > 1 else "below"
    others = "rank 0's" if ranks == 2 else "that of each other rank"
    assert info.message.startswith(f"rank {odd}'s loss was {word} {others} at each of the last 30")
    assert info.values["decades"] == pytest.approx(math.log10(factor), rel=0.1)


@pytest.mark.parametrize("scales", [[1.0] * 2, [1.0] * 8, [1.0, 1.0, 1.05, 1.0]])
def test_ranks_that_take_turns_or_lie_close_are_not_told(scales: list[float]) -> None:
    assert run(RankOutlier(), noisy(300, "loss", scales, 0.001 if max(scales) > 1 else 0.3)) == []


def test_a_rank_that_is_missing_or_equal_once_breaks_the_row() -> None:
    stream = noisy(59, "loss", [1.0, 1.5, 1.0], 0.02)
    stream[29] = replace(stream[29], ranks=(0, 1, 2, 3))  # one that says nothing
    assert [a.step for a in run(RankOutlier(), stream)] == [30]
    stream[29] = step(29, "loss", [1.5, 1.5, 1.0])
    assert run(RankOutlier(), stream) == []


def test_a_loss_that_is_four_times_the_others_is_seen_in_the_mean_of_all_steps() -> None:
    """One loss of each fifty says next to nothing: a step's lies up to 10 x from the mean."""
    rng = np.random.default_rng(1)

    def told(number: int, scales: list[float], steps: int) -> StepRecord:
        scalars: dict[int, dict[str, float]] = {}
        for rank, scale in enumerate(scales):
            losses = scale * np.exp(0.8 * rng.standard_normal(steps))
            scalars[rank] = {name_of(i): float(x) for i, x in enumerate(losses)}
        return record(number * 50, scalars)

    def stream(steps: int) -> list[StepRecord]:
        even = [told(s, [1.0, 1.0, 1.0], steps) for s in range(40)]
        return even + [told(s, [1.0, 4.0, 1.0], steps) for s in range(40, 60)]

    assert run(RankOutlier(), stream(1)) == []
    (warn,) = run(RankOutlier(), stream(50))
    assert (warn.level, warn.step, warn.rank) == ("warn", 44 * 50, 1)


def test_steps_that_lack_a_ranks_loss_are_left_out_of_the_mean() -> None:
    late = record(9, {0: {"loss": 1.0, name_of(1): 100.0, name_of(2): 3.0},
                      1: {"loss": 2.0, name_of(2): 4.0}})  # fmt: skip
    assert losses_by_rank(late) == {0: 2.0, 1: 3.0}
    assert losses_by_rank(record(9, {0: {"loss": 1.0}, 1: {name_of(1): 1.0}})) == {}
    assert losses_by_rank(record(9, {0: {"lr": 1.0}})) == {}
    assert losses_by_rank(record(9, {0: {"loss": 1.0}, 1: {}})) == {0: 1.0}


def test_two_batches_without_a_target_are_let_be() -> None:
    stream = noisy(100, "loss", [1.0] * 3, 0.1)
    for s in (50, 51, 70):
        stream[s] = step(s, "loss", [1.0, 0.0, 1.0])
    assert run(RankOutlier(), stream) == []


def test_a_rank_that_is_missing_or_says_nothing_is_not_compared() -> None:
    alone = [step(s, "loss", [1.0], missing=(1, 2)) for s in range(20)]
    silent = [record(s, {0: {"loss": 1.0}, 1: {}}) for s in range(20, 60)]
    assert run(RankOutlier(), [*alone, *silent]) == []


def test_values_that_nobody_expects_do_not_raise() -> None:
    odd = (math.nan, math.inf, 1e308, 5e-324, -1.0, 0.0)
    stream = [step(s, "output_rms", [odd[s % 6], odd[s % 5], 1.0]) for s in range(200)]
    run(RankOutlier(), [*stream, StepRecord(0, 300, (0, 1), 0)])
    zero = [step(s, "loss", [0.0, 0.0]) for s in range(50)]
    assert levels(run(RankOutlier(), zero)) == []
