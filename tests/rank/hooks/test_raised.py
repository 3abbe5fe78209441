"""What a forward that raised had at hand: its tensors, the innermost first."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddpprobe.rank.hooks.raised import MOST_TENSORS, tensors_at_hand


class Inner(nn.Module):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = x + 1
        same = y
        return check({"deep": [same, y * 2], "ids": ids})


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, outside: Tensor) -> Tensor:
        z = outside * 100
        return self.inner(z, torch.arange(3))


def check(given: dict[str, object]) -> Tensor:
    raise ValueError(str(len(given)))


def error_of(call, *args: object) -> BaseException:
    with pytest.raises(ValueError, match=r"^\d$") as caught:
        call(*args)
    return caught.value


def test_they_are_the_floating_ones_up_to_the_module_that_raised_each_once() -> None:
    found = list(tensors_at_hand(error_of(Outer(), torch.ones(2))))
    # Of `check`: y and its double; of the inner forward: what it was given. None from further out.
    assert [t[0].item() for t in found] == [101.0, 202.0, 100.0]


def test_code_that_only_calls_itself_forward_is_no_module() -> None:
    class Other:
        def forward(self, x: Tensor) -> Tensor:
            return check({"x": x + 1})

    def around(outside: Tensor) -> Tensor:
        return Other().forward(outside)

    found = list(tensors_at_hand(error_of(around, torch.ones(1))))
    assert [t.item() for t in found][:2] == [2.0, 1.0]


def test_there_are_no_more_than_a_few() -> None:
    given = {"all": [torch.ones(1) for _ in range(2 * MOST_TENSORS)]}
    assert len(list(tensors_at_hand(error_of(check, given)))) == MOST_TENSORS


def test_an_exception_that_nobody_raised_has_nothing() -> None:
    assert list(tensors_at_hand(ValueError())) == []
