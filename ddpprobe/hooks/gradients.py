"""Which tensors to hook for a gradient that is still local, whatever wraps the model.

Plain, DDP and tensor-parallel parameters are leaves themselves. FSDP2 puts the unsharded parameters
into the modules only while a unit runs (the same objects on every step). FSDP1 has one flat leaf
per unit, whose gradient is that of the whole unit, unsharded, before the reduction (measured, for
both values of use_orig_params, every sharding strategy, and inside `no_sync`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddpprobe.fuse import Fuse
from ddpprobe.hooks.guest import Guest
from ddpprobe.topology.describe import Topology, gathered_parameters
from ddpprobe.topology.flat import FlatUnit


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
        hook = Guest(fuse.guard(partial(unit_runs, fqn)))
        handles.append(unit.register_forward_pre_hook(hook))
        if unit is topology.root:
            hook(unit)
    return handles
