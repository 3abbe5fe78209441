"""Numbers of the input that move at once are told, and by whose rank; those that drift are not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import ddpprobe
from ddpprobe.detectors.input_shift import REMEMBERED, InputShift
from ddpprobe.records.step import (
    DIGEST,
    INPUT_ELEMENTS,
    INPUT_MAX,
    INPUT_MEAN,
    INPUT_MIN,
    INPUT_RMS,
    INPUT_ZEROS,
    StepRecord,
)
from tests.detectors.made_records import record, run

Batch = np.ndarray
Change = Callable[[Batch], Batch]


def numbers(batch: Batch) -> dict[str, float]:
    return {
        INPUT_RMS: float(np.sqrt((batch**2).mean())), INPUT_MEAN: float(batch.mean()),
        INPUT_MIN: float(batch.min()), INPUT_MAX: float(batch.max()),
        INPUT_ZEROS: float((batch == 0).mean()), INPUT_ELEMENTS: float(batch.size),
    }  # fmt: skip


def drawn(step: int, rank: int = 0) -> Batch:
    return np.random.default_rng((step, rank)).standard_normal((16, 32))


def stream(
    change: Change, ranks: Sequence[int] = (0, 1), world: int = 2, every: int = 1, at: int = 200
) -> list[StepRecord]:
    """Batches of a normal distribution that are changed on some ranks from a step on."""
    return [
        record(step, {
            rank: numbers(change(batch) if step >= at and rank in ranks else batch)
            for rank in range(world) for batch in [drawn(step, rank)]
        })
        for step in range(0, 400, every)
    ]  # fmt: skip


CHANGES: dict[str, Change] = {
    "clipped": lambda x: x.clip(0, 1),
    "not normalized": lambda x: 127 + 40 * x,
    "scaled": lambda x: x / 255,
    "shifted": lambda x: x + 1,
    "half of it padded": lambda x: x * (np.arange(32) < 16),
    "the other sign": lambda x: -abs(x),
}


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("name", CHANGES)
def test_other_numbers_are_told_at_the_third_look(name: str, every: int) -> None:
    (warn,) = run(InputShift(), stream(CHANGES[name], every=every))
    assert (warn.level, warn.step, warn.rank) == ("warn", 200 + 2 * every, None)
    assert (warn.phase, warn.kind, warn.values["since"]) == ("forward", "input", 200)
    assert warn.message.startswith("since step 200 the model is given other numbers")
    assert not warn.values["low"] <= warn.values["now"] <= warn.values["high"]


def test_what_has_moved_furthest_is_named() -> None:
    (warn,) = run(InputShift(), stream(lambda x: x * (np.arange(32) < 16)))
    assert "share of zeros is 0.5, and was 0 before" in warn.message
    (warn,) = run(InputShift(), stream(lambda x: x - 9))
    assert "their rms is 9.0" in warn.message  # it lies between 0.9 and 1.1 otherwise


def test_one_rank_is_named_and_some_are_listed() -> None:
    for ranks, rank, who in (((1,), 1, "rank 1 is"), ((0, 2), None, "ranks 0, 2 are")):
        (warn,) = run(InputShift(), stream(lambda x: x + 1, ranks=ranks, world=3))
        assert (warn.rank, warn.values["ranks"]) == (rank, len(ranks))
        assert warn.message.startswith(f"since step 200 {who} given other numbers")


def test_what_drifts_varies_widely_or_comes_back_is_left_alone() -> None:
    drifts = [record(s, {0: numbers(drawn(s) * (1 + s / 100))}) for s in range(400)]
    assert run(InputShift(), drifts) == []
    varies = [record(s, {0: numbers(drawn(s) * (1 + s % 7))}) for s in range(400)]
    assert run(InputShift(), varies) == []
    tails = np.random.default_rng(0).standard_t(2.5, (400, 64))
    assert run(InputShift(), [record(s, {0: numbers(x)}) for s, x in enumerate(tails)]) == []
    twice = [record(s, {0: numbers(drawn(s) * (9 if 200 <= s < 202 else 1))}) for s in range(400)]
    assert run(InputShift(), twice) == []


def test_batches_of_another_size_explain_it() -> None:
    longer = stream(lambda x: np.concatenate((x, np.zeros((16, 32))), axis=1))
    assert run(InputShift(), longer) == []


def test_it_is_known_of_no_other_ranks_and_of_no_numbers_that_are_not_finite() -> None:
    few = [record(s, {0: numbers(drawn(s) + 9 * (s >= 9))}) for s in range(30)]
    assert run(InputShift(), few) == []
    other = [record(s, {int(s >= 20): numbers(drawn(s) + 9 * (s >= 20))}) for s in range(60)]
    assert run(InputShift(), other) == []
    nan = [record(s, {0: {**numbers(drawn(s)), INPUT_MAX: np.inf}}) for s in range(60)]
    assert run(InputShift(), nan) == []
    assert run(InputShift(), [record(s, {0: {}}) for s in range(60)]) == []


def test_it_is_told_once_and_a_way_back_after_a_quiet_time() -> None:
    def moved(step: int) -> bool:
        return 200 <= step < 320

    records = [record(s, {0: numbers(drawn(s) + 9 * moved(s))}) for s in range(400)]
    assert [a.step for a in run(InputShift(), records)] == [202]
    assert [a.step for a in run(InputShift(quiet_steps=50), records)] == [202, 322]


def test_what_is_remembered_is_bounded() -> None:
    detector = InputShift()
    for each in stream(lambda x: x, at=0):
        detector.update(each)
    assert len(detector._seen) == REMEMBERED + 3


@pytest.mark.parametrize("clips", [False, True])
def test_a_training_whose_inputs_are_clipped_from_some_step_on(tmp_path: Path, clips: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpprobe.install(model, run_dir=tmp_path / "r", every=1, daemon="none"):
        for step in range(30):
            x = torch.randn(32, 8)
            x = x.clamp(0, 1) if clips and step >= 20 else x
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [a for a in ddpprobe.open(tmp_path / "r").anomalies() if a.detector == "input_shift"]
    assert [a.values["since"] for a in found] == [20] * clips


@pytest.mark.parametrize("times", [4, 10, 32])
def test_of_batches_that_are_read_again_each_is_one_look(times: int) -> None:
    """Several steps on each batch: of six batches nobody knows how far others lie apart."""
    again = [
        record(step, {0: numbers(drawn(step // times)) | {DIGEST: float(step // times)}})
        for step in range(600)
    ]
    assert run(InputShift(), again) == []
    changed = [
        record(step, {0: numbers(batch if at < 40 else batch + 1) | {DIGEST: float(at)}})
        for step in range(60 * times)
        for at in [step // times]
        for batch in [drawn(at)]
    ]
    (warn,) = run(InputShift(), changed)
    assert (warn.step, warn.values["since"]) == (42 * times, 40 * times)


@pytest.mark.parametrize("seed", range(8))
def test_extremes_that_windows_of_series_share_are_one_look(seed: int) -> None:
    rng = np.random.default_rng(seed)
    level = np.exp(np.arange(330) / 72 + 0.02 * rng.standard_normal((64, 330)).cumsum(1))
    season = np.sin(2 * np.pi * (np.arange(330) / 12 + rng.random((64, 1))))
    series = level * (3 + season + 0.3 * rng.standard_normal((64, 330)))
    windows = [series[:, step : step + 24] for step in range(300)]
    assert run(InputShift(), [record(s, {0: numbers(x)}) for s, x in enumerate(windows)]) == []


def test_an_extreme_that_has_always_been_the_same_is_known() -> None:
    images = [drawn(step).clip(-1, 1) * (1 if step < 200 else 0.5) for step in range(300)]
    (warn,) = run(InputShift(), [record(s, {0: numbers(x)}) for s, x in enumerate(images)])
    assert warn.step == 202


@pytest.mark.parametrize(("looks", "told"), [(13, False), (63, False), (64, True)])
def test_an_extreme_that_never_varied_is_judged_after_many_looks(looks: int, told: bool) -> None:
    steady = numbers(np.linspace(-1.0, 1.0, 64))
    lower = steady | {INPUT_MAX: 0.9}  # as where the largest of 16 tokens is in none of 64
    steps = [record(s, {0: steady if s < looks else lower}) for s in range(looks + 3)]
    assert bool(run(InputShift(), steps)) is told


@pytest.mark.parametrize(("world", "rank"), [(2, 1), (4, 0), (4, 3)])
@pytest.mark.parametrize("by", [5.0, 0.2])
def test_a_rank_that_is_given_others_from_the_start_is_told_once(
    world: int, rank: int, by: float
) -> None:
    (warn,) = run(InputShift(), stream(lambda x: by * x, (rank,), world, at=0))
    assert (warn.level, warn.step, warn.kind) == ("warn", 9, "input")
    assert warn.rank == (rank if world > 2 else None)
    (own, others) = (warn.values[name] for name in ("rms", "others"))
    assert sorted((own, others)) == pytest.approx(sorted((by, 1.0)), rel=0.1)
    if world > 2:
        assert f"rank {rank} is given other numbers than the others, at each" in warn.message
    else:
        assert "rank 0" in warn.message
        assert "rank 1" in warn.message


def test_a_rank_that_is_given_others_from_some_step_on_is_told_of_that_alone() -> None:
    (warn,) = run(InputShift(), stream(lambda x: 5 * x, (1,), at=200))
    assert "since step 200" in warn.message


@pytest.mark.parametrize(
    ("by", "ranks", "world"),
    [(3.5, (1,), 2), (5.0, (0, 1), 4), (5.0, (0,), 1), (0.0, (1,), 2)],
    ids=["little", "as many as the others", "alone", "zeros"],
)
def test_ranks_that_are_not_apart_are_left_alone(by: float, ranks: tuple[int, ...], world: int):
    assert run(InputShift(), stream(lambda x: by * x, ranks, world, at=0)) == []


def test_ranks_that_take_turns_are_not_apart() -> None:
    """Texts of any length, whose padding is zero."""
    records = [
        record(step, {
            rank: numbers(drawn(step, rank) * (5 if (step + rank) % 2 else 1)) for rank in (0, 1)
        })
        for step in range(100)
    ]  # fmt: skip
    assert run(InputShift(), records) == []
