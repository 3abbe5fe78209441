"""Which tensors to hook for a gradient that is still local, whatever wraps the model.

Plain, DDP and tensor-parallel parameters are leaves themselves. FSDP2 puts the unsharded parameters
into the modules only while a unit runs (the same objects on every step). FSDP1 has one flat leaf
per unit, whose gradient is that of the whole unit, unsharded, before the reduction (measured, for
both values of use_orig_params, every sharding strategy, and inside `no_sync`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddpprobe.rank.hooks.copy_safe_hook import CopySafeObserver
from ddpprobe.rank.stats.dense import local
from ddpprobe.rank.topology.describe import Topology, gathered_parameters
from ddpprobe.rank.topology.flat import FlatUnit
from ddpprobe.rank.torch_private import sharding
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.stopwatch import Caller


def seek(
    topology: Topology,
    fuse: Fuse,
    found: Callable[[str, Tensor], None],
    found_flat: Callable[[FlatUnit], None],
) -> list[RemovableHandle]:
    """At a training forward: report the leaves, some now and some when their unit runs.

    Args:
        topology: the model, which is inside its forward pre-hooks.
        fuse: contains whatever goes wrong later.
        found: called with (FQN, parameter); with the same one more than once.
        found_flat: called with each flat parameter of FSDP1.

    Returns the hooks that wait for the units; one forward finds everything for good.
    """
    for flat in topology.flat:
        found_flat(flat)
    for fqn, parameter in topology.leaves():
        found(fqn, parameter)

    def unit_runs(fqn: str, unit: nn.Module, *_: object) -> None:
        for name, parameter in gathered_parameters(fqn, unit):
            found(name, parameter)

    handles = []
    for fqn, unit in topology.units():
        hook = CopySafeObserver(fuse.guard(partial(unit_runs, fqn), Caller.MODULE))
        handles.append(unit.register_forward_pre_hook(hook))
        if unit is topology.root:
            hook(unit)
    return handles


def stay_local(topology: Topology) -> bool:
    """Whether every `.grad` is this rank's own until the backward is over, and reduced only then.

    So it is where nobody reduces it, and under a DDP that copies its buckets back at the end
    (measured, with communication hooks and unused parameters too). Not so where the gradients are
    the buckets, which are reduced meanwhile, or where parameters are sharded.
    """
    if topology.world_size == 1:
        return topology.wrapper in ("none", "ddp")
    return (
        topology.ddp is not None
        and topology.wrapper == "ddp"
        and not any(sharding.is_replicated(m) for m in topology.root.modules())
        and not topology.ddp.gradient_as_bucket_view
        and topology.ddp.mixed_precision is None
    )


def norm(topology: Topology) -> Tensor | None:
    """L2 norm of this rank's gradients as they are now, float64 [] on the device of the last."""
    found = [
        g if type(g) is Tensor else local(g)
        for _, p in topology.named_parameters()
        if (g := p.grad) is not None
    ]
    devices: dict[torch.device, list[Tensor]] = {}
    for gradient in found:
        if gradient.layout == torch.strided and gradient.numel():
            devices.setdefault(gradient.device, []).append(gradient)
    # What the host can see goes to a device: the other way it would have to wait.
    parts = [_norm(dense) for _, dense in sorted(devices.items(), key=lambda d: d[0].type != "cpu")]
    if not parts:
        return None
    whole = parts[0]
    for part in parts[1:]:
        whole = torch.hypot(_moved(whole, part), part)
    return whole


def _norm(dense: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(dense)  # noqa: SLF001  (what clip_grad_norm_ itself uses)
    whole: Tensor = torch.linalg.vector_norm(torch.stack([n.double() for n in norms]))
    return whole


def divided(norm: Tensor, scale: Tensor) -> Tensor:
    """Return a norm [] divided by a loss scale [], which may be on another device."""
    together = scale.is_cpu or scale.device == norm.device
    return (norm if together else _moved(norm, scale)) / scale


def _moved(number: Tensor, there: Tensor) -> Tensor:
    """Return a number [] on the device of another one, which is not the CPU; nobody waits."""
    if number.is_cpu:
        return torch.full((), number.item(), dtype=number.dtype, device=there.device)
    return number.to(there.device, non_blocking=True)
