"""Of what a plain input was made is concluded from shapes where nothing else tells."""

from __future__ import annotations

import pytest
import torch

from ddpprobe.rank.hooks.tp_provenance import declared_layout


@pytest.mark.parametrize(
    ("converted", "layout"),
    [
        ((4, 3), ("sharded", True)),
        ((2, 6), ("sharded", True)),
        ((2, 3), None),
        ((1, 3), None),
        ((2, 3, 2), None),
    ],
)
def test_a_plain_input_that_has_grown_was_a_shard(
    converted: tuple[int, ...], layout: tuple[str, bool] | None
) -> None:
    assert declared_layout(torch.zeros(2, 3), torch.zeros(converted)) == layout


def test_an_input_that_nobody_converted_says_nothing() -> None:
    plain = torch.zeros(2, 3)
    assert declared_layout(plain, plain) is None
