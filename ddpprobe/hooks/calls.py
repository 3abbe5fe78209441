"""The hooks of a captured step: each call of a chosen module, its tensors and its surroundings.

Inputs are copied before the call, since the module may change them in place. Outputs are copied by
a hook behind all others, gradients by a tensor hook on the outputs, as in `eager`. What activation
checkpointing recomputes in the backward is the same call, and only tells its gradients.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ddpprobe import torch_private
from ddpprobe.dealing import REPLICATE, Placing
from ddpprobe.fuse import Fuse
from ddpprobe.hooks import stream_capture
from ddpprobe.hooks.bundle import Bundle, Key
from ddpprobe.hooks.eager import Clock
from ddpprobe.hooks.guest import Guest, take_off
from ddpprobe.hooks.handed import Handed, Kept, of_sum
from ddpprobe.hooks.layouts import Layouts
from ddpprobe.hooks.outputs import leaves
from ddpprobe.hooks.stream_capture import outside_capture
from ddpprobe.hooks.structure import arguments
from ddpprobe.stats.dense import dtype_name
from ddpprobe.topology import parts, placing
from ddpprobe.topology.describe import Topology
from ddpprobe.topology.parts import OWN, Lies
from ddpprobe.topology.placement import UNKNOWN, Layout, is_dtensor
from ddpprobe.topology.placing import Origin

_DEVICES = ("cpu", "cuda")


@final
class _Call:
    """A call that is under way.

    Attributes:
        micro, number: which call of the module it is.
        given: what its plain input tells of its output's layout.
        inputs: the tensors it was given, and how often they had been changed in place.
        origins: DTensors that it computed, by leaf.
        told: what the header says of it.
    """

    __slots__ = ("given", "inputs", "micro", "number", "origins", "told")

    def __init__(self, micro: int, number: int, given: Kept | None) -> None:
        self.micro, self.number, self.given = micro, number, given
        self.inputs: list[tuple[weakref.ref[Tensor], int]] = []
        self.origins: dict[str, Origin] = {}
        self.told: dict[str, Any] = {}


@final
class CallHooks:
    """Hooks of the chosen modules, for the forwards of one step.

    Args:
        topology: the model.
        clock: tells micro-batch and evaluation.
        fuse: contains whatever goes wrong in here.
    """

    def __init__(self, topology: Topology, clock: Clock, fuse: Fuse) -> None:
        fuse = outside_capture(fuse, partial(stream_capture.warn, "a part of the model is"))
        self._topology, self._clock, self._fuse = topology, clock, fuse
        self._bundle: Bundle | None = None
        self._chosen: Mapping[str, nn.Module] = {}
        self._handles: list[RemovableHandle] = []
        self._running: dict[int, list[_Call]] = {}
        self._calls: Counter[tuple[str, int]] = Counter()  # by module and micro-batch
        self._handed = Handed()
        self._slots: dict[tuple[str, str, str], int] = {}  # of the modules' tensors
        self._doubtful: list[tuple[Key, int]] = []  # whose layout may be concluded, of this step
        self._concluded: dict[int, Layout] = {}  # by slot
        self._layouts = Layouts(topology, self._concluded.__setitem__, fuse)
        self._on_gradient = fuse.guard(self._gradient)

    def begin(self, bundle: Bundle) -> None:
        """Fill `bundle` from now on."""
        self._bundle = bundle
        self._calls.clear()
        self._doubtful.clear()

    def attach(self, chosen: Mapping[str, nn.Module]) -> None:
        """Hang the hooks, inside the root's pre-hooks; {FQN: module} are those that are kept."""
        self.detach()
        self._chosen = chosen
        self._handles += self._layouts.attach()
        if self._layouts.active:
            for fqn, parameter in self._topology.leaves():
                self._layouts.name(fqn, parameter)
        for fqn, module in self._topology.named_modules():
            spread = self._layouts.active and any(map(is_dtensor, module.parameters(recurse=False)))
            if fqn in chosen or spread:
                self._hang(fqn, module)
        root = chosen.get("")
        if root is not None:  # its own call has begun: its pre-hooks are running
            call = self._call("", None)
            call.told = self._tell("", root, call)
            self._running[id(root)] = [call]

    def detach(self) -> None:
        """Take every hook off."""
        take_off(self._handles)
        self._running.clear()
        self._layouts.end()

    def end(self) -> None:
        """All is taken: say how the tensors lie of which it was not known before."""
        self.detach()
        self._handed.forget()
        bundle, self._bundle = self._bundle, None
        if bundle is not None:
            for key, slot in self._doubtful:
                layout = self._concluded.get(slot, UNKNOWN)
                bundle.lay(key, partial(self._concluded_of, key.kind, layout))

    def of_parameter(self, fqn: str) -> Layout:
        """Layout, within a tensor-parallel group, of the gradient of a plain parameter."""
        return self._layouts.of_parameter(fqn)

    def _hang(self, fqn: str, module: nn.Module) -> None:
        def guest(hook: Any, takes: int = 0) -> Guest:  # noqa: ANN401  (a bound method of ours)
            return Guest(self._fuse.guard(partial(hook, fqn)), takes)

        if fqn:  # the root is past its pre-hooks
            before = guest(self._begins, 3)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if self._layouts.active:
            computed = guest(self._computed)
            self._handles.append(module.register_forward_hook(computed, prepend=True))
        # always_call: a forward that raises must not leave a call under way for ever.
        after, add = guest(self._ends, 4), module.register_forward_hook
        self._handles.append(add(after, with_kwargs=True, always_call=True))

    def _begins(
        self, fqn: str, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if self._bundle is None or self._clock.evaluating or torch_private.in_backward():
            return
        call = self._call(fqn, self._handed.kept(module, args, kwargs))
        self._running.setdefault(id(module), []).append(call)
        if fqn not in self._chosen:
            return
        call.told = self._tell(fqn, module, call)
        self._inputs(fqn, call, args, kwargs)

    def _inputs(
        self, fqn: str, call: _Call, args: tuple[object, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if self._bundle is None:
            return
        call.told.update(arguments(args, kwargs))
        for given in (args, kwargs):
            for leaf, tensor in leaves(given):
                key = Key(fqn, "input", fqn, leaf, call.micro, call.number)
                laid = placing.of(tensor) if is_dtensor(tensor) else self._handed.layout(tensor)
                if not tensor.is_inference():
                    call.inputs.append((weakref.ref(tensor), tensor._version))  # noqa: SLF001  (public by docs)
                self._bundle.add(key, tensor, parts.activation(self._topology, fqn, tensor, laid))
                if laid is None and not is_dtensor(tensor) and self._layouts.active:
                    self._layouts.bind(tensor, self._slot(key), None, again=False)

    def _computed(self, fqn: str, module: nn.Module, args: object, output: object) -> None:
        under_way = self._running.get(id(module))
        if under_way and not torch_private.in_backward():
            for leaf, tensor in leaves(output):
                if is_dtensor(tensor):
                    under_way[-1].origins[leaf] = placing.origin(tensor)

    def _ends(
        self, fqn: str, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any],
        output: object,
    ) -> None:  # fmt: skip
        if self._bundle is None or self._clock.evaluating:
            return
        if torch_private.in_backward():
            self._recomputed(fqn, output)
            return
        under_way = self._running.get(id(module))
        if not under_way:
            return
        call = under_way.pop()
        if not fqn:  # seen now for the first time
            self._inputs(fqn, call, args, kwargs)
        changed = [
            t is not None and t._version != version  # noqa: SLF001  (public by docs)
            for t, version in ((ref(), version) for ref, version in call.inputs)
        ]
        call.told["inputs_changed"] = any(changed) if fqn else None
        for leaf, tensor in leaves(output):
            if torch_private.is_functorch(tensor):
                continue
            laid = self._handed.learn(tensor, call.origins.get(leaf), call.given)
            if fqn in self._chosen:
                self._output(fqn, call, leaf, tensor, laid)

    def _output(
        self, fqn: str, call: _Call, leaf: str, tensor: Tensor, laid: Placing | None
    ) -> None:
        if self._bundle is None:
            return
        key = Key(fqn, "output", fqn, leaf, call.micro, call.number)
        self._bundle.add(key, tensor, parts.activation(self._topology, fqn, tensor, laid))
        gradient = key._replace(kind="grad_output")
        if self._layouts.active and not is_dtensor(tensor):
            slot = self._slot(key) if laid is None else None
            self._layouts.bind(tensor, slot, self._slot(gradient), again=False)
        self._tap(gradient, tensor, of_sum(laid) if laid is not None else None)

    def _recomputed(self, fqn: str, output: object) -> None:
        """In reentrant checkpointing only what is recomputed has a graph.

        Which call it was cannot be told of a module that was called several times.
        """
        micro = max(self._clock.micro, 0)
        if fqn not in self._chosen or self._calls[fqn, micro] != 1:
            return
        for leaf, tensor in leaves(output):
            key = Key(fqn, "grad_output", fqn, leaf, micro)
            laid = placing.of(tensor) if is_dtensor(tensor) else None
            if self._layouts.active and laid is None:
                self._layouts.bind(tensor, None, self._slot(key), again=True)
            self._tap(key, tensor, laid)

    def _tap(self, key: Key, tensor: Tensor, laid: Placing | None) -> None:
        # A leaf of autograd would keep the hook for ever.
        if tensor.requires_grad and not tensor.is_leaf and self._bundle is not None:
            tensor.register_hook(_Gradient(self, self._bundle.step, key, laid))

    def gradient(self, step: int, key: Key, laid: Placing | None, gradient: Tensor) -> None:
        """Keep the gradient of an output, if it is one of this step's."""
        if self._bundle is not None and self._bundle.step == step:
            self._on_gradient(key, laid, gradient)

    def _gradient(self, key: Key, laid: Placing | None, gradient: Tensor) -> None:
        if self._bundle is None:
            return
        if is_dtensor(gradient):
            laid = placing.of(gradient)
        with torch_private.outside_modes():
            self._bundle.add(
                key, gradient, parts.activation(self._topology, key.fqn, gradient, laid)
            )

    def _call(self, fqn: str, given: Kept | None) -> _Call:
        micro = max(self._clock.micro, 0)
        number = self._calls[fqn, micro]
        self._calls[fqn, micro] += 1
        return _Call(micro, number, given)

    def _tell(self, fqn: str, module: nn.Module, call: _Call) -> dict[str, Any]:
        """Tell the header of a call that begins, and keep the state of the random numbers."""
        bundle = self._bundle
        if bundle is None:
            return {}
        told = {"micro": call.micro, "call": call.number, "rng": "before", "autocast": autocast()}
        bundle.module(fqn, module)["calls"].append(told)
        for device, state in random_states(module, self._topology.device):
            bundle.add(Key(fqn, "rng", "", device, call.micro, call.number), state, OWN)
        return told

    def _slot(self, key: Key) -> int:
        slot = self._slots.setdefault((key.kind, key.fqn, key.leaf), len(self._slots))
        self._doubtful.append((key, slot))
        return slot

    def _concluded_of(self, kind: str, layout: Layout, shape: tuple[int, ...], lies: Lies) -> Lies:
        """Take what followed from the whole forward for a plain tensor of tensor parallelism."""
        alike = layout[0] == "local"
        if lies["kind"] == "local" and alike:
            return parts.over_tensor_group(self._topology, shape)
        replica = lies["kind"] == "dtensor" and all(a[0] == REPLICATE for a in lies["axes"])
        if replica and kind == "grad_output" and not alike:
            return OWN  # a rank's gradient of it has become its own behind it
        return lies


@final
class _Gradient:
    """A tensor hook that holds no tensor: one that did would never be freed."""

    __slots__ = ("_hooks", "_key", "_laid", "_step")

    def __init__(self, hooks: CallHooks, step: int, key: Key, laid: Placing | None) -> None:
        self._hooks, self._step = weakref.ref(hooks), step
        self._key, self._laid = key, laid

    def __call__(self, gradient: Tensor | None) -> None:
        hooks = self._hooks()
        if hooks is not None and gradient is not None and not torch.compiler.is_compiling():
            hooks.gradient(self._step, self._key, self._laid, gradient)


def random_states(module: nn.Module, device: torch.device) -> list[tuple[str, Tensor]]:
    """State of the random numbers, by kind of device: the host's own copies.

    Args:
        module: the one that is called; of several GPUs that of its parameters counts.
        device: where most of the model computes.
    """
    states = [("cpu", torch.get_rng_state())]
    if device.type != "cuda":
        return states
    there = (p.device for p in module.parameters() if p.is_cuda)
    return [*states, ("cuda", torch.cuda.get_rng_state(next(there, device)))]


def autocast() -> dict[str, str]:
    """Return {kind of device: dtype} of the devices that autocast is on for."""
    return {
        device: dtype_name(torch.get_autocast_dtype(device))
        for device in _DEVICES
        if torch.is_autocast_enabled(device)
    }
