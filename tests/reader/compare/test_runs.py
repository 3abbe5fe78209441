"""Two runs part where they do: at that step, site and statistic, and not before by rounding."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddpprobe.cli.commands.compare import lines
from ddpprobe.cli.main import main
from ddpprobe.reader.compare.difference import Comparison
from ddpprobe.reader.compare.runs import compare
from ddpprobe.reader.compare.scalars import OTHER_PARTS, OTHER_WRAPPER
from ddpprobe.reader.compare.timeline import timeline
from ddpprobe.reader.compare.tolerance import ComparedRows, Tolerance, rounding
from ddpprobe.records.merge import merge_all
from ddpprobe.records.step import (
    COUNTS,
    VALUES,
    Site,
    StepRecord,
    empty_rows,
    merge_counts,
    merge_values,
)
from ddpprobe.store.writer import StoreWriter

from ...conftest import torchrun_in
from ...made_runs import NODE, Made
from ...made_runs import record as made_record

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
DTYPES = st.sampled_from(sorted(EPS))
SEEDS = st.integers(0, 2**32 - 1)


def tensor(seed: int, largest: int = 3000) -> np.ndarray:
    """Some numbers as networks have them: of any scale and size, with zeros, or all equal."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(rng.integers(1, largest)) * 10.0 ** rng.integers(-6, 6)
    match rng.integers(4):
        case 0:
            x = np.maximum(x, 0)
        case 1:
            x[:] = x[0]
        case 2:
            x += 3 * np.abs(x).max()
    return x


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round to nearest, ties to even, in a dtype without limits of its exponent."""
    with np.errstate(divide="ignore"):
        spacing = EPS[dtype] * 2.0 ** np.floor(np.log2(np.abs(x)))
    return np.where(x == 0, 0, np.rint(x / np.where(x == 0, 1, spacing)) * spacing)


def rows(*parts: np.ndarray) -> ComparedRows:
    """Return the statistics of a tensor that is seen in parts."""
    counts, values = empty_rows(1)
    for x in parts:
        finite = x[np.isfinite(x)]
        part = np.zeros((1, len(COUNTS)), np.int64)
        part[0] = [
            x.size, np.isnan(x).sum(), (x == np.inf).sum(), (x == -np.inf).sum(), (x == 0).sum(),
            1, 1,
        ]  # fmt: skip
        numbers = [finite.min(initial=np.inf), finite.max(initial=-np.inf), finite.sum(),
                   (finite * finite).sum()]  # fmt: skip
        counts = merge_counts(counts, part)
        values = merge_values(values, np.array([numbers]))
    return ComparedRows(counts, values)


def excess(a: ComparedRows, b: ComparedRows, dtypes: tuple[str, str], **how: object) -> float:
    tolerance = Tolerance(**how)
    limits = tolerance.limits([tuple(Site("x", "output", dtype=d) for d in dtypes)])
    return float(tolerance.excess(a, b, limits).max())


@settings(max_examples=40, deadline=None)
@given(SEEDS, DTYPES, st.integers(1, 9))
def test_a_tensor_in_another_order_and_other_parts_is_the_same(seed, dtype, parts):
    x = rounded(tensor(seed), dtype)
    other = np.array_split(np.random.default_rng(seed + 1).permutation(x), parts)
    assert excess(rows(x), rows(*other), (dtype, dtype)) <= 1
    assert excess(rows(x), rows(x), (dtype, dtype), exact=True) == 0


@settings(max_examples=40, deadline=None)
@given(SEEDS, DTYPES, DTYPES)
def test_a_tensor_rounded_to_another_dtype_is_the_same(seed, dtype, other):
    x = rounded(tensor(seed), dtype)
    assert excess(rows(x), rows(rounded(x, other)), (dtype, other)) <= 1


@settings(max_examples=40, deadline=None)
@given(SEEDS, DTYPES)
@example(262847861, "bfloat16")  # 24 of 39 elements are zero, which no rounding moves
def test_neighbouring_numbers_in_every_element_are_the_same(seed, dtype):
    x = rounded(tensor(seed), dtype)
    signs = np.random.default_rng(seed + 1).integers(-1, 2, x.shape)
    assert excess(rows(x), rows(rounded(x * (1 + EPS[dtype] * signs), dtype)), (dtype, dtype)) <= 1


@settings(max_examples=40, deadline=None)
@given(SEEDS, DTYPES)
def test_a_tensor_that_grew_by_a_few_roundings_more_is_another(seed, dtype):
    x = rounded(tensor(seed), dtype)
    if np.any(x):
        assert excess(rows(x), rows(x * (1 + 8 * rounding(dtype))), (dtype, dtype)) > 1


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("how", [{}, {"exact": True}, {"rtol": 1.0, "atol": 1e9}])
def test_a_number_that_is_not_finite_is_no_rounding(number, how):
    x = np.ones(100_000)
    assert (
        excess(rows(x), rows(np.append(x[1:], number)), ("bfloat16", "bfloat16"), **how) == np.inf
    )
    both = rows(np.append(x, number))
    assert excess(both, both, ("bfloat16", "bfloat16"), **how) == 0


def test_whole_numbers_have_no_rounding_and_what_was_rounded_once_stays_so():
    one = ("int64", "float32", "bfloat16", "float32", "bool", "float32")
    two = ("int64", "float32", "float32", "float32", "bool", "float32")
    kinds = ("output",) * 5 + ("grad_output",)
    pairs = [
        (Site("", k, dtype=a), Site("", k, dtype=b))
        for k, a, b in zip(kinds, one, two, strict=True)
    ]
    coarse = rounding("bfloat16")
    limits = Tolerance().limits(pairs)
    assert limits.r.tolist() == [0, rounding("float32"), coarse, coarse, 0, 2 * coarse]
    assert limits.alike.tolist() == [False, False, True, False, False, True]
    assert excess(rows(np.arange(9.0)), rows(np.arange(9.0) + 1), ("int64", "int64")) > 1
    assert Tolerance(rtol=0.5).limits(pairs).r.tolist() == [0, 0.5, 0.5, 0.5, 0, 0.5]


def test_a_given_tolerance_means_what_it_says():
    x, same = np.array([3.0, -4.0]), ("float32", "float32")
    assert excess(rows(x), rows(x * 1.0999), same, rtol=0.1) < 1
    assert excess(rows(x), rows(x * 1.12), same, rtol=0.1) > 1
    assert excess(rows(x), rows(x + 0.09), same, rtol=0, atol=0.1) < 1
    assert excess(rows(x), rows(x + 0.11), same, rtol=0, atol=0.1) > 1


# ---- whole runs, in memory

SITES = (
    *(Site(f"blocks.{i}.w", "grad_local", dtype="float32") for i in range(3)),
    *(Site(f"blocks.{i}", k, dtype="float32") for i in range(3) for k in ("output", "grad_output")),
    *(Site(f"blocks.{i}.w", "grad", placement="replicated", dtype="float32") for i in range(3)),
)  # fmt: skip
EXECUTED = (3, 5, 7, 8, 6, 4, 2, 1, 0, 9, 10, 11)


class Told:
    """A run of which the records are given, by attempt."""

    def __init__(self, *attempts: Sequence[StepRecord], wrapper: str = "ddp") -> None:
        self._attempts = attempts
        self.identity = {"wrapper": wrapper}

    def attempts(self) -> list[int]:
        return list(range(len(self._attempts)))

    def records(self, rank: int | None = None, attempt: int | None = None) -> Iterator[StepRecord]:
        return iter(self._attempts[attempt])


def step(number: int, sites: Sequence[Site] = SITES, *, ranks: int = 1, seed: int = 0,
         **changes: object) -> StepRecord:  # fmt: skip
    """A step of a run whose batch is cut over `ranks` ranks; equal seeds, equal numbers."""
    parts = []
    for rank in range(ranks):
        counts, values = empty_rows(len(sites))
        for i, site in enumerate(sites):
            rng = np.random.default_rng([seed, number, *f"{site.fqn}{site.kind}".encode()])
            x = rng.standard_normal(240)
            share = x if site.placement != "local" else np.array_split(x, ranks)[rank]
            found = rows(share)
            counts[i], values[i] = found.counts[0], found.values[0]
        loss = {rank: {"loss": 1 / (number + 1), "micro_batches": 1.0, "forward_seconds": seed}}
        parts.append(StepRecord(0, number, (rank,), 0, True, tuple(sites), counts, values, loss))
    return replace(merge_all(parts), **changes)


def steps(numbers: Sequence[int], **how: object) -> list[StepRecord]:
    return [step(n, **how) for n in numbers]


def of(a: Told, b: Told, glob: str = "*", **how: object) -> Comparison:
    return compare(a, b, Tolerance(**how), glob)


@settings(max_examples=25, deadline=None)
@given(
    at=st.integers(0, 2), row=st.integers(0, len(SITES) - 1), stat=st.sampled_from(VALUES),
    factor=st.floats(1.2, 1e6), dtype=DTYPES, seed=SEEDS,
)  # fmt: skip
def test_one_planted_difference_is_named_exactly(at, row, stat, factor, dtype, seed):
    sites = tuple(replace(s, dtype=dtype) for s in SITES)
    plain, bent = (steps(range(3), sites=sites, seed=seed) for _ in range(2))
    n, v = 240, bent[at].values[row]
    low, high, total, square = v
    backward = sites[row].kind.startswith("grad")
    r, peak, rms = rounding(dtype) * (1 + backward), max(-low, high), math.sqrt(square / n)
    own = 2.6e-6 * (dtype != "float64") + n * 2.0**-52
    left = 1 if backward else n**-0.25
    middle = factor * (r * left + own) * rms
    match stat:
        case "min":
            v[0] = low - factor * r * (peak * (1 + factor * r) if r * factor < 1 else 1e9 * peak)
        case "max":
            v[1] = high + factor * r * (peak * (1 + factor * r) if r * factor < 1 else 1e9 * peak)
        case "sum":
            v[2] = total + n * middle
        case "sum_sq":
            v[3] = n * (rms + middle * (1 + middle / rms if middle < rms else 1e9)) ** 2
    found = of(Told(plain), Told(bent))
    first = found.differences[0]
    named = {"sum": "mean", "sum_sq": "rms"}.get(stat, stat)
    assert (first.step, first.site, first.stat) == (at, sites[row], named)
    assert found.agreed == (at - 1 if at else None)
    assert len(found.differences) == 1
    assert first.order == EXECUTED.index(row)


def test_of_several_sites_the_first_one_executed_is_named_first():
    plain, bent = steps(range(3)), steps(range(3))
    bent[1].values[:] *= 2
    bent[2].values[:] *= 3
    found = of(Told(plain), Told(bent))
    assert [p.site for p in found.differences] == [SITES[i] for i in EXECUTED]
    assert {p.step for p in found.differences} == {1}
    assert [(g.step, g.apart, g.compared) for g in found.growth] == [(1, 12, 12), (2, 12, 12)]


def test_equal_runs_do_not_part_and_say_how_near_they_came():
    found = of(Told(steps(range(4))), Told(steps(range(4))), exact=True)
    assert (found.differences, found.growth, found.nearest, found.agreed) == ([], [], None, 3)
    near = steps(range(4))
    near[2].values[3, VALUES.index("max")] *= 1 + rounding("float32") / 2
    found = of(Told(steps(range(4))), Told(near))
    assert found.differences == []
    assert (found.nearest.step, found.nearest.site, found.nearest.stat) == (2, SITES[3], "max")
    assert 0.4 < found.nearest.excess < 0.6
    assert of(Told(steps(range(4))), Told(near), exact=True).differences[0].stat == "max"


def test_a_scalar_may_be_what_came_nearest_to_a_parting():
    near = steps(range(4))
    near[2].values[3, VALUES.index("max")] *= 1 + rounding("float32") / 16
    near[3].scalars[0]["loss"] *= 1 + rounding("float32")
    found = of(Told(steps(range(4))), Told(near))
    assert (found.differences, found.nearest.step, found.nearest.scalar) == ([], 3, "loss")
    said = next(lines((found, (0, None), []), exact=False))
    assert " of what is allowed, at step 3 in loss of rank 0: value " in said


def test_where_a_scalar_parts_alone_no_site_is_named_as_the_farthest_apart():
    other = steps(range(3))
    other[1].scalars[0]["loss"] = 5.0
    found = of(Told(steps(range(3))), Told(other))
    assert [(g.step, g.apart, g.worst) for g in found.growth] == [(1, 0, None), (2, 0, None)]


def test_a_batch_over_other_ranks_is_compared_after_the_reduction_and_in_the_forward():
    found = of(Told(steps(range(3))), Told(steps(range(3), ranks=4)))
    assert found.differences == []
    assert found.sites == 6
    (why,) = found.left_out
    assert {s.kind for s in found.left_out[why]} == {"grad_output", "grad_local"}
    bent = steps(range(3), ranks=4)
    bent[2].values[9] *= 2
    assert of(Told(steps(range(3))), Told(bent)).differences[0].site == SITES[9]


def with_scalars(records: list[StepRecord], **named: Callable[[int, int], float]) -> Told:
    """Return a run with more scalars, each of (step, rank)."""
    made = []
    for each in records:
        more = {
            rank: {**cells, **{name: of(each.step, rank) for name, of in named.items()}}
            for rank, cells in each.scalars.items()
        }
        made.append(replace(each, scalars=more))
    return Told(made)


@pytest.mark.parametrize(("by", "where"), [(0.1, "input_mean of rank 1"), (1e-9, "")])
def test_runs_of_one_split_part_where_other_data_are_given_to_a_rank(by: float, where: str):
    plain, bent = (steps(range(5), ranks=2) for _ in range(2))
    for each in bent[3:]:
        each.values[EXECUTED.index(0)] *= 1.1  # and what comes of it, in the next step
    a, b = (
        with_scalars(
            records, input_rms=lambda n, _: 1.0 + n,
            input_mean=lambda n, rank, much=much: 0.5 + (much if n >= 2 and rank == 1 else 0),
            input_digest=lambda n, rank, much=much: 7.0 + n + (n >= 2 and much > 0),
        )
        for records, much in ((plain, 0.0), (bent, by))
    )  # fmt: skip
    first = of(a, b).differences[0]
    told = f"{first.scalar} of rank {first.rank}" if first.scalar else ""
    assert (first.step, told) == ((2, where) if where else (3, ""))
    other_split = with_scalars(steps(range(5)), input_rms=lambda n, _: 9.0 + n)
    assert of(a, other_split).differences == []


def test_of_what_has_no_other_number_the_checksum_is_compared():
    a, b = (
        with_scalars(steps(range(4)), input_digest=lambda n, _, of=of: n + (of if n == 2 else 0.0))
        for of in (0.0, 1e9)
    )
    (only,) = of(a, b).differences
    assert (only.step, only.scalar, only.rank) == (2, "input_digest", 0)


def test_a_number_for_each_part_of_the_batch_is_left_out_where_that_is_split_otherwise():
    """As the loss that a model returns: one element of each rank."""
    loss = Site("", "output", "[loss]", dtype="float32")
    one, two = (steps(range(3), ranks=n, sites=(*SITES, loss)) for n in (1, 4))
    for records, parts in ((one, 1), (two, 4)):
        for each in records:
            each.counts[-1] = [parts, 0, 0, 0, 0, parts, parts]
    found = of(
        with_scalars(one, output_rms=lambda *_: 1.0), with_scalars(two, output_rms=lambda *_: 2.0)
    )
    assert found.differences == []
    assert [sites for why, sites in found.left_out.items() if why.startswith("one number")] == [
        [loss]
    ]
    assert all(growth.worst != loss for growth in found.growth)
    again = [replace(each, values=each.values * 1.5) for each in one]
    assert loss in [d.site for d in of(Told(one), Told(again)).differences]


def test_a_part_of_one_rank_is_no_tensor_to_compare():
    part = tuple(replace(s, placement="partial") for s in SITES[:4])
    same = of(Told(steps(range(2), sites=part)), Told(steps(range(2), sites=part)))
    assert same.sites == 4
    other = of(Told(steps(range(2), sites=part)), Told(steps(range(2), sites=SITES[:4])))
    assert other.sites == 0
    assert [len(sites) for sites in other.left_out.values()] == [4]


def test_weights_which_an_optimizer_sets_apart_are_not_compared():
    weights = tuple(Site("blocks.0.w", kind, dtype="float32") for kind in ("param", "update"))
    a, b = (steps(range(2), sites=(*SITES, *weights)) for _ in range(2))
    b[1].values[len(SITES) :] *= 8
    found = of(Told(a), Told(b))
    assert (found.sites, found.differences) == (len(SITES), [])
    assert list(found.left_out.values()) == [["*:param", "*:update"]]
    assert not any(found.alone)
    said = list(lines((found, (0, None), []), exact=False))
    assert said[-1].startswith("not compared (")
    assert said[-1].endswith("): *:param, *:update")


def test_what_a_missing_rank_would_have_held_is_not_compared():
    whole = steps(range(3))
    short = [replace(r, missing=(1,)) for r in steps(range(3))]
    short[1].values[:] *= 8
    found = of(Told(whole), Told(short))
    assert found.incomplete == 3
    assert {p.site.placement for p in found.differences} == {"replicated"}
    assert sum(len(sites) for sites in found.left_out.values()) == 9
    local = [replace(r, sites=SITES[:9], counts=r.counts[:9], values=r.values[:9]) for r in short]
    said = list(lines((of(Told(whole), Told(local)), (0, None), []), exact=False))
    assert said[0] == "undecided: no site could be compared"


def test_a_site_that_only_a_missing_rank_has_is_no_parting():
    short = steps(range(4))
    short[2] = replace(step(2, tuple(s for s in SITES if s != SITES[5])), missing=(1,))
    for runs in ((steps(range(4)), short), (short, steps(range(4)))):
        found = of(*map(Told, runs))
        assert (found.differences, found.incomplete) == ([], 1)
        assert not any(found.alone)


@pytest.mark.parametrize("side", [0, 1])
def test_a_step_that_never_came_to_its_end_is_not_compared(side: int):
    whole, torn = steps(range(4)), steps(range(4))
    counts, values = torn[3].counts.copy(), torn[3].values.copy()
    counts[6:, 6], values[6:] = 0, (np.inf, -np.inf, 0, 0)  # the backward is not there
    values[0] *= 8
    torn[3] = replace(torn[3], counts=counts, values=values, partial=True, missing=(1,))
    runs = (torn, whole)[:: 1 - 2 * side]
    found = of(*map(Told, runs))
    assert (found.differences, found.steps, found.last) == ([], 3, 2)
    assert found.torn == [1 - side, side]
    said = list(lines((found, (0, None), []), exact=False))
    assert said[-1] == f"not compared: 1 step that never came to an end in {'AB'[side]}"


def test_a_site_that_arrived_in_one_run_only_parts_there_without_a_warning():
    whole, short = steps(range(2)), steps(range(2))
    for made, other in ((short, 7), (whole, 5)):
        counts, values = made[1].counts.copy(), made[1].values.copy()
        counts[other], values[other] = 0, (np.inf, -np.inf, 0, 0)
        made[1] = replace(made[1], counts=counts, values=values)
    found = of(Told(whole), Told(short))
    assert {(p.step, p.site, p.stat) for p in found.differences} == {
        (1, SITES[5], "observed"), (1, SITES[7], "observed"),
    }  # fmt: skip


def test_only_steps_that_both_sampled_are_compared():
    late = [replace(r, sampled=r.step != 4) for r in steps(range(2, 10, 2))]
    found = of(Told(steps(range(10))), Told(late))
    assert (found.steps, found.first, found.last, found.only) == (3, 2, 8, [7, 0])


def test_of_a_run_that_was_started_again_the_last_start_counts():
    before = [*steps(range(4)), *steps(range(4, 9), seed=7)]  # it went wrong, and was thrown away
    again = [replace(r, attempt=1) for r in steps(range(4, 10))]
    resumed = Told(before, again)
    assert [(r.attempt, r.step) for r in timeline(resumed)] == [
        *((0, n) for n in range(4)), *((1, n) for n in range(4, 10)),
    ]  # fmt: skip
    found = of(resumed, Told(steps(range(10))))
    assert (found.differences, found.steps) == ([], 10)


def test_sites_of_one_run_only_are_listed_and_matched_by_their_numbers():
    moved = tuple(replace(s, fqn=f"net.{s.fqn}") if "2" in s.fqn else s for s in SITES)
    renamed = [replace(r, sites=moved) for r in steps(range(3))]
    found = of(Told(steps(range(3))), Told(renamed))
    assert found.differences == []
    assert [[s.fqn for s in side] for side in found.alone] == [
        [f"{p}{s.fqn}" for s in SITES if "2" in s.fqn] for p in ("", "net.")
    ]
    assert [(str(a), str(b)) for a, b in found.renamed] == [
        (str(s), f"net.{s}") for s in SITES if "2" in s.fqn
    ]


def test_a_site_that_is_missing_at_one_step_parts_there():
    short = steps(range(4))
    short[2] = step(2, tuple(s for s in SITES if s != SITES[5]))
    found = of(Told(steps(range(4))), Told(short))
    (only,) = found.differences
    assert (only.step, only.site, only.stat, only.a, only.b) == (2, SITES[5], "present", 1, 0)
    assert (found.agreed, found.alone) == (1, ([], []))


def test_unobserved_against_observed_is_a_parting_and_twice_unobserved_is_none():
    plain, blind = steps(range(3)), steps(range(3))
    for record in (*plain, *blind):
        record.counts[4], record.values[4] = (0,) * 6 + (0,), (np.inf, -np.inf, 0, 0)
    blind[1].counts[3, -1] = 0
    (only,) = of(Told(plain), Told(blind)).differences
    assert (only.step, only.site, only.stat) == (1, SITES[3], "observed")


def test_scalars_part_by_rank_and_times_do_not_count():
    slow = [
        replace(r, scalars={0: {**r.scalars[0], "forward_seconds": 9.0}}) for r in steps(range(4))
    ]
    slow[2].scalars[0]["loss"] = 2.0
    (only,) = of(Told(steps(range(4))), Told(slow)).differences
    assert (only.step, only.scalar, only.rank, only.a, only.b) == (2, "loss", 0, 1 / 3, 2.0)
    assert of(Told(steps(range(4))), Told(slow), "blocks.*").differences == []


def test_norms_over_what_a_rank_holds_are_compared_only_under_one_wrapper():
    """Under FSDP2 they are over the rank's shards, and the training is the same."""
    held = ("grad_norm", "grad_norm_used", "state_tensors")
    whole, sharded = (
        [replace(r, scalars={0: r.scalars[0] | dict.fromkeys(held, x)}) for r in steps(range(4))]
        for x in (2.0, 1.0)
    )
    assert of(Told(sharded, wrapper="fsdp2"), Told(whole)).differences == []
    parted = {found.scalar for found in of(Told(sharded), Told(whole)).differences}
    assert parted == {*held}


def test_what_is_summed_over_the_observed_sites_is_compared_only_over_the_same_ones():
    """`exclude=` and `backward="full"` change what is observed, and not what is trained."""
    over = {"output": "output_rms", "grad_local": "grad_norm_local", "grad": "grad_norm"}
    for kind, name in over.items():
        few = steps(range(3), sites=[s for s in SITES if (s.fqn[:8], s.kind) != ("blocks.0", kind)])
        numbers = {
            name: lambda *_: 1.0,
            "sites_expected": lambda *_: 12.0,
            "grad_norm_used": lambda *_: 3.0,
        }
        fewer = numbers | {name: lambda *_: 2.0, "sites_expected": lambda *_: 11.0}
        found = of(with_scalars(steps(range(3)), **numbers), with_scalars(few, **fewer))
        assert (found.differences, list(found.left_out.values())) == ([], [[name]])
        found = of(with_scalars(steps(range(3)), **numbers), with_scalars(steps(range(3)), **fewer))
        assert ([d.scalar for d in found.differences], found.left_out) == ([name], {})


def test_a_scalar_of_one_run_only_is_listed():
    logged = with_scalars(steps(range(3)), extra=lambda *_: 1.0, seconds=lambda *_: 1.0)
    found = of(Told(steps(range(3))), logged)
    assert (found.differences, found.alone) == ([], ([], ["extra", "seconds"]))
    assert list(lines((found, (0, None), []), exact=False))[-1] == "only in B: extra, seconds"
    assert of(Told(steps(range(3))), logged, "blocks.*").alone == ([], [])
    often, seldom = with_scalars(steps(range(3)), **{"loss@-1": lambda *_: 1.0}), steps(range(3))
    assert of(often, Told(seldom)).alone == ([], [])


def test_what_another_wrapper_or_split_changes_is_said_to_be_left_out():
    held = with_scalars(steps(range(2)), grad_norm=lambda *_: 1.0)
    held.identity["wrapper"] = "fsdp2"
    found = of(held, with_scalars(steps(range(2)), grad_norm=lambda *_: 2.0))
    assert list(found.left_out.items()) == [(OTHER_WRAPPER, ["grad_norm"])]
    norm = {"grad_norm": lambda *_: 1.0}
    found = of(
        with_scalars(steps(range(2)), **norm), with_scalars(steps(range(2), ranks=2), **norm)
    )
    assert (OTHER_PARTS, ["grad_norm"]) in found.left_out.items()


def test_a_loss_that_is_nan_is_no_loss_that_nobody_gave():
    bad, none = steps(range(3)), steps(range(3))
    bad[1].scalars[0]["loss"] = math.nan
    none[1].values[:] *= 2
    del none[1].scalars[0]["loss"]
    told = "\n".join(lines((of(Told(steps(range(3))), Told(bad)), (0, None), []), exact=False))
    assert "parted at step 1 in loss of rank 0: value 0.5 against nan (agreed" in told
    assert re.search(r"^ +1 +0 of 12 +0.5 +nan ", told, re.MULTILINE)
    told = "\n".join(lines((of(Told(steps(range(3))), Told(none)), (0, None), []), exact=False))
    assert re.search(r"^ +1 +12 of 12 +0.5 +- ", told, re.MULTILINE)


def test_a_long_divergence_is_kept_at_few_steps():
    short = SITES[3:4]
    found = of(Told(steps(range(70), sites=short)), Told(steps(range(70), sites=short, seed=1)))
    assert [g.step for g in found.growth] == [0, 1, 2, 4, 8, 16, 32, 64, 69]
    assert len(found.differences) == 1


# ---- the verb

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    def run(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return (code, *capsys.readouterr())

    return run


def write(
    path: Path, bend: Callable[[StepRecord], StepRecord] = lambda r: r, steps: int = 6
) -> Path:
    made = Made(path)
    made.write(bend(made_record(r, s)) for s in range(steps) for r in range(2))
    made.close()
    return path


def test_the_verb_names_the_parting_in_its_first_line_whatever_the_names(tmp_path, call):
    evil = Site("blocks.1\x1b[31m\u202e", "output", dtype="float32")

    def name(record: StepRecord) -> StepRecord:
        return replace(record, sites=(record.sites[0], evil, record.sites[2]))

    def bend(record: StepRecord) -> StepRecord:
        if record.step >= 3:
            record.values[1, 1] += 1
        return replace(
            name(record), digests={("a\x07", ""): {record.step // 4: 1 << record.ranks[0]}}
        )

    a, b = write(tmp_path / "a", name), write(tmp_path / "b", bend)
    code, out, err = call("compare", a, b)
    assert (code, err) == (0, "")
    assert out.startswith("parted at step 3 in blocks.1?[31m?:output: max ")
    assert out.split("\n")[0].endswith(" (agreed through step 2)")
    code, out, _ = call("compare", a, b, "--json")
    told = json.loads(out)
    assert (code, told["parted"], told["agreed"], told["sites"]) == (0, True, 2, 3)
    first = told["partings"][0]
    assert (first["step"], first["fqn"], first["stat"]) == (3, evil.fqn, "max")
    assert set(told) == {
        "runs", "format_version", "tolerance", "steps", "sites", "parted", "agreed", "partings",
        "growth", "nearest", "checksums", "reasons", "alone", "renamed", "recast", "left_out",
    }  # fmt: skip


def test_the_verb_tells_checksums_and_circumstances(tmp_path, call):
    def bend(record: StepRecord) -> StepRecord:
        held = {
            ("a.weight", ""): {1: 1 << record.ranks[0]},
            ("b.weight", ""): {7: 1 << record.ranks[0]},
        }
        return replace(record, digests=held) if record.step else record

    a, b = write(tmp_path / "a", bend), write(tmp_path / "b", lambda r: bend(r) if r.step < 4 else
                 replace(r, digests={("b.weight", ""): {9: 1 << r.ranks[0]}}))  # fmt: skip
    _, out, _ = call("compare", a, b)
    assert out.startswith("no parting: no number that is compared differs\n")
    assert "checksums: bits differ after step 4 in b.weight on rank 0 (equal through step 3;" in out
    assert "what else differs" not in out
    other = Made(tmp_path / "c", ranks=3)
    other.write(made_record(r, s) for s in range(6) for r in range(3))
    other.close()
    _, out, _ = call("compare", a, tmp_path / "c")
    what = out.split("what else differs\n")[1].split("\n\n")[0].strip().split("\n")
    assert [line.split() for line in what] == [
        ["A", "B"],
        ["local_world_size", "2", "3"],
        ["world_size", "2", "3"],
    ]


def test_a_glob_over_weights_alone_is_told_that_they_are_not_compared(tmp_path, call):
    weight = Site("blocks.1.w", "param", dtype="float32")

    def bend(record: StepRecord) -> StepRecord:
        return replace(record, sites=(*record.sites[:2], weight))

    a, b = write(tmp_path / "a", bend), write(tmp_path / "b", bend)
    for glob in ("*:param", "blocks.1.w"):
        code, _, err = call("compare", a, b, "--sites", glob)
        assert (code, err.count("\n")) == (2, 1)
        assert f"{glob!r} matches sites of kind param alone, which are not compared" in err


def test_the_process_that_trained_is_no_difference_between_runs(tmp_path, call):
    for name in "ab":
        made = Made(tmp_path / name, process=f"process of {name}")
        made.write(made_record(r, s) for s in range(2) for r in range(2))
        made.close()
    assert "what else differs" not in call("compare", tmp_path / "a", tmp_path / "b")[1]


def test_what_differs_is_told_as_it_was_written(tmp_path, call):
    options = [
        {"backward": "output", "exclude": [], "backend": ""},
        {"backward": "full", "exclude": ["0", "h*"], "backend": "gloo"},
    ]
    for name, told in zip("ab", options, strict=True):
        made = Made(tmp_path / name, options=told)
        made.write(made_record(r, s) for s in range(2) for r in range(2))
        made.close()
    older = write(tmp_path / "older")  # of a version that did not write them down
    a, b = tmp_path / "a", tmp_path / "b"
    said = call("compare", a, b)[1].split("what else differs\n")[1].split("\n\n")[0]
    assert [line.split() for line in said.strip().split("\n")] == [
        ["A", "B"], ["backend", "-", "gloo"], ["backward", "output", "full"],
        ["exclude", "-", "0,", "h*"],
    ]  # fmt: skip
    assert json.loads(call("compare", a, b, "--json")[1])["reasons"] == [
        {"name": "backend", "a": "", "b": "gloo"},
        {"name": "backward", "a": "output", "b": "full"},
        {"name": "exclude", "a": [], "b": ["0", "h*"]},
    ]
    assert json.loads(call("compare", b, older, "--json")[1])["reasons"] == []


def test_wrong_use_is_one_line_and_exit_2(tmp_path, call):
    a, b = write(tmp_path / "a"), write(tmp_path / "b")
    late = Made(tmp_path / "late")
    late.write(made_record(0, s) for s in (10, 20))
    late.close()
    Made(tmp_path / "empty").close()
    for words, says in [
        ((a, tmp_path / "none"), "no such directory"),
        ((a, b, "--sites", "blocks.1"), ""),
        ((a, b, "--sites", "bloks"), "no site matches 'bloks'; nearest: blocks."),
        ((a, tmp_path / "late"), "no step was sampled in both: 6 only in A, 2 only in B"),
        ((a, tmp_path / "empty"), "empty: no step was sampled"),
        ((a, b, "--exact", "--rtol", "0.1"), "--exact leaves nothing to --rtol"),
    ]:
        code, _, err = call("compare", *words)
        if says:
            assert code == 2
            assert says in err
            assert err.count("\n") == 1
    for bad in ("-1", "nan", "x"):
        code, _, err = call("compare", a, b, f"--rtol={bad}")
        assert code == 2
        assert "expected a number of at least 0" in err


def test_a_damaged_store_is_compared_as_far_as_it_goes_and_exits_with_3(tmp_path, call):
    paths = []
    for name in "ab":
        run = Made(tmp_path / name).whole(20).close()
        folder = StoreWriter(run, NODE, block=8, durable=False)
        folder.seal()
        folder.close()
        paths.append(tmp_path / name)
    chunk = next((tmp_path / "b/run.zarr/attempt_000/merged/counts").rglob("c/1/*/*"))
    chunk.write_bytes(chunk.read_bytes()[:-9])
    code, out, err = call("compare", *paths)
    assert code == 3
    assert out.startswith("no parting: no number that is compared differs\n")
    assert "not compared: 8 steps that only A sampled" in out
    assert f"lost: {tmp_path / 'b'}: " in err


# ---- real runs

TRAIN = """
import sys, torch, ddpprobe
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())

def train(path, fault=None, shuffle=False, micros=1, half=False, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), Block(), Block(), nn.Linear(16, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    probe = ddpprobe.install(model, run_dir=path, every=1, daemon="none", **options)
    for step in range(4):
        if step == fault:
            with torch.no_grad():
                model[2].up.weight[0, 0] += 0.5
        ids = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(step))
        ids, loss = ids[torch.randperm(16)] if shuffle else ids, 0.0
        for part in ids.chunk(micros):
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                out = model(part)
                own = nn.functional.cross_entropy(out.flatten(0, 1), part.flatten()) / micros
            own.backward()
            loss += own.detach()
        probe.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    probe.close()

root = sys.argv[1]
train(root + "/a")
train(root + "/shuffled", shuffle=True)
train(root + "/micros", micros=4)
train(root + "/fault", fault=2)
train(root + "/fewer", exclude=["1*"])
train(root + "/full", backward="full")
train(root + "/half", half=True)
train(root + "/half_shuffled", half=True, shuffle=True)
train(root + "/half_fault", half=True, fault=2)
"""


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("real")
    script = root / "train.py"
    script.write_text(TRAIN)
    with torchrun_in(root) as torchrun:
        done = torchrun([script, root], nproc=0)
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize(
    ("a", "b", "words", "says"),
    [
        ("a", "fewer", [], "no parting: no number that is compared differs\n"),
        ("a", "full", [], "no parting: no number that is compared differs\n"),
        ("a", "a", ["--exact"], "no parting: every number that is compared is equal\n"),
        ("a", "shuffled", [], "no parting: the largest difference is 0."),
        ("a", "shuffled", ["--exact"], "parted at step "),
        ("a", "micros", [], "no parting: the largest difference is 0."),
        ("half", "half_shuffled", [], "no parting: the largest difference is 0."),
        ("a", "fault", [], "parted at step 2 in 2.up:output: "),
        ("half", "half_fault", [], "parted at step 2 in 2.up:output: "),
    ],
)
def test_real_runs_part_where_they_were_made_to(real, call, a, b, words, says):
    code, out, err = call("compare", real / a, real / b, *words)
    assert (code, err) == (0, "")
    assert out.startswith(says)
    if "fault" in b:
        assert "(agreed through step 1)" in out
    differs = {"fewer": r"exclude +- +1\*", "full": r"backward +output +full"}
    assert b not in differs or re.search(differs[b], out)
