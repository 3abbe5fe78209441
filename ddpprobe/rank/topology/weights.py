"""The parameters that are trained, each by the part of it that lies on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.flat import layout, trains
from ddpprobe.rank.topology.outliving import on_this_rank, parts_of
from ddpprobe.rank.topology.placement import TpPlacement, is_dtensor
from ddpprobe.rank.torch_private import sharding


class Weight(NamedTuple):
    """A parameter: FQN, this rank's part of it, placement, and bytes by which turns are dealt.

    `size` is the same on all ranks, however uneven their parts are: so that all look at the same
    parameter in the same step.
    """

    fqn: str
    tensor: Tensor
    layout: TpPlacement
    size: int


def weights(topology: Topology) -> Iterator[Weight]:
    """Yield what requires a gradient, tied ones once; for a place where grad is off."""
    for unit in topology.flat:
        for (fqn, part), mine in zip(unit.parts, parts_of(unit), strict=True):
            if trains(part):
                size = part.shape.numel() * mine.tensor.element_size()
                yield Weight(fqn, mine.tensor, layout(part), size)
    stored: dict[tuple[int, str], Tensor] = {}
    if any(True for _ in topology.units()):  # which may still hold them gathered
        for module, name, sharded in sharding.sharded_parameters(topology.root):
            stored[id(module), name] = sharded
    for fqn, module, name, parameter in topology.own_parameters():
        if parameter.requires_grad:
            held = stored.get((id(module), name), parameter)
            size = -(-held.numel() // _shards(held)) * held.element_size()
            yield Weight(fqn, on_this_rank(held), topology.weight_layout(fqn, held), size)


def _shards(tensor: Tensor) -> int:
    """Return into how many parts a tensor is split."""
    if not is_dtensor(tensor):
        return 1
    count = 1
    for size, placement in zip(tuple(tensor.device_mesh.shape), tensor.placements, strict=True):
        count *= 1 if placement.is_replicate() else size
    return count
