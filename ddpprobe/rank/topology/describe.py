"""What wraps the model, what its parts are called without the wrappers, and who holds what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddpprobe.errors import ModelRefused
from ddpprobe.rank import torch_private
from ddpprobe.rank.topology.devices import device_of
from ddpprobe.rank.topology.engine import Engine, EngineGradient
from ddpprobe.rank.topology.flat import FlatUnit, flat_units
from ddpprobe.rank.topology.naming import clean, held, inner, walk
from ddpprobe.rank.topology.placement import (
    LOCAL,
    REPLICATED,
    SHARDED,
    UNKNOWN,
    TpPlacement,
    is_dtensor,
    layout_of,
    ranks_of,
    reduced_layout,
    shard_id,
    shard_name,
)
from ddpprobe.rank.topology.refusals import refuse
from ddpprobe.rank.topology.replicas import reduced_by_ddp, sharded_ids
from ddpprobe.rank.torch_private import dictionaries, sharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_FSDP = "torch.distributed.fsdp"
_Owned = tuple[str, nn.Module, str, nn.Parameter]


@dataclass(eq=False)
class Topology:
    """The model without its outer wrappers, and how its parameters are laid out.

    Attributes:
        root: the user's own module.
        wrapper: none, ddp, fsdp1, fsdp2, hsdp, tp, one of these + tp, pipeline, mixed, or what the
            engine is called.
        world_size: number of ranks of the job.
        device: where it computes, or most of it, if that is on several.
        outer: the outermost wrapper that is known around `root`, or `root`.
        ddps: every DistributedDataParallel in it, (FQN, wrapper).
        flat: FSDP1's flat parameters.
        tensor_meshes: the meshes its tensors are split over: tensor parallelism.
        cut: FQNs of modules of which each rank holds another part (pipeline stages).
        differ: FQNs of modules whose parameters differ by rank, though no wrapper spreads them.
        engine: reduces its gradients and steps it, instead of a wrapper and an optimizer of torch.
    """

    root: nn.Module
    wrapper: str
    world_size: int
    device: torch.device
    outer: nn.Module
    ddps: tuple[tuple[str, DistributedDataParallel], ...] = ()
    flat: tuple[FlatUnit, ...] = ()
    tensor_meshes: tuple[DeviceMesh, ...] = ()
    cut: frozenset[str] = frozenset()
    differ: frozenset[str] = frozenset()
    engine: Engine | None = None
    _replicated: dict[int, bool] | None = field(default=None, repr=False)
    _has_units: bool | None = field(default=None, repr=False)
    _walked: list[tuple[str, nn.Module]] | None = field(default=None, repr=False)
    _own: tuple[list[int], list[_Owned]] | None = field(default=None, repr=False)

    @property
    def ddp(self) -> DistributedDataParallel | None:
        """The DistributedDataParallel around the whole model, if there is one."""
        return next((ddp for fqn, ddp in self.ddps if not fqn), None)

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (FQN, module), parents first; each module once, wrapper classes left out."""
        return ((fqn, m) for fqn, m in self.walk() if inner(m) is None)

    def walk(self) -> Iterable[tuple[str, nn.Module]]:
        """Give (FQN, module) of everything in `root`, wrappers too, as `naming.walk` does."""
        return walk(self.root) if self._walked is None else self._walked

    def remember_modules(self) -> None:
        """Walk once for all that asks until `forget_modules`: the forward to come, to its step."""
        self._walked, self._own = list(walk(self.root)), None

    def forget_modules(self) -> None:
        """Look at the model itself again, whose modules may be others by now."""
        self._walked = self._own = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (FQN, parameter) as the optimizer knows them; a tied one once, by its first name.

        Under FSDP1 these are flat parameters or views of them: see `reduced_gradients`.
        """
        seen: set[int] = set()
        for fqn, _, _, parameter in self.placed_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield fqn, parameter

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (FQN, buffer) of every module, one that several share at each of its places."""
        for path, module in self.walk():
            for name, buffer in dictionaries(module)[1].items():
                if isinstance(buffer, Tensor):
                    yield (f"{path}.{name}" if path else name), buffer

    def units(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (FQN, module) of the FSDP2 units, which gather their parameters before they run."""
        if self._sharded_by_units():
            yield from ((fqn, m) for fqn, m in self.walk() if _is_unit(m))

    def _sharded_by_units(self) -> bool:
        if self._has_units is None:
            self._has_units = any(_is_unit(m) for m in self.root.modules())
        return self._has_units

    def leaves(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (FQN, parameter) whose own `.grad` hook sees the local gradient.

        All but FSDP's: an FSDP2 unit's are `gathered_parameters`, FSDP1's are in `flat`.
        """
        sharded = sharded_ids(self.root) if self._sharded_by_units() else ()
        for fqn, _, _, parameter in self.own_parameters():
            if id(parameter) not in sharded:
                yield fqn, parameter

    def own_parameters(self) -> Iterable[_Owned]:
        """Give (FQN, module, name, parameter) of all that no FSDP1 manages, tied ones once."""
        if self._walked is None:
            return self._list_own()
        # A sampled step asks several times. FSDP2 exchanges what is in the modules meanwhile.
        ids = [id(p) for _, module in self._walked for p in dictionaries(module)[0].values()]
        if self._own is None or self._own[0] != ids:
            self._own = ids, list(self._list_own())
        return self._own[1]

    def placed_parameters(self) -> Iterator[_Owned]:
        """Yield (FQN, module, name, parameter) of every place of a parameter.

        Where an FSDP2 unit holds it gathered, this is the sharded one all the same: the optimizer
        has that one, and the reduced gradient is there.
        """
        units = self._sharded_by_units()
        sharded = sharding.sharded_parameters(self.root) if units else ()
        stored = {(id(module), name): parameter for module, name, parameter in sharded}
        for fqn, module, name, parameter in held(self.walk()):
            yield fqn, module, name, stored.get((id(module), name), parameter)

    def _list_own(self) -> Iterator[_Owned]:
        flat = {id(unit.flat) for unit in self.flat}
        parts = {place for unit in self.flat for place in unit.places}
        seen: set[int] = set()
        for fqn, module, name, parameter in self.placed_parameters():
            if id(parameter) in seen or id(parameter) in flat or (id(module), name) in parts:
                continue
            seen.add(id(parameter))
            yield fqn, module, name, parameter

    def gradients_are_reduced(self) -> bool:
        """Whether `.grad` is the reduced gradient after this backward (not so in `no_sync`)."""
        return (
            self.engine is None
            and all(ddp.require_backward_grad_sync for _, ddp in self.ddps)
            and (
                not self.flat
                or all(sharding.is_synchronized(m) for m in self.outer.modules() if _is_fsdp1(m))
            )
        )

    def reduced_gradients(self) -> Iterator[tuple[str, Tensor, TpPlacement]]:
        """Yield (FQN, gradient, layout) of every parameter that has one, whatever the wrapper.

        A DTensor stands for its local part. The layout says nothing of the ranks of a
        tensor-parallel group where the gradient is a plain tensor or spread over other ranks.
        """
        if self.engine is not None:
            for fqn, part in self.engine_gradients():
                yield fqn, part.elements, SHARDED
            return
        for unit in self.flat:
            yield from unit.gradients()
        for fqn, _, _, parameter in self.own_parameters():
            if parameter.grad is not None:
                yield fqn, parameter.grad, self.gradient_layout(parameter)

    def engine_gradients(self) -> Iterator[tuple[str, EngineGradient]]:
        """Yield (FQN, this rank's part of a reduced gradient) as an engine has them."""
        if self.engine is not None:
            names = {id(parameter): fqn for fqn, _, _, parameter in self.own_parameters()}
            for part in self.engine.gradients():
                if id(part.parameter) in names:
                    yield names[id(part.parameter)], part

    def gradient_layout(self, parameter: Tensor) -> TpPlacement:
        """Return how the reduced gradient of a parameter lies, as of `reduced_gradients`."""
        return self._layout_as_held(parameter.grad, self.managed_by_ddp(parameter))

    def _layout_as_held(self, tensor: Tensor | None, managed: bool | None) -> TpPlacement:  # noqa: FBT001  (as `managed_by_ddp` says it)
        if is_dtensor(tensor):
            layout = reduced_layout(tensor)
            if managed is not None:
                return layout[0], layout[1] and managed
            if layout == REPLICATED and self._tensor_mesh(tensor.device_mesh):
                return layout_of(tensor.device_mesh, tensor.placements)
            return layout
        return REPLICATED if managed is not None or self.world_size == 1 else LOCAL

    def weight_layout(self, fqn: str, parameter: Tensor) -> TpPlacement:
        """Placement of a parameter as it is held between the steps.

        What tensor parallelism does not spread, all ranks of its group hold alike.
        """
        if self.is_apart(fqn.rpartition(".")[0]):
            return UNKNOWN
        layout = self._layout_as_held(parameter, self.managed_by_ddp(parameter))
        if not self.tensor_meshes or self.spans_tensor_meshes(parameter):
            return layout
        alike = REPLICATED if layout == LOCAL else layout
        return alike[0], alike[1] and self.leads_tensor_group()

    def layout(self, fqn: str, tensor: Tensor) -> TpPlacement:
        """Placement of an activation of `fqn`, or of its gradient: plain ones differ by rank.

        Of a plain tensor inside tensor parallelism nothing is known by itself.
        """
        if self.is_apart(fqn):
            return UNKNOWN
        if is_dtensor(tensor):
            return layout_of(tensor.device_mesh, tensor.placements)
        return UNKNOWN if self.tensor_meshes else LOCAL

    def is_apart(self, module: str) -> bool:
        """Whether `module` is another one on each rank that has one of this name."""
        vouched = self.wrapper != "none" and not self.cut
        return module in self.cut or (module in self.differ and not vouched)

    def is_alike(self, module: str) -> bool:
        """Whether other ranks are known to have the very same `module`, with all it keeps."""
        return self.world_size > 1 and not self.tensor_meshes and not self.is_apart(module)

    def spans_tensor_meshes(self, tensor: Tensor) -> bool:
        """Whether a tensor's own placements say how it lies over the tensor-parallel groups."""
        return is_dtensor(tensor) and self._tensor_mesh(tensor.device_mesh)

    def _tensor_mesh(self, mesh: DeviceMesh) -> bool:
        # Not taken out of the loop, which is mostly empty: a mesh takes 0.1 ms to say its ranks.
        return all(set(ranks_of(mesh)) >= set(ranks_of(m)) for m in self.tensor_meshes)

    def leads_tensor_group(self) -> bool:
        """Whether this rank is the one that counts what its tensor-parallel group holds alike."""
        return all(not any(m.get_coordinate() or ()) for m in self.tensor_meshes)

    def replicated_parameters(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (FQN, shard, local tensor) of what several ranks hold alike; shard "": whole."""
        for unit in self.flat:
            yield from unit.replicas()
        if self.world_size == 1:
            return
        for fqn, _, _, parameter in self.own_parameters():
            shard = self.replica_shard(parameter)
            if shard is not None:
                yield fqn, shard, _plain(parameter) if is_dtensor(parameter) else parameter

    def replica_shard(self, parameter: Tensor) -> str | None:
        """Name of the shard of `parameter` that other ranks hold as well: "" is the whole of it.

        None where nobody else holds the same part.
        """
        if is_dtensor(parameter):
            if self.managed_by_ddp(parameter) is not None:
                return shard_id(parameter)
            shard = shard_name(parameter)
            if (
                shard is None
                and self.tensor_meshes
                and not self._tensor_mesh(parameter.device_mesh)
            ):
                return shard_id(parameter)
            return shard
        whole = self.managed_by_ddp(parameter) is not None or bool(self.tensor_meshes)
        return "" if whole and self.world_size > 1 else None

    def managed_by_ddp(self, parameter: Tensor) -> bool | None:
        """Whether this rank is the first of those to whom a DDP gives the same gradient.

        None if no DDP reduces it. An engine keeps all parameters equal, as a DDP would.
        """
        if self.engine is not None:
            return self.world_size == 1 or dist.get_rank() == 0
        if self._replicated is None:
            self._replicated = dict(reduced_by_ddp(self.root, self.ddps))
        return self._replicated.get(id(parameter))


def describe(
    model: nn.Module,
    select: Callable[[str], bool] = lambda _: True,
    engine: Engine | None = None,
) -> Topology:
    """Recognise what wraps `model`; modules that `select` leaves out may be of any kind.

    Args:
        model: plain or wrapped.
        select: whether a module of this FQN is observed.
        engine: trains it, if one does.

    Raises:
        ModelRefused: a wrapper whose numbers would be wrong or silently absent.
    """
    root = model
    while isinstance(root, DistributedDataParallel) or _is_fsdp1(root) or _is_optimized(root):
        wrapped = inner(root)
        if wrapped is None:
            break
        root = wrapped
    if next(root.parameters(), None) is None:
        raise ModelRefused(
            f"{type(model).__name__} has no parameters, so there is nothing to train and nothing "
            "to observe. Pass the model that the optimizer updates."
        )
    walked = list(walk(model))
    refuse(walked, select, model)
    names = {id(m): fqn for fqn, m in walked if inner(m) is None}
    topology = Topology(
        root, "", dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
        device_of(root, model), model,
        tuple((f, m) for f, m in walked if isinstance(m, DistributedDataParallel)),
        flat_units(model, names), _tensor_meshes(root), engine=engine,
    )  # fmt: skip
    topology.wrapper = _wrapper(topology) if engine is None else engine.wrapper
    return topology


def outermost(model: nn.Module) -> nn.Module:
    """Inside a forward of `model`: what was put around it after `install`, or itself."""
    active = torch_private.active_ddp()
    within: nn.Module | None = active
    while within is not None and active is not None:  # something compiled may be in between
        if within is model:
            return active
        within = inner(within)
    return sharding.fsdp_wrapper(model) or model


def gathered_parameters(fqn: str, unit: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (FQN, parameter) that an FSDP2 unit holds unsharded now, inside its forward.

    These are the leaves of the autograd graph, so their gradients are local; the same objects
    serve every step. Parameters of modules that are never called themselves are among them.
    """
    sharded = sharded_ids(unit)
    for name, _, _, parameter in held(walk(unit)):
        if id(parameter) not in sharded:
            yield f"{fqn}.{name}" if fqn else name, parameter


def _wrapper(topology: Topology) -> str:
    """Name of what wraps the model."""
    kinds: set[str] = set()
    if topology.ddps or any(sharding.is_replicated(m) for m in topology.root.modules()):
        kinds.add("ddp")
    if topology.flat:
        kinds.add("fsdp1")
    for _, _, parameter in sharding.sharded_parameters(topology.root):
        replicated = is_dtensor(parameter) and parameter.placements[0].is_replicate()
        kinds.add("hsdp" if replicated else "fsdp2")
    if not kinds & {"fsdp2", "hsdp"} and any(True for _ in topology.units()):
        kinds.add("fsdp2")
    if len(kinds) > 1:
        return "mixed"
    name = next(iter(kinds), "")
    return "+".join(filter(None, (name, "tp" if topology.tensor_meshes else ""))) or "none"


def _tensor_meshes(root: nn.Module) -> tuple[DeviceMesh, ...]:
    """The distinct meshes over which tensors are split, FSDP's own axes left out."""
    sharded = sharded_ids(root)
    meshes = sharding.tensor_meshes(root)
    meshes += [p.device_mesh for p in root.parameters() if is_dtensor(p) and id(p) not in sharded]
    if not meshes:
        return ()
    gathered = {ranks_of(m): m for m in meshes}
    return tuple(gathered.values())


def _is_fsdp1(module: nn.Module) -> bool:
    return torch_private.is_a(module, _FSDP, "FullyShardedDataParallel")


def _is_unit(module: nn.Module) -> bool:
    return torch_private.is_a(module, _FSDP, "FSDPModule")


def _is_optimized(module: nn.Module) -> bool:
    return torch_private.is_a(module, "torch._dynamo.eval_frame", "OptimizedModule")


def _plain(tensor: DTensor) -> Tensor:
    with torch.no_grad():
        return tensor.to_local()


__all__ = ["ModelRefused", "Topology", "clean", "describe", "gathered_parameters", "outermost"]
