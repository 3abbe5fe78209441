"""`register_full_backward_hook`, for `grad_input`, on modules a probe forward has proven safe.

A full hook wraps a module's inputs and outputs in an autograd function. That crashes the user's own
forward when an output is later changed in place or is a view, when the module returns a tuple
subclass, and where a tensor has no views. So the first sampled forward only looks: tensor versions
before and after tell who is changed in place. From the next sampled step on, the safe modules carry
full hooks as well.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddpprobe.rank import torch_private
from ddpprobe.rank.hooks import fast_path
from ddpprobe.rank.hooks.copy_safe_hook import CopySafeObserver, take_off
from ddpprobe.rank.hooks.eager import StepPosition
from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.stats.dense import dtype_name
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.records.step import Site
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.stopwatch import Caller


@final
class FullHooks:
    """Full backward hooks of sampled steps.

    Attributes:
        unsafe: FQN -> why it gets no full hook; known after the probe forward.
    """

    def __init__(
        self, topology: Topology, select: Callable[[str], bool], rows: StepRows,
        clock: StepPosition, fuse: Fuse, resident: Container[nn.Module] = (),
    ) -> None:  # fmt: skip
        self.unsafe: dict[str, str] = {}
        self._topology = topology
        self._select = select
        self._rows = rows
        self._clock = clock
        self._fuse = fuse
        self._resident = resident
        self._handles: list[RemovableHandle] = []
        self._seen: dict[str, list[tuple[Tensor, int]]] | None = None
        self._safe: set[str] | None = None

    @property
    def safe(self) -> frozenset[str]:
        """FQNs of the modules that carry full hooks on sampled steps."""
        return frozenset(self._safe or ())

    def attach(self) -> None:
        """Hang the hooks of this sampled step: the probe's own the first time, full ones later."""
        probing = self._safe is None
        if probing:
            self._seen = {}
        fused = fast_path.fused(module for _, module in self._topology.named_modules())
        for fqn, module in self._topology.named_modules():
            if module in fused:
                self.unsafe[fqn] = fast_path.REASON
            elif module in self._resident:
                # They would break the graph, at each module.
                self.unsafe[fqn] = "compiled with torch.compile: a full hook would break the graph"
            elif probing:
                before = CopySafeObserver(
                    self._fuse.guard(partial(self._before, fqn), Caller.MODULE)
                )
                after = CopySafeObserver(self._fuse.guard(partial(self._after, fqn), Caller.MODULE))
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=False))
                self._handles.append(module.register_forward_hook(after))
            elif fqn in self.safe and self._select(fqn):
                hook = CopySafeObserver(
                    self._fuse.guard(partial(self._backward, fqn), Caller.TENSOR)
                )
                self._handles.append(module.register_full_backward_hook(hook))

    def probed(self) -> None:
        """At the end of the probe forward: judge, and let go of the tensors."""
        if self._seen is None:
            return
        for fqn, tensors in self._seen.items():
            for tensor, version in tensors:
                if tensor._version != version:  # noqa: SLF001  (public by documentation)
                    self.unsafe.setdefault(fqn, "an input or output is changed in place")
        self._safe = {f for f in self._seen if f not in self.unsafe and self._select(f)}
        self._seen = None
        self.detach()

    def detach(self) -> None:
        """Take every hook off."""
        take_off(self._handles)
        self._seen = None

    def _before(self, fqn: str, module: nn.Module, args: object) -> None:
        if self._seen is None or self._clock.evaluating or torch_private.in_backward():
            return
        if torch_private.in_functorch():
            self.unsafe.setdefault(fqn, "runs inside vmap, grad or jvp")
        self._refuse_without_views(fqn, args)
        inputs = [t for _, t in leaves(args) if t.requires_grad]
        if not inputs:
            self.unsafe.setdefault(fqn, "no positional input requires grad: there is no grad_input")
        self._note(fqn, inputs)

    def _after(self, fqn: str, module: nn.Module, args: object, output: object) -> None:
        if self._seen is None or self._clock.evaluating or torch_private.in_backward():
            return
        if not (isinstance(output, Tensor) or type(output) is tuple):
            self.unsafe.setdefault(fqn, f"returns a {type(output).__name__}, not a tensor or tuple")
        if torch_private.is_a(module, "torch.distributed.fsdp", "FSDPModule"):
            self.unsafe.setdefault(fqn, "fully_shard hooks this module's outputs itself")
        self._refuse_without_views(fqn, output)
        outputs = [t for _, t in leaves(output) if t.requires_grad]
        if any(t._is_view() for t in outputs):  # noqa: SLF001
            self.unsafe.setdefault(fqn, "an output is a view, whose base may be changed in place")
        self._note(fqn, outputs)

    def _refuse_without_views(self, fqn: str, passed: object) -> None:
        """A full hook makes a view of each tensor that is passed, with a gradient or without."""
        tensors = passed if isinstance(passed, tuple) else (passed,)
        if any(isinstance(t, Tensor) and not _has_views(t) for t in tensors):
            self.unsafe.setdefault(fqn, "an input or output is a tensor of which no view is made")

    def _note(self, fqn: str, tensors: list[Tensor]) -> None:
        if self._seen is not None:
            noted = self._seen.setdefault(fqn, [])
            noted.extend((t, t._version) for t in tensors)  # noqa: SLF001

    def _backward(
        self, fqn: str, module: nn.Module, grad_input: object, grad_output: object
    ) -> None:
        micro = self._clock.micro
        for leaf, gradient in leaves(grad_input):
            slot = self._rows.table.find((fqn, "grad_input", leaf))
            if slot is None:
                placement, primary = self._topology.layout(fqn, gradient)
                dtype = dtype_name(gradient.dtype)
                site = Site(fqn, "grad_input", leaf, placement, primary, dtype)
                slot = self._rows.table.slot(site)
            self._rows.tap(slot)
            self._rows.add(slot, micro, gradient)


def _has_views(tensor: Tensor) -> bool:
    """Whether torch makes views of a tensor: not of sparse ones, nor of nested ones of old."""
    plain = tensor.layout is torch.strided and not tensor.is_nested
    return plain or tensor.layout is torch.jagged
