"""What a shard holds is what torch cut out, uneven, empty and strided ones included."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ddpprobe.inspect.capture.assemble import region
from ddpprobe.rank.topology import dtensor_spec
from ddpprobe.rank.topology.placement import within
from ddpprobe.rank.torch_private import sharding
from ddpprobe.records.shard_spec import ShardSpec

from ...older_torch import cuts_uneven_strides


def cut(tensor: torch.Tensor, sizes: tuple[int, ...], at: tuple[int, ...],
        placements: list[Placement]) -> torch.Tensor:  # fmt: skip
    """What torch's own placements cut out for one coordinate, mesh axis by mesh axis."""
    for size, index, placement in zip(sizes, at, placements, strict=True):
        if not placement.is_replicate():
            parts, _ = placement._split_tensor(tensor, size, with_padding=False)
            tensor = parts[index]
    return tensor


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 6, 7, 8, 13])
@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        *[((world,), [Shard(0)]) for world in (1, 2, 3, 4)],
        *[((world,), [Shard(1)]) for world in (2, 3)],
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 3), [Shard(0), Shard(0)]),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((3, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
        ((2, 2), [Shard(0), _StridedShard(0, split_factor=2)]),
    ],
    ids=str,
)
def test_what_a_rank_holds_is_what_torch_cuts_out(
    rows: int, sizes: tuple[int, ...], placements: list[Placement]
) -> None:
    if any(isinstance(p, _StridedShard) for p in placements) and not cuts_uneven_strides():
        pytest.skip("this torch cuts strided shards of even sizes only")
    whole = torch.arange(rows * 4).view(rows, 4)
    axes = tuple(dtensor_spec._axis(placement) for placement in placements)
    laid = ShardSpec(tuple(range(math.prod(sizes))), sizes, (rows, 4), axes)
    for rank in laid.ranks:
        at = laid.coordinate(rank)
        held = whole[torch.meshgrid(*region(laid, at), indexing="ij")]
        assert torch.equal(held, cut(whole, sizes, at, placements)), at


def test_within_a_group_the_first_rank_counts_what_all_hold() -> None:
    alone, other = ("local", True), ("local", False)
    assert within(("sharded", True), alone) == ("sharded", True)
    assert within(("sharded", True), other) == ("sharded", False)
    assert within(("sharded", True), ("unknown", True)) == ("unknown", True)
    assert within(("replicated", True), other) == ("replicated", True)


def test_the_private_names_are_there() -> None:
    assert all(sharding.self_test().values())
