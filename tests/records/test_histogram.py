"""Bins add up: whatever is split over ranks, the merged histogram is that of the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpprobe.records import histogram
from ddpprobe.records.histogram import BINS, EDGES, NEAR_ZERO, PATTERNS
from ddpprobe.records.merge import merge_all
from ddpprobe.records.step import Site, StepRecord, empty_rows
from ddpprobe.rundir import framing

SITES = tuple(Site(name, "output") for name in "abc")


def numbers(seed: int, n: int) -> np.ndarray:
    """Return float32 of all sizes, with zeros and what is no number."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n) * 2.0 ** rng.integers(-60, 60, n)
    x[rng.random(n) < 0.1] = 0.0
    x[rng.random(n) < 0.05] = np.nan
    x[rng.random(n) < 0.05] = -np.inf
    return x.astype(np.float32)


def reference(x: np.ndarray) -> np.ndarray:
    """Count by borders; beyond the outermost ones the bins go on."""
    kept = x[np.isfinite(x) & (x != 0)].astype(np.float64)
    positive, negative = kept[kept > 0], -kept[kept < 0]
    half = EDGES[histogram.OCTAVES + 1 : -1]  # between two bins of one sign
    up, down = (np.bincount(np.searchsorted(half, v, "right"), minlength=histogram.OCTAVES)
                for v in (positive, negative))  # fmt: skip
    return np.concatenate((down[::-1], up))


def rows_of(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    finite = x[np.isfinite(x)].astype(np.float64)
    counts = [x.size, np.isnan(x).sum(), (x == np.inf).sum(), (x == -np.inf).sum(), (x == 0).sum()]
    low, high = finite.min(initial=np.inf), finite.max(initial=-np.inf)
    values = [low, high, finite.sum(), np.square(finite).sum()]
    return np.array([[*counts, 1, 1]], np.int64), np.array([values])


def record(rank: int, parts: dict[Site, np.ndarray], without: tuple[str, ...] = ()) -> StepRecord:
    """Return the record of one rank, in which all sites but those `without` have a histogram."""
    sites = tuple(parts)
    rows = [rows_of(x) for x in parts.values()]
    binned = np.array([i for i, site in enumerate(sites) if site.fqn not in without], np.int64)
    bins = np.array([reference(parts[sites[i]]) for i in binned], np.int64).reshape(-1, BINS)
    counts = np.concatenate([empty_rows(0)[0], *(counts for counts, _ in rows)])
    values = np.concatenate([empty_rows(0)[1], *(values for _, values in rows)])
    return StepRecord(0, 3, (rank,), 7, sites=sites, counts=counts, values=values, binned=binned,
                      bins=bins)  # fmt: skip


def told(merged: StepRecord) -> dict[str, list[int]]:
    pairs = zip(merged.binned, merged.bins, strict=True)
    return {merged.sites[row].fqn: bins.tolist() for row, bins in pairs}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 5), st.permutations(range(5)))
def test_merged_in_any_grouping_it_is_that_of_the_whole(seed, ranks, order) -> None:
    rng = np.random.default_rng(seed)
    whole = {site: numbers(seed + i, 200) for i, site in enumerate(SITES)}
    cuts = {site: np.sort(rng.integers(0, 201, ranks - 1)) for site in SITES}
    parts = {site: np.split(x, cuts[site]) for site, x in whole.items()}
    records = []
    for rank in range(ranks):
        names = rng.permutation(len(SITES))  # each rank has its own order of execution
        records.append(record(rank, {SITES[i]: parts[SITES[i]][rank] for i in names}))
    shuffled = [records[i] for i in order if i < ranks]
    at = int(rng.integers(0, ranks))
    grouped = [g for g in (shuffled[:at], shuffled[at:]) if g]
    merged = merge_all([merge_all(group) for group in grouped])
    assert told(merged) == {site.fqn: reference(x).tolist() for site, x in whole.items()}


def test_replicas_are_no_sum_and_of_two_that_dispute_the_row_that_is_kept_has_it() -> None:
    x, y = numbers(1, 50), numbers(2, 50)
    alike = [record(r, {Site("a", "grad", placement="replicated"): x}) for r in (0, 1)]
    assert told(merge_all(alike)) == {"a": reference(x).tolist()}
    other = [record(0, {Site("a", "output"): x}),
             record(1, {Site("a", "output", placement="unknown"): y})]  # fmt: skip
    assert told(merge_all(other)) == {"a": reference(y).tolist()}
    second = record(1, {Site("a", "output", primary=False): y})
    assert told(merge_all([other[0], second])) == {"a": reference(x).tolist()}


def test_a_site_of_which_a_rank_lacks_the_histogram_has_none() -> None:
    parts = [record(0, {SITES[0]: numbers(1, 50), SITES[1]: numbers(2, 9)}),
             record(1, {SITES[0]: numbers(3, 50), SITES[1]: np.zeros(4, np.float32)},
                    without=("a", "b"))]  # fmt: skip
    assert list(told(merge_all(parts))) == ["b"]  # of zeros nothing can be lacking


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(-20, 20))
def test_sign_and_exponent_fold_into_the_bins_also_after_a_loss_scale(seed, power) -> None:
    x = numbers(seed, 300)
    scaled = x * np.float32(2.0**power)
    bits = scaled.view(np.uint32)
    patterns = np.bincount((bits >> 23)[scaled != 0], minlength=PATTERNS).astype(np.float64)
    whole = np.isfinite(scaled) & (np.abs(scaled) >= np.finfo(np.float32).tiny)
    if (whole == (np.isfinite(x) & (x != 0))).all():  # else the scale itself lost something
        assert histogram.fold(patterns[None], 2.0**power)[0].tolist() == reference(x).tolist()


def test_a_scale_of_no_sense_moves_nothing() -> None:
    patterns = np.zeros((1, PATTERNS))
    patterns[0, 127] = 3  # 1.0 to 2.0
    for scale in (0.0, -1.0, np.inf, np.nan, 1.0):
        assert histogram.fold(patterns, scale)[0, np.searchsorted(EDGES, 1.0)] == 3


@pytest.mark.parametrize("power", [-39, -4, 0, 3, 23])
def test_the_share_below_a_power_of_two_is_exact(power: int) -> None:
    x = numbers(5, 4000)
    counts, _ = rows_of(x)
    share = histogram.near_zero(counts, reference(x)[None], 2.0**power)
    assert share.tolist() == [(np.abs(x) < 2.0**power).mean()]


@pytest.mark.parametrize("below", [0.05, 0.0, -1.0, 2.0**-41, 2.0**24, np.nan, np.inf])
def test_the_share_below_any_other_number_is_refused(below: float) -> None:
    counts, bins = empty_rows(1)[0], np.zeros((1, BINS), np.int64)
    with pytest.raises(ValueError, match=r"power of two from 2\*\*-39 to 2\*\*23"):
        histogram.near_zero(counts, bins, below)
    assert np.isnan(histogram.near_zero(counts, bins)).all()  # of no elements none
    assert NEAR_ZERO == 0.0625


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 300))
def test_a_quantile_is_right_to_a_factor_of_two_and_the_ends_are_exact(seed, n) -> None:
    x = numbers(seed, n).astype(np.float64)
    x = np.where(np.abs(x) < EDGES[histogram.OCTAVES + 1], 0.0, np.clip(x, -8e6, 8e6))
    finite = np.sort(x[np.isfinite(x)])
    q = (0.0, 0.1, 0.5, 0.9, 1.0)
    found = histogram.quantiles(*rows_of(x), reference(x)[None], q)[0]
    if not finite.size:
        assert np.isnan(found).all()
        return
    assert (found[0], found[-1]) == (finite[0], finite[-1])
    for share, value in zip(q, found, strict=True):
        # The element that reaches the share, and what its bin allows.
        exact = finite[max(int(np.ceil(share * finite.size - 1e-9)), 1) - 1]
        low, high = sorted((exact / 2, exact * 2))
        assert low <= value <= high, (share, exact)


def test_a_frame_holds_the_histograms_and_a_frame_without_any_is_as_it_was() -> None:
    made = record(0, {SITES[0]: numbers(1, 90), SITES[1]: np.zeros(3, np.float32)})
    tables = framing.NameTables()
    for table in framing.tables_of(made):
        tables.take(framing.Frame(table.type, 0, table.payload))
    read = framing.decode_record(framing.encode_record(made), tables)
    assert told(read) == told(made)
    none = replace(made, binned=made.binned[:0], bins=made.bins[:0])
    assert b"histograms" not in framing.encode_record(none)
    assert told(framing.decode_record(framing.encode_record(none), tables)) == {}


def test_bins_of_other_rows_than_are_said_to_have_them_are_not_written() -> None:
    made = record(0, {site: numbers(1, 9) for site in SITES})
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        framing.encode_histograms(replace(made, bins=made.bins[:2]))


@pytest.mark.parametrize(
    ("filled", "plain"),
    [
        ({}, (0, [])),
        ({0: 4}, (0, [4])),
        ({BINS - 1: 4}, (BINS - 1, [4])),
        ({3: 2, 6: 5}, (3, [2, 0, 0, 5])),
        (dict.fromkeys(range(BINS), 1), (0, [1] * BINS)),
    ],
)
def test_of_a_histogram_no_more_is_written_than_from_its_first_filled_bin_to_its_last(
    filled: dict[int, int], plain: tuple[int, list[int]]
) -> None:
    made = record(0, {site: numbers(1, 9) for site in SITES}, without=("a",))
    made.bins[:] = 0
    for place, count in filled.items():
        made.bins[1, place] = count
    assert framing.encode_histograms(made) == [(1, 0, []), (2, *plain)]
    binned, bins = framing.decode_histograms([(1, 0, []), (2, *plain)], 3)
    assert (binned.tolist(), bins.tolist()) == ([1, 2], made.bins.tolist())
    assert {part.dtype for part in (binned, bins)} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    "plain",
    [
        [[3, 0, [1]]], [[-1, 0, [1]]], [[-1, 0, [1]], [0, 0, [1]]], [[1, 0, [1]], [3, 0, [1]]],
        [[1, 0, [1]], [1, 0, [1]]], [[0, 120, [1] * 9]],
        [[0, -1, [1]]], [[0, 0, [-1]]], [[0, 0, [1 << 63]]], [[0, 0]], [[0, 0, [float("inf")]]],
        [["x", 0, [1]]], 7, [None], [[0, 0, "x"]],
    ],
)  # fmt: skip
def test_histograms_of_no_sense_are_refused(plain: object) -> None:
    made = record(0, {site: numbers(1, 9) for site in SITES})
    tables = framing.NameTables()
    for table in framing.tables_of(made):
        tables.take(framing.Frame(table.type, 0, table.payload))
    payload = framing.encode_record(made)
    head = framing.encode_json({"histograms": plain})[1:-1]
    old = framing.encode_json({"histograms": framing.encode_histograms(made)})[1:-1]
    size = int.from_bytes(payload[:4], "little")
    text = payload[4 : 4 + size].replace(old, head).rstrip()
    text += b" " * (-(len(text) + 4) % 8)
    with pytest.raises(ValueError, match=r"record|bins|literal|64 bits|number|unpack"):
        framing.decode_record(len(text).to_bytes(4, "little") + text + payload[4 + size :], tables)
