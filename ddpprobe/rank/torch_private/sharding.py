"""The private names of torch that only sharded models need; a second half of `torch_private`.

The same rules hold: each with a stated degradation, and nothing private anywhere else.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ddpprobe.errors import ModelRefused
from ddpprobe.rank.torch_private import is_a

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

_CONVERSIONS = 8  # autograd nodes between a converted input and the plain one
_REHEARSAL_DEPTH = 24  # frames between the stage and a hook of its module, DDP and FSDP included
_FSDP = "torch.distributed.fsdp"
_LOCAL_SGD = "torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook"
_SPECS = ("_unsharded_dtensor_spec", "_tp_spec")  # the second is that of torch 2.6


def tensor_meshes(model: nn.Module) -> list[DeviceMesh]:
    """Return the meshes over which FSDP2's parameters are spread besides FSDP's own axes.

    Degradation: refused. Taken for one that is only sharded, a model that is tensor-parallel as
    well would have its activations counted once for each rank of a group.

    Raises:
        ModelRefused: there is such a mesh, and its name is not known.
    """
    found: list[DeviceMesh] = []
    for held in _held_by_fsdp2(model):
        if getattr(held, "is_dtensor", False):
            specs = (getattr(held, name, None) for name in _SPECS)
            spec = next((s for s in specs if s is not None), None)
            if spec is None:
                raise ModelRefused(
                    "the model is sharded by fully_shard over tensor-parallel parts, and this "
                    "torch does not say over which mesh those lie. Use another torch, or leave "
                    "tensor parallelism out."
                )
            found.append(spec.mesh)
    return found


def sharded_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield (module, name, DTensor) of FSDP2's parameters, also while a unit holds them gathered.

    A root unit keeps them gathered from its forward on until its backward.

    Degradation: nothing; gathered parameters are then taken for unsharded ones.
    """
    for held in _held_by_fsdp2(model):
        info = held._module_info  # noqa: SLF001
        yield info.module, info.param_name, held.sharded_param
        for module, name in zip(info.shared_modules, info.shared_param_names, strict=True):
            yield module, name, held.sharded_param


def gathered(
    model: nn.Module, are_comparable: Callable[[Tensor, Tensor], bool]
) -> Iterator[tuple[Tensor, Tensor] | None]:
    """Yield the first trained parameter of each unit of FSDP2 that is gathered now.

    That is this rank's part of the gathered one, which may be of a lower precision, and its shard.
    None stands for a unit with no trained parameter whose whole and shard can be compared.

    Degradation: None for each unit.
    """
    for group in _groups_of_fsdp2(model):
        trained = [held for held in group.fsdp_params if held.sharded_param.requires_grad]
        states = {getattr(getattr(h, "sharded_state", None), "name", None) for h in trained}
        if states & {"UNSHARDED", None}:
            pairs = (_part_and_shard(held, are_comparable) for held in trained)
            yield next((pair for pair in pairs if pair is not None), None)


def _part_and_shard(
    held: Any,  # noqa: ANN401  (private objects)
    are_comparable: Callable[[Tensor, Tensor], bool],
) -> tuple[Tensor, Tensor] | None:
    full: Any = getattr(held, "_unsharded_param", None)
    mesh = held.mesh_info
    full = full.to_local() if hasattr(full, "to_local") else full  # tensor-parallel as well
    shard, size = held.sharded_param.to_local(), getattr(mesh, "shard_mesh_size", 1)
    if full is None or not are_comparable(full, shard):
        return None
    dim, rank = held.fsdp_placement.dim, getattr(mesh, "shard_mesh_rank", 0)
    parts = full.detach().chunk(size, dim)
    if shard.numel() and rank < len(parts) and parts[rank].shape == shard.shape:
        return parts[rank], shard.detach()
    return None


def _held_by_fsdp2(model: nn.Module) -> Iterator[Any]:
    for group in _groups_of_fsdp2(model):
        yield from group.fsdp_params


def _groups_of_fsdp2(model: nn.Module) -> Iterator[Any]:
    for unit in model.modules():
        if is_a(unit, _FSDP, "FSDPModule"):
            state: Any = getattr(unit, "_get_fsdp_state", lambda: None)()
            one = getattr(state, "_fsdp_param_group", None)
            yield from getattr(state, "_fsdp_param_groups", [one] if one else [])


def fsdp_wrapper(root: nn.Module) -> nn.Module | None:
    """Return the FullyShardedDataParallel (FSDP1) that was put directly around `root`.

    torch keeps no way back to it, so this is one pass over the collector's objects.

    Degradation: None; a model wrapped after `install` then shows its flat parameters only.
    """
    kind = getattr(sys.modules.get(_FSDP), "FullyShardedDataParallel", None)
    if kind is None:
        return None
    wrappers = (o for o in gc.get_referrers(kind) if type(o) is kind)
    inner = "_fsdp_wrapped_module"
    return next((o for o in wrappers if o._modules.get(inner) is root), None)  # noqa: SLF001


def is_replicated(module: nn.Module) -> bool:
    """Whether `module` was given to torch's composable `replicate()`, which is DDP inside.

    Degradation: False; its gradients are then taken for unreduced ones.
    """
    contract = sys.modules.get("torch.distributed._composable.contract")
    registry = getattr(contract, "_get_registry", None)
    found: Any = registry(module) if registry is not None else None
    return found is not None and "replicate" in found


def is_joined(ddp: nn.Module) -> bool:
    """Whether a DDP is or was in its `join()`, which lets ranks take unlike numbers of steps.

    Degradation: False; ranks that part there are then told as replicas that differ.
    """
    return bool(getattr(getattr(ddp, "_join_config", None), "enable", False))


def is_local_sgd(ddp: nn.Module) -> bool:
    """Whether torch's hook of post-local SGD keeps the next gradients of a DDP within some ranks.

    Degradation: False; replicas that are to part until they are averaged are then told as a fault.
    """
    states = [state for _, state in getattr(ddp, "_comm_hooks", ())]
    own: list[Any] = [state for state in states if is_a(state, _LOCAL_SGD, "PostLocalSGDState")]
    return any(state.iter >= state.start_localSGD_iter for state in own)


def has_weights_of_another(ddp: nn.Module) -> bool:
    """Whether the last `join()` of a DDP ended with the weights of a rank that had more steps.

    Degradation: False; what that rank has made of the weights is then told of this one, too.
    """
    last = getattr(ddp, "_authoritative_rank", None)
    return last is not None and last != getattr(ddp, "_distributed_rank", last)


def is_extended(flat: Tensor) -> bool:
    """Whether a flat parameter of FSDP1 is made of DTensors (FSDP1 over tensor parallelism).

    Degradation: False.
    """
    return any(e is not None for e in getattr(flat, "_param_extensions", None) or ())


def is_localized(parameter: Tensor) -> bool:
    """Whether DDP put it in the place of a DTensor, whose part it is (`device_mesh=`).

    Degradation: False.
    """
    return hasattr(parameter, "_st_info")


def is_synchronized(unit: nn.Module) -> bool:
    """Whether this backward of an FSDP1 unit reduces its gradients (not so in `no_sync`).

    Degradation: True; the gradient is then known by its size alone.
    """
    return bool(getattr(unit, "_sync_gradients", True))


def localized(tensor: Tensor) -> tuple[DeviceMesh, Any, Any] | None:
    """Return (mesh, placements, placements of its gradient or None) of a fresh `to_local()`.

    Degradation: None; the layout is then inferred from shapes, or unknown.
    """
    node: Any = tensor.grad_fn
    spec = getattr(node, "dtensor_spec", None)
    if spec is None or type(node).__name__ != "_ToTorchTensorBackward":
        return None
    return spec.mesh, spec.placements, getattr(node, "grad_placements", None)


def declared(plain: Tensor, converted: Tensor) -> tuple[DeviceMesh, Any] | None:
    """Return (mesh, placements) with which `plain` was made the DTensor that became `converted`.

    Degradation: None; a layout that was declared and changed at once is then not learned.
    """
    stack: list[Any] = [converted.grad_fn]
    for _ in range(_CONVERSIONS):
        node = stack.pop() if stack else None
        if node is None:
            return None
        if type(node).__name__ == "_FromTorchTensorBackward":
            source, output = node.next_functions[0]
            made = (source, output) == (plain.grad_fn, plain.output_nr)
            if made or getattr(source, "variable", None) is plain:
                placements = getattr(node, "forward_input_placements", None)
                mesh = getattr(node, "forward_input_device_mesh", None)
                return None if placements is None or mesh is None else (mesh, placements)
            return None
        stack = [parent for parent, _ in node.next_functions]
    return None


def passed_on(tensor: Tensor) -> tuple[Any, int] | None:
    """Return (node, output) of the tensor that FSDP2 handed on to a unit as this one.

    Degradation: None; what a unit is given is then another tensor than what was computed.
    """
    node = tensor.grad_fn
    if node is None or type(node).__name__ != "RegisterPostBackwardFunctionBackward":
        return None
    sources = node.next_functions
    return sources[tensor.output_nr] if tensor.output_nr < len(sources) else None


def rehearses() -> bool:
    """Whether a `PipelineStage` only tries the model on memory it never wrote, to learn shapes.

    It does so before its first step, with grad enabled, forward and backward.

    Degradation: False; the first step then has a micro-batch too many, of arbitrary values.
    """
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    frame = sys._getframe(1)  # noqa: SLF001  (CPython's own, documented)
    for _ in range(_REHEARSAL_DEPTH):
        if frame.f_back is None:
            return False
        frame = frame.f_back
        if frame.f_code.co_name == "_forward_metadata_inference":
            return True
    return False


def compute_device(unit: nn.Module) -> torch.device | None:
    """Return where an FSDP1 unit computes, while its parameters may wait on the CPU (offload).

    None for every other module.

    Degradation: None; the model is then taken for one that computes where its parameters wait.
    """
    if not is_a(unit, _FSDP, "FullyShardedDataParallel"):
        return None
    found = getattr(unit, "compute_device", None)
    return found if type(found).__name__ == "device" else None


def split_factor(placement: Placement) -> int:
    """Into how many pieces `_StridedShard` cuts before it deals them out; 1 for a plain shard.

    Degradation: 1; the region of a parameter under FSDP2 and tensor parallelism is then wrong, so
    `self_test` asks for the name.
    """
    return int(getattr(placement, "split_factor", 1))


def self_test() -> dict[str, bool]:
    """Whether each private name is still there."""
    placements = importlib.import_module("torch.distributed.tensor.placement_types")
    strided = getattr(placements, "_StridedShard", None)
    return {"strided_shard": strided is not None and split_factor(strided(0, split_factor=2)) == 2}
