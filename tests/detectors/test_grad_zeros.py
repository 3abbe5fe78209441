"""Gradients that become zero in part are found and named; those that were sparse before are not."""

from __future__ import annotations

import numpy as np
import pytest

from ddpprobe.detectors.grad_zeros import GradZeros
from ddpprobe.records.step import Site, StepRecord
from tests.detectors.made_records import levels, record, run

NAMES = ("embed.weight", "blocks.0.fc.weight", "blocks.1.fc.weight", "head.weight")
SITES = tuple(Site(name, "grad", placement="replicated") for name in NAMES)


def step(number: int, zeros: dict[str, float], **changes: object) -> StepRecord:
    """A gradient of 100 elements each, of which so many are zero; 0 where nothing is said."""
    rows = {s: {"rms": 0.1, "zeros": zeros.get(s.fqn, 0)} for s in SITES}
    return record(number, rows=rows, **changes)


@pytest.mark.parametrize("every", [1, 10])
def test_a_part_that_is_masked_is_named_at_the_fourth_sampled_step(every: int) -> None:
    stream = [step(s, {"embed.weight": 50 if s >= 160 else 3}) for s in range(0, 300, every)]
    (warn,) = run(GradZeros(), stream)
    assert (warn.level, warn.step, warn.module) == ("warn", 160 + 3 * every, "embed")
    assert (warn.kind, warn.phase, warn.rank) == ("grad", "backward", None)
    assert warn.values == {
        "zero_ratio": 0.5, "usual": pytest.approx(0.03), "parameters": 1, "since": 160,
    }  # fmt: skip
    assert warn.message.startswith("50% of the gradient of embed.weight has been exactly zero")


def test_underflow_everywhere_is_one_warning() -> None:
    all_of_them = dict.fromkeys(NAMES, 70)
    (warn,) = run(GradZeros(), [step(s, all_of_them if s >= 60 else {}) for s in range(200)])
    assert (warn.module, warn.values["parameters"]) == ("", 4)


def test_a_gradient_of_zeros_only_or_of_none_is_left_to_others() -> None:
    stream = [step(s, {"head.weight": 100 if s >= 60 else 0}) for s in range(120)]
    assert run(GradZeros(), stream) == []
    gone = {s: {"observed": 0, "numel": 0} for s in SITES}
    stream = [*(step(s, {}) for s in range(60)), *(record(s, rows=gone) for s in range(60, 90))]
    assert run(GradZeros(), stream) == []


@pytest.mark.parametrize("chance", [0.05, 0.3])
def test_an_expert_that_is_sparse_now_and_then_is_left_alone(chance: float) -> None:
    rng = np.random.default_rng(0)
    stream = [step(s, {"head.weight": 90 if rng.random() < chance else 0}) for s in range(3000)]
    assert run(GradZeros(), stream) == []


def test_units_that_die_one_by_one_and_short_batches_are_left_alone() -> None:
    assert run(GradZeros(), [step(s, {"head.weight": min(90, s // 4)}) for s in range(400)]) == []
    stream = [step(s, {"embed.weight": 80 if s % 100 in {97, 98, 99} else 0}) for s in range(400)]
    assert run(GradZeros(), stream) == []


def test_it_is_told_once_and_again_when_it_rises_again() -> None:
    share = lambda s: 80 if s >= 200 else 40 if s >= 60 else 0  # noqa: E731
    stream = [step(s, {"embed.weight": share(s)}) for s in range(400)]
    assert levels(run(GradZeros(), stream)) == [("warn", 63), ("warn", 203)]


def test_steps_that_were_skipped_or_lack_a_rank_say_nothing() -> None:
    quiet = [step(s, {}) for s in range(60)]
    for change in ({"skipped": True}, {"missing": (1,)}, {"partial": True}, {"sampled": False}):
        loud = [step(s, {"embed.weight": 50}, **change) for s in range(60, 120)]
        assert run(GradZeros(), [*quiet, *loud]) == []


@pytest.mark.parametrize(("before", "found"), [(7, 0), (8, 1)])
def test_eight_sampled_steps_before_are_enough(before: int, found: int) -> None:
    stream = [step(s, {"embed.weight": 50 if s >= before else 3}) for s in range(before + 4)]
    assert len(run(GradZeros(), stream)) == found


def test_of_several_the_one_is_told_in_which_most_became_zero() -> None:
    usual = {"embed.weight": 60, "head.weight": 3}
    now = {"embed.weight": 90, "head.weight": 50, "blocks.0.fc.weight": 20}  # which is no fault
    (warn,) = run(GradZeros(), [step(s, now if s >= 60 else usual) for s in range(100)])
    assert warn.message.startswith("50% of the gradient of head.weight ")
    assert (warn.values["usual"], warn.values["parameters"]) == (pytest.approx(0.03), 2)
