"""The hooks of a capture: on the model while it is open, and never in the way.

A forward hook in front of all others sees DTensors before a tensor-parallel module makes them
local; one after all others takes what the module returns. Gradients come through tensor hooks on
the outputs. Every hook returns None and enters through the fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any, final

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddpprobe.inspect.capture.inference import Inference
from ddpprobe.inspect.capture.sites import CallTensors, CapturedSite, CapturedSites
from ddpprobe.inspect.capture.targets import Targets
from ddpprobe.rank import torch_private
from ddpprobe.rank.capture.module_calls import GradientHook, ModuleCalls, of_sum
from ddpprobe.rank.hooks.copy_safe_hook import CopySafeObserver, take_off
from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.stats.dense import local
from ddpprobe.rank.topology import dtensor_spec
from ddpprobe.rank.topology.placement import is_dtensor
from ddpprobe.records.shard_spec import ShardSpec
from ddpprobe.rundir.fuse import Fuse


@final
class ModuleWatcher:
    """Hangs on the chosen modules and fills the sites.

    Args:
        targets: what to watch.
        sites: where tensors go.
        fuse: contains whatever goes wrong in here.
        inputs, grad: whether inputs and gradients are taken, too.
        every: take each N-th forward of the root; the others run without hooks on the modules.
        inference: concludes what tensor-parallel ranks hold alike.

    Attributes:
        groups: ranks of each tensor-parallel mesh that was seen.
    """

    def __init__(
        self, targets: Targets, sites: CapturedSites, fuse: Fuse, inference: Inference, *,
        inputs: bool, grad: bool, every: int,
    ) -> None:  # fmt: skip
        self._targets, self._sites, self._fuse = targets, sites, fuse
        self._inference = inference
        self._inputs, self._grad, self._every = inputs, grad, every
        self._handles: list[RemovableHandle] = []
        self._sampler: list[RemovableHandle] = []
        self._under_way: ModuleCalls[CallTensors] = ModuleCalls()
        self._forwards = 0
        self._tapped: set[str] = set()  # leaves tapped by the front hook of the call that ends now
        self._on_gradient = fuse.guard(partial(_outside_modes, self._gradient))
        self.groups: set[tuple[int, ...]] = set()

    def open(self) -> None:
        """Hang the hooks; if that fails half-way none stays."""
        with ExitStack() as undo:
            undo.callback(self.close)
            if self._every == 1:
                self._attach()
            if self._every > 1 or self._inference.active:
                hook = self._guest(self._sample, 3)
                register = self._targets.root.register_forward_pre_hook
                self._sampler.append(register(hook, with_kwargs=True, prepend=True))
            undo.pop_all()

    def close(self) -> None:
        """Take every hook off. Gradients that arrive later are ignored."""
        self._detach()
        self._inference.close()
        take_off(self._sampler)
        self._under_way.forget()

    def _guest(self, target: Callable[..., object], takes: int = 0) -> CopySafeObserver:
        return CopySafeObserver(self._fuse.guard(target), takes)

    def _attach(self) -> bool:
        """Hang the hooks on the modules as they are now; return whether the root has some."""
        targets = {id(module): name for name, module in self._targets.modules.items()}
        root = False
        for module in self._targets.root.modules():
            name = targets.get(id(module))
            spread = any(is_dtensor(p) for p in module.parameters(recurse=False))
            if name is None and not spread:
                continue  # neither asked for, nor does it tell how tensors are spread
            site = self._sites.by_name[name] if name is not None else None
            add = self._handles.append
            if module is self._targets.root:
                root = True
            if module is not self._targets.root or self._every == 1:
                begin = self._guest(partial(self._begin, site), 3)
                add(module.register_forward_pre_hook(begin, with_kwargs=True))
            first = self._guest(partial(self._first, site))
            add(module.register_forward_hook(first, prepend=True))
            # always_call: a forward that raises must not leave a call under way for ever.
            last = self._guest(partial(self._last, site))
            add(module.register_forward_hook(last, always_call=True))
        return root

    def _detach(self) -> None:
        take_off(self._handles)

    def _sample(self, root: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any]) -> None:
        if torch_private.in_backward():
            return
        self._inference.close()
        if self._forwards % self._every == 0:
            self._inference.begin()
        self._forwards += 1
        if self._every == 1:
            return
        self._detach()
        self._under_way.drop()
        # The root's own begin is here: hooks that come or go inside its pre-hooks fire wrongly.
        if (self._forwards - 1) % self._every == 0 and self._attach():
            name = next((n for n, m in self._targets.modules.items() if m is root), None)
            site = self._sites.by_name[name] if name is not None else None
            self._begin(site, root, args, kwargs)

    def _begin(
        self,
        site: CapturedSite | None,
        module: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        if torch_private.in_backward():
            return
        call = CallTensors()
        self._under_way.begin(module, call, args, kwargs)
        if site is None or not self._inputs:
            return
        for given in (args, kwargs):
            for leaf, tensor in leaves(given):
                if not torch_private.is_functorch(tensor):
                    shard_spec = self._under_way.shard_spec(tensor)
                    self._sites.take(site, call, "input", leaf, tensor, shard_spec)

    def _first(
        self, site: CapturedSite | None, module: nn.Module, args: object, output: object
    ) -> None:
        for parameter in module.parameters(recurse=False):
            if is_dtensor(parameter):
                self._note(dtensor_spec.of(parameter))
        self._tapped.clear()
        call = None
        if not torch_private.in_backward():
            self._under_way.computed(module, output)
            call = self._under_way.current(module)
        for leaf, tensor in leaves(output):
            if is_dtensor(tensor):
                self._note(dtensor_spec.of(tensor))
                if site is not None and self._grad and self._tap(site, call, leaf, tensor):
                    self._tapped.add(leaf)

    def _last(
        self, site: CapturedSite | None, module: nn.Module, args: object, output: object
    ) -> None:
        if torch_private.in_backward():
            if site is not None and self._grad:
                self._tap_again(site, output)
            return
        ended = self._under_way.end(module, output)
        if ended is None or site is None:
            return
        call, outputs = ended
        for leaf, tensor, shard_spec in outputs:
            self._sites.take(site, call, "output", leaf, tensor, shard_spec)
            if not is_dtensor(tensor):
                self._inference.bind(site.name, leaf, tensor, again=False)
            if self._grad and leaf not in self._tapped:
                self._tap(site, call, leaf, tensor)
        if outputs:
            self._sites.finish(site, call)
        elif next(leaves(output), None) is not None:
            site.skipped["a tensor inside vmap, grad or jvp has no readable values"] += 1

    def _tap_again(self, site: CapturedSite, output: object) -> None:
        for leaf, tensor in leaves(output):
            if leaf not in self._tapped:
                self._tap(site, None, leaf, tensor)
            if not is_dtensor(tensor):
                self._inference.bind(site.name, leaf, tensor, again=True)

    def _note(self, shard_spec: ShardSpec) -> None:
        if len(shard_spec.ranks) > 1:
            self.groups.add(shard_spec.ranks)

    def _tap(self, site: CapturedSite, call: CallTensors | None, leaf: str, tensor: Tensor) -> bool:
        """Wait for the gradient of an output; return whether it can come.

        A leaf of autograd would keep the hook for ever. In reentrant checkpointing only the
        recomputation has a graph; in the other kind only the first forward's hooks fire.
        """
        if not tensor.requires_grad or tensor.is_leaf:
            return False
        if call is None:
            call = self._sites.matching(site, leaf, tensor)
        if call is not None and leaf not in call.tapped:
            call.tapped.add(leaf)
            refer, shard_spec = self._sites.refer(call), self._under_way.shard_spec(tensor)
            tensor.register_hook(
                GradientHook(self._on_gradient, site.name, refer, leaf, shard_spec)
            )
        return True

    def _gradient(
        self,
        name: str,
        refer: Callable[[], CallTensors | None],
        leaf: str,
        shard_spec: ShardSpec | None,
        gradient: Tensor,
    ) -> None:
        if not (self._handles or self._sampler):
            return  # the capture is closed
        site = self._sites.by_name[name]
        site.gradients[leaf] += 1
        call = refer()
        if call is None:
            return
        if is_dtensor(gradient):
            shard_spec = dtensor_spec.of(gradient)
        elif shard_spec is not None:
            shard_spec = of_sum(shard_spec)
        replica = shard_spec is not None and shard_spec.label == "replicated"
        if replica and self._inference.doubts((name, "grad", leaf)):
            # Torch takes it for granted that a replica that was made local has a replica for its
            # gradient. Where it met what is each rank's own, so is its gradient.
            gradient, shard_spec = local(gradient), None
        self._sites.take(site, call, "grad", leaf, gradient, shard_spec)


def _outside_modes(target: Callable[..., object], *args: object) -> None:
    with torch_private.outside_modes():
        target(*args)
