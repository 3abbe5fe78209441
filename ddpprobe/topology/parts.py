"""This rank's part of every parameter, gradient and buffer, and how it lies in the whole.

As they are between the backward and the optimizer's step, when every wrapper holds its shards and
nothing else. Nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ddpprobe import torch_private
from ddpprobe.dealing import REPLICATE, Axis, Placing
from ddpprobe.topology import placing
from ddpprobe.topology.describe import Topology
from ddpprobe.topology.flat import FlatUnit
from ddpprobe.topology.naming import held
from ddpprobe.topology.placement import Layout, is_dtensor, ranks_of
from ddpprobe.torch_private import FlatPart, dictionaries, sharding

Lies = Mapping[str, Any]  # a layout, as `packs` describes them
WHOLE: Lies = {"kind": "replicated"}
OWN: Lies = {"kind": "local"}


@dataclass(frozen=True, slots=True)
class Part:
    """What this rank holds of one tensor.

    Attributes:
        fqn: without wrapper prefixes; of a tied one the first.
        tensor: the elements; a DTensor stands for its local part.
        lies: how they lie in the whole.
        first: of several ranks that hold the same this is the first.
    """

    fqn: str
    tensor: Tensor
    lies: Lies
    first: bool


def parameters(found: Topology, rank: int) -> Iterator[Part]:
    """Yield the parameters, as the optimizer knows them; a tied one once."""
    yield from flat_parameters(found)
    sharded = _gathered(found)
    for fqn, module, name, parameter in found.own_parameters():
        stored = sharded.get((id(module), name), parameter)
        yield _part(found, rank, fqn, stored, managed=found.managed_by_ddp(stored))


def flat_parameters(found: Topology) -> Iterator[Part]:
    """Yield the parameters in FSDP1's flat ones; wrong inside the call of the unit of one."""
    for unit in found.flat:
        for fqn, part in unit.parts:
            mine = unit.flat.detach()[part.local_start : part.local_start + part.numel_local]
            yield Part(fqn, mine, _range(part), part.replica == 0)


def gradients(found: Topology, rank: int, within_group: Callable[[str], Layout]) -> Iterator[Part]:
    """Yield the reduced gradients of those parameters that have one.

    Args:
        found: the model.
        rank: this rank.
        within_group: says how the gradient of a plain parameter lies within a tensor-parallel
            group: `local` if all its ranks have the same.
    """
    for unit in found.flat:
        yield from _flat_gradients(unit)
    for fqn, _, _, parameter in found.own_parameters():
        gradient = parameter.grad
        if gradient is None:
            continue
        part = _part(found, rank, fqn, gradient, managed=found.managed_by_ddp(parameter))
        if found.tensor_meshes and not found.spans_tensor_meshes(gradient):
            alike = within_group(fqn)[0] == "local"
            lies = part.lies if is_dtensor(gradient) else over_tensor_group(found, gradient.shape)
            part = replace(part, lies=lies) if alike else Part(fqn, gradient, OWN, first=True)
        yield part


def buffers(found: Topology) -> Iterator[Part]:
    """Yield the buffers, each rank's own: what a wrapper broadcasts has been changed since."""
    lies = WHOLE if found.world_size == 1 else OWN
    for path, module in found.walk():
        for name, buffer in dictionaries(module)[1].items():
            if buffer is not None:
                yield Part(f"{path}.{name}" if path else name, buffer, lies, first=True)


def names(found: Topology) -> dict[str, str]:
    """Return, for every place where the model holds a parameter or buffer, the FQN of its `Part`.

    They differ for tied parameters, which have several places.
    """
    first: dict[object, str] = {}
    places: dict[str, str] = {}
    for path, identity in _identities(found):
        places[path] = first.setdefault(identity, path)
    places.update({part.fqn: part.fqn for part in buffers(found)})
    return places


def activation(found: Topology, fqn: str, tensor: Tensor, laid: Placing | None) -> Lies:
    """Layout of an activation of module `fqn`; `laid`: over a mesh, where that is known."""
    known = laid is not None or not found.tensor_meshes
    if found.is_apart(fqn) or not known:
        return OWN
    if laid is not None:
        return dtensor(laid)
    whole = {"kind": "batch", "dim": 0, "ranks": list(range(found.world_size))}
    return whole if tensor.dim() else OWN


def over_tensor_group(found: Topology, shape: Sequence[int]) -> Lies:
    """Layout of a plain tensor that the ranks of this one's tensor-parallel group hold alike."""
    ranks = ranks_of(found.tensor_meshes[0])
    return dtensor(Placing(ranks, (len(ranks),), tuple(shape), (Axis(REPLICATE),)))


def dtensor(laid: Placing) -> Lies:
    """Layout over a mesh."""
    return {"kind": "dtensor", **laid.to_json()}


def _part(found: Topology, rank: int, fqn: str, tensor: Tensor, *, managed: bool | None) -> Part:
    """Return the part that a tensor is which no FSDP1 manages."""
    if found.is_apart(fqn.rpartition(".")[0]):
        return Part(fqn, tensor, OWN, first=True)
    if is_dtensor(tensor):
        laid = placing.of(tensor)
        apart = not found.tensor_meshes or found.spans_tensor_meshes(tensor)
        first = managed is not False and (apart or found.leads_tensor_group())
        return Part(fqn, tensor, dtensor(laid), first and laid.primary(rank))
    if managed is not None or found.tensor_meshes:
        first = managed is not False and found.leads_tensor_group()
        return Part(fqn, tensor, WHOLE, first)
    return Part(fqn, tensor, WHOLE if found.world_size == 1 else OWN, first=True)


def _flat_gradients(unit: FlatUnit) -> Iterator[Part]:
    parts = dict(unit.parts)
    for fqn, gradient, _ in unit.gradients():
        yield Part(fqn, gradient, _range(parts[fqn]), parts[fqn].replica == 0)


def _range(part: FlatPart) -> Lies:
    start = part.element if part.numel_local else 0
    stop = start + part.numel_local
    return {"kind": "flat", "start": start, "stop": stop, "shape": list(part.shape)}


def _gathered(found: Topology) -> dict[tuple[int, str], Tensor]:
    """FSDP2's own shards, by where the model may hold them gathered now."""
    return {(id(m), name): t for m, name, t in sharding.sharded_parameters(found.root)}


def _identities(found: Topology) -> Iterator[tuple[str, object]]:
    """Yield (FQN, what it is) of every place of a parameter."""
    paths = {id(module): path for path, module in found.walk()}
    flat = {id(unit.flat) for unit in found.flat}
    seen = set()
    for part in torch_private.flat_parts(found.outer):
        prefix = paths.get(id(part.module), "")
        seen.add((id(part.module), part.name))
        yield f"{prefix}.{part.name}" if prefix else part.name, part.identity
    sharded = _gathered(found)
    for path, module, name, parameter in held(found.walk()):
        if id(parameter) not in flat and (id(module), name) not in seen:
            yield path, id(sharded.get((id(module), name), parameter))
