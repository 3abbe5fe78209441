"""The two hooks on the root module, heard wherever torch.compile puts them.

Around a graph they run as plain Python, which is the rule. A root that is itself part of a larger
graph (a compiled function calls it) speaks through the graph: then its events arrive while the
graph runs, after it was chosen. Where the loop calls parts of the root instead of the root, those
speak for it (`parts`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddpprobe.rank import torch_private
from ddpprobe.rank.hooks import stream_capture
from ddpprobe.rank.hooks.copy_safe_hook import CopySafeHook, CopySafeObserver, take_off
from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.hooks.parts import PartHooks
from ddpprobe.rank.hooks.record_op import (
    GRADIENT,
    OUTPUT,
    TRAINED,
    RecordChannel,
    trace_event,
    trace_outputs,
)
from ddpprobe.rank.topology.describe import Topology, outermost
from ddpprobe.rank.topology.naming import inner
from ddpprobe.rank.torch_private import dynamo, sharding
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.stopwatch import Caller

# What a graph says of the root in it, besides its outputs and the gradients to them.
_BEGIN, _END = "begin", "end"
_EVALUATION_BEGIN, _EVALUATION_END = "evaluation begin", "evaluation end"


@final
class RootHooks:
    """Hangs on the root, or on what is compiled around it, and tells of its forwards.

    Args:
        topology: the model.
        fuse: contains whatever goes wrong in here.
        arrives: called when a forward with gradients comes to the model, where several ranks train:
            before a wrapper, or FSDP2, waits for the others.
        begins: called with whether a forward that begins is one with gradients.
        ended: called with the tensors a forward returned, and those of them with a gradient to
            come.
        gradient: called when the gradient of one of these arrives, inside the backward, with the
            micro-batch of `follow`; from inside a graph with None.
        act: called after `begins` outside of the fuse, and not from inside a graph.
        raised: called with the exception that ends a training forward.

    Attributes:
        in_graph: the last event came from inside a graph.
        deaf: the hooks are off, or tell nothing.
        counts: says whether a forward that begins is one of training: one with gradients.
        first: called with the module whose first training forward begins, before anything else;
            True: it is another recorder's from here on.
    """

    def __init__(
        self, topology: Topology, fuse: Fuse, arrives: Callable[[], None],
        begins: Callable[[bool], None],
        ended: Callable[[list[Tensor], list[Tensor]], None], gradient: Callable[[int | None], None],
        act: Callable[[], object], raised: Callable[[BaseException], None],
    ) -> None:  # fmt: skip
        self.in_graph = self._trains = False
        self.first: Callable[[nn.Module], bool] | None = None
        self.counts = torch.is_grad_enabled
        self._topology = topology
        self._arrives = arrives
        self._begins, self._ended, self._gradient = begins, ended, gradient
        self._raised = raised
        self._guarded_begin, self._act = fuse.guard(self._enter, Caller.MODULE), act
        self._after = fuse.guard(self._leave_root, Caller.MODULE)
        self._after_part = fuse.guard(self._leave, Caller.MODULE)
        self._before_all = fuse.guard(self._arrive, Caller.MODULE)
        self._first_of_all: list[RemovableHandle] = []
        self._parts = PartHooks(topology)
        self._arrived = fuse.guard(gradient, Caller.TENSOR)
        self._channel = RecordChannel(fuse.guard(self._hear))
        self._handles: list[RemovableHandle] = []
        self.deaf = False
        self._told: list[tuple[str, Tensor]] = []  # what the root returned, told by its graph

    def hang(self) -> None:
        """Hang the hooks, outside of the root's graph if that is known."""
        self.deaf = False
        if not self._handles:
            module, slot = called(self._topology), self._channel.slot
            self._handles = [
                module.register_forward_pre_hook(_Before(self.begin_root, slot)),
                # Also if the forward raises: a NaN is a common reason, and nobody else sees it.
                module.register_forward_hook(_After(self._after, slot), always_call=True),
            ]
        self._hang_parts()

    def listen_to_parts(self) -> None:
        """The optimizer steps, and the root is not called: hear what is called instead."""
        self._parts.armed = True
        self._hang_parts()

    def end_step(self) -> None:
        """Between steps: keep to the modules that this one was heard by."""
        if self._parts.choose():
            self._hang_parts()

    def _hang_parts(self) -> None:
        self._parts.hang(CopySafeObserver(self.begin), CopySafeObserver(self._after_part))

    @property
    def by_parts(self) -> bool:
        """Whether one forward of the model may be several calls, of parts of it."""
        return self._parts.armed

    @property
    def in_a_part(self) -> bool:
        """Whether the forward under way is one of a part that the root did not call."""
        return self._parts.in_a_part

    def is_only_part(self, module: nn.Module) -> bool:
        """Whether it is all that is ever called of a root that is not."""
        return self._parts.is_only_one(module)

    def unhang(self, *, for_good: bool) -> None:
        """Take them off. From inside a graph they would not come back: there they turn deaf."""
        self.deaf = True
        self._parts.unhang()
        take_off(self._first_of_all)
        if for_good or not self.in_graph:
            take_off(self._handles)

    def follow(self, trained: Iterable[Tensor], micro: int) -> None:
        """Hear of the gradients of what the forward of this micro-batch has returned."""
        if self.in_graph:
            return  # which tells of them itself
        arrived = _Arrived(self._arrived, micro)
        for tensor in trained:
            # A backward inside vmap or grad fills no `.grad`, and nothing can be read in it.
            if not (tensor.is_leaf or torch_private.is_functorch(tensor)):
                tensor.register_hook(arrived)

    def begin(self, module: nn.Module, *_: object) -> None:
        """Hear that a call of the root, or of a part of it, begins."""
        self._guarded_begin(module)
        self._act()

    def begin_root(self, *_: object) -> None:
        """Hear that a call of the root begins, or of what is compiled around it."""
        self.begin(self._topology.root)

    def _enter(self, module: nn.Module) -> None:
        if self._parts.enters(module):
            self._begin(module)

    def _begin(self, module: nn.Module) -> None:
        self.in_graph = False
        self._trains = self.counts() and not (_is_rehearsed() or self._captured())
        if self._trains:
            self._parts.trains()
            self._hang_first_of_all()
            first, self.first = self.first, None
            if first is not None and first(module):
                return
        self._begins(self._trains)

    def _hang_first_of_all(self) -> None:
        """Now that the model is as it is trained: around wrappers, and ahead of FSDP2's hooks."""
        alone = self._topology.world_size == 1
        if not (alone or self._first_of_all or dynamo.in_a_compiled_call()):
            outer, hook = outermost(self._topology.outer), CopySafeObserver(self._before_all)
            self._first_of_all = [outer.register_forward_pre_hook(hook, prepend=True)]

    def _arrive(self, *_: object) -> None:
        is_one = self.counts() and not (_is_rehearsed() or stream_capture.is_captured())
        if is_one and not (self.deaf or self.in_graph or self._parts.armed):
            self._arrives()

    def _captured(self) -> bool:
        """Whether a CUDA graph is made of this forward: nothing is computed, and nothing may wait.

        Merely to ask whether an event is over would break the user's capture off.
        """
        if not stream_capture.is_captured():
            return False
        stream_capture.warn("the model is")
        return True

    def _leave_root(self, module: nn.Module, args: object, output: object) -> None:
        if self._parts.leaves(self._topology.root):
            self._end(module, output, is_root=True)

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        if self._parts.leaves(module):
            self._end(module, output, is_root=False)

    def _end(self, called: nn.Module, output: object, *, is_root: bool) -> None:
        error = sys.exception() if output is None else None
        if error is not None and _comes_from(called, error):
            if self._trains:
                self._raised(error)
            return
        tensors = [tensor for _, tensor in leaves(output)] if self._trains else []
        trained = [tensor for tensor in tensors if tensor.requires_grad]
        # What a part returns is no loss: it may be a metric, or a term of one.
        self._ended(tensors if is_root else [], trained)

    def _hear(self, what: str, leaf: str, tensor: Tensor) -> None:
        if self.deaf or self._captured():
            return
        self.in_graph = True
        if what == GRADIENT:
            self._gradient(None)
        elif torch_private.in_backward():
            return  # a recomputation
        elif what in (_BEGIN, _EVALUATION_BEGIN):
            self._told = []
            self._begins(what == _BEGIN)
        elif what in (OUTPUT, TRAINED):
            self._told.append((what, tensor))
        elif what in (_END, _EVALUATION_END):
            told, self._told = self._told, []
            self._ended([t for _, t in told], [t for said, t in told if said == TRAINED])


class _Speaker(CopySafeHook):
    """A hook of the root: calls its target, or speaks through the graph it is traced into."""

    __slots__ = ("_slot",)

    def __init__(self, target: Callable[..., object], slot: Tensor) -> None:
        super().__init__(target)
        self._slot = slot


@final
class _Before(_Speaker):
    __slots__ = ()

    @dynamo.run_as_python
    def __call__(self, *args: object) -> None:
        if not torch.compiler.is_compiling():
            with torch_private.outside_modes():
                self._target(*args)
        elif not dynamo.is_silent():
            trace_event(self._slot, _BEGIN if torch.is_grad_enabled() else _EVALUATION_BEGIN)


@final
class _After(_Speaker):
    __slots__ = ()

    @dynamo.run_as_python
    def __call__(self, module: nn.Module, args: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            with torch_private.outside_modes():
                self._target(module, args, output)
        elif dynamo.is_silent():
            return
        elif torch.is_grad_enabled():
            trace_outputs(output, self._slot)
            trace_event(self._slot, _END)
        else:
            trace_event(self._slot, _EVALUATION_END)


@final
class _Arrived:
    """A tensor hook that holds no tensor."""

    __slots__ = ("_micro", "_tell")

    def __init__(self, tell: Callable[[int], object], micro: int) -> None:
        self._tell, self._micro = tell, micro

    @dynamo.hands_back
    def __call__(self, _: Tensor | None) -> None:
        self._tell(self._micro)


def _is_rehearsed() -> bool:
    """Whether a forward is run for what it does, and not for its numbers."""
    tracing = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
    return sharding.rehearses() or bool(tracing)


def _comes_from(module: nn.Module, error: BaseException) -> bool:
    """Whether an exception is on its way out of a module's call, which torch holds up for us."""
    raised = error.__traceback__
    return raised is not None and raised.tb_frame.f_locals.get("self") is module


def called(topology: Topology) -> nn.Module:
    """Return the module around the model that is compiled as a whole, or the model."""
    module: nn.Module | None = topology.outer
    while module is not None and module is not topology.root:
        if torch_private.is_compiled(module):
            return module
        module = inner(module)
    return topology.root
