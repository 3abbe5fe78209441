"""Weights that jump, or all shrink or grow, are told; those that begin at zero are not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddpprobe.detectors.weight_jump import WeightJump
from ddpprobe.records.step import LEARNING_RATE, Site, StepRecord
from tests.detectors.made_records import levels, record, run
from tests.detectors.made_weights import Made, weights

AT = 100
OFF = 1e9  # times as far as ever: the rules of norms that move are off


def of_size_and_pace() -> WeightJump:
    return WeightJump(moved=OFF, together=OFF)


def stream(weight, steps: int = 160, every: int = 1) -> list[StepRecord]:
    """Three parameters; `weight` of (step, which) is their size."""
    return [
        weights(s, {f"l{i}.weight": Made(weight(s, i)) for i in range(3)})
        for s in range(0, steps, every)
    ]


@pytest.mark.parametrize("every", [1, 10])
def test_a_weight_that_is_five_times_as_large_is_told_with_its_name(every: int) -> None:
    (warn,) = run(WeightJump(), stream(lambda s, i: 5.0 if s >= AT and i == 1 else 1.0, 200, every))
    assert (warn.level, warn.step, warn.module, warn.kind) == ("warn", AT, "l1.weight", "param")
    assert warn.values["ratio"] == pytest.approx(5.0)
    assert warn.values["parameters"] == 1


@pytest.mark.parametrize(("size", "level"), [(1e14, "warn"), (8e37, "page")])
def test_a_weight_with_which_nothing_can_be_computed_is_a_page(size: float, level: str) -> None:
    (found,) = run(WeightJump(), stream(lambda s, i: size if s >= AT and i == 1 else 1.0, 200))
    assert (found.level, found.step, found.module) == (level, AT, "l1.weight")
    assert ("resume from a checkpoint" in found.message) is (level == "page")
    exploded = run(WeightJump(), stream(lambda s, _: size if s >= AT else 1.0, AT + 5))
    assert {a.level for a in exploded} == {"warn"}  # all at once


def test_a_largest_weight_below_the_learning_rate_is_left_alone() -> None:
    def size(step: int, which: int) -> float:
        return 1.0 if which else 1e-5 if step < AT else 2.4e-4

    for rate, told in ((3e-4, []), (1e-4, [("warn", AT)])):
        found = run(
            WeightJump(moved=OFF),
            [replace(r, scalars={0: {LEARNING_RATE: rate}}) for r in stream(size)],
        )
        assert levels(found) == told


def test_three_times_is_not_enough_nor_are_fewer_than_ten_looks() -> None:
    assert run(of_size_and_pace(), stream(lambda s, i: 3.0 if s >= AT and i == 1 else 1.0)) == []
    assert run(WeightJump(), stream(lambda s, i: 5.0 if s >= 9 and i == 1 else 1.0)) == []


@pytest.mark.parametrize(("every", "step"), [(1, 110), (10, 110)])
@pytest.mark.parametrize("factor", [0.9, 1.1])
@pytest.mark.parametrize("size", [1.0, 1e-3])
def test_all_weights_that_shrink_or_grow_in_each_step_are_told(
    every: int, step: int, factor: float, size: float
) -> None:
    found = run(WeightJump(), stream(lambda s, _: size * factor ** max(0, s - AT), 140, every))
    (warn,) = [a for a in found if "rate" in a.values]
    assert (warn.level, warn.module, warn.step) == ("warn", "", step)
    assert warn.values["rate"] == pytest.approx(factor - 1)


@pytest.mark.parametrize(("parameters", "told"), [(1, False), (2, True)])
def test_a_model_of_two_parameters_shrinks_and_of_one_parameter_alone_nobody_speaks(
    parameters: int, told: bool
) -> None:
    records = [
        weights(s, {f"l{i}.weight": Made(0.9 ** max(0, s - AT)) for i in range(parameters)})
        for s in range(140)
    ]
    assert any("rate" in a.values for a in run(WeightJump(), records)) is told


@pytest.mark.parametrize("every", [1, 10])
def test_weights_that_shrink_slowly_all_together_are_told_and_growth_as_slow_is_not(
    every: int,
) -> None:
    (warn,) = run(of_size_and_pace(), stream(lambda s, _: 0.985 ** max(0, s - AT), 160, every))
    assert (warn.level, warn.module) == ("warn", "")
    assert AT + 20 <= warn.step <= AT + 40
    assert -0.0151 <= warn.values["rate"] <= -0.008
    assert "shrunk" in warn.message
    assert run(of_size_and_pace(), stream(lambda s, _: 1.015 ** max(0, s - AT), 160, every)) == []


def test_weights_that_were_set_to_others_at_one_step_do_not_shrink_from_step_to_step() -> None:
    found = run(WeightJump(), stream(lambda s, _: 0.75 if s >= AT else 1.0, 200))
    assert levels(found) == [("warn", AT)]
    assert "between two looks" in found[0].message


def test_a_start_that_was_too_large_may_shrink_for_fifty_steps_and_later_a_little() -> None:
    assert run(WeightJump(), stream(lambda s, _: 0.985 ** min(s, 49))) == []
    assert run(WeightJump(), stream(lambda s, _: 0.993**s)) == []


def test_one_of_three_that_shrinks_slowly_is_let_be() -> None:
    assert run(WeightJump(), stream(lambda s, i: 0.98 ** max(0, s - AT) if i else 1.0)) != []
    assert run(WeightJump(), stream(lambda s, i: 1.0 if i else 0.98 ** max(0, s - AT))) == []


@pytest.mark.parametrize("factor", [0.9, 1.1])
def test_of_two_parameters_one_that_moves_is_not_half_of_them(factor: float) -> None:
    """The bias of a linear model comes by zero."""
    for both in (False, True):
        records = [
            weights(s, {f"l{i}": Made(factor ** max(0, s - AT) if both or i else 1.0)
                        for i in range(2)})
            for s in range(140)
        ]  # fmt: skip
        assert any("rate" in a.values for a in run(of_size_and_pace(), records)) is both


def test_small_ones_that_shrink_slowly_beside_large_ones_that_do_not_are_let_be() -> None:
    """Biases, where there is only noise to learn."""

    def sized(large: float) -> list[StepRecord]:
        return stream(lambda s, i: 0.98 ** max(0, s - AT) if i else large)

    assert run(of_size_and_pace(), sized(large=1.0)) != []
    assert run(of_size_and_pace(), sized(large=6.0)) == []


def test_what_begins_at_zero_may_grow_and_one_parameter_may_shrink() -> None:
    assert run(WeightJump(), stream(lambda s, _: 1e-3 * s)) == []
    shrinks = stream(lambda s, i: 0.9 ** max(0, s - AT) if i == 1 else 1.0)
    assert run(of_size_and_pace(), shrinks) == []


def noisy(step: int, which: int) -> float:
    """A weight whose norm moves by up to half a percent between two looks."""
    return 1.0 + 0.005 * ((step * (which + 3)) % 2)


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("factor", [0.85, 1.15])
def test_a_norm_that_moves_far_further_than_ever_is_told_with_its_name(
    every: int, factor: float
) -> None:
    late = 2 * AT
    moved = stream(lambda s, i: noisy(s, i) * (factor if s >= late and i == 1 else 1.0), 300, every)
    (warn,) = run(WeightJump(), moved)
    assert (warn.level, warn.step, warn.module, warn.kind) == ("warn", late, "l1.weight", "param")
    assert warn.values["norm"] / warn.values["before"] == pytest.approx(factor, abs=0.01)
    assert (warn.values["times"] > 20, warn.values["parameters"]) == (True, 1)


@pytest.mark.parametrize("rate", [1.0025, 0.9975])
def test_a_norm_that_moves_as_fast_as_before_is_left_alone_where_fewer_steps_are_sampled(
    rate: float,
) -> None:
    steady = stream(lambda s, _: rate**s, steps=500)
    sampled = [r for r in steady if r.step < 50 or r.step % 100 == 0]
    assert run(WeightJump(), sampled) == []


def anew(many: int, rate: float | None = None, every: int = 10) -> list[StepRecord]:
    """Of four parameters that move by 3 % between looks, the first ones grow to 1.2 at once."""
    late = 2 * AT
    out = []
    for at in range(0, 300, every):
        scalars = {0: {LEARNING_RATE: 0.1 if at < late or rate is None else rate}}
        usual, far = (1.03 if at // every % 2 else 1.0), (1.2 if at >= late else 1.0)
        made = {f"l{i}.weight": Made(usual * (far if i < many else 1.0)) for i in range(4)}
        out.append(replace(weights(at, made), scalars=scalars))
    return out


@pytest.mark.parametrize("every", [1, 10])
def test_three_that_move_far_together_are_told_where_one_or_two_are_not(every: int) -> None:
    (warn,) = run(WeightJump(), anew(3, every=every))
    assert (warn.level, warn.step, warn.module) == ("warn", 2 * AT, "l0.weight")
    assert warn.values["parameters"] == 3
    assert 5 < warn.values["times"] < 10
    assert "also l1.weight, l2.weight" in warn.message
    assert [run(WeightJump(), anew(many, every=every)) for many in (1, 2)] == [[], []]


def test_a_learning_rate_that_rises_takes_all_further_and_one_that_falls_does_not() -> None:
    assert run(WeightJump(), anew(3, rate=0.2)) == []
    assert len(run(WeightJump(), anew(3, rate=0.1))) == 1
    assert len(run(WeightJump(), anew(3, rate=0.01))) == 1


def test_all_norms_that_moved_are_told_in_one_line() -> None:
    warn, *_ = run(WeightJump(), stream(lambda s, i: noisy(s, i) * (0.5 if s >= AT else 1.0)))
    assert (warn.values["parameters"], warn.message.count("also ")) == (3, 1)


def test_a_norm_that_moves_less_than_a_tenth_or_as_before_or_too_soon_is_left_alone() -> None:
    little = stream(lambda s, i: noisy(s, i) * (1.09 if s >= AT else 1.0))
    lively = stream(lambda s, i: (1.0 + 0.2 * (s % 2)) * (0.6 if s >= AT and not i else 1.0))
    soon = stream(lambda s, i: noisy(s, i) * (0.6 if s >= 10 and not i else 1.0))
    assert [run(WeightJump(), each) for each in (little, lively, soon)] == [[], [], []]


def test_a_few_that_shrink_among_many_that_begin_to_grow_are_left_alone() -> None:
    def made(step: int) -> dict[str, Made]:
        return {f"l{i}.weight": Made(0.9**step if i < 2 else 1 + step) for i in range(5)}

    assert run(WeightJump(), [weights(s, made(s)) for s in range(60)]) == []


def test_two_of_many_that_began_at_zero_later_than_the_others_are_not_half_of_them() -> None:
    def made(step: int) -> dict[str, Made]:
        late = 1.05**step if step >= 3 else 0.0
        return {f"l{i}.weight": Made(late if i < 2 else 1.0) for i in range(6)}

    assert run(WeightJump(), [weights(s, made(s)) for s in range(120)]) == []


def test_it_is_told_again_after_a_quiet_time_and_a_restart_begins_anew() -> None:
    def weight(step: int, which: int) -> float:
        return 5.0 if step in (AT, AT + 200) and which == 0 else 1.0

    assert levels(run(WeightJump(), stream(weight, 400))) == [("warn", AT), ("warn", AT + 200)]
    later = [weights(s, {"l0.weight": Made(90.0)}, attempt=1) for s in range(160, 200)]
    assert run(WeightJump(), stream(lambda *_: 1.0) + later) == []


def statistics(size, *, rate: float = 0.0) -> list[StepRecord]:
    """Steps of a buffer of 100 elements, `size` of step large, and of a learning rate."""
    site = Site("norm.running_var", "buffer")
    rows = [{site: {"rms": size(s), "max": size(s)}} for s in range(160)]
    return [record(s, {0: {LEARNING_RATE: rate}}, row) for s, row in enumerate(rows)]


def test_a_buffer_that_jumps_or_moves_as_never_before_is_told_as_a_weight_is() -> None:
    for factor, told in (
        (5.0, "largest buffer 5 is 4.98 x"),
        (0.85, "norm of the buffer went from"),
    ):
        jumped = statistics(lambda s, f=factor: noisy(s, 0) * (f if s >= AT else 1.0))
        (warn,) = run(WeightJump(), jumped)
        assert (warn.level, warn.step) == ("warn", AT)
        assert (warn.module, warn.kind) == ("norm.running_var", "buffer")
        assert told in warn.message
        assert "beside the optimizer" not in warn.message


def test_a_norm_over_the_buffers_of_all_ranks_is_said_to_be_one() -> None:
    site = Site("norm.running_var", "buffer", placement="local")
    for placement, words in (("local", "buffer, of all ranks together, went"), ("", "buffer went")):
        at = replace(site, placement=placement or "replicated")
        stream = [
            record(s, {0: {}, 1: {}}, rows={at: {"rms": n, "max": 1.0, "numel": 100}})
            for s in range(60)
            for n in (0.5 if s >= 40 else 0.8 + 1e-4 * (s % 3),)
        ]
        (warn,) = run(WeightJump(), stream)
        assert f"norm of the {words} from" in warn.message


def test_a_buffer_may_be_below_the_learning_rate_and_may_shrink_or_grow_slowly() -> None:
    small = statistics(lambda s: 1e-3 * (5.0 if s >= AT else 1.0), rate=0.1)
    assert levels(run(WeightJump(), small)) == [("warn", AT)]
    for factor in (0.9, 1.1):
        assert run(WeightJump(), statistics(lambda s, f=factor: f**s)) == []


@pytest.mark.parametrize(("lowest", "told"), [(0.0, 0), (-1.0, 1)])
def test_a_mask_of_zeros_and_ones_may_lose_ones_at_once(lowest: float, told: int) -> None:
    site = Site("head.weight_mask", "buffer")
    ones = [60 if s < AT else 20 for s in range(160)]
    of = [{"min": lowest, "max": 1.0, "sum": many, "rms": (many / 100) ** 0.5} for many in ones]
    records = [record(s, {0: {}}, {site: row}) for s, row in enumerate(of)]
    assert len(run(WeightJump(), records)) == told


def of_elements(size, numel, kind: str = "buffer") -> list[StepRecord]:
    """Steps of a tensor, `size` of step large, of `numel` of step elements."""
    site = Site("cache", kind)
    return [
        record(s, rows={site: {"rms": size(s), "max": size(s), "numel": numel(s)}})
        for s in range(160)
    ]


@pytest.mark.parametrize("kind", ["buffer", "param"])
def test_what_is_resized_is_looked_at_anew(kind: str) -> None:
    """A cache that grows, an embedding that is given more words."""

    def numel(step: int) -> int:
        return 100 if step < AT else 300

    assert run(WeightJump(), of_elements(lambda _: 1.0, numel, kind)) == []
    larger = of_elements(lambda s: 1.0 if s < AT else 9.0, numel, kind)
    assert run(WeightJump(), larger) == []
    again = of_elements(lambda s: 1.0 if s < AT else 9.0 if s < AT + 20 else 50.0, numel, kind)
    assert levels(run(WeightJump(), again)) == [("warn", AT + 20)]


OTHERS = {f"l{i}": Made(1.0) for i in range(4)}


def trained_from(step: int, first: int, size: float = 0.1, moves: float = 0.02) -> Made:
    """A weight that no step changes before `first`, and that each one moves far from then on."""
    behind = max(0, step - first + 1)
    return Made(size + moves * behind, moves if behind else 0.0)


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_a_weight_that_stood_still_and_begins_to_be_trained_is_looked_at_anew(
    every: int, size: float
) -> None:
    """A group of parameters whose learning rate was 0: its first moves are no leap."""
    stream_ = [
        weights(s, {**OTHERS, "b": trained_from(s, AT, size, 0.3 * size)})
        for s in range(0, 2 * AT, every)
    ]
    assert run(WeightJump(), stream_) == []


def test_a_weight_that_stood_still_and_is_written_over_is_told() -> None:
    """No step of the optimizer moves it: a bit of a frozen weight that is flipped."""
    frozen = [weights(s, {**OTHERS, "b": Made(0.1 if s < AT else 9.0, 0.0)}) for s in range(2 * AT)]
    assert levels(run(WeightJump(), frozen)) == [("warn", AT)]
    short = [
        weights(s, {**OTHERS, "b": Made(0.1 if s < AT else 9.0, 0.0 if s < 9 else 0.1)})
        for s in range(2 * AT)
    ]
    assert levels(run(WeightJump(), short)) == [("warn", AT)]


@pytest.mark.parametrize("every", [1, 7, 10])
def test_a_count_that_begins_anew_with_each_epoch_is_left_alone(every: int) -> None:
    """A metric's total, and how many of 32 were right in each batch, over epochs of 130 steps."""
    right = [20 + 7 * s % 11 for s in range(1000)]
    for counted in ([32] * 1000, right):
        totals = [float(sum(counted[s - s % 130 : s + 1])) for s in range(1000)]
        records = [
            record(s, rows={Site("metric.total", "buffer"): {"rms": n, "max": n, "numel": 1}})
            for s, n in enumerate(totals)
        ]
        assert run(WeightJump(), records[::every]) == []


def test_a_running_variance_that_rises_and_is_written_over_is_no_count() -> None:
    def rising(step: int) -> float:
        return 1.0 + 0.01 * step

    for low in (0.1, 0.5):
        fallen = statistics(lambda s, low=low: rising(s) if s < AT else low)
        assert levels(run(WeightJump(), fallen)) == [("warn", AT)]
    weight = stream(lambda s, i: 0.01 * (s + 1) if s < AT or i else 0.01)  # no weight is a count
    assert [a.step for a in run(WeightJump(), weight) if "times" in a.values] == [AT]


def test_a_weight_and_a_buffer_that_jump_at_once_are_told_once() -> None:
    both = []
    for number in range(160):
        size = 5.0 if number >= AT else 1.0
        rows = {
            Site("w", "param"): {"rms": size, "max": size},
            Site("b", "buffer"): {"rms": size, "max": size},
        }
        both.append(record(number, rows=rows))
    (warn,) = run(WeightJump(), both)
    assert (warn.module, warn.kind) == ("w", "param")
    assert warn.message.endswith("; buffer b leapt as well")


def test_a_buffer_that_leaps_again_and_again_silences_no_weight() -> None:
    both = []
    for number in range(160):
        size = 50.0 if number >= 130 else 1.0
        loud = 9.0 if number and number % 60 == 0 else 1.0
        rows = {
            Site("w", "param"): {"rms": size, "max": size},
            Site("loud", "buffer"): {"rms": loud, "max": loud},
        }
        both.append(record(number, rows=rows))
    told = [(warn.kind, warn.step) for warn in run(WeightJump(), both)]
    assert ("param", 130) in told
    assert told[0] == ("buffer", 60)


@pytest.mark.parametrize("kind", ["param", "buffer"])
@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("settled", [True, False])
def test_what_a_nan_leaves_of_a_norm_has_not_shrunk(kind: str, every: int, settled: bool) -> None:
    """Half of the elements of each are NaN from a step on, then all of them."""

    def rows(step: int) -> dict[Site, dict[str, float]]:
        bad = 0 if step < AT else 90 if step < AT + 50 else 100
        row = {"rms": (1 - bad / 100) ** 0.5, "max": 0.0 if bad else 1.0, "nan": bad}
        return {Site(f"l{i}.weight", kind): row for i in range(4)}

    first = 0 if settled else AT - 20
    assert run(WeightJump(), [record(s, rows=rows(s)) for s in range(first, 300, every)]) == []
