"""What lies outside of good runs for long is named, and what healthy runs differ by is not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpprobe.reader.baseline.deviations import Deviation, deviations
from ddpprobe.reader.baseline.levels import (
    BAD,
    COUNT,
    LOG_SQUARES,
    LOG_SUM,
    LOOKS,
    MEAN,
    NONFINITE,
    POSITIVE,
    RMS,
    SQUARES,
    SUM,
    Levels,
)
from ddpprobe.records.step import COUNTS, Site, StepRecord
from ddpprobe.rundir import framing

from ...made_runs import ANOMALY, Made

KINDS = ("output", "grad")
SITES = tuple(Site(f"blocks.{i}", kind, dtype="float32") for i in range(3) for kind in KINDS)
ELEMENTS = 4096
Bend = Callable[[int, dict[str, float]], Mapping[str, float]]


def record(seed: int, step: int, bend: Bend = lambda _, named: named, rank: int = 0) -> StepRecord:
    """A step of a run of that seed: rms, loss and the like around 1, 5 % apart; then what bends it.

    `bend` takes the step and what there is by name, and returns it with changes.
    """
    own = np.random.default_rng([seed, 7])
    noise = np.random.default_rng([seed, step, rank])
    names = [*map(str, SITES), "loss", "forward_seconds"]
    named = {
        name: float(own.lognormal(0, 0.05) * noise.lognormal(0, 0.02)) for name in sorted(names)
    }
    bent = bend(step, named)
    counts = np.zeros((len(SITES), len(COUNTS)), np.int64)
    counts[:, [COUNTS.index("numel"), COUNTS.index("observed")]] = ELEMENTS, 1
    values = np.zeros((len(SITES), 4))
    for row, site in enumerate(SITES):
        values[row] = -1, 1, 0, bent[str(site)] ** 2 * ELEMENTS
        counts[row, COUNTS.index("nan")] = bent.get(f"{site} nan", 0)
    scalars = {name: value for name, value in bent.items() if ":" not in name}
    return StepRecord(
        0, step, (rank,), 10**18 + step, sites=SITES, counts=counts, values=values,
        scalars={rank: scalars},
    )  # fmt: skip


def levels(
    seed: int, steps: int = 40, bend: Bend = lambda _, named: named, edges: list[int] | None = None
) -> Levels:
    out = Levels("*", edges)
    for step in range(steps):
        out.take(record(seed, step, bend))
    return out


def beside(
    bend: Bend, goods: int = 2, steps: int = 40, of_good: int | None = None
) -> list[Deviation]:
    """What is outside in a run that is bent, beside good ones."""
    run = levels(0, steps, bend)
    others = [levels(seed, of_good or steps, edges=run.edges) for seed in range(1, goods + 1)]
    return deviations(run, others).outside


def scaled(name: str, by: float, first: int, last: int = 10**9) -> Bend:
    def bend(step: int, named: dict[str, float]) -> Mapping[str, float]:
        return {**named, name: named[name] * (by if first <= step <= last else 1.0)}

    return bend


@pytest.mark.parametrize("goods", [2, 3, 8])
@pytest.mark.parametrize("by", [0.1, 10.0])
@pytest.mark.parametrize("name", ["blocks.1:grad", "blocks.2:output", "loss"])
def test_what_differs_from_a_step_on_is_named_alone_from_the_stretch_of_that_step_on(
    name, by, goods
):
    (found,) = beside(scaled(name, by, first=16), goods)
    quantity = found.quantity
    assert (str(quantity.site) if quantity.site else quantity.scalar) == name
    assert quantity.stat == (RMS if quantity.site else MEAN)
    assert (found.first, found.last, found.lasts) == (16, 39, True)
    assert found.low <= found.high
    assert found.value == pytest.approx(by, rel=0.3)
    assert not found.low <= found.value <= found.high


@pytest.mark.parametrize("seed", range(20))
def test_runs_that_differ_as_the_good_ones_do_are_within(seed):
    run = levels(1000 + seed)
    others = [levels(seed * 10 + i, edges=run.edges) for i in range(2 + seed % 3)]
    found = deviations(run, others)
    assert found.outside == []
    assert len(found.found) > len(SITES)


def test_what_is_over_within_one_stretch_is_no_level():
    assert beside(scaled("loss", 10, first=16, last=23)) == []
    (found,) = beside(scaled("loss", 10, first=16, last=31))
    assert (found.first, found.last, found.lasts) == (16, 31, False)


def test_a_run_that_gets_to_a_place_one_stretch_later_is_within():
    run = levels(0, bend=scaled("loss", 0.01, first=24))
    others = [levels(i, bend=scaled("loss", 0.01, first=16), edges=run.edges) for i in (1, 2)]
    assert deviations(run, others).outside == []


def test_what_good_runs_do_not_agree_on_is_no_deviation():
    def at(level: float) -> Bend:
        return lambda _, named: {**named, "loss": level}

    run = levels(0, bend=at(3.0))
    apart = [levels(i, bend=at(x), edges=run.edges) for i, x in ((1, 1.0), (2, 2.0))]
    near = [levels(i, bend=at(x), edges=run.edges) for i, x in ((1, 1.0), (2, 1.01))]
    assert deviations(run, apart).outside == []
    assert [d.quantity.scalar for d in deviations(run, near).outside] == ["loss"]


@pytest.mark.parametrize("name", ["loss", "blocks.0:output nan"])
def test_what_is_not_finite_once_and_always_was_in_good_runs_is_outside_at_once(name):
    def bend(step: int, named: dict[str, float]) -> Mapping[str, float]:
        return {**named, name: math.nan if name == "loss" else 5} if step == 33 else named

    (found,) = beside(bend)
    assert (found.excess, found.first, found.by, found.lasts) == (math.inf, 32, 39, True)
    if name == "loss":
        assert (found.quantity.stat, math.isnan(found.value)) == (MEAN, True)
    else:
        assert (found.quantity.stat, found.high) == (NONFINITE, 0)
        assert found.value == pytest.approx(5 / ELEMENTS / LOOKS)


def test_an_accuracy_that_nobody_can_tell_is_missing_and_not_outside():
    run = levels(0, bend=lambda _, named: {**named, "class_right": math.nan})
    others = [
        levels(i, bend=lambda _, named: {**named, "class_right": 0.5}, edges=run.edges)
        for i in (1, 2)
    ]
    found = deviations(run, others)
    assert (found.outside, [q.scalar for q in found.missing]) == ([], ["class_right"])


def test_a_setting_on_which_good_runs_agree_is_told_first_however_little_it_differs():
    def at(rate: float) -> Bend:
        return lambda step, named: {**named, "lr": rate / (1 + step), "loss": named["loss"] * rate}

    run = levels(0, bend=at(9.0))
    others = [levels(i, bend=at(1.0), edges=run.edges) for i in (1, 2)]
    lr, loss = deviations(run, others).outside
    assert (lr.quantity.scalar, lr.excess, loss.quantity.scalar) == ("lr", math.inf, "loss")
    assert loss.excess < math.inf
    near = levels(0, bend=at(1.01))
    assert [d.quantity.scalar for d in deviations(near, others).outside] == ["lr"]
    same = levels(0, bend=at(1.0))
    assert deviations(same, others).outside == []
    apart = [levels(i, bend=at(float(i)), edges=run.edges) for i in (1, 2)]
    assert deviations(near, apart).outside == []


def test_the_steps_behind_the_last_whole_stretch_belong_to_it():
    run = levels(0, steps=42, bend=scaled("loss", 10, first=24))
    assert run.edges == [0, 8, 16, 24, 32, 40]
    others = [levels(i, steps=42, edges=run.edges) for i in (1, 2)]
    found = deviations(run, others)
    assert (found.looks, found.last, found.stretches, found.sure) == (42, 41, 5, 24)
    (loss,) = found.outside
    assert (loss.first, loss.by, loss.last, loss.lasts) == (24, 31, 41, True)


def test_a_good_run_that_is_not_finite_and_one_that_lacks_much_are_told_of():
    def bend(step: int, named: dict[str, float]) -> Mapping[str, float]:
        return {**named, "loss": math.nan if step > 20 else 1.0}

    run = levels(0)
    good, bad = levels(1, edges=run.edges), levels(2, bend=bend, edges=run.edges)
    found = deviations(run, [good, bad])
    assert (found.not_finite, found.lacking) == ([None, 16], [0, 0])
    other = Levels("blocks.0:*", run.edges)
    for step in range(40):
        other.take(record(3, step))
    found = deviations(run, [good, other])
    assert found.lacking == [0, len(run.quantities) - len(other.quantities)]
    assert len(found.found) == len(other.quantities)


def test_a_phase_that_takes_longer_is_outside_only_if_a_step_does():
    def slow(name: str, of: float) -> Bend:
        return lambda _, named: {**named, "backward_seconds": 1.0, name: of}

    run = levels(0, bend=slow("forward_seconds", 0.4))
    others = [levels(i, bend=slow("forward_seconds", 0.1), edges=run.edges) for i in (1, 2)]
    assert deviations(run, others).outside == []
    slower = levels(0, bend=slow("forward_seconds", 0.9))
    assert [d.quantity.scalar for d in deviations(slower, others).outside] == ["forward_seconds"]


def test_a_site_that_has_next_to_nothing_is_not_told_of():
    def bend(rms: float) -> Bend:
        return lambda _, named: {**named, "blocks.1:grad": rms}

    run = levels(0, bend=bend(1e-9))
    others = [levels(i, bend=bend(x), edges=run.edges) for i, x in ((1, 1e-12), (2, 1.1e-12))]
    assert deviations(run, others).outside == []
    run = levels(0, bend=bend(0.1))
    assert [str(d.quantity.site) for d in deviations(run, others).outside] == ["blocks.1:grad"]


def test_gradients_before_the_reduction_are_left_out_where_the_batch_is_split_otherwise():
    def split(micros: float, kind: str) -> Levels:
        out = Levels("*", None if micros == 1 else [0, 8, 16, 24, 32])
        for step in range(40):
            made = record(int(micros), step, lambda _, named: {**named, "micro_batches": micros})
            sites = tuple(replace(site, kind=kind) for site in SITES[::2])
            made = replace(
                made, sites=sites, counts=made.counts[::2], values=made.values[::2] / micros
            )
            out.take(made)
        return out

    for kind, told in (("grad_local", []), ("output", [RMS] * 3)):
        found = deviations(split(1, kind), [split(8, kind), split(9, kind)])
        assert found.resplit
        assert [d.quantity.stat for d in found.outside if d.quantity.site] == told


def test_what_each_rank_is_given_is_left_out_where_the_batch_is_split_otherwise():
    def split(rank: int, ranks: int) -> Levels:
        def bend(_: int, named: dict[str, float]) -> dict[str, float]:
            return {**named, "micro_batches": 1.0 * ranks, "input_elements": 144.0 / ranks}

        return levels(rank, bend=bend, edges=None if ranks == 1 else split(0, 1).edges)

    assert deviations(split(0, 1), [split(1, 2), split(2, 2)]).outside == []


def test_what_only_one_side_has_is_listed_and_not_compared():
    run = levels(0, bend=lambda _, named: {**named, "mine": 1.0})
    others = [
        levels(i, bend=lambda _, named: {**named, "theirs": 1.0, f"of {i}": 1.0}, edges=run.edges)  # noqa: B023
        for i in (1, 2)
    ]
    found = deviations(run, others)
    assert [q.scalar for q in found.added] == ["mine"]
    assert [q.scalar for q in found.missing] == ["theirs"]
    assert found.outside == []


def test_of_runs_without_a_sampled_step_nothing_is_compared():
    for run, others in (
        (Levels(), [levels(1, edges=[]), levels(2, edges=[])]),
        (levels(0), [Levels(), levels(2)]),
    ):
        found = deviations(run, others)
        assert (found.found, found.stretches, found.first, found.last) == ([], 0, -1, -1)


def test_what_a_short_good_run_does_not_reach_is_not_compared():
    assert beside(scaled("loss", 10, first=24), steps=40, of_good=24) == []
    run = levels(0, 40)
    found = deviations(run, [levels(1, 40, edges=run.edges), levels(2, 24, edges=run.edges)])
    assert (found.first, found.last, found.stretches) == (0, 23, 3)


def test_the_steps_that_a_good_run_holds_no_more_are_not_compared():
    run = levels(0, bend=scaled("loss", 10, first=0, last=15))
    others = [levels(1, edges=run.edges), Levels(edges=run.edges)]
    for step in range(16, 40):
        others[1].take(record(2, step))
    found = deviations(run, others)
    assert (found.first, found.last, found.stretches, found.outside) == (16, 39, 3, [])


def test_stretches_grow_with_the_run_and_stay_few():
    run = Levels()
    one = record(0, 0)
    for step in range(5_000):
        run.take(replace(one, step=step))
    lengths = np.diff(run.edges)
    assert lengths[0] == LOOKS
    assert (lengths <= np.maximum(LOOKS, np.array(run.edges[1:]) / 10)).all()
    assert len(run.edges) < 70


@given(
    st.lists(
        st.one_of(st.floats(-1e6, 1e6), st.sampled_from([0.0, math.nan, math.inf])),
        min_size=1, max_size=40,
    )
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_what_is_kept_of_a_scalar_is_what_its_numbers_add_up_to(numbers):
    run = Levels()
    for step, x in enumerate(numbers):
        run.take(record(0, step, lambda _, named, x=x: {**named, "mine": x}))
    (key,) = (key for key, q in run.quantities.items() if q.scalar == "mine")
    kept = run.table([key])[:, 0]
    for at, first in enumerate(run.edges):
        part = np.array(numbers[first : [*run.edges[1:], None][at]])
        finite = part[np.isfinite(part)]
        logs = np.log10(finite[finite > 0])
        sums = [
            len(finite),
            finite.sum(),
            (finite**2).sum(),
            len(logs),
            logs.sum(),
            (logs**2).sum(),
        ]
        rows = [COUNT, SUM, SQUARES, POSITIVE, LOG_SUM, LOG_SQUARES]
        np.testing.assert_allclose(kept[rows, at], sums, rtol=1e-9, atol=1e-9)
        assert kept[BAD, at] == len(part) - len(finite)


def write(path: Path, seed: int, bend: Bend = lambda _, named: named, steps: int = 40) -> Path:
    made = Made(path)
    made.write(record(seed, step, bend, rank) for step in range(steps) for rank in range(2))
    made.close()
    return path


@pytest.fixture
def goods(tmp_path: Path) -> list[Path]:
    return [write(tmp_path / f"good-{seed}", seed) for seed in (1, 2)]


def test_the_verb_says_first_what_was_outside_and_where_in_both_forms(tmp_path, goods, call):
    bad = write(tmp_path / "bad", 0, scaled("blocks.1:grad", 20, first=16))
    code, out, err = call("baseline", bad, *goods)
    assert (code, err) == (0, "")
    first, *rest = out.splitlines()
    assert first.startswith("outside of what 2 runs did, since step 16-23: blocks.1:grad, rms, 2")
    assert rest[0].startswith("compared: 40 of 40 sampled steps, from 0 through 39; ")
    assert rest[1].startswith("what began after step 24 may not show yet")
    assert any(line.split()[:4] == ["16-23", "the", "end", "blocks.1:grad"] for line in rest)
    code, out, _ = call("baseline", bad, *goods, "--json")
    said = json.loads(out)
    assert (code, said["is_outside"], said["steps"]) == (
        0, True, {"sampled": 40, "compared": 40, "first": 0, "last": 39, "sure": 24},
    )  # fmt: skip
    (told,) = said["outside"]
    assert (told["site"], told["stat"], told["first"], told["lasts"]) == (
        "blocks.1:grad", "rms", 16, True,
    )  # fmt: skip
    assert said["farthest"] == told


def test_the_verb_says_of_a_run_within_how_near_it_came_to_the_edge(tmp_path, goods, call):
    code, out, err = call("baseline", write(tmp_path / "fine", 5), *goods)
    assert (code, err) == (0, "")
    assert out.startswith("within what 2 runs did, in what is compared: the farthest is 0.")
    assert ", of which 0 were outside" in out


def test_the_verb_tells_what_it_needs(tmp_path, goods, call):
    run = write(tmp_path / "run", 3)
    few = write(tmp_path / "few", 3, steps=9)
    for words, told in (
        (
            (run, goods[0], run, goods[0]),
            f"how far healthy runs are apart: name 2 good ones at least beside {run}; ",
        ),
        ((run, run), f"no other run is named: name 2 good ones at least beside {run}; "),
        (
            (few, *goods),
            f"12 at least, between the same steps in all of them; these have {few} 9 through ",
        ),
        (
            (run, *goods, "--sites", "block*x"),
            " matches 'block*x' (a scalar is compared without --sites); nearest",
        ),
    ):
        code, out, err = call("baseline", *words)
        assert (code, out) == (2, "")
        assert told in err


def test_what_speaks_against_an_answer_is_said(tmp_path, goods, call):
    def bend(step: int, named: dict[str, float]) -> Mapping[str, float]:
        return {**named, "blocks.0:output nan": 5 if step > 20 else 0}

    run, bad = write(tmp_path / "run", 0), write(tmp_path / "bad", 3, bend)
    out = call("baseline", run, *goods, bad)[1].splitlines()
    assert f"{bad} is named as a good run, and is not finite from step 16 on" in out
    made = Made(tmp_path / "paged")
    made.write(record(3, step, rank=rank) for step in range(40) for rank in range(2))
    made.tell(framing.ANOMALY, ANOMALY)
    made.close()
    out = call("baseline", run, *goods, made.path)[1].splitlines()
    told = f"{made.path} is named as a good run, and has a page: "
    assert any(line.startswith(told) and "3 NaN in blocks.1.mlp" in line for line in out)
    made = Made(tmp_path / "other")
    made.write(
        replace(
            record(4, step), sites=(), counts=np.zeros((0, 7), np.int64), values=np.zeros((0, 4))
        )
        for step in range(40)
    )
    made.close()
    out = call("baseline", run, *goods, made.path)[1].splitlines()
    assert any(re.match(rf"{made.path} lacks \d+ numbers that {run} has; \d+ are", x) for x in out)


def test_a_pattern_may_match_the_run_itself_and_a_good_run_twice(tmp_path, goods, call):
    bad = write(tmp_path / "bad", 0, scaled("blocks.1:grad", 20, first=16))
    code, out, err = call("baseline", bad, *goods)
    (tmp_path / "link").symlink_to(goods[0])
    again = call("baseline", bad, bad, goods[0], *goods, tmp_path / "link", bad)
    told = f"ddpprobe: {bad} is the run in question: it is none of the good ones\n"
    assert again == (code, out, err + told)


def test_of_a_damaged_run_with_too_little_left_a_reader_of_json_is_told_nothing_false(
    tmp_path, goods, call
):
    bad = write(tmp_path / "bad", 0, steps=9)
    (segment, *_) = sorted(bad.rglob("*.wal"))
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 0xFF
    segment.write_bytes(content)
    code, out, err = call("baseline", bad, *goods)
    assert (code, out) == (3, "undecided: too little is left to compare\n")
    assert call("baseline", bad, *goods, "--json") == (3, "", err)


def test_sites_alone_are_compared_if_some_are_asked_for(tmp_path, goods, call):
    bad = write(tmp_path / "bad", 0, scaled("loss", 20, first=16))
    assert "loss" in call("baseline", bad, *goods)[1].splitlines()[0]
    code, out, _ = call("baseline", bad, *goods, "--sites", "blocks.*")
    assert code == 0
    assert out.startswith("within what 2 runs did")
