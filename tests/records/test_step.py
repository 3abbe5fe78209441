"""The merge is a commutative monoid; derived statistics follow from columns alone."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpprobe.records.merge import disagreements, merge_all, merge_digests, ranks_of
from ddpprobe.records.step import (
    COLUMNS,
    COUNTS,
    PHASES,
    PLACEMENTS,
    SEVERAL,
    STATS,
    UNORDERED,
    VALUE_IDENTITY,
    VALUES,
    Anomaly,
    Column,
    FirstBad,
    Site,
    StepRecord,
    columns_of,
    derive,
    empty_rows,
    merge_counts,
    merge_runs,
    merge_values,
)

KEYS = [("a", "output"), ("b", "output"), ("b", "grad_output"), ("p", "grad"), ("q", "grad_local")]
exact = st.integers(-(2**20), 2**20)  # sums of these are exact in float64, so == may be asked for


@st.composite
def rank_records(draw: st.DrawFn, rank: int) -> StepRecord:
    """One rank's record of step 3: any subset of the sites, in any order."""
    keys = draw(st.permutations(KEYS))[: draw(st.integers(0, len(KEYS)))]
    sites = tuple(
        Site(f, k, "", "sharded" if f == "p" else "local", primary=f != "p" or draw(st.booleans()))
        for f, k in keys
    )
    n = len(sites)
    counts = np.array(
        [[draw(st.integers(0, 2**40)) for _ in COUNTS] for _ in range(n)], np.int64
    ).reshape(n, len(COUNTS))
    values = np.array([[draw(exact) for _ in VALUES] for _ in range(n)], np.float64)
    order = draw(st.sampled_from([0, 1, 2, UNORDERED]))
    at = draw(st.integers(0, 2)), draw(st.sampled_from(PHASES)), order
    fqn = draw(st.sampled_from([None, "a", "b"]))
    kind = draw(st.sampled_from([None, "grad", "param"]))
    bad = FirstBad(3, *at, rank, fqn, kind, nan=rank + 1, numel=9)
    return StepRecord(
        attempt=0, step=3, ranks=(rank,), wall_time_ns=draw(st.integers(1, 9)), sites=sites,
        counts=counts, values=values.reshape(n, len(VALUES)), scalars={rank: {"loss": float(rank)}},
        first_bad=bad if draw(st.booleans()) else None,
    )  # fmt: skip


several = st.integers(2, 5).flatmap(lambda n: st.tuples(*(rank_records(rank=r) for r in range(n))))


def content(record: StepRecord) -> object:
    """Everything but the order of the sites, comparable."""
    rows = {
        s.key: (tuple(record.counts[i]), tuple(record.values[i]))
        for i, s in enumerate(record.sites)
    }
    return (rows, record.ranks, record.first_bad, dict(record.scalars), record.wall_time_ns)


@given(several, st.randoms())
def test_merging_ranks_in_any_order_and_grouping_gives_the_same_record(records, random) -> None:
    expected = content(merge_all(records))
    pool = list(records)
    while len(pool) > 1:
        random.shuffle(pool)
        pool.append(merge_all((pool.pop(), pool.pop())))
    if len(records) > 1:
        assert content(pool[0]) == expected


@given(several)
def test_local_rows_and_primary_shards_add_up_and_replicas_do_not(records) -> None:
    merged = merge_all(records)
    for i, site in enumerate(merged.sites):
        rows = [
            r.counts[j]
            for r in records
            for j, s in enumerate(r.sites)
            if s.key == site.key and s.primary
        ]
        assert (merged.counts[i] == np.sum(rows, axis=0)).all()


def test_a_replicated_row_is_kept_once() -> None:
    counts, values = empty_rows(1)
    counts[:, 0] = 8
    values[:] = (1.0, 2.0, 3.0, 4.0)
    site = (Site("p", "grad", "", "replicated"),)
    records = [StepRecord(0, 0, (r,), 0, True, site, counts, values) for r in range(4)]
    merged = merge_all(records)
    assert merged.counts[0, 0] == 8
    assert merged.values[0].tolist() == [1.0, 2.0, 3.0, 4.0]


@given(st.lists(st.sampled_from(PLACEMENTS), min_size=2, max_size=5), st.randoms())
def test_a_site_whose_placement_the_ranks_dispute_is_labelled_and_not_added_up(
    said: list[str], random: Random
) -> None:
    pool, alone = [], Site("r", "output", "", "sharded", primary=False)
    for rank, placement in enumerate(said):
        counts, values = empty_rows(2)
        counts[:, 0] = values[:, 2] = 10**rank  # of a sum the digits tell the ranks
        sites = (Site("a", "output", "", placement), alone)
        pool.append(StepRecord(0, 3, (rank,), 0, True, sites, counts, values))
    while len(pool) > 1:
        random.shuffle(pool)
        pool.append(merge_all((pool.pop(), pool.pop())))
    ((site,), counts, values) = pool[0].sites, pool[0].counts, pool[0].values
    assert site.primary
    assert counts[0, 0] == values[0, 2]
    heard = set(said)
    if heard <= {"local", "sharded"}:
        assert site.placement in heard
        assert counts[0, 0] == sum(10**rank for rank in range(len(said)))
        return
    if "unknown" in heard or ("replicated" in heard and len(heard) > 1):
        assert site.placement == "unknown"
    elif "partial" in heard:
        assert site.placement == "partial"
    else:
        assert site.placement == "replicated"
    kept = [p for rank, p in enumerate(said) if counts[0, 0] == 10**rank]
    assert len(kept) == 1
    assert kept[0] not in ("local", "sharded")


def test_rows_of_one_key_in_one_record_merge_and_tables_that_grow_keep_their_rows() -> None:
    a, b, c = (Site(name, "output") for name in "abc")
    tables = ((a, b), (b, b, c), (c, a, b), (a, b))
    parts = []
    for rank, sites in enumerate(tables):
        counts, values = empty_rows(len(sites))
        counts[:, 0] = values[:, 0] = [10 ** (3 * rank + i) for i in range(len(sites))]
        parts.append(StepRecord(0, 3, (rank,), 0, True, sites, counts, values))
    for _ in range(2):  # the second time from memory
        merged = merge_all(parts)
        assert merged.sites == (a, b, c)
        assert merged.counts[:, 0].tolist() == [1_010_000_001, 10_100_011_010, 1_100_000]
        assert merged.values[:, 0].tolist() == [1.0, 10.0, 10.0**5]
    assert parts[0].counts[0, 0] == 1  # what went in is as it was


rows = st.lists(st.tuples(exact, exact, exact, exact), min_size=3, max_size=3)


@given(rows)
def test_values_merge_associatively_commutatively_with_the_empty_row_as_identity(three) -> None:
    a, b, c = (np.array([row], np.float64) for row in three)
    identity = empty_rows(1)[1]
    left = merge_values(merge_values(a, b), c)
    assert (left == merge_values(a, merge_values(b, c))).all()
    assert (merge_values(a, b) == merge_values(b, a)).all()
    assert (merge_values(a, identity) == a).all()


def test_counts_stay_exact_beyond_what_floats_can_hold() -> None:
    big = np.full((1, len(COUNTS)), 2**60 + 1, np.int64)
    assert merge_counts(big, big)[0, 0] == 2 * (2**60 + 1)


@given(st.lists(st.lists(exact, min_size=1, max_size=20), min_size=1, max_size=4))
def test_derived_statistics_of_merged_parts_equal_those_of_the_whole(parts) -> None:
    def row(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        counts, values = empty_rows(1)
        counts[0, 0], counts[0, 4] = x.size, (x == 0).sum()
        values[0] = (x.min(), x.max(), x.sum(), (x * x).sum())
        return counts, values

    arrays = [np.array(p, np.float64) for p in parts]
    counts, values = functools.reduce(
        lambda a, b: (merge_counts(a[0], b[0]), merge_values(a[1], b[1])), map(row, arrays)
    )
    whole = np.concatenate(arrays)
    scale = max(1.0, float(np.abs(whole).max()))
    expected = {
        "mean": whole.mean(), "std": whole.std(), "rms": np.sqrt((whole**2).mean()),
        "norm": np.linalg.norm(whole), "abs_max": np.abs(whole).max(),
        "zero_ratio": (whole == 0).mean(), "nonfinite": 0.0,
    }  # fmt: skip
    for stat, want in expected.items():
        got = derive(stat, counts, values)[0]
        # std by sum_sq - mean^2 loses half the digits where the spread is tiny beside the mean
        tolerance = 1e-6 if stat == "std" else 1e-12
        assert got == pytest.approx(want, rel=1e-9, abs=tolerance * scale)


def test_without_data_a_statistic_is_nan_and_never_zero() -> None:
    counts, values = empty_rows(1)
    for stat in ("mean", "rms", "norm", "abs_max", "min", "max", "sum", "zero_ratio"):
        assert np.isnan(derive(stat, counts, values)[0]), stat


digest_keys = st.sampled_from([("w", ""), ("w", "1"), ("v", "")])
held = st.dictionaries(st.integers(-2, 2), st.integers(1, 2**70), min_size=1, max_size=3)
some_digests = st.dictionaries(digest_keys, held, max_size=3)


@given(some_digests, some_digests, some_digests)
def test_checksums_merge_as_sets_of_ranks(
    a: dict[tuple[str, str], dict[int, int]],
    b: dict[tuple[str, str], dict[int, int]],
    c: dict[tuple[str, str], dict[int, int]],
) -> None:
    assert merge_digests(a, b) == merge_digests(b, a)
    assert merge_digests(merge_digests(a, b), c) == merge_digests(a, merge_digests(b, c))
    assert merge_digests(a, {}) == a == merge_digests(a, a)
    for key, sums in merge_digests(a, b).items():
        for checksum, mask in sums.items():
            one, other = (set(ranks_of(x.get(key, {}).get(checksum, 0))) for x in (a, b))
            assert set(ranks_of(mask)) == one | other
    assert disagreements(merge_digests(a, b)) == {
        key: sums for key, sums in merge_digests(a, b).items() if len(sums) > 1
    }


def test_an_unknown_statistic_names_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="unknown statistic 'median': choose one of numel, nan, pos"
    ):
        derive("median", *empty_rows(1))


def test_records_of_different_steps_or_of_the_same_rank_do_not_merge() -> None:
    with pytest.raises(ValueError, match="cannot merge step 0"):
        merge_all((StepRecord(0, 0, (0,), 0), StepRecord(0, 1, (1,), 0)))
    with pytest.raises(ValueError, match="share ranks"):
        merge_all((StepRecord(0, 0, (0,), 0), StepRecord(0, 0, (0,), 0)))


def test_the_first_bad_tensor_of_all_ranks_is_the_origin() -> None:
    records = [
        StepRecord(0, 5, (0,), 0, first_bad=FirstBad(5, 1, "forward", 3, 0)),
        StepRecord(0, 5, (1,), 0, first_bad=FirstBad(5, 0, "backward", 90, 1)),
        StepRecord(0, 5, (2,), 0, first_bad=FirstBad(5, 0, "step", 1, 2)),
    ]
    assert merge_all(records).first_bad == records[1].first_bad


def test_no_rank_is_the_origin_of_what_several_have_at_the_same_place() -> None:
    bad = [FirstBad(5, 0, "forward", 3, rank, "fc", "output", nan=2, numel=8) for rank in (0, 2)]
    other = FirstBad(5, 0, "forward", 3, 1, "head", "output", nan=1, numel=8)  # a stage's own
    records = [StepRecord(0, 5, (b.rank,), 0, first_bad=b) for b in (*bad, other)]
    merged = merge_all(records).first_bad
    assert merged == replace(bad[0], rank=SEVERAL, nan=4, numel=16)
    reduced = [replace(b, phase="step", kind="grad") for b in bad]
    records = [StepRecord(0, 5, (b.rank,), 0, first_bad=b) for b in reduced]
    assert merge_all(records).first_bad == reduced[0]


# Finite and other elements of four tensors, as two blocks of two rows.
ELEMENTS = (
    ((1.0, 0.0, -4.0, np.nan, np.inf, np.inf, -np.inf, 3.0), (2.0, 2.5, -0.0)),
    ((np.nan, np.nan), ()),
)


def rows_of(elements: tuple[tuple[float, ...], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Rows as the statistics' kernels make them."""
    counts, values = empty_rows(len(elements))
    for row, cells in enumerate(elements):
        x = np.array(cells)
        fine = x[np.isfinite(x)]
        counts[row, :5] = (
            x.size, np.isnan(x).sum(), (x == np.inf).sum(), (x == -np.inf).sum(), (x == 0).sum(),
        )  # fmt: skip
        if fine.size:
            with np.errstate(over="ignore"):
                values[row] = (fine.min(), fine.max(), fine.sum(), (fine * fine).sum())
    return counts, values


def test_statistics_of_rows_with_nan_are_those_of_their_finite_elements() -> None:
    blocks = [rows_of(block) for block in ELEMENTS]
    counts, values = (np.stack(part) for part in zip(*blocks, strict=True))
    nan = np.nan
    finite = [np.array(x)[np.isfinite(x)] for block in ELEMENTS for x in block]
    some = [x if x.size else np.array([nan]) for x in finite]  # of nothing every number is NaN
    with np.errstate(invalid="ignore"):
        expected = {
            "numel": [8, 3, 2, 0], "nan": [1, 0, 2, 0], "pos_inf": [2, 0, 0, 0],
            "neg_inf": [1, 0, 0, 0], "zeros": [1, 1, 0, 0], "nonfinite": [4, 0, 2, 0],
            "zero_ratio": [1 / 8, 1 / 3, 0, nan],  # the only one over all elements
            "min": [x.min() for x in some], "max": [x.max() for x in some],
            "sum": [x.sum() for x in some], "sum_sq": [(x**2).sum() for x in some],
            "mean": [x.mean() for x in some], "std": [x.std() for x in some],
            "rms": [np.sqrt((x**2).mean()) for x in some],
            "norm": [np.linalg.norm(x) for x in some], "abs_max": [np.abs(x).max() for x in some],
        }  # fmt: skip
    assert set(expected) | {"tapped", "observed"} == set(STATS)
    for stat, want in expected.items():
        got = derive(stat, counts, values)
        assert (got.shape, got.dtype) == ((2, 2), np.float64), stat
        np.testing.assert_allclose(got.ravel(), want, rtol=1e-12, err_msg=stat)


def test_the_spread_of_a_constant_that_is_not_exact_is_zero_and_not_nan() -> None:
    counts, values = rows_of(((0.1,) * 3,))
    mean = values[0, 2] / 3
    assert values[0, 3] / 3 < mean * mean  # rounding made the variance negative
    assert derive("std", counts, values)[0] == 0.0


def test_numbers_beyond_all_measure_give_no_warning() -> None:
    counts, values = rows_of(((1e200, 1e200), ()))
    values[1] = (1.0, 1.0, 1.0, 1.0)  # sums of no elements: a damaged row, whatever made it
    for stat in ("std", "mean", "rms", "norm", "zero_ratio"):
        assert np.isnan(derive(stat, counts, values)[1]), stat


def test_runs_of_neighbouring_rows_merge_as_one_by_one() -> None:
    counts, values = rows_of(((5.0, 1.0), (-7.0,), (2.0, np.nan), (0.0, 9.0)))
    merged = merge_runs(counts, values, np.array([0, 3]))
    first = functools.reduce(merge_counts, counts[:3]), functools.reduce(merge_values, values[:3])
    assert merged[0].tolist() == [first[0].tolist(), counts[3].tolist()]
    assert merged[1].tolist() == [first[1].tolist(), values[3].tolist()]


def test_a_site_is_written_as_module_leaf_and_kind() -> None:
    assert str(Site("a.b", "output")) == "a.b:output"
    assert str(Site("", "grad_output", "0.hidden")) == "(root)[0.hidden]:grad_output"


def test_a_record_whose_rows_are_not_one_per_site_is_refused() -> None:
    site = (Site("a", "output"),)
    one, two = empty_rows(1), empty_rows(2)
    for counts, values in ((two[0], one[1]), (one[0], two[1]), (one[0].T, one[1])):
        with pytest.raises(ValueError, match=r"1 sites need .* shapes \(1, 7\) and \(1, 4\), got"):
            StepRecord(0, 0, (0,), 0, True, site, counts, values)


# Two ranks whose records differ in one field each: (of rank 0, of rank 1, of both).
FIELDS = {
    "wall_time_ns": (7, 5, 7),
    "sampled": (False, True, True),
    "skipped": (True, False, True),
    "partial": (False, True, True),
    "missing": ((3, 1), (2, 0), (2, 3)),
    "scalars": ({0: {"loss": 1.0}}, {1: {"loss": 2.0}}, {0: {"loss": 1.0}, 1: {"loss": 2.0}}),
    "digests": ({("w", ""): {9: 1}}, {("w", ""): {9: 2}}, {("w", ""): {9: 3}}),
}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_of_two_records_is_merged_by_its_own_law(name: str) -> None:
    mine, others, both = FIELDS[name]
    plain = {"wall_time_ns": 0, "sampled": False}
    one = replace(StepRecord(2, 3, (0,), **plain), **{name: mine})
    two = replace(StepRecord(2, 3, (1,), **plain), **{name: others})
    wanted = replace(StepRecord(2, 3, (0, 1), **plain), **{name: both})
    for parts in ((one, two), (two, one)):
        merged = merge_all(parts)
        for field in fields(StepRecord):
            if field.name not in ("counts", "values", "binned", "bins"):
                assert getattr(merged, field.name) == getattr(wanted, field.name), field.name


def test_a_merge_of_records_without_the_flags_sets_none() -> None:
    merged = merge_all([StepRecord(0, 1, (r,), 0, sampled=False) for r in (1, 0)])
    assert (merged.sampled, merged.skipped, merged.partial) == (False, False, False)
    assert (merged.missing, merged.first_bad, merged.digests) == ((), None, {})


def test_infinities_of_both_signs_of_several_ranks_add_up() -> None:
    bad = [FirstBad(5, 0, "backward", 3, r, "a", "grad_output", "", r, 10, 200, 9) for r in (1, 2)]
    merged = merge_all([StepRecord(0, 5, (b.rank,), 0, first_bad=b) for b in bad]).first_bad
    assert merged == FirstBad(5, 0, "backward", 3, SEVERAL, "a", "grad_output", "", 3, 20, 400, 18)


def test_of_ranks_that_are_bad_at_several_places_the_earliest_place_is_the_origin() -> None:
    """Out of order, and however equal the rest is: micro-batch, phase, order, site."""
    late = FirstBad(5, 1, "backward", 3, 0, "b", "output", "1", nan=1)
    earlier = [
        replace(late, micro=0, phase="step"), replace(late, phase="forward", order=9),
        replace(late, order=2, fqn="c"), replace(late, fqn="a", kind="x"),
        replace(late, kind="input", leaf="2"), replace(late, leaf="0"),
    ]  # fmt: skip
    for first in earlier:
        for ranks in ((0, 1), (1, 0)):
            found = [replace(late, rank=ranks[0]), replace(first, rank=ranks[1])]
            parts = [StepRecord(0, 5, (b.rank,), 0, first_bad=b) for b in found]
            assert merge_all(parts).first_bad == found[1]


def test_the_ranks_in_a_mask_are_its_bits() -> None:
    assert ranks_of(0) == ()
    assert ranks_of(0b1001_0110) == (1, 2, 4, 7)
    assert ranks_of(1 << 70) == (70,)


def test_ranks_dispute_a_checksum_only_if_they_hold_several() -> None:
    digests = {("a", ""): {1: 3}, ("b", "0"): {1: 1, 2: 2}, ("c", ""): {}}
    assert disagreements(digests) == {("b", "0"): {1: 1, 2: 2}}


def test_the_place_of_an_anomaly_is_its_site_or_the_module_alone() -> None:
    def place(module: str | None, kind: str | None) -> str:
        where = (0, 0, None, module, kind, "forward")
        return Anomaly("nonfinite", "page", *where, True, "", {}, sampled=True).place

    assert place("a.b", "output") == "a.b:output"
    assert place("a.b", None) == "a.b"
    assert place("", None) == "(root)"
    assert place(None, "output") == ""


def one_site(
    rank: int, placement: str, number: int, *, behind: int = 0, **site: bool
) -> StepRecord:
    """A record with one site of that placement, behind others that only this rank has."""
    others = tuple(Site(f"only{rank}.{n}", "output") for n in range(behind))
    counts, values = empty_rows(behind + 1)
    counts[-1, 0] = values[-1, 2] = number
    sites = (*others, Site("r", "output", "", placement, **site))
    return StepRecord(0, 3, (rank,), 0, True, sites, counts, values)


@pytest.mark.parametrize(
    ("said", "placement", "kept"),
    [
        (("local", "partial"), "partial", 20),
        (("partial", "sharded"), "partial", 10),
        (("replicated", "partial"), "unknown", 20),
        (("local", "replicated"), "unknown", 20),
        (("unknown", "local"), "unknown", 10),
        (("replicated", "replicated"), "replicated", 10),
        (("partial", "partial"), "partial", 10),
        (("local", "sharded"), "local", 30),
    ],
)
@pytest.mark.parametrize("behind", [0, 2])
def test_what_two_ranks_say_of_one_site_is_labelled_and_kept_by_the_later_word(
    said: tuple[str, str], placement: str, kept: int, behind: int
) -> None:
    """Wherever the site stands in their tables; of the same word the lowest rank's row."""
    parts = one_site(0, said[0], 10), one_site(1, said[1], 20, behind=behind)
    merged = merge_all(parts)
    row = next(i for i, site in enumerate(merged.sites) if site.fqn == "r")
    assert merged.sites[row].placement == placement
    assert (merged.counts[row, 0], merged.values[row, 2]) == (kept, kept)
    assert len(merged.sites) == len(merged.counts) == len(merged.values) == 1 + behind


def test_the_one_row_that_is_left_of_a_replica_is_the_one_that_counts() -> None:
    parts = [one_site(rank, "replicated", 5, primary=False) for rank in range(2)]
    ((site,), counts) = merge_all(parts).sites, merge_all(parts).counts
    assert (site.primary, counts[0, 0]) == (True, 5)


def test_a_refused_merge_says_whose_records_they_were() -> None:
    with pytest.raises(
        ValueError, match=r"^cannot merge records that share ranks: \(0,\) and \(0, 1\)$"
    ):
        merge_all((StepRecord(0, 0, (0,), 0), StepRecord(0, 0, (0, 1), 0)))
    with pytest.raises(ValueError, match=r"^cannot merge step 4 \(attempt 0\) with 4 \(1\)$"):
        merge_all((StepRecord(0, 4, (0,), 0), StepRecord(1, 4, (1,), 0)))


def test_empty_rows_count_in_integers() -> None:
    counts, values = empty_rows(2)
    assert (counts.dtype, values.dtype) == (np.int64, np.float64)
    assert (counts.shape, values.shape) == ((2, len(COUNTS)), (2, len(VALUES)))


def test_what_a_step_left_behind_blames_a_rank_only_if_it_is_the_only_one() -> None:
    born = FirstBad(5, 0, "step", 0, 1, "fc", "param", nan=2, numel=8)
    alone = [StepRecord(0, 5, (0,), 0), StepRecord(0, 5, (1,), 0, first_bad=born)]
    assert merge_all(alone).first_bad == born
    for other in (born, replace(born, order=3, fqn="head")):  # of another place as well
        third = StepRecord(0, 5, (2,), 0, first_bad=replace(other, rank=2, nan=1))
        assert merge_all([*alone, third]).first_bad == replace(born, rank=SEVERAL)
    grad = StepRecord(0, 5, (3,), 0, first_bad=FirstBad(5, 0, "step", 90, 3, "fc", "grad"))
    assert merge_all([*alone, grad]).first_bad == grad.first_bad


@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column.name)
def test_a_row_without_data_changes_no_column(column: Column) -> None:
    numbers = np.array([-3, 0, 7], column.dtype)
    identity = np.full(3, column.identity).astype(column.dtype)
    merged = column.merge(numbers, identity)
    assert merged.tolist() == column.merge(identity, numbers).tolist() == numbers.tolist()
    assert column.merge is np.add or column.dtype == "float64"  # counts always add up


def test_the_columns_that_a_statistic_needs_are_enough_for_it() -> None:
    counts = np.array([[8, 1, 1, 0, 2, 3, 3], [0, 0, 0, 0, 0, 1, 0]])
    values = np.vstack((np.array([-2.0, 5.0, 6.0, 40.0]), VALUE_IDENTITY))
    for stat in STATS:
        few, small = counts.copy(), values.copy()
        for names, block, nothing in ((COUNTS, few, 0), (VALUES, small, np.nan)):
            block[:, [i for i, name in enumerate(names) if name not in columns_of(stat)]] = nothing
        np.testing.assert_array_equal(derive(stat, few, small), derive(stat, counts, values))
