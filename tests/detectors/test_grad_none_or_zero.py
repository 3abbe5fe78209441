"""Gradients that stop are found and named; those that come and go are not."""

from __future__ import annotations

import numpy as np
import pytest

from ddpprobe.detectors.grad_none_or_zero import GradNoneOrZero
from ddpprobe.records.step import Site, StepRecord
from tests.detectors.made_records import levels, record, run

NAMES = ("embed.weight", "blocks.0.fc.weight", "blocks.0.fc.bias", "blocks.1.fc.weight",
         "blocks.1.fc.bias", "head.weight")  # fmt: skip
SITES = tuple(Site(name, "grad", placement="replicated") for name in NAMES)


def step(
    number: int, gone: str | tuple[str, ...] = "-", how: str = "None", **changes: object
) -> StepRecord:
    """All have a gradient but those whose name begins with `gone`."""
    away = {"observed": 0, "numel": 0} if how == "None" else {"rms": 0.0, "zeros": 100}
    rows = {s: away if s.fqn.startswith(gone) else {"rms": 0.1} for s in SITES}
    return record(number, rows=rows, **changes)


@pytest.mark.parametrize("how", ["None", "zero"])
@pytest.mark.parametrize("every", [1, 10])
def test_a_backbone_that_is_frozen_is_named_as_a_whole(how: str, every: int) -> None:
    steps = range(0, 300, every)
    stream = [step(s, "blocks" if s >= 160 else "-", how) for s in steps]
    (warn,) = run(GradNoneOrZero(), stream)
    assert (warn.level, warn.module, warn.phase) == ("warn", "blocks", "backward")
    assert warn.step == (175 if every == 1 else 180)
    assert warn.values == {"parameters": 4, "zero": 4 * (how == "zero"), "since": 160}
    assert how in warn.message


@pytest.mark.parametrize(
    ("gone", "module"),
    [
        (("embed", "blocks.0"), "blocks.0"),
        (("embed", "blocks.0.fc.weight"), "blocks.0.fc.weight"),  # as large as one another
        (("blocks.0", "head"), "blocks.0"),
    ],
)
def test_the_largest_part_that_stopped_is_the_one_to_look_at(
    gone: tuple[str, ...], module: str
) -> None:
    """Of equals the one nearest to the loss: what comes before it gets none because of it."""
    (warn,) = run(GradNoneOrZero(), [step(s, gone if s >= 60 else "-") for s in range(200)])
    assert warn.module == module


def test_parts_that_share_no_module_are_all_named() -> None:
    stream = [step(s, "blocks.1.fc.bias" if s >= 60 else "-") for s in range(200)]
    assert [a.module for a in run(GradNoneOrZero(), stream)] == ["blocks.1.fc.bias"]


@pytest.mark.parametrize("chance", [0.05, 0.2, 0.5])
def test_layer_drop_is_left_alone(chance: float) -> None:
    rng = np.random.default_rng(1)
    stream = [step(s, "blocks.1" if rng.random() < chance else "-") for s in range(2000)]
    assert run(GradNoneOrZero(), stream) == []


def test_what_is_frozen_first_and_trained_later_is_left_alone() -> None:
    assert run(GradNoneOrZero(), [step(s, "blocks" if s < 150 else "-") for s in range(300)]) == []


def test_two_phases_in_turn_are_left_alone() -> None:
    stream = [step(s, "blocks" if s % 2 else "head") for s in range(300)]
    assert run(GradNoneOrZero(), stream) == []


def test_steps_that_were_skipped_or_not_delivered_by_all_say_nothing() -> None:
    quiet = [step(s) for s in range(60)]
    skipped = [step(s, "blocks", skipped=True) for s in range(60, 120)]
    missing = [step(s, "blocks", missing=(1,)) for s in range(120, 180)]
    assert run(GradNoneOrZero(), [*quiet, *skipped, *missing]) == []


def test_it_is_told_again_after_the_gradients_were_back() -> None:
    stream = [step(s, "blocks" if 60 <= s < 90 or s >= 200 else "-") for s in range(300)]
    assert levels(run(GradNoneOrZero(), stream)) == [("warn", 75), ("warn", 215)]


def test_a_gradient_that_is_not_finite_is_one() -> None:
    rows = {s: {"nan": 100} for s in SITES}
    stream = [*(step(s) for s in range(60)), *(record(s, rows=rows) for s in range(60, 120))]
    assert run(GradNoneOrZero(), stream) == []


@pytest.mark.parametrize("every", [1, 10])
def test_a_module_whose_gradients_were_zero_from_the_first_look_is_told_once(every: int) -> None:
    names = ("embed.weight", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "head.weight",
             "head.bias")  # fmt: skip
    dead = names[1:6]  # the head's bias learns, so the head is not dead as a whole
    sites = [Site(name, "grad") for name in names]
    rows = {s: {"rms": 0.0, "zeros": 100} if s.fqn in dead else {"rms": 0.1} for s in sites}
    stream = [record(s, rows=rows) for s in range(0, 200, every)]
    (warn,) = run(GradNoneOrZero(), stream)
    assert (warn.level, warn.step, warn.module) == ("warn", 40, "fc2")  # the last one in order
    assert warn.values == {"parameters": 4, "zero": 4, "since": 0}
    assert "fc1, fc2" in warn.message
    (late,) = run(GradNoneOrZero(never=90, least_never=8), stream)
    assert late.step == 90


def test_zeros_from_the_start_are_left_alone_where_one_is_not_zero_or_is_not_there() -> None:
    assert run(GradNoneOrZero(), [step(s, "embed") for s in range(200)]) == []  # None: frozen
    stream = [step(s, "embed", "zero" if s != 20 else "None") for s in range(200)]
    assert [a.step for a in run(GradNoneOrZero(), stream)] == [40]  # one look without does no harm
    once = [step(s, "embed" if s else "-", "zero") for s in range(12)]
    assert run(GradNoneOrZero(), once) == []
    nothing = [step(s, "", "zero") for s in range(200)]  # a model that nobody trains just now
    assert run(GradNoneOrZero(), nothing) == []


def test_an_expert_that_is_never_chosen_is_left_alone_while_its_likes_are() -> None:
    stream = [step(s, "blocks.1", "zero") for s in range(200)]
    assert run(GradNoneOrZero(), stream) == []
    (warn,) = run(GradNoneOrZero(), [step(s, "blocks", "zero") for s in range(200)])
    assert (warn.module, warn.values["parameters"]) == ("blocks.1.fc", 4)


def test_experts_that_lose_their_gradients_are_an_information() -> None:
    for name, level in (("experts.1", "info"), ("branch.1", "warn")):
        sites = [Site(f"{name}.weight", "grad"), Site("head.weight", "grad")]
        stream = [
            record(s, rows={sites[0]: {"rms": 0.1 * (s < 100)}, sites[1]: {"rms": 0.1}})
            for s in range(200)
        ]
        assert [a.level for a in run(GradNoneOrZero(), stream)] == [level]


@pytest.mark.parametrize(
    "name",
    ["blocks.0.fc.weight_orig", "blocks.0.fc.parametrizations.weight.0", "blocks.0.fc.1.weight"],
)
def test_a_parameter_that_another_of_its_module_replaces_was_renamed(name: str) -> None:
    def renamed(number: int, new: str) -> StepRecord:
        rows = {s: {"rms": 0.1} for s in SITES}
        if number >= 60:
            rows[SITES[1]] = {"observed": 0, "numel": 0}
            rows[Site(new, "grad", placement="replicated")] = {"rms": 0.1}
        return record(number, rows=rows)

    assert run(GradNoneOrZero(), [renamed(s, name) for s in range(200)]) == []
    (warn,) = run(GradNoneOrZero(), [renamed(s, "blocks.1.fc.late") for s in range(200)])
    assert warn.module == "blocks.0.fc.weight"
