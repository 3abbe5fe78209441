"""The moment at which training begins: what `install()` waits for where it came too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddpprobe.rank.hooks.copy_safe_hook import CopySafeObserver, take_off
from ddpprobe.rank.hooks.root import called
from ddpprobe.rank.topology.describe import Topology


@final
class FirstForward:
    """Calls `act` once, in the first forward with gradients of a model, before it computes.

    It listens to every module, as the loop may call parts of the model without the model.

    Args:
        topology: the model.
        act: called with the module whose call begins.
        always: in the first forward, with gradients or without.
    """

    def __init__(
        self, topology: Topology, act: Callable[[nn.Module], object], *, always: bool = False
    ) -> None:
        outer, self._handles = called(topology), list[RemovableHandle]()

        def begins(module: nn.Module, *_: object) -> None:
            if (torch.is_grad_enabled() or always) and self.cancel():
                act(topology.root if module is outer else module)

        self._hook = CopySafeObserver(begins)
        self._modules = [outer, *(m for _, m in topology.walk())]
        self.hang()

    def hang(self) -> None:
        """Hang the hooks again after `cancel`."""
        self._handles = [
            module.register_forward_pre_hook(self._hook, prepend=True)
            for module in self._modules
            if not isinstance(module, torch.jit.ScriptModule)
        ]

    def cancel(self) -> bool:
        """Take the hooks off. Returns whether they still waited."""
        waited = bool(self._handles)
        take_off(self._handles)
        return waited
