"""A phase that alone takes all ranks longer is told within some steps; what slows all is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from ddpprobe.detectors.slowdown import Slowdown
from ddpprobe.records.step import QUEUED, STEP_PHASES, TRAINABLE, Anomaly, Site, StepRecord
from tests.detectors.made_records import record, run

OUTPUT = Site("head", "output")
AT = 200
Phases = tuple[float, float, float, float]  # seconds: data, forward, backward, optimizer
USUAL = (0.01, 0.02, 0.03, 0.01)


def forward(factor: float, usual: Phases = USUAL) -> Phases:
    return usual[0], usual[1] * factor, usual[2], usual[3]


def job(
    phases: Callable[[int, int], Phases],
    every: int = 1,
    queued: Callable[[int, int], float] | None = lambda *_: 0.0,
    numel: Callable[[int], int] = lambda _: 100,
    trained: float = 4.0,
) -> list[StepRecord]:
    """Steps of two ranks, of which the phases, and what the forward was queued, are given."""
    out = []
    for step in range(0, 400, every):
        scalars = {}
        for rank in (0, 1):
            taken = dict(zip(STEP_PHASES, phases(step, rank), strict=True))
            scalars[rank] = {f"{name}_seconds": took for name, took in taken.items()}
            scalars[rank] |= {"reduce_seconds": 0.001, TRAINABLE: trained}
            if queued is not None:
                scalars[rank] |= {QUEUED[part]: 0.0 for part in (*STEP_PHASES, "reduce")}
                scalars[rank][QUEUED["forward"]] = queued(step, rank)
        at = 100_000_000 * step
        out.append(record(step, scalars, {OUTPUT: {"numel": numel(step)}}, wall_time_ns=at))
    return out


def told(*given: object, **more: object) -> list[Anomaly]:
    return run(Slowdown(), job(*given, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize("every", [1, 10])
def test_hooks_that_pile_up_are_told_with_the_phase(every: int) -> None:
    warn, *_ = told(lambda step, _: forward(1 + 0.05 * max(0, step - AT)), every)
    assert (warn.level, warn.rank, warn.phase) == ("warn", None, "forward")
    assert "the forward takes each rank" in warn.message
    assert "hooks, graphs and lists that are kept" in warn.message
    assert AT + 30 < warn.step < AT + (70 if every == 1 else 100)  # at 30 it takes 2.5 times
    assert warn.values["phase_before"] == pytest.approx(USUAL[1])
    assert warn.values["times"] == pytest.approx(warn.values["phase_seconds"] / USUAL[1])


def test_what_the_other_phases_took_and_since_when_is_told_in_numbers() -> None:
    def phases(step: int, _: int) -> Phases:
        at = step >= AT
        return USUAL[0], USUAL[1] * (6 if at else 1), USUAL[2] * (1.5 if at else 1), USUAL[3]

    (warn,) = told(phases)
    assert AT <= warn.values["since"] <= warn.step
    assert "the other phases take at most 1.52 x as long" in warn.message
    assert warn.values["others"] == pytest.approx(1.5, 0.03)  # without the reduction
    assert f"since about step {warn.values['since']}" in warn.message
    slow, *_ = told(lambda step, _: forward(1 + 0.05 * max(0, step - AT)), 1)
    assert f"20 of the last 20 sampled steps, since step {slow.step - 19} or before" in slow.message


def test_what_grows_slowly_is_compared_with_how_it_was_long_ago() -> None:
    first, *_ = told(lambda step, _: forward(1 + 0.01 * step))
    assert 200 < first.step < 300
    assert first.values["before"] < 0.08


@pytest.mark.parametrize("place", [2, 3])
def test_any_phase_that_computes_is_judged(place: int) -> None:
    def phases(step: int, _: int) -> Phases:
        times = [1.0, 1.0, 1.0, 1.0]
        times[place] = 6.0 if step >= AT else 1.0
        data, there, back, step_of_it = (a * b for a, b in zip(times, USUAL, strict=True))
        return data, there, back, step_of_it

    (warn,) = told(phases)
    assert warn.phase == {2: "backward", 3: "step"}[place]
    assert warn.step < AT + 30


@pytest.mark.parametrize(
    "phases",
    [
        lambda step, rank: forward(6 if step >= AT and rank else 1),  # one rank: `straggler`
        lambda step, _: forward(6 if AT <= step < AT + 14 else 1),  # a pause
        lambda step, _: forward(6 if step >= AT and step % 10 < 7 else 1),  # now and then
        lambda step, _: forward(2.4 if step >= AT else 1),
        lambda step, _: forward(6 if step < AT else 1),  # it was slow, and is not
        lambda step, _: tuple((6 if step >= AT else 1) * part for part in USUAL),  # all of it
        lambda step, _: forward(6 if step >= AT else 1, (0.01, 0.0009, 0.002, 0.001)),  # 5 ms
        lambda step, _: forward(6 if step >= AT else 1, (0.3, 0.02, 0.03, 0.01)),  # of 0.37 s
    ],
)
def test_what_is_no_phase_of_all_ranks_is_left_alone(phases: Callable[[int, int], Phases]) -> None:
    assert told(phases) == []


def test_as_much_more_work_takes_as_much_longer() -> None:
    def longer(step: int, _: int) -> Phases:
        return forward(6 if step >= AT else 1)

    assert told(longer, numel=lambda step: 400 if step >= AT else 100) == []
    assert len(told(longer, numel=lambda step: 200 if step >= AT else 100)) == 1
    assert len(told(longer, numel=lambda _: 0)) == 1  # what modules return is not told


def test_what_a_rank_was_queued_for_is_not_its_own() -> None:
    def longer(step: int, _: int) -> Phases:
        return forward(6 if step >= AT else 1)

    assert told(longer, queued=lambda step, _: 0.1 if step >= AT else 0.0) == []
    assert told(longer, queued=lambda *_: math.nan) == []
    assert told(longer, queued=None) == []


def test_what_a_rank_waits_for_one_that_had_no_core_does_not_pile_up() -> None:
    def longer(step: int, _: int) -> Phases:
        return (*USUAL[:2], USUAL[2] * (6 if step >= AT else 1), USUAL[3])

    def now_and_then(step: int, _: int) -> Phases:
        return longer(step, 0) if step % 9 else USUAL

    def in_turn(seconds: float) -> list[Anomaly]:
        stream = job(longer)
        for one in stream:
            for scalars in one.scalars.values():
                scalars[QUEUED["backward"]] = seconds * (one.step >= AT)  # type: ignore[index]
        return run(Slowdown(), stream)

    assert len(in_turn(0.005)) == 1
    assert in_turn(0.08) == []  # as long again for the other one
    assert told(now_and_then) == []  # threads that nobody counts had no core


def test_of_a_model_that_trains_nothing_only_the_forward_is_its_own() -> None:
    def student(step: int, _: int) -> Phases:
        return (*USUAL[:2], USUAL[2] * (6 if step >= AT else 1), USUAL[3])

    assert len(told(student)) == 1
    assert told(student, trained=0.0) == []
    (warn,) = told(lambda step, _: forward(6 if step >= AT else 1), trained=0.0)
    assert warn.phase == "forward"


def test_what_was_told_is_told_again_when_it_grows_as_much_again() -> None:
    def twice(step: int, _: int) -> Phases:
        return forward(1 if step < 100 else 4 if step < 250 else 16)

    assert [100 <= warn.step < 130 or 250 <= warn.step < 280 for warn in told(twice)] == [True] * 2


@pytest.mark.parametrize("setting", ["phase_times", "phase_steps"])
def test_settings_that_cannot_be_are_refused(setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        Slowdown(**{setting: 0})
