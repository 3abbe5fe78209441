"""What outlives a step on this rank: buffers, optimizer state, parameters, as they lie here.

Of what is sharded it is this rank's shard. Nothing is gathered and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, final

from torch import Tensor, nn
from torch.optim import Optimizer

from ddpprobe.rank.stats.dense import local
from ddpprobe.rank.topology.flat import FlatUnit
from ddpprobe.rank.torch_private import dictionaries

if TYPE_CHECKING:
    from ddpprobe.rank.topology.describe import Topology

Key = tuple[str, str, str]


class OutlivingTensor(NamedTuple):
    """One tensor: where it is told of, itself, and the id of what its state is kept under.

    `kind` is one of `records.STATE_KINDS`; `fqn` that of the buffer or the parameter; `leaf` the
    key in an optimizer's state.
    """

    kind: str
    fqn: str
    leaf: str
    tensor: Tensor
    owner: int

    @property
    def key(self) -> Key:
        """Identity over the steps."""
        return (self.kind, self.fqn, self.leaf)


@final
class Inventory:
    """Lists what outlives a step, and names it anew only where something was exchanged.

    Between the steps it holds no tensor. What FSDP or DTensor keep is named anew each time.

    Args:
        topology: the model.
        optimizers: those whose state is listed.
        name: `parameters_of` or `outliving` of these; called where grad is off.
    """

    def __init__(
        self,
        topology: Topology,
        optimizers: Callable[[], Iterable[Optimizer]],
        name: Callable[[], Iterable[OutlivingTensor]],
    ) -> None:
        self._topology, self._optimizers, self._name = topology, optimizers, name
        self._remembers = not topology.flat and not any(True for _ in topology.units())
        self._seen: tuple[list[str], list[int]] | None = None
        self._places: list[int] = []  # in `_listed`, of what is named
        self._keys: tuple[Key, ...] = ()
        self._owners: tuple[int, ...] = ()

    def take(self) -> tuple[tuple[Key, ...], list[Tensor]]:
        """Return keys and tensors; the keys are the last ones themselves if nothing has changed."""
        names: list[str] = []
        there: list[Tensor | None] = []
        if self._remembers:
            names, there = self._listed()
            seen = names, [id(tensor) for tensor in there]
            if seen == self._seen:
                return self._keys, [there[place] for place in self._places]  # type: ignore[misc]  # those are tensors
            self._seen = seen
        held = list(self._name())
        # A tensor cut out of a flat one, or out of a DTensor, is a new object each time.
        keys, owners = tuple([one.key for one in held]), tuple([one.owner for one in held])
        if (keys, owners) != (self._keys, self._owners):
            self._keys, self._owners = keys, owners
        if self._remembers:
            places = {id(tensor): place for place, tensor in enumerate(there)}
            self._remembers = all(id(one.tensor) in places for one in held)
            if self._remembers:
                self._places = [places[id(one.tensor)] for one in held]
        return self._keys, [one.tensor for one in held]

    def _listed(self) -> tuple[list[str], list[Tensor | None]]:
        """List all that may be named, and what its name is made of."""
        names: list[str] = []
        there: list[Tensor | None] = []
        for path, module in self._topology.walk():
            parameters, buffers, _ = dictionaries(module)
            names += (path, *buffers, *parameters)
            there += (*buffers.values(), *parameters.values())
        for optimizer in self._optimizers():
            for owner, state in optimizer.state.items():
                there.append(owner)
                for key, value in state.items() if isinstance(state, dict) else ():
                    if isinstance(value, Tensor):  # an `int` is another object at each step
                        names.append(key)
                        there.append(value)
        return names, there


def parameters_of(topology: Topology) -> Iterator[OutlivingTensor]:
    """Yield the parameters, tied ones once; a DTensor or a flat one by this rank's part.

    Both of these iterators are for a place where grad is off.
    """
    for unit in topology.flat:
        yield from parts_of(unit)
    for fqn, _, _, parameter in topology.own_parameters():
        yield OutlivingTensor("param", fqn, "", on_this_rank(parameter), id(parameter))


def outliving(topology: Topology, optimizers: Iterable[Optimizer]) -> Iterator[OutlivingTensor]:
    """Yield all of it in the order in which one spoils the next, as far as there is one."""
    for fqn, buffer in topology.named_buffers():
        yield OutlivingTensor("buffer", fqn, "", on_this_rank(buffer), id(buffer))
    parameters = list(parameters_of(topology))
    names: dict[int, str] = {}
    for held in parameters:
        names.setdefault(held.owner, held.fqn)
    flat = {id(unit.flat): unit for unit in topology.flat}
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            if id(owner) in names and isinstance(state, dict):
                yield from _state_of(names[id(owner)], state, flat.get(id(owner)))
    yield from parameters


def _state_of(
    fqn: str, state: dict[str, object], unit: FlatUnit | None
) -> Iterable[OutlivingTensor]:
    tensors = [(key, value) for key, value in state.items() if isinstance(value, Tensor)]
    if unit is None:
        return [
            OutlivingTensor("optim_state", fqn, key, v if type(v) is Tensor else local(v), id(v))
            for key, v in tensors
        ]
    whole = unit.flat.numel()
    parts = [parts_of(unit, key, v) for key, v in tensors if v.numel() == whole]
    rest = [
        OutlivingTensor("optim_state", fqn, key, local(v), id(v))
        for key, v in tensors
        if v.numel() != whole
    ]
    return [*chain.from_iterable(parts), *rest]


def on_this_rank(tensor: Tensor) -> Tensor:
    """Return what lies on this rank; grad is off, so of a DTensor this is its very part."""
    return tensor if type(tensor) in (Tensor, nn.Parameter) else local(tensor)


def parts_of(
    unit: FlatUnit, leaf: str = "", value: Tensor | None = None
) -> Iterator[OutlivingTensor]:
    """Yield the parts of a flat parameter, or of what an optimizer keeps for it."""
    kind, source = ("param", unit.flat) if value is None else ("optim_state", value)
    for fqn, part in unit.parts:
        owner = part.parameter if part.parameter is not None else unit.flat
        yield OutlivingTensor(kind, fqn, leaf, unit.cut(part, source), id(owner))
