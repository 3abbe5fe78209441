"""Which torch optimizers own parameters of a model: their steps are its steps."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from ddpprobe.rank import torch_private
from ddpprobe.rank.topology.describe import Topology

_FEW = 8  # optimizers in a step, of whose every combination it is remembered what they own


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
        self._own: dict[int, Tensor] = {}  # the model's parameters, as listed in this step
        self._complete: dict[tuple[int, ...], bool] = {}  # do these own every parameter?
        self._stepped: list[int] = []  # ids of those that did in this step
        self._before: frozenset[int] = frozenset()  # of those that did in the one before
        self._left: set[int] = set()  # ids of the parameters that they left, where they are many

    def optimizers(self) -> list[Optimizer]:
        """Return those that were seen to step parameters of this model, or its engine's."""
        if self._topology.engine is not None:
            return [self._topology.engine.optimizer]
        return [optimizer for optimizer, (_, ids) in self._owned.items() if ids]

    @property
    def first(self) -> Optimizer | None:
        """The first one that was seen to step parameters of this model, or its engine's."""
        if self._topology.engine is not None:
            return self._topology.engine.optimizer
        return next((optimizer for optimizer, (_, ids) in self._owned.items() if ids), None)

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
        return not (ours and self._is_complete(ours))

    def parameters_of(self, optimizer: Optimizer) -> frozenset[int]:
        """Ids of the parameters of this model that `optimizer` owns; empty: it is not ours."""
        size = sum([len(group["params"]) for group in optimizer.param_groups])
        known = self._owned.get(optimizer)
        if known is None or known[0] != size or not (known[1] or self.any):
            given = [p for group in optimizer.param_groups for p in group["params"]]
            ids = self._ours(given)
            if not (ids or self.any) and _is_out_of_date(given, list(self._own.values())):
                ids = frozenset(map(id, given))
            known = self._owned[optimizer] = (size, ids)
            self.look_again()  # its id may have been another one's
            self.any |= bool(ids)
        return known[1]

    def all_parameters(self) -> set[int]:
        """Ids of all that the optimizers have that were seen to step, of this model or not."""
        groups = [group for optimizer in self._owned for group in optimizer.param_groups]
        return {id(parameter) for group in groups for parameter in group["params"]}

    def are_to_come(self) -> bool:
        """Whether an optimizer lives that owns some of it, stepped or not: not for every step."""
        groups = [getattr(o, "param_groups", ()) for o in torch_private.living(Optimizer)]
        return any(self._ours([p for g in of_one for p in g["params"]]) for of_one in groups)

    def begin_step(self) -> None:
        """Begin a step, in which no optimizer has stepped yet."""
        self._before = frozenset(self._stepped)
        self._stepped.clear()
        self._left.clear()
        self.let_go()

    def let_go(self) -> None:
        """Hold no parameter of the model: one that is not its own any more is nobody's."""
        self._own.clear()

    def of_the_step_before(self, most: int) -> Iterator[Tensor]:
        """Yield parameters of the model that an optimizer has stepped in the step before.

        `most`: of each optimizer; the first ones.
        """
        for optimizer, (_, mine) in list(self._owned.items()):
            if id(optimizer) in self._before:
                given = (p for group in optimizer.param_groups for p in group["params"])
                yield from (p for p in islice(given, most) if id(p) in mine)

    def look_again(self) -> None:
        """Forget which optimizers own all that is trained: the loop may freeze and thaw it."""
        self._complete.clear()

    @property
    def some_stepped(self) -> bool:
        """Whether one has, in this step."""
        return bool(self._stepped)

    def have_all_stepped(self, optimizer: Optimizer) -> bool:
        """Take note that one has stepped; return whether now all that is trained was stepped."""
        self._stepped.append(id(optimizer))
        many = len(self._stepped)
        if many <= _FEW:
            return self._is_complete(tuple(self._stepped))
        # Perhaps as many optimizers as parameters, each called in the backward: ask one at a time.
        if many == _FEW + 1:
            self._left = self._left_by(self._stepped)
        else:
            self._left -= self.parameters_of(optimizer)
        return not self._left

    def _is_complete(self, optimizers: tuple[int, ...]) -> bool:
        """Whether the optimizers of these ids own everything that is trained."""
        complete = self._complete.get(optimizers)
        if complete is None:
            complete = self._complete[optimizers] = not self._left_by(optimizers)
        return complete

    def _left_by(self, optimizers: Collection[int]) -> set[int]:
        """Ids of what is trained by none of the optimizers of these ids."""
        ids = set(optimizers)
        left = {id(p) for _, p in self._topology.named_parameters() if p.requires_grad}
        return left.difference(*(mine for o, (_, mine) in self._owned.items() if id(o) in ids))

    def _ours(self, given: Sequence[Tensor]) -> frozenset[int]:
        """Ids of those of these tensors that are parameters of the model now."""
        if not all(self._is_listed(p) for p in given):  # it may have exchanged some
            named = self._topology.named_parameters()
            self._own = {id(parameter): parameter for _, parameter in named}
        return frozenset(id(p) for p in given if self._is_listed(p))

    def _is_listed(self, tensor: Tensor) -> bool:
        return self._own.get(id(tensor)) is tensor


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
