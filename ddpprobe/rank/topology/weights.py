"""The parameters that are trained, each by the part of it that lies on this rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.flat import FlatUnit, layout, trains
from ddpprobe.rank.topology.outliving import on_this_rank
from ddpprobe.rank.topology.placement import LOCAL, UNKNOWN, TpPlacement, is_dtensor
from ddpprobe.rank.torch_private import FlatPart


class Weight(NamedTuple):
    """A parameter: FQN, this rank's part of it, placement, and bytes by which turns are dealt.

    `size` is the same on all ranks, however uneven their parts are: so that all look at the same
    parameter in the same step; 0 of a buffer, which may be of another size on each. `owner` is what
    an optimizer keeps its state under; for one that is `flat`, a part of a flat parameter of FSDP1,
    that is of all parameters of the unit.
    """

    fqn: str
    tensor: Tensor
    layout: TpPlacement
    size: int
    owner: Tensor
    flat: tuple[FlatUnit, FlatPart] | None = None

    def part_of(self, state: Tensor) -> Tensor:
        """Return this rank's part of what an optimizer keeps for `owner`."""
        if self.flat is None:
            return on_this_rank(state)
        unit, part = self.flat
        return unit.cut(part, state)


def buffers(topology: Topology) -> Iterator[Weight]:
    """Yield the floating buffers, each rank's own, for a place where grad is off.

    Of a tensor-parallel group the first rank's counts, as what follows from equal batches is equal.
    Those of stages of a pipeline are not one buffer, even if they are called alike.
    """
    own = LOCAL[0], topology.leads_tensor_group()
    for fqn, buffer in topology.named_buffers():
        if buffer.is_floating_point():
            place = UNKNOWN if topology.is_apart(fqn.rpartition(".")[0]) else own
            yield Weight(fqn, on_this_rank(buffer), place, 0, buffer)


def weights(topology: Topology) -> Iterator[Weight]:
    """Yield what requires a gradient, tied ones once; for a place where grad is off."""
    for unit in topology.flat:
        for fqn, part in unit.parts:
            if trains(part):
                mine, own = unit.cut(part, unit.flat), part.parameter
                size = part.shape.numel() * mine.element_size()
                owner, flat = (unit.flat, (unit, part)) if own is None else (own, None)
                yield Weight(fqn, mine, layout(part), size, owner, flat)
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
