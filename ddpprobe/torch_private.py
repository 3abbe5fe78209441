"""Every private torch name ddpprobe uses, each with a self-test and a stated degradation.

Nothing private is touched anywhere else, so a torch release that moves one of these is handled in
this file alone.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._C._distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel


def _lookup(module: str, *names: str) -> Any:  # noqa: ANN401  (it is whatever torch keeps there)
    try:
        found: Any = importlib.import_module(module)
        for name in names:
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    return found


_graph_task_id = _lookup("torch._C", "_current_graph_task_id")
_engine_queue_callback = _lookup(
    "torch.autograd", "Variable", "_execution_engine", "queue_callback"
)
_default_store = _lookup("torch.distributed.distributed_c10d", "_get_default_store")
_is_functorch = _lookup("torch._C", "_functorch", "is_functorch_wrapped_tensor")
_active_ddp = _lookup("torch.nn.parallel", "DistributedDataParallel", "_get_active_ddp_module")


def is_a(thing: object, module: str, name: str) -> bool:
    """Whether `thing` is an instance of a torch class, without importing the class's module.

    If nobody has imported it, nothing can be an instance. (`torch.distributed.tensor` alone would
    add 0.4 s to the start of a script that does not use it.)
    """
    loaded = getattr(sys.modules.get(module), name, None)
    return loaded is not None and isinstance(thing, loaded)


def in_backward() -> bool:
    """Whether this thread is inside an autograd backward: a forward seen now is a recomputation.

    Degradation: False, so that activations of checkpointed modules are counted twice.
    """
    return bool(_graph_task_id() != -1) if _graph_task_id is not None else False


def after_backward(callback: Callable[[], None]) -> bool:
    """Call `callback` once when the running backward, reducers included, is over.

    A callback queued from a tensor hook runs before DDP copies its buckets back (measured), one
    that such a callback queues runs after it. Must be called from inside a backward.

    Degradation: returns False; gradients are then read at the optimizer step, after clipping.
    """
    if _engine_queue_callback is None:
        return False
    queue = cast("Callable[[Callable[[], None]], None]", _engine_queue_callback)
    queue(lambda: queue(callback))
    return True


def default_store() -> Store | None:
    """Return the store of the default process group.

    Degradation: None; `install` then opens one of its own from MASTER_ADDR and MASTER_PORT.
    """
    return cast("Store", _default_store()) if _default_store is not None else None


def active_ddp() -> DistributedDataParallel | None:
    """Return the DistributedDataParallel whose forward is running.

    Degradation: None; a model wrapped after `install` is then taken for an unwrapped one.
    """
    found = _active_ddp() if _active_ddp is not None else None
    return found if isinstance(found, DistributedDataParallel) else None


def is_functorch(tensor: torch.Tensor) -> bool:
    """Whether `tensor` lives inside vmap, grad or jvp, where its numbers cannot be read.

    Degradation: False; such a tensor then blows the fuse of the hooks.
    """
    return bool(_is_functorch(tensor)) if _is_functorch is not None else False


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module` was compiled with `module.compile()` or `torch.compile(module)`."""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
    )


def self_test() -> dict[str, bool]:
    """Try each private name on a one-element model; False: it is gone or means something else."""
    seen: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2

    def hook(_: torch.Tensor) -> None:
        seen.append(f"in:{in_backward()}")
        after_backward(lambda: seen.append(f"after:{x.grad is not None}"))

    y.register_hook(hook)
    y.sum().backward()
    return {
        "in_backward": "in:True" in seen and not in_backward(),
        "after_backward": "after:True" in seen,
        "default_store": _default_store is not None,
        "is_functorch": _is_functorch is not None,
        "active_ddp": _active_ddp is not None,
    }
