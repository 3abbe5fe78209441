"""The hooks of a captured step: each call of a chosen module, its tensors and its surroundings.

Inputs are copied before the call, since the module may change them in place. Outputs are copied by
a hook after all others, gradients by a tensor hook on the outputs, as in `eager`. What activation
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

from ddpprobe.rank import torch_private
from ddpprobe.rank.capture.module_calls import GradientHook, ModuleCalls, of_sum
from ddpprobe.rank.capture.step_capture import PackKey, StepCapture
from ddpprobe.rank.capture.structure import arguments
from ddpprobe.rank.hooks import stream_capture
from ddpprobe.rank.hooks.copy_safe_hook import CopySafeObserver, take_off
from ddpprobe.rank.hooks.eager import StepPosition
from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.hooks.stream_capture import outside_capture
from ddpprobe.rank.hooks.tp_inference import TpInference
from ddpprobe.rank.stats.dense import dtype_name
from ddpprobe.rank.topology import parts
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.topology.placement import UNKNOWN, TpPlacement, is_dtensor
from ddpprobe.records.shard_spec import OWN, REPLICATE, ShardSpec, SpecJson
from ddpprobe.rundir.fuse import Fuse
from ddpprobe.rundir.stopwatch import Caller

_DEVICES = ("cpu", "cuda")


@final
class _Call:
    """A call that is under way.

    Attributes:
        micro, number: which call of the module it is.
        inputs: the tensors it was given, and how often they had been changed in place.
        header: what the pack's header says of it.
    """

    __slots__ = ("header", "inputs", "micro", "number")

    def __init__(self, micro: int, number: int) -> None:
        self.micro, self.number = micro, number
        self.inputs: list[tuple[weakref.ref[Tensor], int]] = []
        self.header: dict[str, Any] = {}


@final
class CallHooks:
    """Hooks of the chosen modules, for the forwards of one step.

    Args:
        topology: the model.
        clock: tells micro-batch and evaluation.
        fuse: contains whatever goes wrong in here.
    """

    def __init__(self, topology: Topology, clock: StepPosition, fuse: Fuse) -> None:
        fuse = outside_capture(fuse, partial(stream_capture.warn, "a part of the model is"))
        self._topology, self._clock, self._fuse = topology, clock, fuse
        self._step_capture: StepCapture | None = None
        self._chosen: Mapping[str, nn.Module] = {}
        self._handles: list[RemovableHandle] = []
        self._under_way: ModuleCalls[_Call] = ModuleCalls()
        self._calls: Counter[tuple[str, int]] = Counter()  # by module and micro-batch
        self._slots: dict[tuple[str, str, str], int] = {}  # of the modules' tensors
        self._doubtful: list[tuple[PackKey, int]] = []  # in this step, with their slots
        self._inferred: dict[int, TpPlacement] = {}  # by slot
        self._inference = TpInference(topology, self._inferred.__setitem__, fuse)
        self._on_gradient = fuse.guard(self._gradient, Caller.TENSOR)

    def begin(self, step_capture: StepCapture) -> None:
        """Fill `step_capture` from now on."""
        self._step_capture = step_capture
        self._calls.clear()
        self._doubtful.clear()

    def attach(self, chosen: Mapping[str, nn.Module]) -> None:
        """Hang the hooks, inside the root's pre-hooks; {FQN: module} are those that are kept."""
        self.detach()
        self._chosen = chosen
        self._handles += self._inference.attach()
        if self._inference.active:
            for fqn, parameter in self._topology.leaves():
                self._inference.name(fqn, parameter)
        for fqn, module in self._topology.named_modules():
            spread = self._inference.active and any(
                map(is_dtensor, module.parameters(recurse=False))
            )
            if fqn in chosen or spread:
                self._hang(fqn, module)
        root = chosen.get("")
        if root is not None:  # its own call has begun: its pre-hooks are running
            call = self._call("")
            call.header = self._header("", root, call)
            self._under_way.begin(root, call)

    def detach(self) -> None:
        """Take every hook off."""
        take_off(self._handles)
        self._under_way.drop()
        self._inference.end()

    def end(self) -> None:
        """After the step: set the placements that only the whole forward could tell."""
        self.detach()
        self._under_way.forget()
        step_capture, self._step_capture = self._step_capture, None
        if step_capture is not None:
            for key, slot in self._doubtful:
                placement = self._inferred.get(slot, UNKNOWN)
                step_capture.lay(key, partial(self._settled, key.kind, placement))

    def of_parameter(self, fqn: str) -> TpPlacement:
        """Placement, within a tensor-parallel group, of the gradient of a plain parameter."""
        return self._inference.of_parameter(fqn)

    def _hang(self, fqn: str, module: nn.Module) -> None:
        def guest(hook: Any, takes: int = 0) -> CopySafeObserver:  # noqa: ANN401  (a bound method of ours)
            return CopySafeObserver(self._fuse.guard(partial(hook, fqn), Caller.MODULE), takes)

        if fqn:  # the root is past its pre-hooks
            before = guest(self._begins, 3)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        if self._inference.active:
            computed = guest(self._computed)
            self._handles.append(module.register_forward_hook(computed, prepend=True))
        # always_call: a forward that raises must not leave a call under way for ever.
        after, add = guest(self._ends, 4), module.register_forward_hook
        self._handles.append(add(after, with_kwargs=True, always_call=True))

    def _begins(
        self, fqn: str, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if self._step_capture is None or self._clock.evaluating or torch_private.in_backward():
            return
        call = self._call(fqn)
        self._under_way.begin(module, call, args, kwargs)
        if fqn not in self._chosen:
            return
        call.header = self._header(fqn, module, call)
        self._inputs(fqn, call, args, kwargs)

    def _inputs(
        self, fqn: str, call: _Call, args: tuple[object, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if self._step_capture is None:
            return
        call.header.update(arguments(args, kwargs))
        for given in (args, kwargs):
            for leaf, tensor in leaves(given):
                key = PackKey(fqn, "input", fqn, leaf, call.micro, call.number)
                shard_spec = self._under_way.shard_spec(tensor)
                if not tensor.is_inference():
                    call.inputs.append((weakref.ref(tensor), tensor._version))  # noqa: SLF001  (public by docs)
                spec = parts.activation(self._topology, fqn, tensor, shard_spec)
                self._step_capture.add(key, tensor, spec)
                if shard_spec is None and self._inference.active:
                    self._inference.bind(tensor, self._slot(key), None, again=False)

    def _computed(self, fqn: str, module: nn.Module, args: object, output: object) -> None:
        if not torch_private.in_backward():
            self._under_way.computed(module, output)

    def _ends(
        self, fqn: str, module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, Any],
        output: object,
    ) -> None:  # fmt: skip
        if self._step_capture is None or self._clock.evaluating:
            return
        if torch_private.in_backward():
            self._recomputed(fqn, output)
            return
        ended = self._under_way.end(module, output)
        if ended is None:
            return
        call, outputs = ended
        if not fqn:  # seen now for the first time
            self._inputs(fqn, call, args, kwargs)
        changed = [
            t is not None and t._version != version  # noqa: SLF001  (public by docs)
            for t, version in ((ref(), version) for ref, version in call.inputs)
        ]
        call.header["inputs_changed"] = any(changed) if fqn else None
        if fqn not in self._chosen:
            return
        for leaf, tensor, shard_spec in outputs:
            key = PackKey(fqn, "output", fqn, leaf, call.micro, call.number)
            spec = parts.activation(self._topology, fqn, tensor, shard_spec)
            self._step_capture.add(key, tensor, spec)
            gradient = key._replace(kind="grad_output")
            if self._inference.active and not is_dtensor(tensor):
                slot = self._slot(key) if shard_spec is None else None
                self._inference.bind(tensor, slot, self._slot(gradient), again=False)
            self._tap(gradient, tensor, of_sum(shard_spec) if shard_spec is not None else None)

    def _recomputed(self, fqn: str, output: object) -> None:
        """In reentrant checkpointing only what is recomputed has a graph.

        Which call it was cannot be told of a module that was called several times.
        """
        micro = max(self._clock.backward.micro_or(self._clock.micro), 0)
        if fqn not in self._chosen or self._calls[fqn, micro] != 1:
            return
        for leaf, tensor in leaves(output):
            key = PackKey(fqn, "grad_output", fqn, leaf, micro)
            if self._inference.active and not is_dtensor(tensor):
                self._inference.bind(tensor, None, self._slot(key), again=True)
            self._tap(key, tensor, None)

    def _tap(self, key: PackKey, tensor: Tensor, shard_spec: ShardSpec | None) -> None:
        # A leaf of autograd would keep the hook for ever.
        if tensor.requires_grad and not tensor.is_leaf and self._step_capture is not None:
            step = self._step_capture.step
            tensor.register_hook(GradientHook(self._on_gradient, step, key, shard_spec))

    def _gradient(
        self, step: int, key: PackKey, shard_spec: ShardSpec | None, gradient: Tensor
    ) -> None:
        """Keep the gradient of an output, if it is one of this step's."""
        if self._step_capture is None or self._step_capture.step != step:
            return
        spec = parts.activation(self._topology, key.fqn, gradient, shard_spec)
        self._step_capture.add(key, gradient, spec)

    def _call(self, fqn: str) -> _Call:
        micro = max(self._clock.micro, 0)
        number = self._calls[fqn, micro]
        self._calls[fqn, micro] += 1
        return _Call(micro, number)

    def _header(self, fqn: str, module: nn.Module, call: _Call) -> dict[str, Any]:
        """Begin the header of a call, and keep the state of the random numbers."""
        step_capture = self._step_capture
        if step_capture is None:
            return {}
        header = {"micro": call.micro, "call": call.number, "rng": "before", "autocast": autocast()}
        step_capture.module(fqn, module)["calls"].append(header)
        for device, state in random_states(module, self._topology.device):
            step_capture.add(PackKey(fqn, "rng", "", device, call.micro, call.number), state, OWN)
        return header

    def _slot(self, key: PackKey) -> int:
        """Return the slot of a tensor whose placement may follow from the whole forward."""
        slot = self._slots.setdefault((key.kind, key.fqn, key.leaf), len(self._slots))
        self._doubtful.append((key, slot))
        return slot

    def _settled(
        self, kind: str, placement: TpPlacement, shape: tuple[int, ...], spec: SpecJson
    ) -> SpecJson:
        """Return what follows from the whole forward for a plain tensor of tensor parallelism."""
        alike = placement[0] == "local"
        if spec["kind"] == "local" and alike:
            return parts.over_tensor_group(self._topology, shape)
        replica = spec["kind"] == "dtensor" and all(a[0] == REPLICATE for a in spec["axes"])
        if replica and kind == "grad_output" and not alike:
            return OWN  # a rank's gradient of it has become its own after it
        return spec


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
