"""What one module holds at a moment inside a forward: each tensor whole, where it is just whole."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from ddpprobe.rank import torch_private
from ddpprobe.rank.capture.host_copy import has_memory
from ddpprobe.rank.topology import dtensor_spec, parts
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.naming import clean
from ddpprobe.rank.topology.parts import LocalPart
from ddpprobe.rank.topology.placement import is_dtensor
from ddpprobe.rank.torch_private import FlatPart
from ddpprobe.records.shard_spec import OWN, WHOLE, SpecJson


class Holding(NamedTuple):
    """One parameter or buffer.

    Attributes:
        kind: `param` or `buffer`.
        place: where the model has it, by FQN.
        fqn: what it is kept as; of a tied parameter's shard its first place.
        tensor: the elements; a DTensor stands for its local part.
        spec: how they lie in the whole.
    """

    kind: str
    place: str
    fqn: str
    tensor: Tensor
    spec: SpecJson


def state_of(topology: Topology, fqn: str, module: nn.Module) -> Iterator[Holding]:
    """Yield what `module`, called `fqn`, holds now.

    FSDP gathers the parameters of a unit for the unit's own call. Outside of it a rank has its
    shards, and those are yielded, with their place in the whole.
    """
    prefix = f"{fqn}." if fqn else ""
    paths = {id(inner): clean(name) for name, inner in module.named_modules()}
    seen = set()
    for part, shard in _flat_parts(topology):
        path = paths.get(id(part.module))
        if path is None:
            continue
        place = prefix + (f"{path}.{part.name}" if path else part.name)
        seen.add(place)
        view = getattr(part.module, part.name, None)
        if isinstance(view, Tensor) and view.shape == part.shape and has_memory(view):
            yield Holding("param", place, place, view, WHOLE)
        elif shard is not None:
            yield Holding("param", place, shard.fqn, shard.tensor, shard.spec)
    flat = {id(unit.flat) for unit in topology.flat}
    for name, parameter in module.named_parameters():
        place = prefix + clean(name)
        if id(parameter) not in flat and place not in seen:
            spec = dtensor_spec.of(parameter).to_json() if is_dtensor(parameter) else WHOLE
            yield Holding("param", place, place, parameter, spec)
    for name, buffer in module.named_buffers():
        place = prefix + clean(name)
        yield Holding("buffer", place, place, buffer, WHOLE if topology.world_size == 1 else OWN)


def _flat_parts(topology: Topology) -> Iterator[tuple[FlatPart, LocalPart | None]]:
    """Yield (part, this rank's shard of it) of what FSDP1 manages, a tied one at each place."""
    if not topology.flat:
        return
    paths = {id(module): path for path, module in topology.walk()}
    shards = {part.fqn: part for part in parts.flat_parameters(topology)}
    first: dict[object, str] = {}
    for part in torch_private.flat_parts(topology.outer):
        path = paths.get(id(part.module), "")
        name = f"{path}.{part.name}" if path else part.name
        yield part, shards.get(first.setdefault(part.identity, name))
