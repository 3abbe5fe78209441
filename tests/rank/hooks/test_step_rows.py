"""The rows of a step are, per site, what the tensors add up to, whatever order they came in."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from torch import Tensor

from ddpprobe.rank.hooks import lanes
from ddpprobe.rank.hooks.bin_rows import BinRows
from ddpprobe.rank.hooks.execution_order import ExecutionOrder
from ddpprobe.rank.hooks.pending_rows import StepResult, unless_logged
from ddpprobe.rank.hooks.row_buffer import RowBuffer
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.records.histogram import BINS
from ddpprobe.records.step import FirstBad, Site

from ... import far

CPU = torch.device("cpu")
ONE = torch.ones(1)
NAN = torch.tensor([1.0, math.nan, math.inf, -math.inf, -math.inf])


def rows_of(*sites: tuple[str, str], rank: int = 0, pipelined: bool = False) -> StepRows:
    """Return rows with a slot for each (FQN, kind), in this order, of which rank 0 counts all."""
    rows = StepRows(CPU, rank, order=ExecutionOrder(pipelined=pipelined))
    for slot, (fqn, kind) in enumerate(sites):
        assert rows.table.slot(Site(fqn, kind, primary=rank == 0)) == slot
    return rows


def result(rows: StepRows, *, partial: bool = False, skipped: bool = False) -> StepResult:
    return rows.fetch().result(7, partial=partial, skipped=skipped)


def expected(tensors: list[Tensor]) -> list[float]:
    whole = torch.cat([t.flatten().double() for t in tensors])
    return [whole.min().item(), whole.max().item(), whole.sum().item(), (whole**2).sum().item()]


def test_what_a_step_tells_of_a_site_is_of_all_its_tensors_together() -> None:
    torch.manual_seed(0)
    kinds = ("output", "grad_output", "grad_local", "grad", "input")
    rows = rows_of(*((f"m{i}", kind) for i, kind in enumerate(kinds)))
    given: dict[int, list[Tensor]] = defaultdict(list)
    for micro in range(3):
        for slot in (4, 0, 2, 1, 0, 3):
            tensor = torch.randn(3 + slot, 2)
            rows.tap(slot)
            rows.add(slot, micro, tensor)
            given[slot].append(tensor)
        rows.confirm(micro)
    found = result(rows)
    assert [site.fqn for site in found.sites] == [f"m{i}" for i in range(5)]
    for slot, tensors in given.items():
        numel, *bad, _zeros, tapped, observed = found.counts[slot].tolist()
        assert (numel, tapped, observed) == (sum(t.numel() for t in tensors), *[len(tensors)] * 2)
        assert not any(bad)
        assert found.values[slot].tolist() == pytest.approx(expected(tensors))
    assert found.first_bad is None


@pytest.mark.parametrize("partial", [False, True])
def test_a_forward_counts_if_its_backward_came_or_nothing_is_left_out(partial: bool) -> None:
    rows = rows_of(("a", "output"), ("a", "grad_output"))
    for micro in (0, 1, 2, 3):
        rows.add(0, micro, torch.full((10**micro,), 1.0))
    for micro in (1, 3):
        rows.add(1, micro, ONE)
        rows.confirm(micro)
    found = result(rows, partial=partial)
    assert found.counts[0][0] == (1111 if partial else 1010)
    assert found.counts[1][0] == 2


def test_gradients_that_are_read_anew_replace_those_read_before() -> None:
    rows = rows_of(("a", "output"), ("w", "grad"), ("w", "grad_local"))
    for value in (math.nan, 3.0):
        rows.forget({1})
        rows.add(0, 0, torch.tensor([2.0]))
        rows.add(1, 0, torch.tensor([value]))
        rows.add(2, 0, torch.tensor([5.0]))
        rows.add_scalar("loss", 1.0)
    rows.confirm(0)
    found = result(rows)
    assert found.values[:, 2].tolist() == [4.0, 3.0, 10.0]
    assert found.first_bad is None


def test_numbers_of_one_name_are_averaged_and_the_scripts_own_come_before_ours() -> None:
    rows = rows_of()
    rows.add_scalar("loss", 1.0)
    rows.add_scalars(("lr", "loss"), torch.tensor([0.25, 4.0]))
    rows.add_scalar(unless_logged("lr"), torch.tensor(9.0))
    rows.add_scalar(unless_logged("tokens"), torch.tensor(12, dtype=torch.int64))
    found = result(rows)
    assert found.scalars == {"loss": 2.5, "lr": 0.25, "tokens": 12.0}
    assert found.sites == ()


@pytest.mark.parametrize("scale", [None, 1.0, 8.0, 0.0, -2.0, math.inf, math.nan])
@pytest.mark.parametrize("grad_is_scaled", [False, True])
def test_gradients_are_divided_by_a_loss_scale_that_one_can_divide_by(
    scale: float | None, grad_is_scaled: bool
) -> None:
    kinds = ("output", "grad_output", "grad_input", "grad_local", "grad")
    rows = rows_of(*((kind, kind) for kind in kinds))
    rows.grad_is_scaled = grad_is_scaled
    for slot in range(5):
        rows.add(slot, 0, torch.tensor([-8.0, 16.0]))
    rows.confirm(0)
    if scale is not None:
        rows.add_scalar("loss_scale", scale)
    by = 8.0 if scale == 8.0 else 1.0
    for kind, values in zip(kinds, result(rows).values.tolist(), strict=True):
        d = by if kind.startswith("grad_") or (kind == "grad" and grad_is_scaled) else 1.0
        assert values == [-8.0 / d, 16.0 / d, 8.0 / d, 320.0 / d**2], kind


@pytest.mark.parametrize("rank", [0, 3])
def test_a_local_gradient_that_came_twice_in_a_micro_batch_is_one_of_parts(rank: int) -> None:
    fqns = ("once", "both", "twice", "unknown", "last")
    rows = rows_of(*((f, "grad_local") for f in fqns), ("twice", "output"), rank=rank)
    # By micro-batch: -1 where the forward is not known.
    for slot, micro in [(0, 0), (1, 1), (2, 1), (3, -1), (0, 1), (1, 2), (2, 1), (3, -1), (4, 2),
                        (0, -1), (0, 2), (5, 1), (5, 1)]:  # fmt: skip
        rows.add(slot, micro, torch.ones(2))
    for micro in range(3):
        rows.confirm(micro)
    sites = result(rows).sites
    assert {s.fqn for s in sites if s.placement == "partial"} == {"twice", "unknown"}
    assert {s.kind for s in sites if s.placement == "partial"} == {"grad_local"}
    assert {s.primary for s in sites} == {rank == 0}


@pytest.mark.parametrize("rank", [0, 5])
def test_a_checksum_is_told_with_the_rank_that_took_it(rank: int) -> None:
    words = {}
    for one_by_one in (False, True):
        rows = rows_of(rank=rank)
        held = [("a", "", torch.arange(5.0)), ("b", "0:2", torch.arange(6.0))]
        rows.add_scalar("loss", 0.0)
        if one_by_one:
            for one in held:
                rows.add_checksum(*one)
        else:
            rows.add_checksums(held)
        words[one_by_one] = found = result(rows).digests
        assert list(found) == [("a", ""), ("b", "0:2")]
        assert [list(ranks.values()) for ranks in found.values()] == [[1 << rank]] * 2
    assert words[False] == words[True]
    assert words[False]["a", ""].keys() != words[False]["b", "0:2"].keys()


def test_the_first_bad_tensor_is_told_with_its_place_and_its_numbers() -> None:
    heard: list[FirstBad] = []
    rows = rows_of(("w", "grad"), ("a", "output"), ("b", "output"), ("w", "grad_local"), rank=2)
    rows.on_bad = heard.append
    rows.begin()
    rows.add(1, 0, ONE)
    assert (len(rows), rows.bad, rows.are_finite()) == (1, False, True)
    rows.add(0, 1, NAN)  # reduced: bad on all ranks at once
    assert heard == []
    rows.add(2, 3, NAN)
    rows.add(3, 3, NAN)
    want = FirstBad(
        step=-1, micro=3, phase="forward", order=2, rank=2, fqn="b", kind="output", leaf="",
        nan=1, pos_inf=1, neg_inf=2, numel=5,
    )  # fmt: skip
    assert heard == [want]
    assert (rows.bad, rows.are_finite()) == (True, False)
    assert [rows.bad_from(i) for i in range(5)] == [True] * 4 + [False]
    found = result(rows).first_bad
    assert found is not None
    assert (found.step, found.order, found.fqn) == (7, 2, "b")
    rows.begin()
    assert (len(rows), rows.bad, rows.bad_from(0), rows.first_fault()) == (0, False, False, None)
    rows.add(3, 0, NAN)
    assert [bad.kind for bad in heard] == ["output", "grad_local"]
    assert rows.first_fault() is None  # it is not of the forward


def test_what_came_in_bad_is_told_of_every_output_of_that_call_and_of_no_other() -> None:
    rows = rows_of(("a", "output"), ("b", "output"))
    heard: list[FirstBad] = []
    rows.on_bad = heard.append
    rows.add(0, 0, ONE, tell=False)
    rows.tell_call(0, lambda: pytest.fail("nothing is bad"))
    rows.add(0, 0, NAN, tell=False)
    rows.add(1, 0, NAN, tell=False)
    assert heard == []
    rows.tell_call(2, lambda: ("args.0", (4, 3, 2, 9)))
    (told,) = heard
    assert (told.fqn, told.kind, told.leaf) == ("b", "input", "args.0")
    assert (told.nan, told.pos_inf, told.neg_inf, told.numel) == (4, 3, 2, 9)
    first = result(rows).first_bad
    assert first is not None
    assert (first.fqn, first.kind, first.nan) == ("a", "output", 1)


MASK = torch.tensor([1.0, -math.inf])


@pytest.mark.parametrize(
    ("loss", "skipped", "fault"),
    [(None, False, False), (1.0, False, False), (math.nan, False, True), (math.inf, False, True),
     (1.0, True, False), (math.nan, True, True)],
)  # fmt: skip
def test_infinities_are_no_fault_unless_the_loss_shows_that_they_did_harm(
    loss: float | None, skipped: bool, fault: bool
) -> None:
    rows = rows_of(("mask", "output"), ("w", "grad_local"))
    rows.begin()
    rows.add(0, 0, MASK)
    rows.add(1, 0, ONE)
    if loss is not None:
        rows.add_scalar("loss", loss)
    rows.add_scalar("other", math.nan)  # of the script's, which says nothing of the loss
    found = result(rows, skipped=skipped)
    assert (found.first_bad is not None) == fault
    assert [(one.site.fqn, one.told) for one in found.learned] == (
        [] if fault or skipped else [("mask", False)]
    )


def test_without_a_local_witness_a_reduced_gradient_is_the_first_bad_tensor() -> None:
    rows = rows_of(("w", "grad"), ("v", "grad"), ("w", "param"))
    rows.add(2, 0, NAN)  # left to those who look at all weights
    rows.add(1, 0, NAN)
    rows.add(0, 0, NAN)
    first = result(rows).first_bad
    assert first is not None
    assert (first.fqn, first.kind, first.phase, first.order) == ("v", "grad", "step", 1)


def test_where_ranks_run_one_after_the_other_the_clock_tells_which_was_first(monkeypatch) -> None:
    clock = iter([10**18 + 1, 10**18 + 5, 10**18 + 6, 10**18 + 9])
    monkeypatch.setattr("time.time_ns", lambda: next(clock))
    heard: list[FirstBad] = []
    rows = rows_of(("a", "output"), pipelined=True)
    rows.on_bad = heard.append
    rows.add_scalar("loss", 0.0)
    rows.add(0, 0, NAN)
    found = result(rows).first_bad
    assert found is not None
    assert found.order == 10**18 + 5
    rows.begin()  # the first step: an infinity could prove harmless, a NaN not
    rows.add_scalar("loss", 0.0)
    rows.add(0, 0, NAN)
    assert [bad.order for bad in heard] == [10**18 + 5, 10**18 + 9]


def test_a_tensor_that_comes_again_unchanged_is_read_once_and_a_changed_one_anew() -> None:
    rows = rows_of(("a", "output"), ("b", "output"))
    tensor = torch.ones(3)
    view = tensor.numpy()  # writes past the version counter

    def last() -> float:
        return rows._row(len(rows) - 1)[7]

    rows.add(0, 0, tensor)
    first = last()
    view[:] = 2.0
    rows.add(1, 0, tensor)
    assert last() == first
    rows.add(1, 0, tensor, again=True)
    assert last() == 2 * first
    tensor.add_(1.0)
    rows.add(1, 0, tensor)
    assert last() == 3 * first
    view[:] = 5.0
    rows.add(1, 0, tensor, reused=True)
    assert last() == 5 * first
    view[:] = 6.0
    rows.add(1, 0, tensor)
    assert last() == 6 * first
    rows.begin()
    view[:] = 7.0
    rows.add(1, 0, tensor)
    assert last() == 7 * first


def test_a_bad_tensor_that_comes_again_is_bad_again() -> None:
    rows = rows_of(("a", "output"), ("b", "output"))
    rows.add(0, 0, NAN)
    rows.add(1, 0, NAN)
    assert rows.bad_from(1)
    np.testing.assert_equal(rows._row(0), rows._row(1))
    rows.add(1, 0, ONE)
    assert not rows.bad_from(2)


def test_the_last_row_tells_all_if_it_is_of_that_site_and_finite() -> None:
    rows = rows_of(("a", "output"), ("b", "output"))
    assert not rows.end_told(0)
    rows.add(0, 0, ONE)
    assert (rows.end_told(0), rows.end_told(1)) == (True, False)
    rows.add(1, 0, NAN)
    assert (rows.end_told(0), rows.end_told(1)) == (False, False)


def test_what_has_no_statistics_is_counted_by_reason_and_makes_no_row() -> None:
    rows = rows_of(("a", "output"))
    for _ in range(2):
        rows.add(0, 0, torch.ones(3, device="meta"))
    rows.add(0, 0, ONE)
    found = result(rows, partial=True)
    assert found.unsupported == {"a meta tensor has no values": 2}
    assert found.counts[0][0] == 1
    rows.begin()
    assert result(rows).unsupported == {}
    assert found.unsupported  # what was fetched stays


def test_of_a_step_of_which_no_forward_counts_there_are_no_histograms() -> None:
    rows = StepRows(CPU, 0, bins=BinRows(lambda _: True))
    rows.add(rows.table.slot(Site("a", "output")), 0, torch.ones(3))
    found = result(rows)
    assert (len(found.sites), found.binned.tolist(), found.bins.shape) == (0, [], (0, BINS))
    assert (found.binned.dtype, found.bins.dtype) == (np.int64, np.int64)


def test_counts_of_a_histogram_are_whole_numbers() -> None:
    rows = StepRows(CPU, 0, bins=BinRows(lambda _: True))
    rows.add(rows.table.slot(Site("a", "output")), 0, torch.ones(3))
    found = result(rows, partial=True)
    assert found.bins.sum() == 3
    assert found.bins.dtype == np.int64


def test_more_rows_than_a_buffer_begins_with_keep_their_places() -> None:
    rows = rows_of(("a", "output"))
    for i in range(2500):
        rows.add_scalar(f"n{i}", float(i))
    rows.add(0, 0, torch.full((2,), 3.0))
    found = result(rows, partial=True)
    assert list(found.scalars.values()) == [float(i) for i in range(2500)]
    assert found.values[0].tolist() == [3.0, 3.0, 6.0, 18.0]


@pytest.mark.parametrize("before", [1021, 1022, 1023, 1024])
def test_numbers_that_are_kept_together_find_room_at_the_end_of_a_buffer(before: int) -> None:
    rows = rows_of(("a", "output"))
    assert rows.add_all(0, [(0, ONE)] * before) == before
    rows.add_scalars(("x", "y"), torch.tensor([3.0, 4.0]))
    found = result(rows, partial=True)
    assert found.scalars == {"x": 3.0, "y": 4.0}
    assert found.counts[0][0] == before


def test_rows_are_overwritten_once_their_copy_is_over(monkeypatch) -> None:
    lane, waited = far.SlowLane(), list[object]()
    monkeypatch.setattr(lanes, "is_near", lambda _: False)
    monkeypatch.setattr(lanes, "lane_of", lambda _: lane)
    monkeypatch.setattr(lane, "follow", waited.append)
    buffer = RowBuffer(CPU)
    buffer.begin()
    assert waited == []
    host, arrival = buffer.to_host(3)
    assert host.shape == (3, 9)
    for _ in range(2):
        buffer.begin()
        assert waited == [arrival]
