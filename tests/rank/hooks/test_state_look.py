"""One look at many tensors tells which of them are not finite, wherever they are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ddpprobe.rank.hooks.state_look import BadTensor, Looker, counts_of, is_finite

from ... import far

SHAPES = ((), (3,), (), (2, 3), (5000,), (4, 3), (0,), (70, 70))


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.ones(shape, dtype=dtype) for shape in SHAPES]


def keys() -> tuple[tuple[str, str, str], ...]:
    return tuple(("param", f"p{i}", "") for i in range(len(SHAPES)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("far_away", [False, True])
def test_each_bad_tensor_is_told_by_its_key_in_their_order(
    bad: float, dtype: torch.dtype, far_away: bool, monkeypatch
) -> None:
    if far_away:
        far.pretend(monkeypatch)
    looker, names = Looker(), keys()
    infinite = not math.isnan(bad)
    given = [t for t in tensors(dtype) if t.numel()]
    named = tuple(k for k, s in zip(names, SHAPES, strict=True) if 0 not in s)
    for places in ([], [0], [5, 1], [2, 3, 6], [6, 4, 0]):
        for i in places:
            given[i].view(-1)[-1] = bad
        look = looker.look(named, given)
        assert look.count == len(given)
        assert look.ready() == (not far_away)
        look.wait()
        assert look.ready()
        found = look.bad()
        assert [b.key for b in found] == [named[i] for i in sorted(places)]
        assert {b.infinite for b in found} <= {infinite}
        one = (int(math.isnan(bad)), int(bad == math.inf), int(bad == -math.inf))
        for i, told in zip(sorted(places), found, strict=True):
            assert told.counts == ((0, 0, 0, 0) if far_away else (*one, given[i].numel()))
        for i in places:
            given[i].view(-1)[-1] = 1.0


def test_a_nan_beside_an_infinity_is_no_infinity_and_a_sum_that_overflows_is_neither() -> None:
    tensors = [
        torch.tensor([math.inf, math.nan, -math.inf]), torch.full((9,), 3e38), torch.ones(()),
    ]  # fmt: skip
    look = Looker().look(keys()[:3], tensors)
    assert look.bad() == [BadTensor(keys()[0], infinite=False, counts=(1, 1, 1, 3))]
    assert [is_finite(t) for t in tensors] == [False, True, True]


def test_what_has_no_numbers_that_can_be_read_is_left_out() -> None:
    strange = [torch.full((2,), math.nan, device="meta"), torch.eye(2).to_sparse() * math.nan]
    look = Looker().look(keys()[:3], [*strange, torch.tensor([math.nan])])
    assert look.count == 1
    assert [bad.key for bad in look.bad()] == [keys()[2]]
    assert [counts_of(t) for t in strange] == [(0, 0, 0, 0)] * 2
    assert all(is_finite(t) for t in strange)


def test_other_tensors_in_the_places_of_some_are_looked_at_as_well() -> None:
    looker, names = Looker(), keys()[:4]
    given = [torch.ones(3), torch.ones(()), torch.ones(3), torch.ones(2, 2)]
    assert looker.look(names, given).bad() == []
    given[0], given[1] = torch.tensor([[1.0, math.nan]]), torch.tensor([math.inf])
    assert [bad.key for bad in looker.look(names, given).bad()] == [names[0], names[1]]
    fewer = looker.look(names[:1], given[:1])  # another list altogether
    assert (fewer.count, [bad.key for bad in fewer.bad()]) == (1, [names[0]])
