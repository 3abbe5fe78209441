"""FSDP1's flat parameters: which elements of which parameter a rank's shard is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from ddpprobe.rank import torch_private
from ddpprobe.rank.topology.placement import REPLICATED, TpPlacement
from ddpprobe.rank.torch_private import FlatPart


@dataclass(frozen=True, slots=True)
class FlatUnit:
    """One flat parameter and its parts: (FQN, part), a tied parameter once.

    `places` is where the model holds them, (id of the module, name): a tied one in several.
    `whole` is how many elements they have on all ranks together, without padding after them.
    """

    flat: Tensor
    parts: tuple[tuple[str, FlatPart], ...]
    places: frozenset[tuple[int, str]]
    whole: int

    def cut(self, part: FlatPart, source: Tensor) -> Tensor:
        """Return the elements of a part, 1-D, of the flat parameter or of a tensor that lies alike.

        FSDP1 keeps the root unit's gathered from its forward until its backward.
        """
        gathered = part.sharded and self.flat.numel() >= self.whole
        start = part.start if gathered else part.local_start
        size = part.shape.numel() if gathered else part.numel_local
        return source.detach().view(-1)[start : start + size]

    def split(self, gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Yield (FQN, view) of this rank's unsharded gradient of the whole unit, 1-D."""
        for fqn, part in self.parts:
            if trains(part):
                yield fqn, gradient[part.start : part.start + part.shape.numel()]

    def gradients(self) -> Iterator[tuple[str, Tensor, TpPlacement]]:
        """Yield (FQN, this rank's elements, layout) of the reduced gradients, without padding.

        Nothing for a gradient that has not been reduced (`no_sync` leaves it unsharded).
        """
        for fqn, part in self.parts:
            gradient = part.parameter.grad if part.parameter is not None else self.flat.grad
            if gradient is None or not trains(part):
                continue
            if part.parameter is None:
                shard = self.flat.numel()
                if gradient.numel() != shard:
                    continue
                gradient = gradient[part.local_start : part.local_start + part.numel_local]
            if gradient.numel() == part.numel_local:
                yield fqn, gradient, layout(part)

    def replicas(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (FQN, shard, local elements) of what replicas of this rank hold alike."""
        for fqn, part in self.parts:
            if part.replicas > 1:
                shard = f"{part.rank}/{part.ranks}" if part.sharded else ""
                data = self.flat.detach()[part.local_start : part.local_start + part.numel_local]
                yield fqn, shard, data


def flat_units(model: nn.Module, names: Mapping[int, str]) -> tuple[FlatUnit, ...]:
    """Return the flat parameters of a model; `names` gives a module's FQN by its id."""
    found: dict[int, list[FlatPart]] = {}
    for part in torch_private.flat_parts(model):
        found.setdefault(id(part.flat), []).append(part)
    return tuple(_unit(parts, names) for parts in found.values())


def _unit(flat_parts: Sequence[FlatPart], names: Mapping[int, str]) -> FlatUnit:
    parts: dict[tuple[int, int], tuple[str, FlatPart]] = {}
    for part in flat_parts:
        prefix = names.get(id(part.module), "")
        parts.setdefault(part.identity, (f"{prefix}.{part.name}" if prefix else part.name, part))
    places = frozenset((id(part.module), part.name) for part in flat_parts)
    whole = max(part.start + part.shape.numel() for _, part in parts.values())
    return FlatUnit(flat_parts[0].flat, tuple(parts.values()), places, whole)


def layout(part: FlatPart) -> TpPlacement:
    """Placement of the part's reduced gradient: of several replicas of a shard the first counts."""
    return ("sharded", part.replica == 0) if part.sharded else REPLICATED


def trains(part: FlatPart) -> bool:
    """Whether it is trained now: a script may freeze and thaw, so this is asked each time."""
    held: Tensor = part.parameter if part.parameter is not None else part.flat
    return held.requires_grad
