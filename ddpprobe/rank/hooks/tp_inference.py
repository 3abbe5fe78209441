"""How plain tensors lie inside tensor parallelism, where torch's modules hide it.

`parallelize_module` turns a module's inputs into DTensors and its outputs back into plain tensors,
so that a hook sees a (2, 8, 3) of which nobody can tell whether it is a value or a third of one.
What can be known is collected here during one sampled forward, and nothing is guessed:

- a fresh `to_local()` remembers its DTensor; a DTensor made of a plain input says how that lay;
- what plain code computes from replicated tensors alone is replicated; that it was from those alone
  is read off the autograd graph, back to the last tensors whose layout is known;
- an elementwise module of torch's own keeps the layout of its one input.

A gradient has the layout of its output as long as nothing after it mixes what is replicated with
what is not: there a rank's gradient of a replicated tensor may be its own. What comes before the
last such place has gradients of unknown layout.

All else is `unknown`: labelled, and merged with nothing. Taken for granted is what tensor
parallelism itself needs: that the model's inputs are the same on the ranks of one group. Should a
later annotation contradict that, everything concluded from it becomes unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddpprobe.rank import torch_private
from ddpprobe.rank.hooks.copy_safe_hook import CopySafeObserver
from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.hooks.tp_provenance import (
    MIXED,
    REPLICAS,
    RunningModule,
    Tensors,
    TrackedTensor,
    declared_layout,
    from_hidden,
    is_local,
    kept_from,
)
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.placement import UNKNOWN, TpPlacement, is_dtensor
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.stopwatch import Caller


@final
class TpInference:
    """Placements of the outputs of a tensor-parallel model, during its sampled forwards.

    Args:
        topology: the model; without tensor parallelism everything here does nothing.
        amend: called with (slot, layout) when the layout of a site becomes known or changes.
        fuse: contains whatever goes wrong.
    """

    def __init__(
        self, topology: Topology, amend: Callable[[int, TpPlacement], None], fuse: Fuse
    ) -> None:
        self.active = bool(topology.tensor_meshes)
        self._topology = topology
        self._amend = amend
        self._fuse = fuse
        self._alone: TpPlacement = ("local", topology.leads_tensor_group())
        self._infers = len(topology.tensor_meshes) == 1
        self._tensors = Tensors()
        self._calls: list[RunningModule] = []
        self._began: dict[str, int] = {}  # FQN -> when its first call began
        self._uniform: dict[str, bool] = {}  # FQN -> its code saw replicated tensors only
        self._parameters: dict[str, int] = {}
        self._mixed = -1  # the last tensor made of replicated and other ones
        self._layouts: dict[int, TpPlacement] = {}  # slot -> its layout
        self._torn: set[int] = set()  # slots that lie now so, now otherwise
        self._concluded: set[int] = set()  # slots whose layout follows from the assumption

    def attach(self) -> list[RemovableHandle]:
        """Hang the hooks that look at a forward, and forget the last one."""
        self.end()
        if not self.active:
            return []
        self._mixed = -1
        self._tensors.apart.clear()
        self._began.clear()
        self._uniform.clear()
        self._calls.append(RunningModule("", [], 0))  # the root's pre-hooks are running
        handles = []
        for fqn, module in self._topology.named_modules():
            if fqn:  # the root is past its pre-hooks
                before = self._guest(self._enters, fqn, 3)
                after = self._guest(self._converted, fqn, 3)
                add = module.register_forward_pre_hook
                handles += [add(before, prepend=True, with_kwargs=True),
                            add(after, with_kwargs=True)]  # fmt: skip
            hidden, out = self._guest(self._hidden, fqn), self._guest(self._returns, fqn)
            handles.append(module.register_forward_hook(hidden, prepend=True))
            handles.append(module.register_forward_hook(out))
        return handles

    def _guest(self, target: Callable[..., None], fqn: str, takes: int = 0) -> CopySafeObserver:
        return CopySafeObserver(self._fuse.guard(partial(target, fqn), Caller.MODULE), takes)

    def end(self) -> None:
        """At the end of the forward: what nothing was learned of is unknown."""
        for seen in self._tensors:
            for slot, is_gradient in seen.slots:
                if seen.layout is None:
                    self._tear(slot)
                elif is_gradient:
                    self._settle_gradient(seen, slot)
        self._calls.clear()
        self._tensors.forget()

    def bind(
        self, tensor: Tensor, output: int | None, gradient: int | None, *, again: bool
    ) -> None:
        """Say which sites hold `tensor`, an output, and its gradient; it may become known later.

        `again`: it is recomputed in the backward, and lies as it did in the forward.
        """
        if again:
            if gradient is not None:
                known = self._layouts.get(output, UNKNOWN) if output is not None else UNKNOWN
                self.declare(gradient, self.of_gradient("", known))
            return
        seen = self._see(tensor)
        for slot, is_gradient in ((output, False), (gradient, True)):
            if slot is not None:
                seen.slots.append((slot, is_gradient))
        self._settle(seen)

    def declare(self, slot: int, layout: TpPlacement) -> None:
        """Set the layout of a site; one that lies now so, now otherwise is unknown for good."""
        known = self._layouts.get(slot)
        if known == layout or slot in self._torn:
            return
        if known is not None:
            self._tear(slot)
            return
        self._layouts[slot] = layout
        self._amend(slot, layout)

    def name(self, fqn: str, parameter: Tensor) -> None:
        """Say which object stands for a parameter in this forward."""
        self._parameters[fqn] = id(parameter)

    def of_parameter(self, fqn: str) -> TpPlacement:
        """Placement, within a tensor-parallel group, of the gradient of a plain parameter.

        It is the same on all ranks of the group if its module computed with replicated tensors, and
        so did all that came after it.
        """
        owner = fqn.rpartition(".")[0]
        alone = self._parameters.get(fqn) not in self._tensors.apart
        uniform = alone and self._uniform.get(owner, False)
        return self.of_gradient(owner, self._alone) if uniform else UNKNOWN

    def of_gradient(self, owner: str, layout: TpPlacement) -> TpPlacement:
        """Placement of a gradient that arrives at module `owner`, and by torch lies as `layout`."""
        doubtful = layout[0] in ("local", "replicated") and self._began.get(owner, -1) < self._mixed
        return UNKNOWN if self.active and doubtful else layout

    # -- hooks ------------------------------------------------------------------------------------

    def _enters(self, fqn: str, module: nn.Module, args: object, kwargs: object) -> None:
        if torch_private.in_backward():
            return
        of_torch = type(module).__module__.startswith("torch.nn.modules.")
        inputs = list(leaves((args, kwargs)))
        call = RunningModule(fqn, inputs, len(self._tensors), of_torch=of_torch)
        for _, tensor in call.inputs:
            seen = self._see(tensor)
            if seen.layout is None:
                self._infer(seen, tensor, self._calls[-1] if self._calls else None)
            call.entered.append((seen, tensor.shape, tensor.requires_grad))
        self._calls.append(call)

    def _converted(self, fqn: str, module: nn.Module, args: object, kwargs: object) -> None:
        """Learn from inputs that were declared to be DTensors how the plain ones lie."""
        call = self._current(fqn)
        if call is None:
            return
        given = dict(call.inputs)
        for path, tensor in leaves((args, kwargs)):
            plain = given.get(path)
            declared = None if plain is None else declared_layout(plain, tensor)
            if plain is not None and declared is not None:
                self._learn(self._see(plain), declared)

    def _hidden(self, fqn: str, module: nn.Module, args: object, output: object) -> None:
        call = self._current(fqn)
        if call is not None:
            call.hidden = {path: t for path, t in leaves(output) if is_dtensor(t)}

    def _returns(self, fqn: str, module: nn.Module, args: object, output: object) -> None:
        call = self._current(fqn)
        if call is None:
            return
        self._calls.pop()
        own = any(is_dtensor(p) for p in module.parameters(recurse=False))
        alone = all(is_local(seen) for seen, _, _ in call.entered)
        self._began.setdefault(fqn, call.order)
        self._uniform[fqn] = not own and alone and self._uniform.get(fqn, True)
        for path, tensor in leaves(output):
            seen = self._see(tensor)
            if seen.layout is None and path in call.hidden:
                layout = from_hidden(call.hidden[path], tensor)
                if layout is not None:
                    self._learn(seen, layout)
            if seen.layout is None:
                kept = kept_from(module, call, tensor)
                if kept is not None:
                    seen.inferred = kept.inferred
                    self._set(seen, kept.layout)
                elif own:
                    self._mixed = seen.order
                else:
                    self._infer(seen, tensor, call)
            if self._calls:
                self._calls[-1].entered.append((seen, tensor.shape, tensor.requires_grad))
        if not self._calls:
            self._tensors.let_go()

    # -- knowledge --------------------------------------------------------------------------------

    def _current(self, fqn: str) -> RunningModule | None:
        if torch_private.in_backward() or not self._calls:
            return None
        while len(self._calls) > 1 and self._calls[-1].fqn != fqn:
            self._calls.pop()  # it raised, and somebody caught that
        return self._calls[-1] if self._calls[-1].fqn == fqn else None

    def _see(self, tensor: Tensor) -> TrackedTensor:
        return self._tensors.see(tensor)

    def _infer(self, seen: TrackedTensor, tensor: Tensor, call: RunningModule | None) -> None:
        """Conclude for a tensor that the plain code of `call` made, or the user gave the root."""
        if seen.judged or seen.source is not None:
            return
        seen.judged = True
        made_of = REPLICAS if call is None else self._tensors.made_of(tensor, call)
        if made_of == MIXED:
            self._mixed = seen.order
        if self._infers and made_of == REPLICAS:
            seen.inferred = True
            self._set(seen, self._alone)

    def _learn(self, seen: TrackedTensor, layout: TpPlacement) -> None:
        """Take a fact; one that contradicts a conclusion undoes all conclusions."""
        if seen.layout is not None and seen.layout != layout:
            if seen.inferred:
                self._infers = False
                self._uniform.clear()
                for slot in tuple(self._concluded):
                    self._tear(slot)
                for other in self._tensors:
                    if other.inferred:
                        other.layout, other.inferred = UNKNOWN, False
            seen.layout = UNKNOWN
            for slot, _ in seen.slots:
                self._tear(slot)
            return
        seen.inferred = False
        self._set(seen, layout)

    def _set(self, seen: TrackedTensor, layout: TpPlacement | None) -> None:
        seen.layout = layout
        if seen.source is not None and seen.source.layout is None:
            self._set(seen.source, layout)
        self._settle(seen)

    def _settle(self, seen: TrackedTensor) -> None:
        if seen.layout is None:
            return
        for slot, is_gradient in seen.slots:
            if seen.inferred:
                self._concluded.add(slot)
            if not is_gradient:
                self.declare(slot, seen.layout)

    def _settle_gradient(self, seen: TrackedTensor, slot: int) -> None:
        """Now that the forward is over: has a rank's gradient of it become its own after it?"""
        layout = seen.gradient or seen.layout or UNKNOWN
        doubtful = layout[0] == "local" and seen.order < self._mixed
        self.declare(slot, UNKNOWN if doubtful else layout)

    def _tear(self, slot: int) -> None:
        self._torn.add(slot)
        self._layouts[slot] = UNKNOWN
        self._amend(slot, UNKNOWN)
