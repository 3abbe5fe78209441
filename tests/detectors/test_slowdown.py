"""A step that takes all ranks longer is told once it lasts; more work, and noise, are not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from ddpprobe.detectors.slowdown import Slowdown
from ddpprobe.records.step import QUEUED, STEP_PHASES, TRAINABLE, Site, StepRecord
from tests.detectors.made_records import record, run

OUTPUT = Site("head", "output")
PARTS = (0.01, 0.33, 0.6, 0.06, 0.06)  # of a second: data, forward, backward, of it waiting, step
Parts = tuple[float, ...]


def phased(parts: Parts, factor: float = 1.0) -> dict[str, float]:
    data, forward, backward, reduction, optimizer = (factor * part for part in parts)
    told = dict(zip(STEP_PHASES, (data, forward, backward, optimizer), strict=True))
    named = {f"{phase}_seconds": seconds for phase, seconds in told.items()}
    return {**named, "reduce_seconds": reduction, TRAINABLE: 7.0}


def job(
    parts: Callable[[int, int], Parts], steps: int = 3000, every: int = 10, ranks: int = 3,
    numel: Callable[[int], int] = lambda _: 100,
) -> list[StepRecord]:  # fmt: skip
    """Sampled steps of a second or so each, of ranks whose times are given by step and rank."""
    rng = np.random.default_rng(0)
    out = []
    for step in range(0, steps, every):
        noise = np.exp(0.08 * rng.standard_normal(ranks))
        scalars = {rank: phased(parts(step, rank), noise[rank]) for rank in range(ranks)}
        at = int(1e9 * step)
        out.append(record(step, scalars, {OUTPUT: {"numel": numel(step)}}, wall_time_ns=at))
    return out


def later(*, since: int = 1500, **more: float) -> Callable[[int, int], Parts]:
    """From a step on so many seconds more in some phases."""
    names = ("data", "forward", "backward", "reduction", "optimizer")

    def parts(step: int, _: int) -> Parts:
        added = [more.get(name, 0.0) * (step >= since) for name in names]
        added[2] += added[3]  # the wait is a part of the backward
        return tuple(before + now for before, now in zip(PARTS, added, strict=True))

    return parts


@pytest.mark.parametrize(
    ("where", "words", "phase"),
    [("data", "in reading data; look at the loader", "forward"),
     ("forward", "in the forward; look at clocks", "forward"),
     ("backward", "in the backward; look at clocks", "backward"),
     ("optimizer", "in the optimizer; look at", "step")],
)  # fmt: skip
def test_a_step_that_takes_longer_for_ten_minutes_is_told_with_where_the_time_goes(
    where: str, words: str, phase: str
) -> None:
    (warn,) = run(Slowdown(), job(later(since=1500, **{where: 0.8})))
    assert (warn.level, warn.rank, warn.phase) == ("warn", None, phase)
    assert words in warn.message
    assert 1500 + 0.85 * 600 < warn.step <= 1500 + 600
    assert warn.values["times"] == pytest.approx(1.8, rel=0.05)
    assert warn.values["more"] == pytest.approx(0.8, rel=0.05)
    assert warn.values["since"] == 1500


def test_a_reduction_that_all_ranks_wait_for_is_told_within_some_steps() -> None:
    (warn,) = run(Slowdown(), job(later(reduction=1.5)))
    assert (
        "in the reduction of gradients; look at the network between nodes, and at what else runs"
        in warn.message
    )
    assert 1500 + 20 <= warn.step <= 1500 + 50
    (warn,) = run(Slowdown(), job(later(reduction=1.5), every=1))
    assert 1500 + 30 <= warn.step <= 1500 + 40


def test_a_reduction_that_waits_for_a_rank_with_no_core_is_no_network() -> None:
    def queued(seconds: float, **parts: float) -> list[StepRecord]:
        stream = job(later(reduction=1.5))
        out = []
        for one in stream:
            late = one.step >= 1500
            more = {
                **dict.fromkeys(QUEUED.values(), 0.0),
                **{QUEUED[part]: of * late for part, of in parts.items()},
            }
            starved = one.step // 10 % 3  # it is another one in each step
            scalars = {
                rank: {**told, **more, QUEUED["forward"]: seconds * late * (rank == starved)}
                for rank, told in one.scalars.items()
            }
            out.append(replace(one, scalars=scalars))
        return out

    def others(stream: list[StepRecord]) -> int:
        return len([warn for warn in run(Slowdown(), stream) if warn.step < 1600])

    assert others(queued(0.0)) == others(queued(0.1)) == 1
    assert others(queued(1.5)) == others(queued(1.1)) == 0
    assert others(queued(0.0, reduce=1.5, backward=1.5)) == 0


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_that_have_no_core_for_minutes_are_told_with_the_reason(ranks: int) -> None:
    def queued(seconds: float) -> str:
        out = []
        for one in job(later(backward=0.8), ranks=ranks):
            more = dict.fromkeys(QUEUED.values(), 0.0)
            more[QUEUED["backward"]] = seconds * (one.step >= 1500)
            scalars = {rank: {**told, **more} for rank, told in one.scalars.items()}
            out.append(replace(one, scalars=scalars))
        (warn,) = run(Slowdown(phase_times=9.0), out)
        return warn.message

    why = "in the backward; look at what else runs on the hosts: for 0.5 s of a step a rank had no"
    assert why in queued(0.5)
    assert "look at clocks" in queued(0.3)


def test_a_network_that_is_slow_for_some_steps_or_by_a_little_is_left_alone() -> None:
    def some_steps(step: int, _: int) -> Parts:
        return later(reduction=1.5)(2000 * (1500 <= step < 1525), 0)

    assert run(Slowdown(), job(some_steps, every=1)) == []

    def now_and_then(step: int, _: int) -> Parts:
        return later(reduction=1.5 if step % 30 == 0 else 0.15, backward=0.3)(step, 0)

    assert run(Slowdown(), job(now_and_then, steps=1900)) == []
    assert run(Slowdown(), job(later(reduction=0.15), steps=2100, every=1)) == []


def test_ranks_that_wait_for_one_wait_for_no_network() -> None:
    def waiting(step: int, rank: int) -> Parts:
        data, forward, backward, reduction, optimizer = PARTS
        late = 1.5 * (step >= 1500)
        if rank == 1:
            return data, forward + late, backward, reduction, optimizer
        return data, forward, backward + late, reduction + late, optimizer

    assert run(Slowdown(), job(waiting)) == []


def test_what_takes_longer_in_proportion_to_what_is_computed_is_no_slowdown() -> None:
    longer = job(later(forward=0.3, backward=0.5), numel=lambda step: 200 if step >= 1500 else 100)
    assert run(Slowdown(), longer) == []
    as_much = job(later(forward=0.3, backward=0.5), numel=lambda step: 110 if step >= 1500 else 100)
    assert len(run(Slowdown(), as_much)) == 1


def test_parameters_that_are_trained_from_some_step_on_begin_a_past_of_their_own() -> None:
    stream = job(later(backward=0.8))
    for one in stream:
        for said in one.scalars.values():
            said[TRAINABLE] += one.step >= 1500  # type: ignore[index]
    assert run(Slowdown(), stream) == []


def test_minutes_that_are_over_noise_and_a_little_more_are_left_alone() -> None:
    def some_minutes(step: int, _: int) -> Parts:
        return tuple((3 if 1500 <= step < 1500 + 480 else 1) * part for part in PARTS)

    assert run(Slowdown(), job(some_minutes)) == []
    assert run(Slowdown(), job(lambda *_: PARTS, steps=8000)) == []
    assert run(Slowdown(), job(later(forward=0.4))) == []
    assert len(run(Slowdown(times=1.3), job(later(forward=0.4)))) == 1


def test_steps_of_two_lengths_in_turn_are_no_slowdown() -> None:
    """A fifth of the steps take three times as long, and from some step on two fifths."""

    def mixed(step: int, _: int) -> Parts:
        long = (step // 10) % 5 < (2 if step >= 1500 else 1)
        return tuple((3 if long else 1) * part for part in PARTS)

    assert run(Slowdown(), job(mixed)) == []


def test_one_rank_alone_is_judged_too_and_waits_for_nobody() -> None:
    (warn,) = run(Slowdown(), job(later(backward=0.8), ranks=1))
    assert warn.step > 1500 + 0.85 * 600
    assert "takes the rank" in warn.message


def test_rare_looks_need_longer_and_a_clock_that_is_set_back_begins_anew() -> None:
    (warn,) = run(Slowdown(), job(later(since=3000, forward=0.8), steps=9000, every=100))
    assert 3000 + 100 * 17 <= warn.step <= 3000 + 100 * 20
    stream = job(later(forward=0.8))
    for i, one in enumerate(stream):
        if one.step >= 1500:
            moved = one.wall_time_ns - int(1e9 * 5000)
            stream[i] = record(one.step, one.scalars, {OUTPUT: {}}, wall_time_ns=moved)
    assert run(Slowdown(), stream) == []


def test_what_was_told_is_what_later_steps_are_compared_with() -> None:
    def twice(step: int, _: int) -> Parts:
        slow = 1500 <= step < 3000 or step >= 9000
        return tuple((2 if slow else 1) * part for part in PARTS)

    first, second = run(Slowdown(), job(twice, steps=12_000))
    assert 1500 < first.step < 2200
    assert 9000 < second.step < 9700


def test_steps_without_all_ranks_or_times_are_not_judged() -> None:
    stream = job(later(forward=0.8))
    untold = [record(one.step, {0: {}}, wall_time_ns=one.wall_time_ns) for one in stream[150:]]
    missing = [
        record(one.step, one.scalars, missing=(3,), wall_time_ns=one.wall_time_ns)
        for one in stream[150:]
    ]
    odd = [
        record(one.step, {r: {**said, "data_seconds": math.nan} for r, said in one.scalars.items()})
        for one in stream[150:]
    ]
    for rest in (untold, missing, odd):
        assert run(Slowdown(), [*stream[:150], *rest]) == []


def test_parts_that_are_long_in_turn_are_judged_by_the_step() -> None:
    """Of three parts two are long in each step: the medians of all three are long."""

    def in_turn(step: int, _: int) -> Parts:
        parts = [0.3, 0.3, 0.3]
        if step >= 1500:
            parts = [1.0, 1.0, 1.0]
            parts[step // 10 % 3] = 0.0
        return *parts, 0.0, 0.0

    (warn,) = run(Slowdown(), job(in_turn))
    assert warn.values["step_seconds"] == pytest.approx(2, rel=0.1)
    assert warn.values["since"] == 1500


def test_steps_that_took_no_time_have_no_ratio() -> None:
    def none_at_first(step: int, _: int) -> Parts:
        return tuple((step >= 1500) * part for part in (0.1, 0.1, 2.0, 1.5, 0.1))

    assert run(Slowdown(), job(none_at_first)) == []


def test_a_wait_that_is_longer_in_steps_that_are_shorter_can_be_asked_for() -> None:
    shorter = later(reduction=0.3, forward=-0.3, backward=-0.2)
    assert run(Slowdown(), job(shorter, steps=1700)) == []
    (warn,) = run(Slowdown(reduced_step=0.5), job(shorter, steps=1700))
    assert warn.values["step_seconds"] < warn.values["before"]
    assert warn.values["since"] == pytest.approx(1500, abs=20)
