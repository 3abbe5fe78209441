"""Gradients that grow between the backward and the optimizer are found; those clipped are not."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from ddpprobe.detectors.grad_altered import GradAltered
from ddpprobe.records.step import (
    KEPT,
    LEARNING_RATE,
    NOTHING_REDUCES,
    UNREDUCED,
    USED_NORM,
    StepRecord,
)
from tests.detectors.made_records import levels, record, run


def step(number: int, ratios: Sequence[float], **changes: object) -> StepRecord:
    """Each rank's gradient, and that of its optimizer: so many times as large."""
    norm = 1 + number % 5
    said = {r: {"grad_norm": norm, USED_NORM: norm * x} for r, x in enumerate(ratios)}
    return record(number, said, **changes)


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("ratio", [1.01, 2.0, 2.9])
def test_gradients_that_become_larger_are_found_at_the_third_sampled_step(
    every: int, ratio: float
) -> None:
    stream = [step(s, [ratio if s >= 160 else 1.0]) for s in range(0, 300, every)]
    (warn,) = run(GradAltered(), stream)
    assert (warn.level, warn.step, warn.rank) == ("warn", 160 + 2 * every, 0)
    assert warn.values == {"ratio": pytest.approx(ratio), "since": 160, "ranks": 1}


def test_one_rank_is_named_and_several_are_not() -> None:
    for bad, rank in (([1, 2, 1], 1), ([1, 2, 2], None), ([2, 2, 2], None)):
        stream = [step(s, bad if s >= 60 else [1, 1, 1]) for s in range(90)]
        (warn,) = run(GradAltered(), stream)
        assert (warn.rank, warn.values["ranks"]) == (rank, bad.count(2))


def test_ranks_that_may_average_their_gradients_by_hand_are_left_alone() -> None:
    for reduced, found in ((1.0, 1), (NOTHING_REDUCES, 0)):
        stream = [step(s, [1.0, 1.03 if s >= 60 else 1.0]) for s in range(90)]
        for each in stream:
            for said in each.scalars.values():
                said[UNREDUCED] = reduced
        assert len(run(GradAltered(), stream)) == found


def test_clipping_that_begins_and_two_norms_of_bfloat16_are_left_alone() -> None:
    rng = np.random.default_rng(0)
    stream = [step(s, [1.0 if s < 60 else rng.uniform(0.01, 1.0)]) for s in range(200)]
    assert run(GradAltered(), stream) == []
    stream = [step(s, [1 + rng.uniform(-0.004, 0.004)]) for s in range(500)]
    assert run(GradAltered(), stream) == []


@pytest.mark.parametrize("factor", [3.0, 1e-5])
def test_a_scale_that_was_there_from_the_start_is_meant(factor: float) -> None:
    assert run(GradAltered(), [step(s, [3.0 + s % 2]) for s in range(100)]) == []
    stream = [step(s, [3.0 if s % 4 == 0 else factor]) for s in range(100)]
    assert run(GradAltered(), stream) == []


def test_with_a_quiet_of_0_each_is_told_that_comes_behind_a_step_without() -> None:
    found = run(GradAltered(quiet_steps=0), [step(s, [2.0 if s >= 60 else 1.0]) for s in range(70)])
    assert levels(found) == [("warn", s) for s in range(62, 70)]


def given(number: int, norm: float | None, **more: float) -> StepRecord:
    """Two ranks whose optimizers got gradients of one norm, of 2 that the backward left."""
    said = {"grad_norm": 2.0, LEARNING_RATE: 0.1, **({} if norm is None else {USED_NORM: norm})}
    return record(number, {rank: {**said, **more} for rank in (0, 1)})


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize(("little", "said"), [(None, "zero_grad"), (0.0, "zero_grad"),
                                              (1e-3, "clipped to")])  # fmt: skip
def test_gradients_of_which_little_is_left_are_told_at_the_third_look(
    every: int, little: float | None, said: str
) -> None:
    looks = range(0, 300, every)
    (warn,) = run(GradAltered(), [given(s, little if s >= 160 else 1.0) for s in looks])
    assert (warn.level, warn.step, warn.rank) == ("warn", 160 + 2 * every, None)
    assert said in warn.message
    assert warn.values == {"share": (little or 0.0) / 2, "before": 0.5, "since": 160}


def test_large_gradients_that_are_clipped_and_small_ones_that_are_not_lose_nothing() -> None:
    for norms in ((2e3, 1.0), (1e-3, 1e-3)):  # what the backward left, what was used
        stream = [given(s, 1.0) for s in range(50)]
        stream += [given(s, norms[1], grad_norm=norms[0]) for s in range(50, 100)]
        assert run(GradAltered(), stream) == []
    never = [given(s, None) for s in range(100)]  # sparse ones have no norm
    twice = [given(s, 1e-3 if s in {60, 61} else 1.0) for s in range(100)]
    assert run(GradAltered(), never) == run(GradAltered(), twice) == []


def test_two_steps_in_a_row_are_too_few() -> None:
    stream = [step(s, [2.0 if s in {60, 61, 90} else 1.0]) for s in range(100)]
    assert run(GradAltered(), stream) == []


@pytest.mark.parametrize(("before", "found"), [(7, 0), (8, 1)])
def test_what_was_passed_on_unchanged_counts_from_the_last_time_that_it_was_not(
    before: int, found: int
) -> None:
    ratios = [*[1.0] * 7, 2.0, *[1.0] * before, *[2.0] * 5]
    assert len(run(GradAltered(), [step(s, [x]) for s, x in enumerate(ratios)])) == found


def test_it_is_told_again_behind_a_quiet_time() -> None:
    stream = [step(s, [2.0 if 60 <= s < 70 or s >= 200 else 1.0]) for s in range(300)]
    assert levels(run(GradAltered(), stream)) == [("warn", 62), ("warn", 202)]


def test_numbers_that_are_none_and_steps_that_were_skipped_say_nothing() -> None:
    quiet = [step(s, [1.0]) for s in range(60)]
    for said in ({}, {"grad_norm": 0.0, USED_NORM: 1.0}, {"grad_norm": np.nan, USED_NORM: 1.0},
                 {"grad_norm": 1.0}, {"grad_norm": 1.0, USED_NORM: np.inf}):  # fmt: skip
        assert run(GradAltered(), [*quiet, *(record(s, {0: said}) for s in range(60, 90))]) == []
    skipped = [step(s, [2.0], skipped=True) for s in range(60, 90)]
    assert run(GradAltered(), [*quiet, *skipped]) == []


def clipped(number: int, to: float, scale: float, *, unscaled: bool) -> StepRecord:
    """A gradient of norm 5 to 9 that is clipped after the scaler's division, or before it."""
    norm = 5.0 + number % 5
    used = to if unscaled else to / scale
    return record(number, {0: {"grad_norm": norm, USED_NORM: used, "loss_scale": scale}})


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("to", [0.1, 1.0, 10.0])
def test_gradients_that_are_clipped_while_they_are_scaled_are_told_once(
    to: float, every: int
) -> None:
    scales = [2.0**16 if s < 100 else 2.0**17 for s in range(0, 300, every)]
    stream = [clipped(i * every, to, s, unscaled=False) for i, s in enumerate(scales)]
    (warn,) = run(GradAltered(), stream)
    assert (warn.level, warn.step, warn.rank) == ("warn", 4 * every, None)
    assert warn.values["clipped_to"] == pytest.approx(to)
    assert "scaler.unscale_(optimizer)" in warn.message


@pytest.mark.parametrize("to", [0.01, 0.5, 1.0])
def test_gradients_that_are_clipped_behind_the_scaler_are_left_alone(to: float) -> None:
    assert run(GradAltered(), [clipped(s, to, 2.0**16, unscaled=True) for s in range(200)]) == []
    assert run(GradAltered(), [clipped(s, to, 1.0, unscaled=True) for s in range(200)]) == []


def test_small_gradients_that_are_not_always_the_same_are_not_said_to_be_clipped() -> None:
    rng = np.random.default_rng(0)
    stream = [clipped(s, rng.uniform(0.5, 1.0), 2.0**16, unscaled=False) for s in range(200)]
    assert run(GradAltered(), stream) == []


def used(number: int, before: float, now: float) -> StepRecord:
    return record(number, {0: {"grad_norm": before, USED_NORM: now}})


def test_a_share_that_grows_slowly_from_next_to_nothing_is_left_alone() -> None:
    """A weight decay that is added by hand: at first it makes the gradient a little smaller."""
    ratios = [1.0] * 10 + [0.998, 0.995, 0.99, 0.97, 0.96, 0.99, 1.01, 1.2, 1.05, 1.4, 5.0, 9.0]
    assert run(GradAltered(), [used(s, 0.9**s, 0.9**s * x) for s, x in enumerate(ratios)]) == []
    upwards = [1 + 0.001 * max(0, s - 20) for s in range(80)]
    assert run(GradAltered(), [used(s, 2.0, 2.0 * x) for s, x in enumerate(upwards)]) == []


def test_what_is_clipped_by_a_little_was_clipped() -> None:
    norms = [1.02 + 0.01 * (s % 3) for s in range(40)]
    clipped_ = [used(s, norm, 1.0) for s, norm in enumerate(norms)]
    larger = [used(s, 1.02, 1.1) for s in range(40, 50)]
    assert levels(run(GradAltered(), [*clipped_, *larger])) == [("warn", 42)]


@pytest.mark.parametrize("ratio", [3.1, 100.0, 1e30])
def test_one_gradient_that_is_many_times_larger_is_told_at_once(ratio: float) -> None:
    stream = [step(s, [ratio if s == 60 else 1.0] * 2) for s in range(90)]
    (warn,) = run(GradAltered(), stream)
    assert (warn.level, warn.step, warn.rank) == ("warn", 60, None)
    assert warn.values == {"ratio": pytest.approx(ratio), "since": 60, "ranks": 2}
    assert run(GradAltered(jump=2 * ratio), stream) == []


def kept(norms: Sequence[float | None], every: int = 1) -> list[StepRecord]:
    """Steps of two ranks whose backward has added to a gradient of this norm; None: to none."""
    names = [{} if norm is None else {KEPT: norm} for norm in norms]
    return [record(i * every, {0: said, 1: said}) for i, said in enumerate(names)]


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("before", [[], [None] * 20, [0.0] * 20])
def test_gradients_that_nobody_has_set_to_zero_are_told_once(
    before: list[float | None], every: int
) -> None:
    (warn,) = run(GradAltered(), kept([*before, *[0.5] * 60], every))
    began = len(before) * every
    assert (warn.level, warn.step, warn.rank) == ("warn", began + 2 * every, None)
    assert warn.values == {"norm": 0.5, "since": began}
    assert "zero_grad" in warn.message


def test_gradients_that_are_set_to_zero_now_and_then_are_meant() -> None:
    assert run(GradAltered(), kept([0.5, 0.5, None] * 20)) == []
    assert run(GradAltered(), kept([0.5, 0.5, 0.0] * 20)) == []
    assert run(GradAltered(), kept([0.0] * 60)) == []


def clipped_to(number: int, norm: float, to: float) -> StepRecord:
    """A gradient of two ranks, clipped."""
    said = {"grad_norm": norm, USED_NORM: min(norm, to)}
    return record(number, {0: dict(said), 1: dict(said)})


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("before", [1.0, 1e9])
def test_a_smaller_number_to_clip_to_is_told_however_small_gradients_are(
    every: int, before: float
) -> None:
    norms = np.random.default_rng(0).lognormal(-1, 0.5, 400)
    steps = range(0, 400, every)
    stream = [clipped_to(s, norms[s], before if s < 200 else 0.08) for s in steps]
    (warn,) = run(GradAltered(quiet_steps=1000), stream)
    assert (warn.level, warn.step) == ("warn", 200 + 4 * every)
    usual = np.median(np.minimum(norms[:200:every][-64:], before))
    assert warn.values == {
        "clipped_to": pytest.approx(0.08), "before": pytest.approx(usual), "since": 200
    }  # fmt: skip


def test_clipping_to_one_number_throughout_is_meant() -> None:
    norms = np.random.default_rng(0).lognormal(-1, 1.5, 400)
    falling = norms * np.linspace(30, 0.01, 400)  # clipped at first, then hardly ever
    rising = falling[::-1]
    for each in (norms, falling, rising):
        assert run(GradAltered(), [clipped_to(s, each[s], 0.1) for s in range(400)]) == []


def test_clipping_that_adapts_or_begins_where_most_gradients_pass_is_left_alone() -> None:
    norms = np.random.default_rng(0).lognormal(-1, 1.0, 400)
    adapts = [clipped_to(s, norms[s], np.percentile(norms[: s + 1], 10)) for s in range(400)]
    assert run(GradAltered(), adapts) == []
    begins = [clipped_to(s, norms[s], 1e9 if s < 200 else np.median(norms)) for s in range(400)]
    assert run(GradAltered(), begins) == []
    four = [clipped_to(s, norms[s], 0.05 if 200 <= s < 204 else 1.0) for s in range(400)]
    assert run(GradAltered(), four) == []
