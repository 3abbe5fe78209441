"""A stand-in for a model: the same classes and attributes, fake tensors, no hook and no wrapper.

The forward of the stand-in can then be run for its shapes. Nothing it does reaches the model: its
modules, containers and tensors are its own, and without FSDP's and TP's hooks there is no
collective. Parameters have their global shapes, as in the model before it was wrapped.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from functools import partial
from types import MethodType
from typing import Any, cast, final

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from ddpprobe.errors import SummaryError
from ddpprobe.inspect.summary.parameters import UNINITIALIZED, HeldParameter, held_tensor
from ddpprobe.rank import torch_private
from ddpprobe.rank.topology.naming import inner, own_class

_BARE = nn.Module().__dict__


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside DDP, FSDP1, torch.compile and checkpoint wrappers, or itself."""
    while True:
        wrapped = module.module if isinstance(module, DataParallel) else inner(module)
        if wrapped is None:
            return module
        module = wrapped


@final
class Skeleton:
    """Makes the stand-in; to be used inside `mode`.

    Args:
        mode: what `torch_private.fake_tensors()` gave.
        held: the parameters, by (id of their module, name).

    Attributes:
        modules: the stand-in of each module, by the id of the original.
        device: where inputs are put; the first parameter's, and cpu for meta.
    """

    def __init__(self, mode: Any, held: Mapping[tuple[int, str], HeldParameter]) -> None:  # noqa: ANN401
        self.modules: dict[int, nn.Module] = {}
        self._mode = mode
        self._held = held
        self._fakes: dict[object, Tensor] = {}
        self._containers: dict[int, Any] = {}
        self._kept: list[object] = []  # what ids stand for must not be freed meanwhile
        self._place: torch.device | None = None
        self._owned: dict[int, list[str]] = {}
        for owner, name in held:
            self._owned.setdefault(owner, []).append(name)
        first = next(iter(held.values()), None)
        self.device = _real(first.device) if first else torch.device("cpu")

    def build(self, module: nn.Module) -> nn.Module:
        """Return the stand-in of a module and everything below it."""
        module = unwrapped(module)
        if id(module) in self.modules:
            return self.modules[id(module)]
        if isinstance(module, torch.jit.ScriptModule):
            raise SummaryError(
                f"{type(module).__name__} is a ScriptModule, whose forward cannot be run on fake "
                "tensors. Call ddpprobe.summary(model) without inputs, or pass the eager model."
            )
        new = object.__new__(own_class(module))
        self.modules[id(module)] = new
        parameters, buffers, children = torch_private.dictionaries(module)
        mine = {
            n: self._parameter(self._held[id(module), n]) for n in self._owned.get(id(module), ())
        }
        state = {name: copy.copy(value) for name, value in _BARE.items() if "hook" in name}
        state["_parameters"] = {**dict.fromkeys(parameters), **mine}
        state["_buffers"] = {name: self.translate(buffer) for name, buffer in buffers.items()}
        state["_modules"] = {n: child and self.build(child) for n, child in children.items()}
        state["_compiled_call_impl"] = None
        new.__dict__.update(state)
        for name, value in module.__dict__.items():
            if name not in state and name not in mine:
                new.__dict__[name] = self.translate(value)
        if isinstance(module, nn.SyncBatchNorm):  # its own forward is a collective, of like shapes
            new.__dict__["forward"] = partial(nn.BatchNorm1d.forward, cast("nn.BatchNorm1d", new))
        return new

    def translate(self, value: Any) -> Any:  # noqa: ANN401, PLR0911  (any attribute or argument)
        """Return a value in which tensors are fake and modules are stand-ins."""
        if isinstance(value, Tensor):
            return self.fake(held_tensor(value), value)
        if isinstance(value, nn.Module):
            return self.build(value)
        if isinstance(value, MethodType) and id(value.__self__) in self.modules:
            return MethodType(value.__func__, self.modules[id(value.__self__)])
        if isinstance(value, partial):
            return partial(
                *self.translate((value.func, *value.args)), **self.translate(value.keywords)
            )
        if isinstance(value, (MutableMapping, list)):
            return self._container(value)
        if type(value) is tuple or hasattr(value, "_fields"):
            parts = [self.translate(part) for part in value]
            return tuple(parts) if type(value) is tuple else type(value)(*parts)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            new = copy.copy(value)
            for field in dataclasses.fields(value):
                part = self.translate(getattr(value, field.name, None))
                object.__setattr__(new, field.name, part)
            return new
        return value

    def inputs(self, value: Any) -> Any:  # noqa: ANN401
        """Translate arguments of the forward: their tensors lie where the model does."""
        self._place = self.device
        return self.translate(value)

    def fake(self, held: HeldParameter, tensor: Tensor | None = None) -> Tensor:
        """Return the fake tensor of these facts: always the same one for the same tensor."""
        known = self._fakes.get(held.identity)
        if known is None:
            device = self._place or _real(held.device)
            if tensor is not None and tensor.layout != torch.strided:
                known = cast("Tensor", self._mode.from_tensor(tensor))
            elif held.stride is None:
                known = torch.empty(held.shape, dtype=held.dtype, device=device)
            else:
                known = torch.empty_strided(
                    held.shape, held.stride, dtype=held.dtype, device=device
                )
            if tensor is None or tensor.is_leaf:
                known.requires_grad_(held.trainable)
            self._fakes[held.identity] = known
            self._kept.append(tensor)
        return known

    def _parameter(self, held: HeldParameter) -> Tensor:
        if held.placement == UNINITIALIZED:
            raise SummaryError(
                "a lazy module has no parameters yet. Run one real forward first, or call "
                "ddpprobe.summary(model) without inputs."
            )
        known = self._fakes.get(held.identity)
        if not isinstance(known, nn.Parameter):
            known = nn.Parameter(self.fake(held).detach(), requires_grad=held.trainable)
            self._fakes[held.identity] = known
        return known

    def _container(self, value: Any) -> Any:  # noqa: ANN401
        if id(value) not in self._containers:
            new = self._containers[id(value)] = copy.copy(value)
            self._kept.append(value)
            for key in list(new) if isinstance(new, MutableMapping) else range(len(new)):
                new[key] = self.translate(value[key])
        return self._containers[id(value)]


def _real(device: torch.device) -> torch.device:
    """Return a device on which a forward may make tensors of its own: not meta."""
    return torch.device("cpu") if device.type == "meta" else device
