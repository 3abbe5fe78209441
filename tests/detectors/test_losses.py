"""A loss that jumps or runs away is told; one that is noisy, falls, or is no loss, is not."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from ddpprobe.detectors.detector import Detector
from ddpprobe.detectors.level_shift import LevelShift
from ddpprobe.detectors.loss_runaway import LossRunaway
from ddpprobe.detectors.loss_spike import LossSpike
from ddpprobe.records.every_loss import name_of
from ddpprobe.records.step import Site, StepRecord
from tests.detectors.made_records import levels, record, run

BOTH = pytest.mark.parametrize("detector", [LossSpike, LossRunaway])


def step(number: int, *losses: float, **changes: object) -> StepRecord:
    return record(number, {rank: {"loss": loss} for rank, loss in enumerate(losses)}, **changes)


def falling(steps: int, every: int = 1) -> list[StepRecord]:
    """Two ranks' losses from 3 down to 0.5, with some noise."""
    rng = np.random.default_rng(0)
    mean = [0.5 + 2.5 * math.exp(-s / 30) for s in range(0, steps, every)]
    noise = np.exp(0.1 * rng.standard_normal((len(mean), 2)))
    return [step(i * every, *(m * noise[i])) for i, m in enumerate(mean)]


@BOTH
@pytest.mark.parametrize("every", [1, 10])
def test_a_loss_that_falls_is_left_alone(detector: type[Detector], every: int) -> None:
    assert run(detector(), falling(600, every)) == []


def test_a_loss_that_begins_at_zero_but_for_rounding_only_grows() -> None:
    grown = [1e-8, *(4e-6 * step**1.5 for step in range(1, 300))]  # the KL term of GRPO
    assert run(LossRunaway(), [step(number, loss) for number, loss in enumerate(grown)]) == []
    (warn, *_) = run(LossRunaway(), [step(n, loss) for n, loss in enumerate(grown[4:])])
    assert warn.detector == "loss_runaway"  # it began at a hundredth of that, not at zero


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize(("times", "level"), [(3e2, "warn"), (1e4, "page")])
def test_a_loss_of_a_thousand_times_what_it_began_with_is_a_page(
    every: int, times: float, level: str
) -> None:
    blown = [step(s, *(times * rank for rank in (2.0, 3.0))) for s in range(200, 250, every)]
    (found,) = run(LossRunaway(), [*falling(200, every), *blown])
    assert found.level == level


def test_a_spike_is_told_at_once_with_its_numbers() -> None:
    stream = [*falling(200), step(200, 6.0, 4.0)]
    (warn,) = run(LossSpike(), stream)
    assert (warn.level, warn.step, warn.rank, warn.phase) == ("warn", 200, None, "forward")
    assert warn.values["loss"] == 5.0
    assert 8 < warn.values["ratio"] < 12


@pytest.mark.parametrize(
    ("losses", "rank"),
    [((0.5, 6.0), 1), ((6.0, 6.0), None), ((0.5, 0.5, 9.0, 0.5), 2), ((0.5, 9.0, 9.0), None),
     ((math.nan, 6.0), None)],
)  # fmt: skip
def test_the_rank_without_which_there_is_no_spike_is_named(losses, rank: int | None) -> None:
    (warn,) = run(LossSpike(), [*falling(200), step(200, *losses)])
    assert (warn.step, warn.rank) == (200, rank)
    told = f"; that of rank {rank} is {max(losses):.3g}, the mean of the others 0.5"
    assert warn.message.endswith(told) == (rank is not None)


def between(records: list[StepRecord], every: int) -> list[StepRecord]:
    """Keep each `every`-th record, with the losses of those before it."""
    kept = []
    for i in range(every - 1, len(records), every):
        group = records[i - every + 1 : i + 1]
        scalars = {
            rank: {name_of(group[-1].step - r.step): r.scalars[rank]["loss"] for r in group}
            for rank in group[-1].scalars
        }
        kept.append(replace(group[-1], scalars=scalars))
    return kept


@BOTH
def test_at_any_interval_the_same_is_said_as_of_records_of_every_step(
    detector: type[Detector],
) -> None:
    stream = [*falling(205), step(205, 6.0, 4.0), *[step(s, 1.0, 1.0) for s in range(206, 260)]]
    stream += [step(s, 9.0, 9.0) for s in range(260, 300)]
    every_step = run(detector(), stream)
    assert every_step
    for every in (5, 10, 100):
        found = run(detector(), between(stream, every))
        assert [replace(a, sampled=True, wall_time_ns=0) for a in found] == [
            replace(a, wall_time_ns=0) for a in every_step
        ]
    alone = [replace(r, sampled=r.step % 50 == 49) for r in between(stream, 10)]
    assert len(run(detector(), alone)) == len(every_step)


def test_a_spike_that_is_still_below_the_first_loss_is_told() -> None:
    stream = [step(s, 3.0 * 10 ** (-min(s, 20) / 40)) for s in range(100)]  # down to a third
    (warn,) = run(LossSpike(), [*stream, step(100, 2.9)])
    assert warn.step == 100
    deep = [step(s, 3.0 * 10 ** (-min(s, 120) / 40)) for s in range(200)]  # to a thousandth
    assert run(LossSpike(), [*deep, step(200, 0.14)]) == []
    assert len(run(LossSpike(), [*deep, step(200, 0.16)])) == 1


def test_one_ranks_outlier_among_many_is_no_spike() -> None:
    many = [step(s, *np.exp(0.1 * np.random.default_rng(s).standard_normal(64))) for s in range(80)]
    assert run(LossSpike(), [*many, step(80, 20.0, *[1.0] * 63)]) == []


def test_a_runaway_is_told_once_it_lasted_and_again_only_behind_a_new_best() -> None:
    stream = falling(200) + [step(s, 3.0) for s in range(200, 320)]
    stream += [step(s, 0.2) for s in range(320, 400)] + [step(s, 3.0) for s in range(400, 460)]
    found = run(LossRunaway(), stream)
    assert [a.level for a in found] == ["warn"] * 2
    assert 215 <= found[0].step <= 235
    assert found[1].step > 400
    assert found[0].values["ratio"] > 3


def to_the_start(best: float, end: float, steps: int = 60, every: int = 1) -> list[StepRecord]:
    """A loss that falls from 3 to its best in 100 steps, and is elsewhere from step 150 on."""
    losses = [max(best, 3.0 - (3.0 - best) * s / 100) if s < 150 else end for s in range(300)]
    return [step(s, losses[s]) for s in range(0, 150 + steps, every)]


@pytest.mark.parametrize("every", [1, 10])
def test_a_loss_that_is_back_where_it_began_has_run_away(every: int) -> None:
    stream = to_the_start(1.9, 3.0, 100, every)
    (warn,) = run(LossRunaway(), stream)
    assert warn.level == "warn"
    assert 150 <= warn.values["since"] <= 200
    assert ", where it began (" in warn.message


@pytest.mark.parametrize(
    ("best", "end", "steps"),
    [
        (2.1, 2.5, 60),  # not back at the first ones
        (2.4, 3.0, 60),  # had not learned much
        (2.1, 3.0, 35),  # 30 steps, beside those that the smoothed loss takes
    ],
)
def test_a_loss_that_is_not_quite_back_or_not_for_long_has_not(
    best: float, end: float, steps: int
) -> None:
    assert run(LossRunaway(), to_the_start(best, end, steps)) == []


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("loss", [30.0, 1e3, 1e7])
def test_one_enormous_loss_that_stays_in_the_mean_is_no_runaway(loss: float, every: int) -> None:
    stream = [*falling(200, every), step(200, loss)]
    stream += [step(s, 0.2) for s in range(200 + every, 400, every)]
    assert run(LossRunaway(), stream) == []
    stream += [step(s, loss) for s in range(400, 500, every)]
    assert len(run(LossRunaway(), stream)) == 1


def test_at_an_interval_of_ten_a_runaway_takes_three_sampled_steps() -> None:
    stream = falling(200, 10) + [step(s, 3.0) for s in range(200, 300, 10)]
    (warn,) = run(LossRunaway(), stream)
    assert 220 <= warn.step <= 250


@BOTH
def test_what_is_small_beside_the_first_losses_is_not_lost(detector: type[Detector]) -> None:
    stream = [step(s, 3.0 * 10 ** (-s / 20)) for s in range(120)]
    assert run(detector(), stream + [step(s, 1e-3) for s in range(120, 300)]) == []


@BOTH
def test_rewards_and_densities_are_not_judged(detector: type[Detector]) -> None:
    rng = np.random.default_rng(0)
    stream = [step(s, rng.standard_normal()) for s in range(100)]
    assert run(detector(), stream + [step(s, 1e6) for s in range(100, 200)]) == []


@BOTH
def test_a_restart_begins_anew(detector: type[Detector]) -> None:
    assert run(detector(), falling(200) + [step(s, 5.0, attempt=1) for s in range(300)]) == []


@BOTH
def test_values_that_nobody_expects_do_not_raise(detector: type[Detector]) -> None:
    odd = (math.nan, math.inf, 1e308, 5e-324, 1.0)
    stream = [step(s, odd[s % 5]) for s in range(400)]
    run(detector(), [*stream, StepRecord(0, 400, (), 0)])


def test_a_loss_that_is_zero_once_ends_the_judgement() -> None:
    stream = [*falling(100), step(100, 0.0)] + [step(s, 9.0) for s in range(101, 200)]
    assert levels(run(LossRunaway(), stream)) == []


def growing(factor: float, steps: int = 300) -> list[StepRecord]:
    """A loss that begins with 3, and grows by so much within a hundred steps, with some noise."""
    rng = np.random.default_rng(1)
    mean = [3.0 * (1 + (factor - 1) * min(s / 100, 1.0)) for s in range(steps)]
    return [step(s, m * math.exp(0.05 * rng.standard_normal())) for s, m in enumerate(mean)]


def test_a_loss_that_training_has_made_worse_than_it_began_is_told_once() -> None:
    (warn,) = run(LossRunaway(ratio=100), growing(3.0))
    assert (warn.level, warn.phase, warn.module, warn.rank) == ("warn", "forward", None, None)
    assert warn.step == 100  # as soon as it may be: since step 50 or so all losses are above
    assert warn.values["first"] == pytest.approx(3.0, rel=0.1)
    assert ". If the data are as hard as at first, training makes the model worse" in warn.message
    assert run(LossRunaway(ratio=100), growing(1.4)) == []


def test_what_is_above_the_start_must_be_so_fifty_times_in_a_row() -> None:
    for above, told in ((50, []), (51, [220])):  # the first of them decides what is the last
        stream = [step(s, 9.0 if 170 <= s < 170 + above else 3.0) for s in range(300)]
        found = run(LossRunaway(ratio=100, above=51), stream)
        assert [a.step for a in found] == told


def test_a_run_that_ran_away_is_not_told_to_be_worse_as_well() -> None:
    stream = [*falling(100), *(step(s, 9.0) for s in range(100, 300))]
    (warn,) = run(LossRunaway(), stream)
    assert "the best" in warn.message


@pytest.mark.parametrize("of_first", [0.5, 4.0])
def test_the_mean_of_the_ranks_that_are_left_beside_a_nan_has_not_run_away(of_first: float) -> None:
    stream = [step(s, of_first, 1.0) for s in range(200)]
    stream += [step(s, of_first, math.nan) for s in range(200, 400)]
    stream += [step(s, math.nan, 1.0) for s in range(400, 600)]
    assert run(LossRunaway(), stream) == []
    assert run(LevelShift(), stream) == []


def summed(steps: int, *, longer: bool, per_token: float = 1.0) -> list[StepRecord]:
    """A loss that is a sum over tokens, of which there are more and more; or not."""
    out = Site("head", "output")
    lengths = [4 + s // 8 for s in range(steps)]
    return [
        record(s, {0: {"loss": per_token**s * n}}, {out: {"numel": 8 * (n if longer else 4)}})
        for s, n in enumerate(lengths)
    ]


def test_a_summed_loss_that_grows_as_the_outputs_do_has_not_run_away() -> None:
    assert run(LossRunaway(), summed(300, longer=True)) == []
    assert levels(run(LossRunaway(), summed(300, longer=False))) == [("warn", 95)]


def test_a_loss_that_grows_faster_than_the_outputs_do_runs_away() -> None:
    assert levels(run(LossRunaway(), summed(300, longer=True, per_token=1.02)))[0][0] == "warn"
