"""What cannot be observed truthfully, and what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpprobe.errors import ModelRefused
from ddpprobe.rank import torch_private
from ddpprobe.rank.topology.engine import Engine
from ddpprobe.rank.topology.placement import is_dtensor
from ddpprobe.rank.torch_private import sharding

# Engines that keep parameters or gradients where torch's own names do not show them.
_ENGINES = ("apex", "colossalai", "deepspeed", "fairscale", "horovod", "megatron", "oslo", "smp")
# Where tensors can be read, and the host hears of it without waiting; ROCm calls itself cuda.
# What is on meta has no memory yet, and gets it by `to_empty`.
_DEVICES = ("cpu", "cuda", "meta")
_ENGINE_INSTALL = (
    "With ZeRO of stage 1 or 2, write from ddpprobe.integrations.deepspeed import install, and "
    "install(engine) with what deepspeed.initialize() returned."
)
_PLAIN_DISPATCH = Tensor.__torch_dispatch__


def refuse_module(fqn: str, module: nn.Module) -> None:
    """Refuse a module whose numbers would be wrong or silently absent.

    Raises:
        ModelRefused: with its name.
    """
    where = f"module {fqn!r}" if fqn else "the model"
    leave_out = _leave_out(fqn)
    if isinstance(module, DataParallel):
        raise ModelRefused(
            f"{where} is a DataParallel: its replicas live for one forward only. "
            "Use DistributedDataParallel."
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise ModelRefused(
            f"{where} is a ScriptModule, which takes no hooks. Pass the eager model{leave_out}."
        )
    engine = type(module).__module__.split(".")[0]
    if any(kind.__name__ == "DeepSpeedEngine" for kind in type(module).__mro__):
        raise ModelRefused(
            f"{where} is an engine of DeepSpeed, which takes the gradients away before anybody "
            f"sees them reduced. {_ENGINE_INSTALL}"
        )
    if engine in _ENGINES:
        raise ModelRefused(
            f"{where} is a {type(module).__name__} of {engine}, which keeps gradients where torch "
            "does not show them: they would be missing or wrong here. Use torch's own FSDP, "
            f"fully_shard or DistributedDataParallel{leave_out}."
        )


def refuse_parameter(owner: str, name: str, parameter: Tensor) -> None:
    """Refuse a parameter whose elements cannot be read where it stands.

    Raises:
        ModelRefused: with its name and its type.
    """
    fqn = f"{owner}.{name}" if owner else name
    _refuse_device(fqn, parameter)
    if is_dtensor(parameter):
        return
    if nn.parameter.is_lazy(parameter):
        raise ModelRefused(
            f"parameter {fqn!r} is not initialized yet. Run one forward of the model before "
            "ddpprobe.install(model), as its optimizer needs, too."
        )
    if hasattr(parameter, "ds_id"):
        raise ModelRefused(
            f"parameter {fqn!r} is partitioned by DeepSpeed ZeRO-3: an empty tensor stands in its "
            f"place. Use torch's fully_shard{_leave_out(owner)}."
        )
    if getattr(type(parameter), "__torch_dispatch__", _PLAIN_DISPATCH) is not _PLAIN_DISPATCH:
        kind = type(parameter)
        raise ModelRefused(
            f"parameter {fqn!r} is a {kind.__module__}.{kind.__qualname__}, a tensor subclass "
            f"whose elements ddpprobe cannot read. Convert it to a plain tensor{_leave_out(owner)}."
        )


def _refuse_device(fqn: str, parameter: Tensor) -> None:
    device = parameter.device_mesh.device_type if is_dtensor(parameter) else parameter.device.type
    if device not in _DEVICES:
        raise ModelRefused(
            f"parameter {fqn!r} is on {device!r}. ddpprobe observes models on the CPU and on CUDA "
            "devices (NVIDIA, and AMD through ROCm). On others it has never run: a NaN might pass "
            "without a word. Set DDPPROBE_DISABLE=1 to train there without it."
        )


def _refuse_localized(fqn: str, module: nn.Module) -> None:
    """Refuse DDP around tensor parallelism, also where the modules it concerns are left out.

    torch keeps the parameters outside of the modules from the first forward on, and puts DTensors
    in their place, which are none. So there are no gradients to be found, and nothing says which
    ranks hold the same activations: they would be counted twice.
    """
    own = module._parameters.values()  # noqa: SLF001  (torch's own dictionary, as in `walk`)
    swapped = any(is_dtensor(v) and not v.is_leaf for v in vars(module).values())
    if any(p is not None and sharding.is_localized(p) for p in own) or swapped:
        raise ModelRefused(
            f"module {fqn!r} is tensor-parallel within DistributedDataParallel(device_mesh=...): "
            "torch takes its parameters out of it in the first forward, so their gradients would "
            "be missing here and activations counted twice. Use "
            "torch.distributed.fsdp.fully_shard over the same mesh."
        )


def refuse(
    modules: list[tuple[str, nn.Module]], select: Callable[[str], bool], model: nn.Module
) -> None:
    """Refuse what is wrong in the chosen ones of `modules`, (FQN, module).

    Raises:
        ModelRefused: the first of them, by name.
    """
    replicated = any(
        isinstance(m, DistributedDataParallel) or sharding.is_replicated(m) for _, m in modules
    )
    for fqn, module in modules:
        if replicated:
            _refuse_localized(fqn, module)
        if select(fqn):
            refuse_module(fqn, module)
            for name, parameter in module.named_parameters(recurse=False):
                refuse_parameter(fqn, name, parameter)
    for part in torch_private.flat_parts(model):
        if sharding.is_extended(part.flat):
            raise ModelRefused(
                f"parameter {part.name!r} is sharded by FullyShardedDataParallel (FSDP1) over "
                "tensor-parallel parts. Use torch.distributed.fsdp.fully_shard with "
                "tensor parallelism."
            )


def refuse_taken(parameters: Iterable[tuple[str, Tensor]], engine: Engine | None) -> None:
    """Refuse a model whose gradients DeepSpeed takes away before anybody sees them reduced.

    No step of it would ever be seen to end, unless its engine is asked.

    Raises:
        ModelRefused: the first parameter (FQN, parameter) of which this is known.
    """
    for fqn, parameter in parameters if engine is None else ():
        if hasattr(parameter, "_hp_mapping"):
            raise ModelRefused(
                f"parameter {fqn!r} is trained by an engine of DeepSpeed. {_ENGINE_INSTALL}"
            )


def _leave_out(fqn: str) -> str:
    return f", or leave it out with exclude={fqn + '*'!r}" if fqn else ""
