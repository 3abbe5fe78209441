"""Of what a tensor was made: the facts from which `tp_inference` concludes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from ddpprobe.rank.stats.dense import local
from ddpprobe.rank.topology.placement import TpPlacement, is_dtensor, layout_of
from ddpprobe.rank.torch_private import sharding

REPLICAS, APART, MIXED = "replicas", "apart", "mixed"
_MAX_NODES = 10_000  # of one module's own code
_CUTS = ("AsStrided", "Chunk", "Index", "Narrow", "Select", "Slice", "Split", "Unbind", "Unsafe")


@final
class TrackedTensor:
    """What is known of one tensor.

    Attributes:
        layout, gradient: of it, and of its gradient where that differs; None: not known yet.
        inferred: it follows from the assumption that the model's inputs are replicated.
        source: the tensor that was handed on as this one.
        slots: the sites that hold it, and whether each is its gradient's.
        order: position in the order of first sight.
        judged: it was tried to infer its layout, which is done once, where it was made.
    """

    __slots__ = (
        "gradient",
        "inferred",
        "judged",
        "layout",
        "order",
        "ref",
        "slots",
        "source",
        "version",
    )

    def __init__(self, tensor: Tensor, order: int) -> None:
        self.ref = weakref.ref(tensor)
        self.order = order
        self.version = _version(tensor)
        self.layout: TpPlacement | None = None
        self.gradient: TpPlacement | None = None
        self.inferred = self.judged = False
        self.source: TrackedTensor | None = None
        self.slots: list[tuple[int, bool]] = []


@final
class RunningModule:
    """A module that is running.

    Attributes:
        inputs: (path, tensor) it was called with, before anything converted them.
        of_torch: it is one of torch.nn.
        entered: what came into its own code: inputs and outputs of the modules it called; each with
            its shape, and whether autograd follows it.
        hidden: its outputs as the DTensors they were before they were made local.
        order: how many tensors had been seen when it was called.
    """

    __slots__ = ("entered", "fqn", "hidden", "inputs", "of_torch", "order")

    def __init__(
        self, fqn: str, inputs: list[tuple[str, Tensor]], order: int, *, of_torch: bool = False
    ) -> None:
        self.fqn = fqn
        self.order = order
        self.inputs = inputs
        self.of_torch = of_torch
        self.entered: list[tuple[TrackedTensor, torch.Size, bool]] = []
        self.hidden: dict[str, Tensor] = {}


@final
class Tensors:
    """The tensors of one forward that were inputs or outputs of a module.

    Attributes:
        apart: ids of plain parameters whose gradient is each rank's own.
    """

    def __init__(self) -> None:
        self._seen: dict[int, TrackedTensor] = {}
        self._all: list[TrackedTensor] = []  # also those whose tensor is gone
        self._made_by: dict[
            tuple[Any, int], TrackedTensor
        ] = {}  # (autograd node, output) -> tensor
        self.apart: set[int] = set()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[TrackedTensor]:
        return iter(self._all)

    def let_go(self) -> None:
        """Drop the autograd nodes, which keep the graph alive."""
        self._made_by.clear()

    def forget(self) -> None:
        """Forget everything."""
        self._seen.clear()
        self._all.clear()
        self._made_by.clear()

    def see(self, tensor: Tensor) -> TrackedTensor:
        """Return what is known of `tensor` as it is now; changed in place it is another one."""
        seen = self._seen.get(id(tensor))
        if seen is not None and seen.ref() is tensor and seen.version == _version(tensor):
            return seen
        seen = self._seen[id(tensor)] = TrackedTensor(tensor, len(self._all))
        self._all.append(seen)
        if tensor.grad_fn is not None:
            self._made_by[tensor.grad_fn, tensor.output_nr] = seen
        if is_dtensor(tensor):
            seen.layout = layout_of(tensor.device_mesh, tensor.placements)
        elif (known := sharding.localized(tensor)) is not None:
            mesh, placements, gradient = known
            seen.layout = layout_of(mesh, placements)
            seen.gradient = layout_of(mesh, gradient) if gradient is not None else None
        elif (source := sharding.passed_on(tensor)) is not None:
            seen.source = self._made_by.get(source)
            if seen.source is not None:
                seen.layout, seen.inferred = seen.source.layout, seen.source.inferred
        return seen

    def made_of(self, tensor: Tensor, call: RunningModule) -> str:
        """Of what the code of `call` made `tensor`: REPLICAS alone, none of them (APART), or MIXED.

        What autograd does not follow (ids, masks) counts with all that entered. A slice may be this
        rank's own, so the result must have a shape that entered, but in torch's own modules. An
        autograd function of somebody's own may do anything.
        """
        followed = tensor.grad_fn is not None
        kinds = {is_local(seen) for seen, _, graded in call.entered if not (graded and followed)}
        still = False not in kinds
        leaves: set[int] = set()  # plain parameters: the same on every rank of the group
        found, cuts = self._sources(tensor, leaves) if followed else (set(), False)
        if found is None or (cuts and not self._came_back(tensor, call)):
            return MIXED
        if still and False not in found:
            return REPLICAS
        self.apart |= leaves  # each rank's gradient of them is its own
        return MIXED if True in found else APART

    def _sources(self, tensor: Tensor, leaves: set[int]) -> tuple[set[bool] | None, bool]:
        """Walk the graph back to known tensors: which kinds (replicated?), and was anything cut?

        Adds the ids of the plain parameters on the way to `leaves`. None instead of the kinds if
        something on the way may have done anything.
        """
        own, cuts = self._seen.get(id(tensor)), False
        kinds: set[bool] = set()
        stack: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr)]
        visited = set(stack)
        while stack:
            node, output = stack.pop()
            seen = self._made_by.get((node, output))
            if seen is not None and seen is not own:
                kinds.add(is_local(seen))
                continue
            if len(visited) > _MAX_NODES or isinstance(node, BackwardCFunction):
                return None, cuts
            if hasattr(node, "variable"):
                if is_dtensor(node.variable):
                    return None, cuts
                leaves.add(id(node.variable))
            cuts = cuts or node.name().startswith(_CUTS)
            parents = {parent for parent in node.next_functions if parent[0] is not None}
            stack.extend(parents - visited)
            visited |= parents
        return kinds, cuts

    @staticmethod
    def _came_back(tensor: Tensor, call: RunningModule) -> bool:
        whole = [shape for seen, shape, _ in call.entered if is_local(seen)]
        return call.of_torch or tensor.shape in whole


def is_local(seen: TrackedTensor) -> bool:
    """Whether the ranks of the tensor-parallel group are known to hold the same."""
    return seen.layout is not None and seen.layout[0] == "local"


def kept_from(module: nn.Module, call: RunningModule, output: Tensor) -> TrackedTensor | None:
    """The input whose layout an elementwise module's output has: torch's own, no parameters."""
    if not call.of_torch or len(call.inputs) != 1:
        return None
    (_, tensor), (seen, _, _) = call.inputs[0], call.entered[0]
    if seen.layout is None or seen.layout[0] != "sharded" or tensor.shape != output.shape:
        return None
    own = next(module.parameters(), None) is not None or next(module.children(), None) is not None
    return None if own else seen


def declared_layout(plain: Tensor, converted: Tensor) -> TpPlacement | None:
    """Placement that a plain input was declared to have when it was converted to `converted`.

    None: it was not converted, or nothing tells (an input without grad, redistributed since).
    """
    if plain is converted or is_dtensor(plain):
        return None
    if is_dtensor(converted) and same_memory(plain, converted):
        return layout_of(converted.device_mesh, converted.placements)
    if (declared := sharding.declared(plain, converted)) is not None:
        return layout_of(*declared)
    sizes = list(zip(plain.shape, converted.shape, strict=False))  # of a DTensor: the global ones
    grown = len(plain.shape) == len(converted.shape) and any(whole > part for part, whole in sizes)
    return ("sharded", True) if grown else None


def from_hidden(hidden: Tensor, tensor: Tensor) -> TpPlacement | None:
    """Placement of a plain output by the DTensor it was a moment ago, perhaps redistributed since.

    For where autograd keeps no record (no_grad, a cast by mixed precision).
    """
    if not is_dtensor(hidden) or is_dtensor(tensor):
        return None
    mesh, placements, shape = hidden.device_mesh, hidden.placements, tuple(hidden.shape)
    if same_memory(hidden, tensor):
        return layout_of(mesh, placements)
    if mesh.ndim != 1 or any(n <= 1 for n in shape):
        return None  # a dimension of one element is split and whole at once
    if tuple(tensor.shape) == shape:
        return None if placements[0].is_shard() else ("local", not any(mesh.get_coordinate() or ()))
    split = [d for d, n in enumerate(tensor.shape) if n != shape[d]]
    return ("sharded", True) if len(split) == 1 and tensor.dim() == len(shape) else None


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are locally one in memory; two empty ones of a shape cannot differ."""
    with torch.no_grad():
        x, y = local(a), local(b)
    same = x.shape == y.shape and x.dtype == y.dtype
    return same and (x.numel() == 0 or x.data_ptr() == y.data_ptr())


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; an inference tensor does not count it."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001  (public by documentation)
