"""The parameters that are trained, each by the part of it that lies on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.flat import FlatUnit, layout, trains
from ddpprobe.rank.topology.outliving import on_this_rank, parts_of
from ddpprobe.rank.topology.placement import LOCAL, TpPlacement, is_dtensor


class Weight(NamedTuple):
    """A parameter: FQN, this rank's part of it, placement, and bytes by which turns are dealt.

    `size` is the same on all ranks, however uneven their parts are: so that all look at the same
    parameter in the same step. `owner` is what an optimizer keeps its state under; in a flat one of
    FSDP1, `unit`, that is of all parameters of the unit.
    """

    fqn: str
    tensor: Tensor
    layout: TpPlacement
    size: int
    owner: Tensor
    unit: FlatUnit | None = None

    def part_of(self, name: str, state: Tensor) -> Tensor:
        """Return this rank's part of what an optimizer keeps under a name for `owner`."""
        if self.unit is None:
            return on_this_rank(state)
        return next(p.tensor for p in parts_of(self.unit, name, state) if p.fqn == self.fqn)


def buffers(topology: Topology) -> Iterator[Weight]:
    """Yield the floating buffers, each rank's own, for a place where grad is off.

    Of a tensor-parallel group the first rank's counts, as what follows from equal batches is equal.
    """
    place = LOCAL[0], topology.leads_tensor_group()
    for fqn, buffer in topology.named_buffers():
        if buffer.is_floating_point():
            here = on_this_rank(buffer)
            yield Weight(fqn, here, place, here.numel() * here.element_size(), buffer)


def weights(topology: Topology) -> Iterator[Weight]:
    """Yield what requires a gradient, tied ones once; for a place where grad is off."""
    for unit in topology.flat:
        for (fqn, part), mine in zip(unit.parts, parts_of(unit), strict=True):
            if trains(part):
                size = part.shape.numel() * mine.tensor.element_size()
                own = part.parameter
                owner, shared = (unit.flat, unit) if own is None else (own, None)
                yield Weight(fqn, mine.tensor, layout(part), size, owner, shared)
    for fqn, _, _, parameter in topology.own_parameters():
        if parameter.requires_grad:
            size = -(-parameter.numel() // _shards(parameter)) * parameter.element_size()
            place = topology.weight_layout(fqn, parameter)
            yield Weight(fqn, on_this_rank(parameter), place, size, parameter)


def _shards(tensor: Tensor) -> int:
    """Return into how many parts a tensor is split."""
    if not is_dtensor(tensor):
        return 1
    count = 1
    for size, placement in zip(tuple(tensor.device_mesh.shape), tensor.placements, strict=True):
        count *= 1 if placement.is_replicate() else size
    return count
