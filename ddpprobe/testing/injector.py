"""Plants a `Fault` in a model through hooks, at one step and micro-batch of one rank.

Until its step a fault is one idle hook on the root module; it fires once and is gone.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from ddpprobe.rank.hooks.copy_safe_hook import take_off
from ddpprobe.rank.topology.describe import describe
from ddpprobe.testing.fault import Fault, one_of

logger = logging.getLogger("ddpprobe.testing")


class Injection:
    """A planted fault, as returned by `inject`; also a context manager.

    `fired` becomes True on the rank of the fault when it has happened.
    """

    def __init__(
        self, root: nn.Module, target: nn.Module, fault: Fault, first_step: int = 0
    ) -> None:
        self.fault = fault
        self.fired = False
        self._root = weakref.ref(root)
        self._target = weakref.ref(target)
        self._step = first_step
        self._micro = -1
        self._stepped = False
        self._armed: RemovableHandle | None = None
        self._handles = [
            root.register_forward_pre_hook(_Hook(self._on_root_forward)),
            register_optimizer_step_post_hook(self._on_optimizer_step),
        ]

    def remove(self) -> None:
        """Take the fault back; harmless if it has fired or was removed before."""
        self._disarm()
        take_off(self._handles)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _on_optimizer_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        # Parameters are looked up every time: FSDP2 replaces them when it wraps.
        # A step before any forward is none: loading a checkpoint may take one to make the state.
        root = self._root()
        if root is not None and self._micro >= 0:
            ours = {id(p) for p in root.parameters()}
            self._stepped |= any(id(p) in ours for g in optimizer.param_groups for p in g["params"])

    def _on_root_forward(self, _root: nn.Module, _args: object) -> None:
        if not torch.is_grad_enabled():
            return  # an eval pass
        # The step advances at the first training forward after it, not in the optimizer's hook:
        # two optimizers on one model, or one inside another, are still one step.
        self._micro += 1
        if self._stepped:
            self._step, self._micro, self._stepped = self._step + 1, 0, False
        self._disarm()
        due = (self._step, self._micro) == (self.fault.step, self.fault.micro)
        target = self._target()
        if due and target is not None and self.fault.rank == _rank():
            # In front of every other hook, so that whoever observes the module sees the fault.
            hook = _Hook(self._on_target_forward)
            self._armed = target.register_forward_hook(hook, prepend=True)

    def _on_target_forward(self, _module: nn.Module, _args: object, output: object) -> object:
        if self.fired:
            return None
        hit = self._hit_forward if self.fault.phase == "forward" else self._hit_backward
        replaced, found = _replace_first(output, hit)
        if found:
            return replaced
        if self.fault.phase == "backward":
            return None  # reentrant checkpointing: the output requires grad when it is recomputed
        msg = (
            f"{self.fault}: the module returned no floating-point tensor but "
            f"{type(output).__name__}; name a module that does"
        )
        raise RuntimeError(msg)

    def _hit_forward(self, output: Tensor) -> Tensor:
        self._say_fired()
        return _spoil(output, self.fault)

    def _hit_backward(self, output: Tensor) -> Tensor | None:
        if not output.requires_grad:
            return None
        # On a copy of our own: autograd drops the hooks of a view whose base is written to.
        own = output.clone()
        own.register_hook(self._on_gradient)
        return own

    def _on_gradient(self, grad: Tensor) -> Tensor:
        if self.fired or not self._handles:
            return grad
        self._say_fired()
        return _spoil(grad, self.fault)

    def _say_fired(self) -> None:
        self.fired = True
        logger.warning("ddpprobe.testing: planted %s", self.fault)

    def _disarm(self) -> None:
        if self._armed is not None:
            self._armed.remove()
            self._armed = None


def inject(model: nn.Module, spec: str | Fault, first_step: int = 0) -> Injection:
    """Plant one fault in a model, plain or wrapped by DDP or FSDP; call it on every rank.

    Steps are counted from now on by torch's optimizer hooks, for optimizers that own parameters of
    the model; micro-batches by forward passes of the root with gradients enabled. A step that a
    GradScaler skips is no step here: its forward passes count as micro-batches.

    Args:
        model: the model as it is trained, or the module inside the wrapper.
        spec: a `Fault`, or text such as "nan:step=60,rank=1,module=blocks.2.mlp,phase=backward".
        first_step: number of the first step from now on, if the training was resumed.

    Raises:
        ValueError: the specification is wrong, there is no such module or rank, or the model's
            wrapper is not supported.
    """
    fault = Fault.parse(spec) if isinstance(spec, str) else spec
    topology = describe(model)
    modules = dict(topology.named_modules())
    if fault.module not in modules:
        one_of("module", fault.module, [name for name in modules if name])
    if dist.is_initialized() and fault.rank >= dist.get_world_size():
        msg = f"rank={fault.rank}: this job has ranks 0 to {dist.get_world_size() - 1}"
        raise ValueError(msg)
    return Injection(topology.root, modules[fault.module], fault, first_step)


class _Hook:
    """A hook that stays behind when its model is copied or saved."""

    def __init__(self, fn: Callable[..., object]) -> None:
        self._fn = fn

    def __call__(self, *args: object) -> object:
        return self._fn(*args)

    def __deepcopy__(self, _memo: object) -> Callable[..., None]:
        return _do_nothing

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        return _get_do_nothing, ()


def _do_nothing(*_args: object) -> None:
    return None


def _get_do_nothing() -> Callable[..., None]:
    return _do_nothing


def _spoil(x: Tensor, fault: Fault) -> Tensor:
    """Return a copy of x, of any shape, with the fault in it; the rest is bit-identical.

    To autograd `explode` is a multiplication, while a NaN or Inf is a flipped memory cell: it is
    written behind autograd's back. Neither saves a tensor, so that a checkpointed region can be
    recomputed without the fault.
    """
    if fault.kind == "explode":
        return x * fault.factor
    own = x.clone()
    local = _local(own.detach())
    count = min(fault.elements, local.numel())
    if count:
        at = (2 * torch.arange(count, device=local.device) + 1) * local.numel() // (2 * count)
        local[torch.unravel_index(at, local.shape)] = float(fault.kind)
    return own


def _local(x: Tensor) -> Tensor:
    """This rank's memory of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def _replace_first(value: object, fn: Callable[[Tensor], Tensor | None]) -> tuple[Any, bool]:
    """Rebuild a nested output with its first floating-point tensor replaced by `fn` of it.

    `fn` may decline a tensor by returning None. The second value says whether one was replaced.
    """
    if isinstance(value, Tensor):
        new = fn(value) if value.is_floating_point() else None
        return (value, False) if new is None else (new, True)
    for key, child in _children(value):
        new, found = _replace_first(child, fn)
        if found:
            return _with_child(value, key, new), True
    return value, False


def _children(value: object) -> Iterable[tuple[Any, object]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, tuple | list):
        return enumerate(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return ()


def _with_child(value: Any, key: Any, child: object) -> Any:  # noqa: ANN401  (any container)
    if isinstance(value, tuple):
        items = [child if i == key else item for i, item in enumerate(value)]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    new = copy.copy(value)
    if isinstance(value, Mapping | list):
        new[key] = child
    else:
        object.__setattr__(new, key, child)  # also in a frozen dataclass
    return new


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
