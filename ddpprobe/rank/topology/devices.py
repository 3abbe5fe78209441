"""Where a model computes, which is not always where its parameters wait."""

from __future__ import annotations

import torch
from torch import nn

from ddpprobe.rank.topology.placement import is_dtensor
from ddpprobe.rank.torch_private import sharding

_WAITING = ("cpu", "meta")  # kinds of device with parameters that may be used elsewhere


def device_of(root: nn.Module, outer: nn.Module) -> torch.device:
    """Return where a model computes, or its first part if that is on several GPUs.

    Parameters on the CPU say little beside others on a GPU, or under a wrapper that moves them
    there for their use (offload by FSDP1 and FSDP2).

    Args:
        root: the user's own module.
        outer: the outermost wrapper around it.
    """
    for parameter in root.parameters():
        if is_dtensor(parameter):
            kind = parameter.device_mesh.device_type
            if kind != parameter.device.type:
                return torch.device(kind, torch.get_device_module(kind).current_device())
        if parameter.device.type not in _WAITING:
            return parameter.device
    for unit in outer.modules():
        device = sharding.compute_device(unit)
        if device is not None and device.type not in _WAITING:
            return device
    return torch.device("cpu")
