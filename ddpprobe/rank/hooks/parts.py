"""The forwards of a root that is never called itself: parts of it are called instead.

A Lightning module on one device is only asked for its `training_step`; a `ModuleList` or a plain
container has no forward at all. What is called then are modules inside of it. In the first training
step all of them carry two hooks. Those that no other module of the model called are the *heads*:
from then on only they carry any, and if it was the root alone, nothing but the root does.
"""

from __future__ import annotations

from typing import final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ddpprobe.rank import torch_private
from ddpprobe.rank.hooks import fast_path
from ddpprobe.rank.hooks.copy_safe_hook import CopySafeObserver, take_off
from ddpprobe.rank.topology.describe import Topology


def is_container(root: nn.Module) -> bool:
    """Whether a training loop may never call `root` itself.

    It has no forward of its own, or it has Lightning's `training_step`, which is called instead.
    """
    has_forward = type(root).forward is not nn.Module.forward or "forward" in vars(root)
    return not has_forward or callable(getattr(root, "training_step", None))


@final
class PartHooks:
    """Tells the calls that no other module of the model makes from those inside of them.

    Attributes:
        armed: parts may be called without the root.
    """

    def __init__(self, topology: Topology) -> None:
        self.armed = is_container(topology.root)
        self._topology = topology
        self._inside: nn.Module | None = None  # the outermost call under way
        self._heads: dict[nn.Module, None] = {}
        self._chosen = False
        self._handles: list[RemovableHandle] = []

    def hang(self, before: CopySafeObserver, after: CopySafeObserver) -> None:
        """Hang two hooks on the heads, and on every module while they are not known."""
        if not self.armed or self._handles:
            return
        modules = list(self._heads) if self._chosen else [m for _, m in self._topology.walk()]
        fused = fast_path.fused(modules)
        for module in modules:
            # The root has hooks of its own, and a ScriptModule takes none.
            bare = isinstance(module, torch.jit.ScriptModule) or module in fused
            if not (bare or module is self._topology.root):
                self._handles.append(module.register_forward_pre_hook(before))
                self._handles.append(module.register_forward_hook(after, always_call=True))

    def unhang(self) -> None:
        """Take them off."""
        self._inside = None
        take_off(self._handles)

    def enters(self, module: nn.Module) -> bool:
        """Whether a call of `module` that begins is an outermost one, and no recomputation."""
        if not self.armed:
            return module is self._topology.root
        if self._inside is not None or torch_private.in_backward():
            return False
        self._inside = module
        return True

    @property
    def in_a_part(self) -> bool:
        """Whether the outermost call under way is not the root's."""
        return self._inside is not None and self._inside is not self._topology.root

    def is_only_one(self, module: nn.Module) -> bool:
        """Whether training calls this part and no other: it stands for the model then."""
        return self.armed and self._chosen and list(self._heads) == [module]

    def trains(self) -> None:
        """Hear that the outermost call under way is one with gradients: it makes a head."""
        if self._inside is not None and not self._chosen:
            self._heads[self._inside] = None

    def leaves(self, module: nn.Module) -> bool:
        """Whether a call of `module` that ends is the outermost one."""
        if not self.armed:
            return module is self._topology.root
        if self._inside is not module or torch_private.in_backward():
            return False
        self._inside = None
        return True

    def choose(self) -> bool:
        """At the end of a step: keep the heads. Returns whether other hooks are to be hung."""
        if not self.armed or self._chosen or not self._heads:
            return False
        self._chosen = True
        self.armed = list(self._heads) != [self._topology.root]
        self.unhang()
        return True
