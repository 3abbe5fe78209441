"""Weights that hardly get a gradient are named; biases, zeros and single steps are not."""

from __future__ import annotations

from ddpprobe.detectors.vanishing import Vanishing
from ddpprobe.records.step import Site, StepRecord
from tests.detectors.made_records import levels, record, run

NAMES = ("layers.0.weight", "layers.0.bias", "layers.9.weight")


def step(number: int, first: float, bias: float = 1.0, last: float = 1.0) -> StepRecord:
    rows = zip(NAMES, (first, bias, last), strict=True)
    return record(number, rows={Site(name, "grad"): {"rms": rms} for name, rms in rows})


def test_the_weight_that_gets_least_is_named_after_fifty_steps_once() -> None:
    (warn,) = run(Vanishing(), [step(s, 1e-7) for s in range(300)])
    assert (warn.level, warn.step, warn.module) == ("warn", 50, "layers.0.weight")
    assert 6.9 < warn.values["decades"] < 7.1


def test_at_an_interval_of_ten_it_takes_as_long() -> None:
    assert levels(run(Vanishing(), [step(s, 1e-7) for s in range(0, 300, 10)])) == [("warn", 50)]


def test_four_decades_are_left_alone_and_so_are_biases_and_zeros() -> None:
    for first, bias in ((1e-4, 1.0), (1.0, 1e-9), (0.0, 1.0)):
        assert run(Vanishing(), [step(s, first, bias) for s in range(300)]) == []


def test_a_weight_is_compared_with_those_of_its_name_in_other_layers() -> None:
    def of(**rms: float) -> list[StepRecord]:
        rows = {Site(f"{n.replace('__', '.')}.weight", "grad"): {"rms": x} for n, x in rms.items()}
        return [record(s, rows=rows) for s in range(100)]

    small = {"blocks__0__q": 1e-7, "blocks__1__q": 1e-6}
    assert run(Vanishing(), of(embed=1.0, **small)) == []
    (warn,) = run(Vanishing(), of(embed=1.0, **small, blocks__2__q=1.0))
    assert (warn.module, warn.values["decades"]) == ("blocks.0.q.weight", 7.0)
    assert "below that of blocks.2.q.weight" in warn.message
    (warn,) = run(Vanishing(), of(embed=10.0, stem=1e-7, **small))  # it has none: with all
    assert (warn.module, warn.values["largest"]) == ("stem.weight", 10.0)


def test_the_weight_that_is_named_is_one_that_lasted() -> None:
    """At the last look another one is still further below, which was not before."""

    def of(number: int, other: float) -> StepRecord:
        rms = {"layers.0.weight": 1e-6, "layers.1.weight": other, "layers.9.weight": 1.0}
        return record(number, rows={Site(name, "grad"): {"rms": x} for name, x in rms.items()})

    (warn,) = run(Vanishing(), [of(s, 1.0 if s < 50 else 1e-9) for s in range(80)])
    assert (warn.step, warn.module, warn.values["decades"]) == (50, "layers.0.weight", 6.0)
    now_and_then = [of(s, 1e-9 if s % 2 else 0.0) for s in range(80)]
    assert [warn.module for warn in run(Vanishing(), now_and_then)] == ["layers.0.weight"]
    in_turn = [of(s, 1e-9 if s % 2 else 1.0) for s in range(80)]
    assert [warn.module for warn in run(Vanishing(), in_turn)] == ["layers.0.weight"]


def test_a_step_in_between_begins_the_count_anew() -> None:
    assert run(Vanishing(), [step(s, 1e-7 if s % 40 else 1.0) for s in range(300)]) == []


def test_values_that_nobody_expects_do_not_raise() -> None:
    huge = [step(s, 1e-150, 1.0, 1e150) for s in range(100)]
    assert levels(run(Vanishing(), huge)) == [("warn", 50)]
    run(Vanishing(), [step(s, float("nan"), float("inf"), -1.0) for s in range(100)])
