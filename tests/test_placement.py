"""The region of a shard is the one torch cut out, uneven, empty and strided ones included."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ddpprobe.topology.placement import Region, box, region, within
from ddpprobe.torch_private import sharding


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape)


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
def test_a_region_is_what_torch_cuts_out_or_none(
    rows: int, sizes: tuple[int, ...], placements: list[Placement]
) -> None:
    whole = numbered((rows, 4))
    held = []
    for at in itertools.product(*(range(size) for size in sizes)):
        part = cut(whole, sizes, at, placements)
        found = box((rows, 4), sizes, at, placements)
        if found is None:
            assert not is_box(part, whole)
            continue
        slices = tuple(slice(o, o + n) for o, n in zip(found.offset, found.shape, strict=True))
        assert torch.equal(whole[slices], part), at
        assert found.global_shape == (rows, 4)
        held += part.flatten().tolist() if at[0] == 0 or not placements[0].is_replicate() else []
    if all(type(p) is not _StridedShard for p in placements):
        assert sorted(held) == whole.flatten().tolist()


def is_box(part: torch.Tensor, whole: torch.Tensor) -> bool:
    first, last = part.flatten()[0], part.flatten()[-1]
    return bool(last - first + 1 == part.numel()) and part.shape[1] == whole.shape[1]


def test_a_plain_tensor_is_whole_and_a_partial_sum_has_no_region() -> None:
    assert region(numbered((2, 3))) == Region((0, 0), (2, 3), (2, 3))
    assert box((), (2,), (0,), [Replicate()]) == Region((), (), ())
    assert Partial().is_partial()


def test_within_a_group_the_first_rank_counts_what_all_hold() -> None:
    alone, other = ("local", True), ("local", False)
    assert within(("sharded", True), alone) == ("sharded", True)
    assert within(("sharded", True), other) == ("sharded", False)
    assert within(("sharded", True), ("unknown", True)) == ("unknown", True)
    assert within(("replicated", True), other) == ("replicated", True)


def test_the_private_names_are_there() -> None:
    assert all(sharding.self_test().values())
