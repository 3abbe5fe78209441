"""Reads the reduced gradients of a sampled step, as they are when their optimizer takes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import final

from torch import Tensor

from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.tp_inference import TpInference
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.placement import UNKNOWN, TpPlacement, within

_Found = tuple[str, Tensor, TpPlacement]


@final
class ReducedGradients:
    """Reduces what is in `.grad` of every chosen parameter: the reduced gradient or its shard.

    It may be read again: after a further micro-batch, which adds to it. What an optimizer has taken
    is not: the script may have set it to zero since, as where an optimizer of each parameter steps
    inside the backward.

    Args:
        topology: the model.
        select: whether a module FQN is observed.
        rows: where rows go.
        inference: how gradients lie on the ranks of a tensor-parallel group.
        slot: returns the slot of (FQN, gradient, layout).
    """

    def __init__(
        self, topology: Topology, select: Callable[[str], bool], rows: StepRows,
        inference: TpInference, slot: Callable[[str, Tensor, TpPlacement], int],
    ) -> None:  # fmt: skip
        self._topology, self._select, self._rows = topology, select, rows
        self._inference, self._slot = inference, slot
        self._slots: dict[str, int] = {}  # FQN -> where its gradient was read, in this step
        # Ids of the parameters of the optimizer that is stepping, and of those that have stepped.
        self._taking: set[int] = set()
        self._taken: set[int] = set()
        self._names: dict[int, tuple[str, Tensor]] = {}  # of all parameters, by id

    def __bool__(self) -> bool:
        """Whether some were read in this step."""
        return bool(self._slots)

    def begin(self) -> None:
        """Forget the step before."""
        self._slots.clear()
        self._taking.clear()
        self._taken.clear()
        self._names.clear()

    def read(self, micro: int) -> None:
        """Read all that are there, but those that an optimizer took."""
        taken = {fqn for fqn, _ in self._named(self._taken)}
        found = self._topology.reduced_gradients()
        self._add(micro, (one for one in found if one[0] not in taken), self._slots.keys() - taken)

    def read_of(self, micro: int, parameters: Collection[int]) -> None:
        """Read those of the parameters of these ids; all, where none was taken before."""
        if not self._taken or self._topology.flat:  # FSDP1's are no parameters of the model
            self.read(micro)
            return
        named = self._named(parameters)
        held = ((fqn, p.grad, self._topology.gradient_layout(p)) for fqn, p in named)
        found = [(fqn, grad, layout) for fqn, grad, layout in held if grad is not None]
        self._add(micro, found, {fqn for fqn, _ in named if fqn in self._slots})

    def take(self, parameters: Collection[int]) -> None:
        """Hear that an optimizer steps the parameters of these ids; a closure may go on."""
        self._taking.update(parameters)

    def end_take(self) -> None:
        """Hear that it has stepped."""
        self._taken |= self._taking
        self._taking.clear()

    def _named(self, parameters: Collection[int]) -> list[tuple[str, Tensor]]:
        if parameters and not self._names:
            owned = self._topology.own_parameters()
            self._names = {id(parameter): (fqn, parameter) for fqn, _, _, parameter in owned}
        return [self._names[p] for p in parameters if p in self._names]

    def _add(self, micro: int, found: Iterable[_Found], again: Collection[str]) -> None:
        """Read what was found; `again`: FQNs of which there is a row that is not to count."""
        if again:
            self._rows.forget({self._slots.pop(fqn) for fqn in again})
        self._rows.add_all(micro, self._placed(found))

    def _placed(self, found: Iterable[_Found]) -> Iterator[tuple[int, Tensor]]:
        for fqn, gradient, placement in found:
            owner = fqn.rpartition(".")[0]
            if self._select(owner):
                layout = self._layout(fqn, owner, gradient, placement)
                slot = self._slots[fqn] = self._slot(fqn, gradient, layout)
                self._rows.table.amend(slot, layout)
                yield slot, gradient

    def _layout(
        self, fqn: str, owner: str, gradient: Tensor, placement: TpPlacement
    ) -> TpPlacement:
        if self._topology.is_apart(owner):
            return UNKNOWN
        if self._inference.active:
            mine = self._rows.table.find((fqn, "grad_local", ""))
            if mine is not None and self._rows.table.site(mine).placement == "unknown":
                return UNKNOWN  # in any of the micro-batches
        if self._topology.spans_tensor_meshes(gradient):
            return self._inference.of_gradient(owner, placement)
        if not self._inference.active:
            return placement
        return within(placement, self._inference.of_parameter(fqn))
