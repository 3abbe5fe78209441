"""What moves at once and stays is told, and where; noise, trends, and what is meant are not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from ddpprobe.detectors.level_shift import LevelShift
from ddpprobe.detectors.suite import chosen, default_suite
from ddpprobe.records.every_loss import name_of
from ddpprobe.records.step import NOTED, NUMEL, TRAINING, Anomaly, Site, StepRecord
from tests.detectors.made_records import levels, record, run

A, B = (Site(name, "output") for name in ("a", "b"))
GRAD = Site("a.weight", "grad")
AT = 100


def step(
    number: int, *, loss: float = 1.0, a: float = 1.0, b: float = 1.0, grad: float = 1.0,
    more: dict[str, float] | None = None, numel: int = 100, **changes: object,
) -> StepRecord:  # fmt: skip
    rows = {A: {"rms": a, "numel": numel}, B: {"rms": b, "numel": numel}, GRAD: {"rms": grad}}
    scalars = {0: {"loss": loss, "lr": 0.1, "trainable_parameters": 4.0, **(more or {})}}
    return record(number, scalars, rows, **changes)


def noisy(
    changed: Callable[[int], dict[str, object]], steps: int = 160, spread: float = 0.1
) -> list[StepRecord]:
    """Steps whose numbers scatter, each multiplied by what `changed` says of it."""
    rng = np.random.default_rng(0)
    out = []
    for number in range(steps):
        says = changed(number)
        kept = {k: says.pop(k) for k in [*says] if k not in ("loss", "a", "b", "grad")}
        noise = np.exp(spread * rng.standard_normal(4)).tolist()
        values = {
            name: float(says.get(name, 1.0)) * x  # type: ignore[arg-type]
            for name, x in zip(("loss", "a", "b", "grad"), noise, strict=True)
        }
        out.append(step(number, **values, **kept))  # type: ignore[arg-type]
    return out


def behind(**factors: object) -> Callable[[int], dict[str, object]]:
    return lambda number: dict(factors) if number >= AT else {}


def only(found: Iterable[Anomaly]) -> Anomaly:
    (one,) = found
    return one


def test_a_loss_that_rises_at_once_and_stays_is_told_once() -> None:
    warn = only(run(LevelShift(), noisy(behind(loss=2.0), steps=400)))
    assert (warn.level, warn.module, warn.kind, warn.rank) == ("warn", None, None, None)
    assert (warn.phase, warn.step) == ("forward", AT + 3)  # a large one is told by four values
    assert 1.7 < warn.values["ratio"] < 2.3
    assert warn.message.startswith("loss has been ")
    assert "at each of the last 4 steps" in warn.message


@pytest.mark.parametrize(
    ("before", "now", "ratio"), [(1e-20, 1e300, 1e300), (1e300, 1e-20, 1e-300)]
)
def test_a_shift_further_than_a_float_can_say_is_told(
    before: float, now: float, ratio: float
) -> None:
    found = run(LevelShift(), [step(s, loss=before if s < AT else now) for s in range(AT + 9)])
    assert only(a for a in found if a.message.startswith("loss")).values["ratio"] == ratio


def test_a_smaller_rise_takes_eight_values() -> None:
    warn = only(run(LevelShift(), noisy(behind(loss=1.2), spread=0.03)))
    assert (warn.step, warn.values["values"]) == (AT + 7, 8)
    assert run(LevelShift(loss_ratio=1.5), noisy(behind(loss=1.2), spread=0.03)) == []


def test_a_loss_that_falls_at_once_is_what_training_is_for() -> None:
    falls = noisy(lambda n: {"loss": 0.3, "grad": 0.3} if n >= AT else {})
    assert run(LevelShift(), falls) == []


def test_a_loss_that_falls_to_a_tenth_at_once_is_another_loss() -> None:
    warn = only(run(LevelShift(), noisy(behind(loss=0.1))))
    assert (warn.level, warn.step, warn.module) == ("warn", AT + 3, None)
    assert warn.message.startswith("loss has been 9")
    assert "x below its level" in warn.message
    slowly = noisy(lambda n: {"loss": 0.1 ** min(1.0, max(0, n - AT) / 40)}, steps=300)
    assert run(LevelShift(), slowly) == []
    decayed = noisy(lambda n: {"loss": 0.1, "more": {"lr": 0.01}} if n >= AT else {})
    assert run(LevelShift(), decayed) == []


def test_gradients_that_leave_their_relation_to_the_loss_are_told_in_both_directions() -> None:
    for factor in (3.0, 1 / 3):
        # The gradient follows the loss, which scatters by a decade and hides it.
        rng = np.random.default_rng(1)
        losses = np.exp(1.0 * rng.standard_normal(160)).tolist()
        stream = [
            step(n, loss=x, grad=x * (factor if n >= AT else 1.0) * (1 + 0.05 * math.sin(n)))
            for n, x in enumerate(losses)
        ]
        warn = only(run(LevelShift(), stream))
        assert warn.message.startswith("gradient norm by loss has been ")
        assert (warn.phase, warn.step <= AT + 7) == ("backward", True)
        assert warn.values["ratio"] == pytest.approx(factor, rel=0.1)


def test_a_gradient_norm_that_rises_is_told_also_without_a_loss() -> None:
    stream = noisy(behind(grad=3.0))
    bare = [record(r.step, {0: {"lr": 0.1}}, _rows(r)) for r in stream]
    warn = only(run(LevelShift(), bare))
    assert (warn.message[:13], warn.phase) == ("gradient norm", "backward")
    down = [record(r.step, {0: {"lr": 0.1}}, _rows(r)) for r in noisy(behind(grad=0.2))]
    assert run(LevelShift(), down) == []


def _rows(made: StepRecord) -> dict[Site, dict[str, float]]:
    return {
        site: {"numel": 100, "sum_sq": float(made.values[row, 3])}
        for row, site in enumerate(made.sites)
    }


def test_the_first_module_in_execution_order_is_named_and_the_others_told() -> None:
    for factor, way in ((5.0, " x its level before"), (0.2, " x below its level before")):
        warn = only(run(LevelShift(), noisy(behind(a=factor, b=factor, loss=2.0), spread=0.02)))
        assert (warn.module, warn.kind, warn.phase) == ("a", "output", "forward")
        assert way in warn.message
        assert "with it that of b, loss" in warn.message
        assert warn.values["outputs"] == 2
    second = only(run(LevelShift(), noisy(behind(b=3.0), spread=0.02)))
    assert (second.module, second.values["outputs"]) == ("b", 1)


def test_half_of_the_outputs_may_move_less_if_they_move_together() -> None:
    names = [Site(f"m{i}", "output") for i in range(6)]
    for moved, found in ((3, 0), (4, 1), (6, 1)):
        rng = np.random.default_rng(0)
        stream = []
        for number in range(160):
            sizes = np.exp(0.02 * rng.standard_normal(6))
            sizes[:moved] *= 0.7 if number >= AT else 1.0
            rows = {site: {"rms": float(x)} for site, x in zip(names, sizes, strict=True)}
            stream.append(record(number, {0: {"lr": 0.1}}, rows))
        told = run(LevelShift(), stream)
        assert len(told) == found
        assert [(a.module, a.values["outputs"]) for a in told] == [("m0", moved)][:found]


def test_one_module_among_many_must_be_clearer_than_a_number_of_the_run() -> None:
    stream = noisy(lambda n: {"a": 1.3 ** (n // 8 % 2) * (3.0 if n >= AT + 4 else 1.0)}, spread=0.0)
    assert run(LevelShift(), stream) == []
    assert len(run(LevelShift(output_clear=1.0), stream)) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"more": {"lr": 0.2}},
        {"more": {"lr": 0.05}},
        {"more": {"trainable_parameters": 5.0}},
        {"numel": 200},
    ],
)
def test_what_the_loop_changes_on_purpose_explains_a_shift(change: dict[str, object]) -> None:
    shift = behind(loss=2.0, a=3.0, grad=3.0, **change)
    assert run(LevelShift(), noisy(shift, spread=0.02)) == []


def sized(size: Callable[[int], tuple[int, int]], loss: float = 1.0) -> list[Anomaly]:
    """A gradient norm that is 4 times what it was, by the elements of two outputs at each step."""

    def resized(one: StepRecord) -> StepRecord:
        counts = one.counts.copy()
        counts[:2, NUMEL] = size(one.step)
        return replace(one, counts=counts)

    stream = noisy(behind(grad=4.0, loss=loss), spread=0.02)
    return run(LevelShift(), [resized(one) for one in stream])


@pytest.mark.parametrize("loss", [1.0, 2.0])
def test_fewer_samples_of_more_pixels_are_another_size(loss: float) -> None:
    assert sized(lambda n: (9000, 480) if n < AT else (8900, 240), loss) == []
    assert sized(lambda n: (9000, 480) if n < 60 else (8900, 240) if n < AT else (9000, 120)) == []
    assert len(sized(lambda n: (9000, 480) if n < AT else (8900, 470), loss)) == 1


@pytest.mark.parametrize("short", [20, 7])
def test_sizes_that_do_not_stay_explain_nothing(short: int) -> None:
    lengths = np.random.default_rng(1).integers(100, 900, 200).tolist()
    assert len(sized(lambda n: (90000, lengths[n]))) == 1  # texts
    assert (
        len(sized(lambda n: (9000, 120 if n % short == short - 1 else 480))) == 1
    )  # an epoch's end


def test_a_learning_rate_that_moves_slowly_explains_nothing() -> None:
    def slow(number: int) -> dict[str, object]:
        return {"loss": 2.0 if number >= AT else 1.0, "more": {"lr": 0.1 * 0.99**number}}

    assert len(run(LevelShift(), noisy(slow))) == 1


def rated(rate: Callable[[int], float], every: int = 10) -> list[StepRecord]:
    """A run whose loss doubles at `AT`, sampled now and then, at a learning rate by step."""
    losses = [float(r.scalars[0]["loss"]) for r in noisy(behind(loss=2.0))]
    out = []
    for number in range(0, len(losses), every):
        said = {name_of(back): losses[number - back] for back in range(min(every, number + 1))}
        out.append(record(number, {0: {**said, "lr": rate(number)}}))
    return out


def test_a_rate_that_was_warmed_up_long_before_explains_no_loss_of_now() -> None:
    warmed_up = rated(lambda n: 0.1 * min(1.0, (n + 1) / 25))
    assert levels(run(LevelShift(), warmed_up)) == [("warn", AT + 10)]


def test_a_rate_that_falls_as_ever_explains_no_loss_that_rises() -> None:
    cosine = rated(lambda n: 0.1 * (0.1 + 0.45 * (1 + math.cos(math.pi * n / 200))))
    assert levels(run(LevelShift(), cosine)) == [("warn", AT + 10)]
    assert run(LevelShift(), rated(lambda n: 0.1 if n < AT else 0.05)) == []
    assert run(LevelShift(), rated(lambda n: 0.1 * (1 + n / 50))) == []  # one that rises may


@pytest.mark.parametrize("rate", [1.02, 0.98])
def test_a_trend_is_no_shift(rate: float) -> None:
    trend = noisy(lambda n: dict.fromkeys(("loss", "a", "b", "grad"), rate**n), spread=0.02)
    assert run(LevelShift(), trend) == []


@pytest.mark.parametrize("seed", range(3))
def test_heavy_tails_are_no_shift(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tails = np.exp(rng.standard_t(2, (400, 4))).tolist()
    stream = [step(n, loss=x, a=y, b=z, grad=w) for n, (x, y, z, w) in enumerate(tails)]
    assert run(LevelShift(), stream) == []


def test_what_comes_back_is_no_shift() -> None:
    spike = noisy(lambda n: {"loss": 9.0, "a": 9.0} if AT <= n < AT + 3 else {})
    assert run(LevelShift(), spike) == []


def test_the_loss_of_every_step_is_judged_where_few_are_sampled() -> None:
    whole = noisy(behind(loss=2.0), steps=200)
    losses = [float(r.scalars[0]["loss"]) for r in whole]
    kept = []
    for number in range(0, 200, 10):
        scalars = {"loss": losses[number], "lr": 0.1}
        scalars |= {name_of(back): losses[number - back] for back in range(1, 10) if number >= back}
        kept.append(record(number, {0: scalars}))
    assert levels(run(LevelShift(), kept)) == [("warn", AT + 10)]


def test_a_note_a_restart_and_a_long_quiet_make_it_new() -> None:
    noted = noisy(
        lambda n: {"loss": 2.0} | ({"more": {NOTED: 1.0}} if n == AT else {}) if n >= AT else {}
    )
    assert run(LevelShift(), noted) == []
    twice = noisy(lambda n: {"loss": 2.0 ** (n // 150)}, steps=450)
    assert levels(run(LevelShift(), twice)) == [("warn", 153), ("warn", 303)]
    assert levels(run(LevelShift(quiet_steps=200), twice)) == [("warn", 153)]


def test_partial_skipped_and_incomplete_steps_are_not_taken() -> None:
    for changes in ({"partial": True}, {"skipped": True}, {"missing": (1,)}):
        shifted = [step(n, a=3.0, grad=3.0, **changes) for n in range(AT, 2 * AT)]  # type: ignore[arg-type]
        assert run(LevelShift(), [*(step(n) for n in range(AT)), *shifted]) == []


def test_gans_and_rewards_are_left_alone() -> None:
    for task in ("gan", "rl"):
        suite = default_suite(chosen({}, task))
        found = [a for r in noisy(behind(loss=2.0)) for a in suite.update(r)]
        assert not [a for a in found if a.detector == "level_shift"]


@pytest.mark.parametrize(
    "wrong",
    [{"norm_ratio": 0.0}, {"clear": -1.0}, {"recent": 0}, {"blocks": 1}, {"loss_ratio": math.inf}],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LevelShift(**wrong)  # type: ignore[arg-type]


def with_rows(changed: Callable[[int], dict[str, float]], steps: int = 160) -> list[StepRecord]:
    """Steps of an output and three gradients that scatter; `changed` says factors of these."""
    rng = np.random.default_rng(1)
    b, c = (Site(f"{name}.weight", "grad") for name in "bc")
    out = []
    for number in range(steps):
        grads = changed(number)
        noise = np.exp(0.1 * rng.standard_normal(4)).tolist()
        rows = {
            A: {"rms": 1.0},
            GRAD: {"rms": noise[0] * grads.get("a", 1.0)},
            b: {"rms": noise[1] * grads.get("b", 1.0)},
            c: {"rms": noise[3] * grads.get("c", 1.0)},
        }
        said = {"loss": noise[2], "lr": 0.1, "trainable_parameters": 4.0}
        out.append(record(number, {0: said}, rows))
    return out


def test_the_share_of_one_parameter_is_told_and_its_module_named() -> None:
    grads = {"a": 0.01, "b": 1.2}  # the norm of all stays where it was
    warn = only(run(LevelShift(), with_rows(lambda s: grads if s >= AT else {})))
    assert (warn.module, warn.kind, warn.phase, warn.step) == ("a", "grad", "backward", AT + 3)
    assert "share of the gradient" in warn.message
    assert "at each of the last 4 sampled steps" in warn.message


def test_shares_that_move_in_several_modules_name_none_of_them() -> None:
    grads = {"a": 0.01, "b": 1.7, "c": 0.01}
    (warn,) = run(LevelShift(), with_rows(lambda s: grads if s >= AT else {}))
    assert (warn.module, warn.kind) == (None, "grad")
    assert "with it that of c.weight" in warn.message


@pytest.mark.parametrize("rate", [1.005, 0.995])
@pytest.mark.parametrize("every", [10, 100])
def test_a_trend_is_no_shift_where_fewer_steps_are_sampled_than_before(
    rate: float, every: int
) -> None:
    trend = noisy(lambda n: dict.fromkeys(("loss", "a", "b"), rate**n), steps=1500, spread=0.002)
    sampled = [r for r in trend if r.step < 100 or r.step % every == 0]
    assert run(LevelShift(), sampled) == []


def test_a_shift_is_told_where_fewer_steps_are_sampled_than_before() -> None:
    shifted = noisy(lambda n: {"a": 5.0 if n >= 150 else 1.0}, steps=300, spread=0.002)
    sampled = [r for r in shifted if r.step < 100 or r.step % 10 == 0]
    assert levels(run(LevelShift(), sampled)) == [("warn", 180)]


def of_many(
    changed: Callable[[int, int], float], first: int = 0, last: int = 300
) -> list[StepRecord]:
    """Every tenth step of five outputs that scatter little; `changed` says factors of these."""
    rng = np.random.default_rng(2)
    sites = [Site(name, "output") for name in "abcde"]
    out = []
    for number in range(first, last, 10):
        noise = np.exp(0.01 * rng.standard_normal(5)).tolist()
        rows = {s: {"rms": noise[i] * changed(number, i)} for i, s in enumerate(sites)}
        out.append(record(number, {0: {"lr": 0.1, "trainable_parameters": 4.0}}, rows))
    return out


def test_outputs_that_move_together_are_told_behind_twelve_values_of_a_run_of_a_hundred_steps(
) -> None:  # fmt: skip
    for at, told in ((100, []), (110, []), (120, [150]), (170, [200])):
        moved = of_many(lambda s, _, at=at: 1.5 if s >= at else 1.0)
        assert [a.step for a in run(LevelShift(), moved)] == told
    late = of_many(lambda s, _: 1.5 if s >= 200 + 90 else 1.0, first=200)
    assert run(LevelShift(), late) == []


def test_of_few_values_a_small_move_one_alone_and_one_that_comes_and_goes_say_nothing() -> None:
    small = of_many(lambda s, _: 1.25 if s >= 150 else 1.0)
    alone = of_many(lambda s, i: 9.0 if s >= 150 and not i else 1.0)
    lively = of_many(lambda s, _: (1.0 + 0.15 * (s // 40 % 2)) * (1.5 if s >= 150 else 1.0))
    assert [run(LevelShift(), each) for each in (small, alone, lively)] == [[], [], []]


def test_where_more_values_are_known_a_move_against_few_of_them_must_be_twice_as_clear() -> None:
    for at, spread, told in ((0, 0.06, [230]), (320, 0.06, []), (320, 0.02, [550])):
        came = range(at + 40, at + 60)  # what the last 16 values know nothing of

        def moved(
            s: int, _: int, at: int = at, spread: float = spread, came: range = came
        ) -> float:
            level = 1.6 if s in came else 1.5 if s >= at + 200 else 1.0
            return level * (1.0 + spread * (s // 40 % 2))

        assert [a.step for a in run(LevelShift(), of_many(moved, last=at + 300))] == told


@pytest.mark.parametrize(("factor", "told"), [(1e-3, [200]), (0.1, [])])
def test_of_few_values_the_share_of_a_gradient_must_move_by_two_decades(
    factor: float, told: list[int]
) -> None:
    stream = with_rows(lambda s: {"a": factor} if s >= 17 else {}, steps=24)
    tenth = [record(10 * r.step, dict(r.scalars), _rows_of(r)) for r in stream]
    assert [a.step for a in run(LevelShift(), tenth)] == told


def _rows_of(r: StepRecord) -> dict[Site, dict[str, float]]:
    return {site: {"sum_sq": r.values[i, 3]} for i, site in enumerate(r.sites)}


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_norms_that_are_put_into_evaluation_mode_are_meant(share: float) -> None:
    def changed(number: int) -> dict[str, object]:
        late = number >= AT
        return {"grad": 9.0 if late else 1.0, "more": {TRAINING: share if late else 1.0}}

    told = run(LevelShift(), noisy(changed))
    assert levels(told) == ([("warn", AT + 3)] if share == 1.0 else [])


def signed(at_end: Callable[[int], float], steps: int = 160, spread: float = 0.1) -> list[Anomaly]:
    """What is said of a loss that scatters around zero, to which `at_end` adds from step 100 on."""
    rng = np.random.default_rng(0)
    losses = [spread * float(rng.standard_normal()) for _ in range(steps)]
    losses[AT:] = [x + at_end(n) for n, x in enumerate(losses[AT:], AT)]
    return run(LevelShift(), (step(n, loss=x) for n, x in enumerate(losses)))


@pytest.mark.parametrize("way", [1, -1])
def test_a_loss_around_zero_that_moves_far_at_once_and_stays_is_told(way: int) -> None:
    warn = only(signed(lambda _: 3.0 * way))
    assert (warn.level, warn.module, warn.step) == ("warn", None, AT + 3)
    assert warn.values["now"] == pytest.approx(3.0 * way, abs=0.2)
    assert warn.values["before"] == pytest.approx(0.0, abs=0.1)
    assert "ratio" not in warn.values
    assert f"loss has been about {warn.values['now']:.3g}, not " in warn.message


def test_a_loss_whose_level_had_not_moved_at_all_is_told_without_a_ratio() -> None:
    def loss(number: int) -> float:
        return -5.0 if number >= AT else (-1.0, 0.0, 0.0, 0.0)[number % 4]

    found = run(LevelShift(), [step(s, loss=loss(s)) for s in range(AT + 9)])
    warn = only(a for a in found if a.message.startswith("loss"))
    assert "its level had not moved at all in its window" in warn.message
    assert "clear" not in warn.values


def test_a_loss_below_zero_that_begins_to_run_away_is_told() -> None:
    assert only(signed(lambda n: -0.2 * (n - AT))).values["now"] < 0


def test_a_loss_around_zero_that_moves_as_far_as_it_scatters_is_left_alone() -> None:
    assert signed(lambda _: 0.5) == []


def test_a_loss_that_goes_below_zero_as_it_falls_is_left_alone() -> None:
    rng = np.random.default_rng(0)
    falls = [3.0 * math.exp(-n / 60) - 1.5 + 0.02 * rng.standard_normal() for n in range(300)]
    assert run(LevelShift(), (step(n, loss=x) for n, x in enumerate(falls))) == []


def test_a_loss_that_has_always_been_zero_has_no_level_that_it_could_leave() -> None:
    rewards = [0.0] * AT + [1.0, 1.2, 0.9, 1.1, 1.0, 1.3, 0.8, 1.1] * 3
    assert run(LevelShift(), (step(n, loss=x) for n, x in enumerate(rewards))) == []


def test_a_positive_loss_that_becomes_negative_at_once_is_told() -> None:
    flipped = noisy(behind(loss=-1.0), spread=0.05)
    assert only(run(LevelShift(), flipped)).values["now"] == pytest.approx(-1.0, abs=0.1)
