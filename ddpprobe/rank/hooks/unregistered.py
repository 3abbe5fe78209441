"""Parameters that are trained through the model and are not the model's: torch does not know them.

Modules in a Python list, tuple or dict are not registered: `parameters()` leaves them out, so no
optimizer has them, no wrapper reduces their gradients, and no checkpoint holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import final

from torch import nn

from ddpprobe.rank.topology.describe import Topology
from ddpprobe.records.step import UNREGISTERED

_MOST_KEPT = 1000  # of a container: a longer one is data
_MOST_TOLD = 8  # attributes


@final
class Unregistered:
    """Counts at each sampled step those that nobody steps, if there were any at the first one.

    It keeps none: the script may put others in their place, and these are to be freed then.

    Args:
        topology: the model.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._are_some: bool | None = None

    def told(self, stepped: Callable[[], Collection[int]]) -> Mapping[str, float]:
        """Return scalars: by attribute how many have a gradient, and are in no optimizer.

        Args:
            stepped: ids of the parameters of all optimizers that were seen to step.
        """
        if self._are_some is None:
            self._are_some = any(True for _ in _find(self._topology))
        if not self._are_some:
            return {}
        ids = stepped()
        counts = {
            path: sum(p.requires_grad and p.grad is not None and id(p) not in ids for p in found)
            for path, found in _find(self._topology)
        }
        some = [(path, count) for path, count in counts.items() if count]
        return {f"{UNREGISTERED}{path}": float(count) for path, count in some[:_MOST_TOLD]}


def _find(topology: Topology) -> Iterator[tuple[str, list[nn.Parameter]]]:
    """Yield (path of an attribute, parameters in it that the model has nowhere)."""
    known = {id(p) for p in topology.outer.parameters()}
    known |= {id(p) for _, p in topology.named_parameters()}
    for path, module in topology.walk():
        for name, value in vars(module).items():
            if name.startswith("_") or not isinstance(value, (list, tuple, dict)):
                continue
            if len(value) > _MOST_KEPT:
                continue
            kept = value.values() if isinstance(value, dict) else value
            mine = {id(p): p for each in kept for p in _parameters_of(each) if id(p) not in known}
            if mine:
                known.update(mine)
                yield f"{path}.{name}" if path else name, list(mine.values())


def _parameters_of(value: object) -> Iterator[nn.Parameter]:
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
