"""Gradients that stay each rank's own are told; local SGD and equal data are no fault of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ddpprobe.detectors.reduction import Reduction
from ddpprobe.records.step import LOCAL_SGD, NOTED, UNREDUCED, USED_NORM, Site, StepRecord
from tests.detectors.made_records import hear, levels, record, run
from tests.made_reduction import Gradient, but_the_last, mean, scaled
from tests.made_reduction import step as step_of


def step(number: int, *, reduced: bool, told: float = 0.0, **changes: object) -> StepRecord:
    """A step of three ranks; `told`: no reduction took place at all, and how it is known."""
    local = np.random.default_rng(number).random(3) + 0.5
    scalars = {}
    for rank in range(3):
        norm = 0.6 if reduced else local[rank]
        scalars[rank] = {"grad_norm_local": local[rank], "grad_norm": norm, "micro_batches": 1.0}
        if told:
            scalars[rank][UNREDUCED] = float(told)
    return record(number, scalars, **changes)


def test_a_reduction_that_changes_nothing_pages_at_the_third_sampled_step() -> None:
    stream = [step(s, reduced=s < 50) for s in range(100)]
    (page,) = run(Reduction(), stream)
    assert (page.level, page.step, page.rank, page.first_cause) == ("page", 52, None, True)
    assert "changed nothing" in page.message


def test_hooks_that_were_lost_warn_first_and_page_when_nothing_is_reduced_any_more() -> None:
    stream = [step(s, reduced=s < 50, told=s >= 50) for s in range(100)]
    found = run(Reduction(), stream)
    assert levels(found) == [("warn", 52), ("page", 69)]
    assert "no reduction took place" in found[0].message


def test_only_behind_twenty_steps_in_a_row_that_were_reduced_hooks_count_as_lost() -> None:
    for before in (0, 30):  # then one step without, and what came before it counts no more
        for reduced, levels_ in ((19, ["warn"]), (20, ["warn", "page"])):
            first = before + bool(before)
            until = first + reduced
            stream = [
                step(s, reduced=s < until and (s != before or not before), told=s >= until)
                for s in range(until + 25)
            ]
            assert [a.level for a in run(Reduction(), stream)] == levels_


def used(of: int, reduced: bool, norms: list[float], told: float = 0.0) -> StepRecord:
    """A step of three ranks whose optimizers got gradients of these norms."""
    one = step(of, reduced=reduced)
    more = [{USED_NORM: norm} | ({UNREDUCED: told} if told else {}) for norm in norms]
    return replace(one, scalars={r: {**one.scalars[r], **more[r]} for r in range(3)})


def test_gradients_that_a_script_reduces_itself_are_left_alone() -> None:
    """They are read as the backward leaves them: `average_gradients` of PyTorch's tutorial."""
    for told in (0.0, 1.0, 2.0):
        stream = [used(s, False, [0.6 + 0.01 * s] * 3, told) for s in range(50)]
        assert run(Reduction(), stream) == []
    clipped = [used(s, False, [1.0] * 3, 2.0) for s in range(50)]
    assert run(Reduction(), clipped) == []


def test_gradients_of_a_model_without_a_wrapper_that_stay_apart_are_warned_of() -> None:
    apart = [used(s, False, [0.5, 0.6, 0.7 + 0.01 * s], 2.0) for s in range(100)]
    (warn,) = run(Reduction(), apart)
    assert (warn.level, warn.step) == ("warn", 2)
    assert "no wrapper around the model" in warn.message


def test_a_clipped_norm_does_not_hide_that_a_wrapped_model_is_not_reduced() -> None:
    stream = [used(s, s < 50, [1.0] * 3) for s in range(100)]
    (page,) = run(Reduction(), stream)
    assert (page.level, page.step) == ("page", 53)


def test_of_gradients_that_the_script_holds_back_nothing_is_said() -> None:
    held = [step(s, reduced=s < 50, told=3.0 * (s >= 50)) for s in range(100)]
    assert run(Reduction(), held) == []


def test_steps_without_a_reduction_from_the_start_are_warned_of_and_never_page() -> None:
    apart = [step(s, reduced=False, told=True) for s in range(400)]
    assert {a.level for a in run(Reduction(), apart)} == {"warn"}
    in_turn = [step(s, reduced=s % 50 == 0, told=s % 50 != 0) for s in range(400)]
    assert {a.level for a in run(Reduction(), in_turn)} == {"warn"}


def test_what_torch_s_hook_of_local_sgd_keeps_within_ranks_is_not_judged() -> None:
    made = [step(number, reduced=False) for number in range(30)]
    for said in (said for one in made for said in one.scalars.values()):
        said[LOCAL_SGD] = 1.0
    assert run(Reduction(), made) == []


def test_a_reduced_gradient_is_left_alone() -> None:
    assert run(Reduction(), [step(s, reduced=True) for s in range(200)]) == []


def of(number: int, reduced: float, local: tuple[float, ...] = (1.0, 0.5)) -> StepRecord:
    """A step whose reduced gradient has this norm on all ranks."""
    return record(number, {
        rank: {"grad_norm_local": own, "grad_norm": reduced, "micro_batches": 1.0}
        for rank, own in enumerate(local)
    })  # fmt: skip


@pytest.mark.parametrize("placement", ["replicated", "sharded"])
@pytest.mark.parametrize("micros", [1, 4])
@pytest.mark.parametrize("ranks", [2, 8])
def test_gradients_that_are_summed_from_some_step_on_are_told_at_the_third_look(
    placement: str, micros: int, ranks: int
) -> None:
    for every in (1, 10):
        stream = [
            step_of(s, scaled(ranks if s >= 100 else 1), ranks=ranks, micros=micros,
                    placement=placement)
            for s in range(0, 200, every)
        ]  # fmt: skip
        (warn,) = hear(Reduction(), stream)
        assert (warn.level, warn.step, warn.rank) == ("warn", 100 + 2 * every, None)
        assert (warn.module, warn.kind) == (None, "grad")
        assert warn.values == pytest.approx({"factor": ranks, "before": 1.0, "since": 100})
        assert f"is {ranks} x the mean of the {ranks} ranks' own since step 100" in warn.message
        assert "they are summed" in warn.message


def test_gradients_that_are_scaled_from_some_step_on_are_told_by_how_much() -> None:
    (warn,) = run(Reduction(), [step_of(s, scaled(0.9 if s >= 50 else 1)) for s in range(60)])
    assert (warn.level, warn.step) == ("warn", 52)
    assert "is 0.9 x the mean" in warn.message
    assert "scaled in the reduction, or after it" in warn.message


def test_another_factor_now_and_then_or_each_time_another_one_is_not_told() -> None:
    now_and_then = [step_of(s, scaled(2 if s >= 50 and s % 3 else 1)) for s in range(100)]
    assert run(Reduction(), now_and_then) == []
    never_the_same = [step_of(s, scaled(1 + s % 7 if s >= 50 else 1)) for s in range(100)]
    assert run(Reduction(), never_the_same) == []


def test_whoever_sums_from_the_start_means_to() -> None:
    assert run(Reduction(), [step_of(s, scaled(2)) for s in range(100)]) == []
    assert run(Reduction(), [step_of(s, scaled(1 if s < 7 else 2)) for s in range(100)]) == []
    (warn,) = run(Reduction(), [step_of(s, scaled(1 if s < 8 else 2)) for s in range(100)])
    assert warn.step == 10
    unsettled = [step_of(s, scaled(1 + s % 2 if s < 20 else 3)) for s in range(100)]
    assert run(Reduction(), unsettled) == []


def test_the_new_factor_is_the_usual_one_then_and_a_return_from_it_is_told_as_well() -> None:
    there_and_back = [step_of(s, scaled(3 if 50 <= s < 200 else 1)) for s in range(300)]
    there, back = hear(Reduction(), there_and_back)
    assert (there.step, there.values["before"], there.values["factor"]) == (
        52, pytest.approx(1), pytest.approx(3),
    )  # fmt: skip
    assert (back.step, back.values["before"], back.values["factor"]) == (
        202, pytest.approx(3), pytest.approx(1),
    )  # fmt: skip


def test_a_parameter_that_was_never_reduced_hides_no_other_factor_and_is_none_itself() -> None:
    def but_one(factor: float) -> Callable[[Gradient, str], Gradient]:
        return lambda gradients, name: (
            gradients[0] if name == "b.bias" else factor * mean(gradients, name)
        )

    stream = [step_of(s, but_one(3 if s >= 50 else 1), ranks=3) for s in range(100)]
    (found,) = [a for a in hear(Reduction(), stream) if "mean of the 3" in a.message]
    assert found.values["factor"] == pytest.approx(3)
    assert 52 <= found.step < 60  # its own sum may be most of what there is to tell


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("placement", ["replicated", "sharded"])
def test_a_mean_that_is_divided_once_more_is_told_at_the_fifth_step(
    ranks: int, placement: str
) -> None:
    def stream(factor: float, last: int = 300) -> list[StepRecord]:
        changes = {"ranks": ranks, "placement": placement}
        return [step_of(s, scaled(factor if s < last else 1), **changes) for s in range(300)]

    (warn,) = hear(Reduction(), stream(1 / ranks))
    assert (warn.level, warn.step, warn.kind) == ("warn", 4, "grad")
    assert warn.values == pytest.approx({"factor": 1 / ranks})
    assert "divided by the number of ranks twice" in warn.message
    for factor in (0.97, 0.7, -1.0):
        (warn,) = hear(Reduction(), stream(factor))
        assert f"is {factor:g} x the mean" in warn.message
        assert "scaled, too" in warn.message
    assert hear(Reduction(), stream(0.99)) == []
    assert hear(Reduction(), stream(1 / ranks, last=4)) == []


def test_a_note_does_not_begin_the_first_steps_anew_and_another_factor_after_it_is_meant() -> None:
    def noted(number: int, factor: float) -> StepRecord:
        return step_of(number, scaled(factor), told={NOTED: 1.0})

    later = [noted(50, 0.5), *(step_of(s, scaled(0.5)) for s in range(51, 80))]
    assert run(Reduction(), [*(step_of(s) for s in range(50)), *later]) == []
    between = [step_of(s, scaled(0.5)) if s != 2 else noted(2, 0.5) for s in range(20)]
    assert levels(run(Reduction(), between)) == [("warn", 4)]


@pytest.mark.parametrize("ranks", [3, 16])
@pytest.mark.parametrize("noise", [1.0, 0.05])
def test_a_rank_that_is_left_out_from_some_step_on_is_told_at_the_third_look(
    ranks: int, noise: float
) -> None:
    """However much the gradients of the others are like its own."""

    def alike(gradients: Gradient) -> Gradient:
        return gradients.mean(axis=0) + noise * (gradients - gradients.mean(axis=0))

    def leave_it_out(gradients: Gradient, _: str) -> Gradient:
        # The mean of all but the last of gradients that are nearer to their mean than these.
        own = gradients.mean(axis=0)
        return own + noise * (alike(gradients)[:-1].mean(axis=0) - own)

    stream = [step_of(s, leave_it_out if s >= 50 else mean, ranks=ranks) for s in range(100)]
    (warn,) = hear(Reduction(), stream)
    assert (warn.level, warn.step) == ("warn", 52)
    assert f"no multiple of the mean of the {ranks} ranks' own since step 50" in warn.message
    assert warn.values == pytest.approx({"before": 1.0, "since": 50})


def rounded(bits: int) -> Callable[[Gradient, str], Gradient]:
    """Return a reduction to a mean of so many bits; bfloat16 has 8."""

    def reduce(gradients: Gradient, name: str) -> Gradient:
        found = mean(gradients, name)
        unit = 2.0 ** (np.floor(np.log2(np.abs(found))) + 1 - bits)
        return np.round(found / unit) * unit

    return reduce


def test_rounding_is_no_other_multiple_however_coarse_it_is() -> None:
    for ranks in (2, 64):
        assert run(Reduction(), [step_of(s, rounded(8), ranks=ranks) for s in range(100)]) == []
    now_and_then = [step_of(s, rounded(4 if s < 4 or s >= 50 else 40)) for s in range(100)]
    assert run(Reduction(), now_and_then) == []


def test_rounding_hides_no_rank_that_is_left_out() -> None:
    def leave_it_out(gradients: Gradient, name: str) -> Gradient:
        return rounded(8)(gradients[:-1], name)

    stream = [step_of(s, leave_it_out if s >= 50 else rounded(8), ranks=3) for s in range(100)]
    (warn,) = hear(Reduction(), stream)
    assert 52 <= warn.step < 60  # a sum of elements may look well by chance
    assert "no multiple" in warn.message


def test_what_tells_nothing_is_not_counted_among_those_that_are_a_multiple() -> None:
    stream = [
        step_of(s, but_the_last if s >= 50 else mean, ranks=3,
                cancelled=("a.weight", "b.weight"))
        for s in range(100)
    ]  # fmt: skip
    (warn,) = hear(Reduction(), stream)
    assert (warn.step, "no multiple" in warn.message) == (52, True)


def test_another_factor_and_then_none_are_not_one_run_of_three() -> None:
    def at(number: int) -> Callable[[Gradient, str], Gradient]:
        return scaled(2) if number == 50 else but_the_last if number in (51, 52) else mean

    assert run(Reduction(), [step_of(s, at(s), ranks=3) for s in range(100)]) == []


def test_a_hook_that_compresses_matrices_alone_is_not_told() -> None:
    """PowerSGD averages vectors as they are; it begins at some step."""

    def compress(gradients: Gradient, name: str) -> Gradient:
        found = mean(gradients, name)
        return found if name.endswith("bias") else found[::-1] * np.linspace(0, 2, len(found))

    stream = [step_of(s, compress if s >= 50 else mean, ranks=4) for s in range(200)]
    assert run(Reduction(), stream) == []


def test_ranks_with_the_same_data_are_not_told_apart() -> None:
    scalars = {r: {"grad_norm_local": 1.0, "grad_norm": 1.0, "micro_batches": 1.0} for r in (0, 1)}
    assert run(Reduction(), [record(s, scalars) for s in range(50)]) == []


def test_shards_micro_batches_and_missing_ranks_are_not_judged() -> None:
    sharded = {Site("fc.weight", "grad", placement="sharded"): {"rms": 1}}
    parts = [record(s, step(s, reduced=False).scalars, sharded) for s in range(20)]
    missing = [step(s, reduced=False, missing=(3,)) for s in range(20, 40)]
    micros = []
    for s in range(40, 60):
        scalars = {
            r: {**x, "micro_batches": 2.0} for r, x in step(s, reduced=False).scalars.items()
        }
        micros.append(record(s, scalars))
    assert run(Reduction(), [*parts, *missing, *micros]) == []


def test_norms_whose_squares_no_float_holds_do_not_raise() -> None:
    assert run(Reduction(), [of(s, 1e300, (1e300, 0.5e300)) for s in range(20)]) == []


def test_values_that_nobody_expects_do_not_raise() -> None:
    odd = (math.nan, math.inf, 0.0, -1.0, 1e308)
    stream = []
    for s in range(100):
        told = {"grad_norm_local": odd[s % 5], "grad_norm": odd[s % 3], "micro_batches": 1.0}
        stream.append(record(s, {0: told, 1: {**told, "grad_norm": 1.0}}))
    run(Reduction(), [*stream, StepRecord(0, 200, (0, 1), 0)])


def of_parameters(
    number: int, local: dict[str, float], reduced: dict[str, float], ranks: int = 2, micro: int = 1
) -> StepRecord:
    """Norms of each parameter; `local` of each of the ranks, whose merged row holds all."""
    rows = {}
    for kind, norms in (("grad_local", local), ("grad", reduced)):
        for fqn, norm in norms.items():
            many = ranks if kind == "grad_local" else 1
            placement = "local" if kind == "grad_local" else "replicated"
            rows[Site(fqn, kind, placement=placement)] = {"numel": 1, "sum_sq": many * norm**2}
    said = {
        "grad_norm_local": math.hypot(*local.values()),
        "grad_norm": math.hypot(*reduced.values()),
        "micro_batches": float(micro),
    }
    apart = {
        r: {**said, "grad_norm_local": said["grad_norm_local"] * (1 + 0.1 * r)} for r in range(2)
    }
    return record(number, apart, rows)


def test_a_parameter_that_gets_what_belongs_to_another_is_named_at_the_third_look() -> None:
    local = {"a.weight": 1.0, "a.bias": 0.1, "b.weight": 2.0}
    crossed = {"a.weight": 0.07, "a.bias": 0.7, "b.weight": 1.4}
    mean = {fqn: norm / 2**0.5 for fqn, norm in local.items()}
    for every in (1, 10):
        stream = [
            of_parameters(s, local, crossed if s >= 50 else mean) for s in range(0, 200, every)
        ]
        (warn,) = run(Reduction(), stream)
        assert (warn.level, warn.step, warn.module) == ("warn", 50 + 2 * every, "a")
        assert warn.values == {"ratio": pytest.approx(7.0), "parameters": 1}
        assert "a.bias is 7 x as large" in warn.message
    now_and_then = [of_parameters(s, local, mean if s % 3 == 0 else crossed) for s in range(200)]
    assert run(Reduction(), now_and_then) == []


def test_a_few_that_are_far_too_large_are_told_though_they_make_the_whole_too_large() -> None:
    local = dict.fromkeys(("a.weight", "b.weight", "c.weight", "d.weight"), 1.0)
    mean = {fqn: norm / 2**0.5 for fqn, norm in local.items()}
    for worst, said in (({"b.weight": 14.0}, ["b"]), ({"b.weight": 2.0}, []),
                        ({"a.weight": 14.0, "b.weight": 14.0}, [])):  # fmt: skip
        stream = [of_parameters(s, local, mean | worst if s >= 50 else mean) for s in range(200)]
        assert [(a.module, a.step) for a in run(Reduction(), stream)] == [(m, 52) for m in said]


def test_what_no_optimizer_takes_may_be_the_sum_of_many_steps() -> None:
    """A head alone is trained from step 20 on, and nobody sets the other gradients to zero."""
    stream = [step_of(s, scaled(3 if s >= 20 else 1)) for s in range(100)]
    norms = [r.scalars[0]["grad_norm"] for r in stream]
    of_the_head = [0.5 + 0.01 * np.sin(s) for s in range(100)]
    for taken, said in ((of_the_head, 0), (norms, 1), ([0.1] * 100, 1)):
        used = [*norms[:20], *taken[20:]]
        told = [
            replace(r, scalars={k: {**v, USED_NORM: used[r.step]} for k, v in r.scalars.items()})
            for r in stream
        ]
        assert len(run(Reduction(), told)) == said


def test_gradients_that_are_equal_or_summed_from_the_start_are_not_said_to_be_anothers() -> None:
    local = {"a.weight": 1.0, "a.bias": 0.1, "b.weight": 2.0}
    assert run(Reduction(), [of_parameters(s, local, local) for s in range(100)]) == []
    summed = {fqn: 2 * norm for fqn, norm in local.items()}
    assert run(Reduction(), [of_parameters(s, local, summed) for s in range(100)]) == []
    crossed = {"a.weight": 0.07, "a.bias": 0.7, "b.weight": 1.4}
    accumulated = [of_parameters(s, local, crossed, micro=2) for s in range(100)]
    assert run(Reduction(), accumulated) == []
    alone = [of_parameters(s, {"b.weight": 2.0}, crossed) for s in range(100)]
    assert run(Reduction(), alone) == []  # what has no local row is not known
