"""This rank's part of every parameter, gradient and buffer, and how it lies in the whole.

As they are between the backward and the optimizer's step, when every wrapper holds its shards and
nothing else. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ddpprobe.rank import torch_private
from ddpprobe.rank.topology import dtensor_spec
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.engine import EngineGradient
from ddpprobe.rank.topology.flat import FlatUnit
from ddpprobe.rank.topology.placement import TpPlacement, is_dtensor, ranks_of
from ddpprobe.rank.torch_private import FlatPart
from ddpprobe.records.shard_spec import OWN, REPLICATE, WHOLE, MeshAxis, ShardSpec, SpecJson


@dataclass(frozen=True, slots=True)
class LocalPart:
    """What this rank holds of one tensor.

    Attributes:
        fqn: without wrapper prefixes; of a tied one the first.
        tensor: the elements; a DTensor stands for its local part.
        spec: how they lie in the whole.
        first: of several ranks that hold the same this is the first.
    """

    fqn: str
    tensor: Tensor
    spec: SpecJson
    first: bool


def parameters(topology: Topology, rank: int) -> Iterator[LocalPart]:
    """Yield the parameters, as the optimizer knows them; a tied one once."""
    yield from flat_parameters(topology)
    for fqn, _, _, parameter in topology.own_parameters():
        yield _part(topology, rank, fqn, parameter, managed=topology.managed_by_ddp(parameter))


def flat_parameters(topology: Topology) -> Iterator[LocalPart]:
    """Yield the parameters in FSDP1's flat ones; wrong inside the call of the unit of one."""
    for unit in topology.flat:
        for fqn, part in unit.parts:
            mine = unit.flat.detach()[part.local_start : part.local_start + part.numel_local]
            yield LocalPart(fqn, mine, _range(part), part.replica == 0)


def gradients(
    topology: Topology, rank: int, within_group: Callable[[str], TpPlacement]
) -> Iterator[LocalPart]:
    """Yield the reduced gradients of those parameters that have one.

    Args:
        topology: the model.
        rank: this rank.
        within_group: says how the gradient of a plain parameter lies within a tensor-parallel
            group: `local` if all its ranks have the same.
    """
    for fqn, mine in topology.engine_gradients():
        yield LocalPart(fqn, mine.elements, _stretch(mine), first=True)
    if topology.engine is not None:
        return
    for unit in topology.flat:
        yield from _flat_gradients(unit)
    for fqn, _, _, parameter in topology.own_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        part = _part(topology, rank, fqn, gradient, managed=topology.managed_by_ddp(parameter))
        if topology.tensor_meshes and not topology.spans_tensor_meshes(gradient):
            if within_group(fqn)[0] != "local":
                part = LocalPart(fqn, gradient, OWN, first=True)
            elif not is_dtensor(gradient):
                part = replace(part, spec=over_tensor_group(topology, gradient.shape))
        yield part


def buffers(topology: Topology) -> Iterator[LocalPart]:
    """Yield the buffers, each rank's own: what a wrapper broadcasts has been changed since."""
    spec = WHOLE if topology.world_size == 1 else OWN
    for fqn, buffer in topology.named_buffers():
        yield LocalPart(fqn, buffer, spec, first=True)


def names(topology: Topology) -> dict[str, str]:
    """Return the FQN of the `LocalPart` for every place where the model holds a tensor of state.

    They differ for tied parameters, which have several places.
    """
    first: dict[object, str] = {}
    places: dict[str, str] = {}
    for path, identity in _identities(topology):
        places[path] = first.setdefault(identity, path)
    places.update({part.fqn: part.fqn for part in buffers(topology)})
    return places


def activation(
    topology: Topology, fqn: str, tensor: Tensor, shard_spec: ShardSpec | None = None
) -> SpecJson:
    """Return the spec of an activation of module `fqn`.

    Args:
        topology: the model.
        fqn: of the module.
        tensor: the activation; a DTensor tells its own shard spec.
        shard_spec: of a plain one, where that is known.
    """
    if is_dtensor(tensor):
        shard_spec = dtensor_spec.of(tensor)
    if topology.is_apart(fqn) or (shard_spec is None and topology.tensor_meshes):
        return OWN
    if shard_spec is not None:
        return shard_spec.to_json()
    whole = {"kind": "batch", "dim": 0, "ranks": list(range(topology.world_size))}
    return whole if tensor.dim() else OWN


def over_tensor_group(topology: Topology, shape: Sequence[int]) -> SpecJson:
    """Return the spec of a plain tensor that all ranks of our tensor-parallel group hold alike."""
    ranks = ranks_of(topology.tensor_meshes[0])
    return ShardSpec(ranks, (len(ranks),), tuple(shape), (MeshAxis(REPLICATE),)).to_json()


def _part(
    topology: Topology, rank: int, fqn: str, tensor: Tensor, *, managed: bool | None
) -> LocalPart:
    """Return the part that a tensor is which no FSDP1 manages."""
    if topology.is_apart(fqn.rpartition(".")[0]):
        return LocalPart(fqn, tensor, OWN, first=True)
    if is_dtensor(tensor):
        shard_spec = dtensor_spec.of(tensor)
        apart = not topology.tensor_meshes or topology.spans_tensor_meshes(tensor)
        first = managed is not False and (apart or topology.leads_tensor_group())
        return LocalPart(fqn, tensor, shard_spec.to_json(), first and shard_spec.primary(rank))
    if managed is not None or topology.tensor_meshes:
        first = managed is not False and topology.leads_tensor_group()
        return LocalPart(fqn, tensor, WHOLE, first)
    return LocalPart(fqn, tensor, WHOLE if topology.world_size == 1 else OWN, first=True)


def _flat_gradients(unit: FlatUnit) -> Iterator[LocalPart]:
    parts = dict(unit.parts)
    for fqn, gradient, _ in unit.gradients():
        yield LocalPart(fqn, gradient, _range(parts[fqn]), parts[fqn].replica == 0)


def _range(part: FlatPart) -> SpecJson:
    start = part.element if part.numel_local else 0
    return _flat(start, part.numel_local, part.shape)


def _stretch(part: EngineGradient) -> SpecJson:
    return _flat(part.start, part.elements.numel(), part.parameter.shape)


def _flat(start: int, count: int, shape: Sequence[int]) -> SpecJson:
    return {"kind": "flat", "start": start, "stop": start + count, "shape": list(shape)}


def _identities(topology: Topology) -> Iterator[tuple[str, object]]:
    """Yield (FQN, what it is) of every place of a parameter.

    FSDP1 with parameters of the user's and FSDP2 put one object into all places of one.
    """
    paths = {id(module): path for path, module in topology.walk()}
    flat = {id(unit.flat) for unit in topology.flat}
    for part in torch_private.flat_parts(topology.outer):
        prefix = paths.get(id(part.module), "")
        yield f"{prefix}.{part.name}" if prefix else part.name, part.identity
    for path, _, _, parameter in topology.placed_parameters():
        if id(parameter) not in flat:
            yield path, id(parameter)
