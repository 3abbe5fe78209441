"""Which torch optimizers own parameters of a model: their steps are its steps."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from ddpprobe.rank.topology.describe import Topology


@final
class Owners:
    """Learns of each optimizer, when it is about to step, what of the model it owns.

    Attributes:
        any: whether one was seen that owns some of it; until then others are asked again.
    """

    def __init__(self, topology: Topology) -> None:
        self.any = False
        self._topology = topology
        self._owned: weakref.WeakKeyDictionary[Optimizer, tuple[int, frozenset[int]]] = (
            weakref.WeakKeyDictionary()
        )
        self._complete: dict[tuple[int, ...], bool] = {}  # do these own every parameter?

    def optimizers(self) -> list[Optimizer]:
        """Return those that were seen to step parameters of this model, or its engine's."""
        if self._topology.engine is not None:
            return [self._topology.engine.optimizer]
        return [optimizer for optimizer, (_, ids) in self._owned.items() if ids]

    def stepped_by(self) -> set[int]:
        """Return the ids of living optimizers that stepped parameters of this model."""
        return {id(optimizer) for optimizer in self.optimizers()}

    def may_own(self, optimizer: int) -> bool:
        """Whether the living optimizer of this id owns parameters of this model, or may do so.

        One that never stepped may, unless those that did own everything.
        """
        for known, (_, mine) in self._owned.items():
            if id(known) == optimizer:
                return bool(mine)
        ours = tuple(id(o) for o, (_, mine) in self._owned.items() if mine)
        return not (ours and self.is_complete(ours))

    def parameters_of(self, optimizer: Optimizer) -> frozenset[int]:
        """Ids of the parameters of this model that `optimizer` owns; empty: it is not ours."""
        size = sum([len(group["params"]) for group in optimizer.param_groups])
        known = self._owned.get(optimizer)
        if known is None or known[0] != size or not (known[1] or self.any):
            own = [p for _, p in self._topology.named_parameters()]
            mine = set(map(id, own))
            given = [p for group in optimizer.param_groups for p in group["params"]]
            ids = frozenset(id(p) for p in given if id(p) in mine)
            if not (ids or self.any) and _is_out_of_date(given, own):
                ids = frozenset(map(id, given))
            known = self._owned[optimizer] = (size, ids)
            self.any |= bool(ids)
        return known[1]

    def all_parameters(self) -> set[int]:
        """Ids of all that the optimizers have that were seen to step, of this model or not."""
        groups = [group for optimizer in self._owned for group in optimizer.param_groups]
        return {id(parameter) for group in groups for parameter in group["params"]}

    def is_complete(self, optimizers: tuple[int, ...]) -> bool:
        """Whether the optimizers of these ids own everything that is trained."""
        complete = self._complete.get(optimizers)
        if complete is None:
            trainable = {id(p) for _, p in self._topology.named_parameters() if p.requires_grad}
            for optimizer, (_, parameters) in self._owned.items():
                if id(optimizer) in optimizers:
                    trainable -= parameters
            complete = self._complete[optimizers] = not trainable
        return complete


def _is_out_of_date(given: Sequence[Tensor], own: Sequence[Tensor]) -> bool:
    """Whether an optimizer was made for tensors that the model has exchanged since.

    `fully_shard` does so, and whoever builds the model anew. Such an optimizer has parameters of
    the model's shapes and not one gradient, where the model has some: it steps nothing, but it is
    what the loop takes its steps with.

    Args:
        given: to the optimizer.
        own: the model's.
    """
    if any(p.grad is not None for p in given) or all(p.grad is None for p in own):
        return False
    shapes = [sorted(tuple(p.shape) for p in all_ if p.requires_grad) for all_ in (given, own)]
    return shapes[0] == shapes[1]
