"""A module that nobody trains is told; what would not have moved anyway is not."""

from __future__ import annotations

import math

import pytest

from ddpprobe.detectors.never_updated import NeverUpdated
from ddpprobe.records.step import LEARNING_RATE, TRAINABLE, StepRecord
from tests.detectors.made_records import levels, run
from tests.detectors.made_weights import Made, weights

NEVER = Made(1.0, 0.0)


def stream(steps: int = 120, every: int = 1, **never: Made) -> list[StepRecord]:
    """`fc.weight` and `fc.bias` move; `__` in the names of the others stands for a dot."""
    records = []
    for step in range(0, steps, every):
        moving = {f"fc.{name}": Made(1 + 1e-3 * step, 1e-3) for name in ("weight", "bias")}
        still = {name.replace("__", "."): made for name, made in never.items()}
        records.append(weights(step, moving | still))
    return records


@pytest.mark.parametrize("every", [1, 10])
def test_a_whole_module_with_a_gradient_is_told_once_after_fifty_steps(every: int) -> None:
    (warn,) = run(NeverUpdated(), stream(300, every, head__weight=NEVER, head__bias=NEVER))
    assert (warn.level, warn.step, warn.module, warn.kind) == ("warn", 50, "head", "update")
    assert warn.values == {"parameters": 2, "since": 0, "gradient": pytest.approx(1.0)}


def test_a_gradient_that_is_not_known_now_is_not_spoken_of() -> None:
    records = stream(50, head__weight=NEVER)
    without = stream(80, head__weight=Made(1.0, 0.0, None))
    (warn,) = run(NeverUpdated(), records + without[50:])
    assert (warn.step, warn.module, warn.values) == (50, "head", {"parameters": 1, "since": 0})
    assert "though others move" in warn.message


@pytest.mark.parametrize(
    "never",
    [
        {"fc__gain": NEVER},  # the module moves
        {"pool__weight": Made(1.0, 0.0, None)},  # unused
        {"zero__weight": Made(1.0, 0.0, 0.0)},  # after what begins at zero
        {"conv__bias": Made(1.0, 0.0, 1e-8)},  # in front of a norm, alone
        {"norm__weight": Made(1.0, 0.0, 1e-3, "bfloat16")},  # half a number further in 300 steps
        {"norm__weight": Made(1.0, 0.0, 0.0, "bfloat16")},
        {"norm__weight": Made(1.0, 0.0, None, "float16")},
    ],
)
def test_what_would_not_have_moved_is_left_alone(never: dict[str, Made]) -> None:
    assert run(NeverUpdated(), stream(300, **never)) == []


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize(("dtype", "gradient"), [("bfloat16", 0.05), ("float16", 0.02)])
def test_what_is_rounded_away_step_by_step_is_told_once_with_its_dtype(
    dtype: str, gradient: float, every: int
) -> None:
    gain, weak = Made(1.0, 0.0, gradient, dtype), Made(1.0, 0.0, gradient / 8, dtype)
    moved = {"norm__bias": Made(0.1, 1e-4, gradient)}
    (warn,) = run(NeverUpdated(), stream(400, every, norm__weight=gain, last__weight=weak, **moved))
    assert (warn.level, warn.step, warn.module) == ("warn", 50, "norm.weight")
    spacing = {"bfloat16": 2**-7, "float16": 2**-10}[dtype]
    step = pytest.approx(0.01 * gradient / spacing)  # in proportion to the gradient of the others
    assert warn.values == {"parameters": 2, "since": 0, "spacings": step}
    assert f"numbers of {dtype} beside" in warn.message


def test_what_moved_between_two_looks_is_left_alone() -> None:
    """A generator whose turn is never in a sampled step."""
    made = [weights(s, {"a.weight": Made(1 + s, 0.0), "b.weight": Made(1 + s)}) for s in range(200)]
    assert run(NeverUpdated(), made) == []


def test_a_part_that_is_trained_later_is_looked_at_from_then_on() -> None:
    records = stream(60) + stream(160, head__weight=NEVER)[60:]
    (warn,) = run(NeverUpdated(), records)
    assert (warn.step, warn.module) == (110, "head")


def cut_off(trained: float, *names: str, every: int = 1, alive: int = 4) -> list[StepRecord]:
    """Parameters that move, and others that never have a gradient; so many require one."""
    none = {name: Made(1.0, 0.0, None) for name in names}
    return [
        weights(
            s, {f"fc.{i}": Made(1 + 1e-3 * s) for i in range(alive)} | none,
            scalars={0: {TRAINABLE: trained}},
        )
        for s in range(0, 200, every)
    ]  # fmt: skip


@pytest.mark.parametrize("every", [1, 10])
def test_a_large_part_that_requires_a_gradient_and_never_had_one_is_told_once(every: int) -> None:
    names = ("blocks.0.weight", "blocks.1.weight", "blocks.1.bias")
    (warn,) = run(NeverUpdated(), cut_off(7, *names, every=every))
    assert (warn.level, warn.step, warn.module, warn.kind) == ("warn", 50, "blocks", "grad")
    assert warn.values == {"parameters": 3, "since": 0}
    assert "3 of 7 parameters require a gradient and have never had one" in warn.message


def test_what_is_frozen_or_a_small_part_or_one_of_many_alike_is_left_alone() -> None:
    names = ("blocks.0.weight", "blocks.1.weight", "blocks.1.bias")
    assert run(NeverUpdated(), cut_off(4, *names)) == []  # requires_grad=False
    assert run(NeverUpdated(), cut_off(7, *names, alive=0)) == []  # nothing is trained just now
    pooler = cut_off(10, "pooler.weight", "pooler.bias", alive=8)
    assert run(NeverUpdated(), pooler) == []
    assert run(NeverUpdated(part=0.2), pooler)
    experts = [f"fc.{i}" for i in range(10, 14)]  # named as those that have one
    assert run(NeverUpdated(), cut_off(8, *experts)) == []


@pytest.mark.parametrize("calls", [2, 1, 0], ids=["each time", "seldom", "never"])
def test_a_layer_of_many_alike_is_told_and_an_expert_that_is_never_chosen_is_not(calls) -> None:
    """A detach between blocks cuts off those before it, which are called at each step."""
    names = ("embed.weight", "blocks.0.weight", "blocks.1.weight")
    none = {name: Made(1.0, 0.0, None) for name in names}
    always = ["embed", "blocks.2"]
    records = [
        weights(
            s, {"blocks.2.weight": Made(1 + 1e-3 * s), "head.weight": Made(1 + 1e-3 * s)} | none,
            always + (["blocks.0", "blocks.1"] if calls == 2 or calls * s % 9 else []),
            scalars={0: {TRAINABLE: 5.0}},
        )
        for s in range(200)
    ]  # fmt: skip
    found = run(NeverUpdated(), records)
    if calls == 2:
        (warn,) = found
        assert (warn.step, warn.module, warn.values["parameters"]) == (50, "embed", 3)
        assert "have never had one since step 0, in embed, blocks.0, blocks.1;" in warn.message
    else:
        assert found == []


def test_what_moves_without_a_gradient_at_any_look_is_left_alone() -> None:
    """A generator whose turn is never in a sampled step."""
    records = [
        weights(
            s, {"fc.0": Made(1 + s), "generator.0": Made(1 + s, 0.0, None)},
            scalars={0: {TRAINABLE: 2.0}},
        )
        for s in range(0, 200, 2)
    ]  # fmt: skip
    assert run(NeverUpdated(), records) == []


def test_gradients_too_large_for_their_squares_neither_raise_nor_tell() -> None:
    made = {"fc.weight": Made(1.0, 1e-3, math.inf), "head.weight": Made(1.0, 0.0, 0.0)}
    assert run(NeverUpdated(), [weights(step, made) for step in range(100)]) == []


def still(
    rate: float | None, *, gradient: float | None = 0.1, moves: int = 999,
    trained: float | None = None,
) -> list[StepRecord]:  # fmt: skip
    """Two parameters that an optimizer steps and does not change, before step `moves`."""
    said = {} if rate is None else {LEARNING_RATE: rate}
    said |= {} if trained is None else {TRAINABLE: trained}
    made = [
        Made(1.0 if s < moves else 1.0 + s, 0.0 if s < moves else 1.0, gradient) for s in range(200)
    ]
    return [weights(s, {"a": m, "b": m}, scalars={0: said}) for s, m in enumerate(made)]


def test_a_model_of_which_the_optimizer_changes_nothing_is_paged_once() -> None:
    (page,) = run(NeverUpdated(), still(0.1))
    assert (page.level, page.step, page.module, page.kind) == ("page", 50, "", "update")
    assert page.values == {"parameters": 2, "since": 0, "gradient": pytest.approx(2**0.5)}
    assert "made before fully_shard" in page.message
    (warn,) = run(NeverUpdated(), still(0.0))
    assert (warn.level, warn.step) == ("warn", 50)
    assert "the learning rate is 0" in warn.message


def test_a_part_that_is_observed_alone_and_not_trained_is_no_model_of_which_nothing_changes() -> (
    None
):
    """`include=` of a backbone whose head alone the optimizer was given."""
    (page,) = run(NeverUpdated(), still(0.1, trained=2.0))
    assert page.level == "page"
    (warn,) = run(NeverUpdated(), still(0.1, trained=4.0))
    assert (warn.level, warn.step, warn.values["parameters"]) == ("warn", 50, 2)
    assert "no bit of the 2 observed of 4 parameters has changed since step 0" in warn.message
    assert "made before fully_shard" not in warn.message


def test_a_rate_of_zero_hides_no_optimizer_that_has_other_tensors() -> None:
    still_zero = still(0.0)[:100]
    paged = run(NeverUpdated(), still_zero + still(0.1)[100:])
    assert levels(paged) == [("warn", 50), ("page", 150)]


def test_a_rate_that_was_zero_for_a_while_is_not_paged_when_it_trains() -> None:
    stream = still(0.0, moves=100)[:100] + still(0.1, moves=100)[100:]
    assert levels(run(NeverUpdated(), stream)) == [("warn", 50)]


def test_a_model_without_an_optimizer_or_gradients_or_that_moved_once_is_not_paged() -> None:
    assert run(NeverUpdated(), still(None)) == []
    assert run(NeverUpdated(), still(0.1, gradient=0.0)) == []
    assert run(NeverUpdated(), still(0.1, gradient=None)) == []
    assert "page" not in {level for level, _ in levels(run(NeverUpdated(), still(0.1, moves=40)))}
