"""Which tensors to hook for a gradient that is still local, whatever wraps the model; its norms.

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
from ddpprobe.rank.hooks.pending_rows import unless_logged
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.stats.dense import local
from ddpprobe.rank.topology.describe import Topology, gathered_parameters
from ddpprobe.rank.topology.flat import FlatUnit
from ddpprobe.rank.torch_private import sharding
from ddpprobe.records.step import USED_NORM
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


class UsedNorms:
    """The norm of the gradients as the optimizers of a step are given them: after any clipping.

    Each optimizer is asked for its own when its `step` begins, as another may have none left by
    then, or none yet. On the device of the gradients; nobody waits.
    """

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._mine: frozenset[int] | None = None  # ids of the model's parameters
        self._known = True

    def begin_step(self) -> None:
        """Forget the step before."""
        self._parts, self._mine, self._known = [], None, True

    def add(self, optimizer: object, topology: Topology, scale: Tensor | None) -> None:
        """Take the gradients of the model's parameters that an optimizer is about to use.

        Args:
            optimizer: of torch; one without parameter groups has none.
            topology: the model.
            scale: [] by which it will divide them itself; None: they are what they are.
        """
        if self._mine is None:
            self._mine = frozenset(id(p) for _, p in topology.named_parameters())
        groups = getattr(optimizer, "param_groups", ())
        owned = [p for group in groups for p in group["params"] if id(p) in self._mine]
        found = [g if type(g) is Tensor else local(g) for p in owned if (g := p.grad) is not None]
        if not all(_has_norm(g) for g in found):
            self._known = False
            return
        devices: dict[torch.device, list[Tensor]] = {}
        for gradient in found:
            if gradient.numel():
                devices.setdefault(gradient.device, []).append(gradient)
        for dense in devices.values():
            self._parts.append(_norm(dense) if scale is None else divided(_norm(dense), scale))

    def tell(self, rows: StepRows, *, alone: bool = False) -> None:
        """Put the norm of all of them into the step's rows; nothing where it is not known.

        `alone`: there is no row of a gradient, so nothing else tells a norm of them.
        """
        whole = together(self._parts)
        if whole is not None and self._known:
            for name in (USED_NORM, "grad_norm") if alone else (USED_NORM,):
                rows.add_scalar(unless_logged(name), whole)


def _has_norm(gradient: Tensor) -> bool:
    """Whether it is a plain tensor with numbers; a sparse one has rows that repeat."""
    plain = type(gradient) in (Tensor, nn.Parameter) and not gradient.is_nested
    return plain and gradient.layout is torch.strided and not gradient.is_meta


def together(parts: list[Tensor]) -> Tensor | None:
    """Return the norm [] of parts whose norms [] these are, on one of their devices."""
    if not parts:
        return None
    # What the host can see goes to a device: the other way it would have to wait.
    whole, *others = sorted(parts, key=lambda part: not part.is_cpu)
    for part in others:
        whole = torch.hypot(_moved(whole, part), part)
    return whole


def _norm(dense: list[Tensor]) -> Tensor:
    norms = torch._foreach_norm(dense)  # noqa: SLF001  (what clip_grad_norm_ itself uses)
    whole: Tensor = torch.linalg.vector_norm(torch.stack(norms), dtype=torch.float64)
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
