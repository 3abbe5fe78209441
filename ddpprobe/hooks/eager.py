"""Observation of an eager model, attached for one sampled step and gone after it.

Forward: a forward hook per chosen module reduces its outputs. Backward: a tensor hook on each
output gives the gradient with respect to it, bit-identical to what a full-backward hook would see
and safe where that one crashes the user's forward (in-place consumers, views). Parameters: a tensor
hook on the parameter *as the forward sees it* gives this rank's gradient before any reduction,
under FSDP2 too, where a module holds the unsharded parameter only while its unit runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddpprobe import torch_private
from ddpprobe.fuse import Fuse
from ddpprobe.hooks.guest import Guest
from ddpprobe.hooks.outputs import leaves
from ddpprobe.hooks.step_rows import StepRows
from ddpprobe.records import Site
from ddpprobe.stats.dense import local
from ddpprobe.topology import Topology, gathered_parameters, tensor_placement


class Clock(Protocol):
    """What hooks ask the step clock: the micro-batch under way, and whether this is evaluation."""

    micro: int
    evaluating: bool


@final
class EagerHooks:
    """The hooks of sampled steps.

    Args:
        topology: the model.
        select: whether a module of this FQN is observed.
        rows: where rows go.
        clock: tells micro-batch and evaluation.
        fuse: contains whatever goes wrong in here.
    """

    def __init__(
        self,
        topology: Topology,
        select: Callable[[str], bool],
        rows: StepRows,
        clock: Clock,
        fuse: Fuse,
    ) -> None:
        self._topology = topology
        self._select = select
        self._rows = rows
        self._clock = clock
        self._fuse = fuse
        self._handles: list[RemovableHandle] = []
        self._tapped: set[int] = set()
        self.on_gradient = fuse.guard(self._gradient)

    @property
    def attached(self) -> bool:
        """Whether hooks hang on the model now."""
        return bool(self._handles)

    def attach(self) -> None:
        """Hang the hooks on the model as it is now (modules may have been replaced since)."""
        for fqn, module in self._topology.named_modules():
            if self._select(fqn):
                hook = Guest(self._fuse.guard(_Forward(self, fqn)))
                self._handles.append(module.register_forward_hook(hook))
        if self._topology.wrapper != "fsdp2":
            for fqn, parameter in self._topology.named_parameters():
                self._tap_parameter(fqn, parameter)
            return
        for fqn, unit in self._topology.units():
            tap = Guest(self._fuse.guard(partial(self._tap_unit, fqn)))
            self._handles.append(unit.register_forward_pre_hook(tap))
            if unit is self._topology.root:
                tap(unit)  # we are inside its pre-hooks already

    def detach(self) -> None:
        """Take every hook off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._tapped.clear()

    def forward(self, fqn: str, output: object) -> None:
        """Handle one module's output."""
        if self._clock.evaluating:
            return
        micro = self._clock.micro
        recomputed = torch_private.in_backward()
        for leaf, tensor in leaves(output):
            if not recomputed and _has_numbers(tensor):
                self._rows.add(self._slot(fqn, "output", leaf, tensor, tap=True), micro, tensor)
            # In reentrant checkpointing only the recomputation has a graph; in the other kind only
            # the first forward's hooks fire. Registering on both is right for either. A leaf would
            # keep the hook for ever.
            if tensor.requires_grad and not tensor.is_leaf:
                slot = self._slot(fqn, "grad_output", leaf, tensor, tap=not recomputed)
                tensor.register_hook(_Gradient(self, slot, micro))

    def _tap_unit(self, fqn: str, unit: nn.Module, *_: object) -> None:
        for name, parameter in gathered_parameters(fqn, unit):
            self._tap_parameter(name, parameter)

    def _tap_parameter(self, fqn: str, parameter: Tensor) -> None:
        """Observe the local gradient of one parameter for the rest of this step."""
        chosen = self._select(fqn.rpartition(".")[0])
        if not chosen or not parameter.requires_grad or id(parameter) in self._tapped:
            return
        self._tapped.add(id(parameter))
        slot = self._slot(fqn, "grad_local", "", parameter, tap=True)
        self._handles.append(parameter.register_hook(_Gradient(self, slot, -1)))

    def read_gradients(self) -> None:
        """Reduce what is in `.grad` of every chosen parameter: the reduced gradient or shard."""
        for fqn, parameter in self._topology.named_parameters():
            gradient = parameter.grad
            if gradient is None or not self._select(fqn.rpartition(".")[0]):
                continue
            slot = self._rows.table.find((fqn, "grad", ""))
            if slot is None:
                placement, primary = self._topology.gradient_placement(gradient)
                site = Site(fqn, "grad", "", placement, primary, _dtype(gradient))
                slot = self._rows.table.slot(site)
            self._rows.tap(slot)
            self._rows.add(slot, self._clock.micro, gradient)

    def _gradient(self, slot: int, micro: int, gradient: Tensor) -> None:
        if not self.attached:
            return  # a graph kept alive beyond its step
        if micro < 0:
            micro = self._clock.micro
        self._rows.confirm(micro)
        self._rows.add(slot, micro, gradient)

    def _slot(self, fqn: str, kind: str, leaf: str, tensor: Tensor, *, tap: bool) -> int:
        slot = self._rows.table.find((fqn, kind, leaf))
        if slot is None:
            placement, primary = tensor_placement(tensor)
            slot = self._rows.table.slot(Site(fqn, kind, leaf, placement, primary, _dtype(tensor)))
        if tap:
            self._rows.tap(slot)
        return slot


@final
class _Forward:
    __slots__ = ("_fqn", "_hooks")

    def __init__(self, hooks: EagerHooks, fqn: str) -> None:
        self._hooks, self._fqn = hooks, fqn

    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        self._hooks.forward(self._fqn, output)


@final
class _Gradient:
    """A tensor hook that holds no tensor: one that did would never be freed (measured)."""

    __slots__ = ("_hooks", "_micro", "_slot")

    def __init__(self, hooks: EagerHooks, slot: int, micro: int) -> None:
        self._hooks, self._slot, self._micro = hooks, slot, micro

    def __call__(self, gradient: Tensor) -> None:
        self._hooks.on_gradient(self._slot, self._micro, gradient)


def _has_numbers(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def gradient_norm(topology: Topology) -> Tensor | None:
    """L2 norm of this rank's gradients as they are now, float32 [] on their device."""
    gradients = [local(p.grad) for _, p in topology.named_parameters() if p.grad is not None]
    dense = [g for g in gradients if g.layout == torch.strided and g.numel()]
    if not dense:
        return None
    norms = torch._foreach_norm(dense)  # noqa: SLF001  (what clip_grad_norm_ itself uses)
    norm: Tensor = torch.linalg.vector_norm(torch.stack([n.float() for n in norms]))
    return norm
