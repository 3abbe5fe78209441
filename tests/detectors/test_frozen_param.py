"""Weights that stop though they are pulled at are told; what has a reason to stand still is not."""

from __future__ import annotations

import numpy as np
import pytest

from ddpprobe.detectors.frozen_param import FrozenParam
from ddpprobe.records.step import LEARNING_RATE, TRAINABLE, StepRecord
from tests.detectors.made_records import levels, record, run
from tests.detectors.made_weights import Made, weights

FQNS = ("embed.weight", "fc.weight", "fc.bias", "head.weight")
STOP = 100


def stream(
    stopped: tuple[str, ...] = FQNS, steps: int = 300, every: int = 1, gradient: float | None = 0.1,
    change: float = 1e-3, turns: int = 1, dtype: str = "float32", **changes: object,
) -> list[StepRecord]:  # fmt: skip
    """Weights that move by `change` in each step until those in `stopped` do not."""
    records = []
    for look, step in enumerate(range(0, steps, every)):
        made = {}
        for place, fqn in enumerate(FQNS):
            still = fqn in stopped and step >= STOP
            moved = change * min(step, STOP if fqn in stopped else step)
            now = gradient if still else 0.1
            seen = place % turns == look % turns
            made[fqn] = Made(1 + moved, (0.0 if still else change) if seen else None, now, dtype)
        records.append(weights(step, made, **changes))
    return records


@pytest.mark.parametrize("every", [1, 10])
def test_a_model_of_which_nothing_moves_any_more_is_a_page(every: int) -> None:
    (page,) = run(FrozenParam(), stream(every=every))
    assert (page.level, page.module, page.kind, page.rank) == ("page", "", "update", None)
    assert page.step == STOP + 20
    assert page.values["parameters"] == 4
    assert page.message.endswith(
        "; maybe the learning rate is 0, or the optimizer's step is left out, or it was given "
        "others"
    )


def test_with_next_to_no_gradient_it_may_have_converged_and_is_no_page() -> None:
    moving = stream((), steps=STOP, gradient=0.1)
    steep = [weights(0, {f: Made(1.0, 1e-3, 500.0, "float32") for f in FQNS}), *moving[1:]]
    (warn,) = run(FrozenParam(), [*steep, *stream()[STOP:]])
    assert (warn.level, warn.step, warn.module) == ("warn", STOP + 20, "")
    assert "maybe it has converged" in warn.message


def test_a_part_is_a_warning_that_names_the_module_once() -> None:
    (warn,) = run(FrozenParam(), stream(("fc.weight", "fc.bias")))
    assert (warn.level, warn.step, warn.module) == ("warn", STOP + 20, "fc")
    assert warn.values == {"parameters": 2, "since": STOP, "gradient": pytest.approx(2**0.5)}
    assert warn.message.endswith("; maybe their learning rate is 0, or the optimizer has lost them")


def test_a_part_that_is_observed_alone_and_frozen_is_no_model_of_which_nothing_moves() -> None:
    """`include=` of a backbone whose learning rate is set to 0 while the head trains on."""
    assert levels(run(FrozenParam(), stream(scalars={0: {TRAINABLE: 4.0}})))[0][0] == "page"
    (warn,) = run(FrozenParam(), stream(scalars={0: {TRAINABLE: 6.0}}))
    assert (warn.level, warn.step, warn.values["parameters"]) == ("warn", STOP + 20, 4)


def test_where_parameters_take_turns_none_need_be_seen_twice() -> None:
    (page,) = run(FrozenParam(), stream(turns=4))
    assert (page.level, page.module) == ("page", "")
    assert page.step <= STOP + 24


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient": None},  # an expert without tokens, a part that was frozen
        {"gradient": 0.0},  # a dead unit
        {"gradient": 5e-4},  # a fit that has converged
        {"change": 1e-7},  # rounding had stopped it: the end of a schedule
        {"change": 1e-3, "dtype": "bfloat16"},
        {"skipped": True},
        {"missing": (1,)},
    ],
)
def test_what_has_a_reason_to_stand_still_is_left_alone(changes: dict[str, object]) -> None:
    assert run(FrozenParam(), stream(**changes)) == []


def test_what_never_moved_or_comes_and_goes_is_left_alone() -> None:
    pauses = np.random.default_rng(0).random(400) < 0.3
    records = []
    for step, pause in enumerate(pauses):
        some = Made(1 + step * 1e-3, 0.0 if 200 < step < 230 or pause else 1e-3)
        made = {"expert.weight": some, "idle.weight": Made(1.0, 0.0), "fc.weight": Made(1 + step)}
        records.append(weights(step, made))
    assert run(FrozenParam(), records) == []


def test_a_step_that_is_declared_for_each_of_many_micro_batches_is_no_freeze() -> None:
    """Every 16th such step moves the weights, and the sampled ones are never among them."""
    made = [weights(s, {"fc.weight": Made(1 + s // 16 * 1e-3, 0.0)}) for s in range(1, 400, 8)]
    assert run(FrozenParam(), made) == []


def test_what_moves_again_and_stops_again_is_told_again() -> None:
    records = stream(steps=STOP + 60)
    for step in range(STOP + 60, STOP + 400):
        change = 1e-3 if step < STOP + 260 else 0.0
        made = dict.fromkeys(FQNS, Made(2 + 1e-3 * min(step, STOP + 260), change))
        records.append(weights(step, made))
    pages = [("page", STOP + 20), ("page", STOP + 280)]
    assert levels(run(FrozenParam(), records)) == pages


def test_an_attempt_begins_anew() -> None:
    there = STOP + 5
    still = dict.fromkeys(FQNS, Made(1.0, 0.0))
    later = [weights(s, still, attempt=1) for s in range(there, there + 60)]
    assert run(FrozenParam(), stream(steps=there) + later) == []


def rated(number: int, rate: float, **changes: object) -> StepRecord:
    return record(number, {0: {LEARNING_RATE: rate}}, **changes)


@pytest.mark.parametrize("every", [1, 10])
def test_a_learning_rate_that_is_halved_in_each_step_is_told_once(every: int) -> None:
    rates = [1e-3 * 0.5 ** max(0, s - 100) for s in range(0, 400, every)]
    (warn,) = run(FrozenParam(), [rated(i * every, rate) for i, rate in enumerate(rates)])
    assert (warn.level, warn.module, warn.kind) == ("warn", None, "update")
    assert warn.values["since"] == (117 if every == 1 else 120)
    assert warn.step == (137 if every == 1 else 140)
    assert warn.values["highest"] == 1e-3


def test_a_short_fading_is_the_end_of_a_schedule() -> None:
    for degree in (1, 2, 4):
        rates = [(1 - s / 2000) ** degree for s in range(2000)]
        assert run(FrozenParam(), [rated(s, rate) for s, rate in enumerate(rates)]) == []
    steps = range(0, 20_000, 10)
    cosine = [rated(s, 0.5 + 0.5 * np.cos(np.pi * s / 20_000)) for s in steps]
    assert run(FrozenParam(), cosine) == []


def test_a_rate_of_0_is_left_to_the_weights_and_one_that_comes_back_begins_anew() -> None:
    assert run(FrozenParam(), [rated(s, 1.0 if s < 50 else 0.0) for s in range(200)]) == []
    stream = [rated(s, 1e-9 if s % 100 > 60 else 1.0) for s in range(300)]
    assert levels(run(FrozenParam(), stream)) == [("warn", 81), ("warn", 181), ("warn", 281)]
    warmup = [rated(s, 1e-9 * 1.5 ** min(s, 50)) for s in range(200)]
    assert run(FrozenParam(), warmup) == []


def in_turn(first: int, second: int, steps: int, every: int = 1) -> list[StepRecord]:
    """Two optimizers: `a` and `b` move for `first` steps, then `c` for `second`, and so on."""
    records, moved = [], {"a": 0, "b": 0, "c": 0}
    for step in range(steps):
        now = "ab" if step % (first + second) < first else "c"
        for name in now:
            moved[name] += 1
        if step % every == 0:
            made = {f: Made(1 + 1e-3 * n, 1e-3 if f in now else 0.0) for f, n in moved.items()}
            records.append(weights(step, made, scalars={0: {TRAINABLE: 3.0}}))
    return records


@pytest.mark.parametrize(("first", "second"), [(60, 20), (30, 30), (60, 60), (20, 60), (90, 40)])
@pytest.mark.parametrize("every", [1, 5, 10])
def test_two_optimizers_that_take_turns_are_left_alone(first: int, second: int, every: int) -> None:
    assert run(FrozenParam(), in_turn(first, second, 600, every)) == []


def test_what_stopped_as_others_began_is_told_when_it_does_not_come_back() -> None:
    (warn,) = run(FrozenParam(), in_turn(60, 1000, 600))
    assert (warn.level, warn.step) == ("warn", 301)  # four times as long as it had moved
    assert warn.values["parameters"] == 2


def test_what_stops_while_others_begin_that_had_no_gradient_is_told_at_once() -> None:
    records = []
    for step in range(200):
        old = Made(1 + 1e-3 * min(step, STOP), 1e-3 if step < STOP else 0.0)
        new = Made(1.0, 0.0, None) if step < STOP else Made(1 + 1e-3 * step)
        records.append(weights(step, {"old": old, "new": new, "fc": Made(1 + 1e-3 * step)}))
    assert levels(run(FrozenParam(), records)) == [("warn", STOP + 20)]
