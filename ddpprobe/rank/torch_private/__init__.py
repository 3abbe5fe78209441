"""Every private torch name ddpprobe uses, each with a self-test and a stated degradation.

Nothing private is touched anywhere else, so a torch release that moves one of these is handled in
this file alone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, cast

import torch
from torch._C._distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _python_dispatch

from ddpprobe.rank.torch_private.dynamo import never_traced

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _lookup(module: str, *names: str) -> Any:  # noqa: ANN401  (it is whatever torch keeps there)
    try:
        value: Any = importlib.import_module(module)
        for name in names:
            value = getattr(value, name)
    except (ImportError, AttributeError):
        return None
    return value


DispatchMode = _python_dispatch.TorchDispatchMode  # in torch's documentation since 1.13
_graph_task_id = _lookup("torch._C", "_current_graph_task_id")
_engine_queue_callback = _lookup(
    "torch.autograd", "Variable", "_execution_engine", "queue_callback"
)
_raw_stream = _lookup("torch._C", "_cuda_getCurrentRawStream")
_default_store = _lookup("torch.distributed.distributed_c10d", "_get_default_store")
_is_functorch = _lookup("torch._C", "_functorch", "is_functorch_wrapped_tensor")
_depth_of_modes = _lookup("torch._C", "_len_torch_dispatch_stack")
_without_modes = _lookup("torch.utils._python_dispatch", "_disable_current_modes")
_function_modes = _lookup("torch.overrides", "_get_current_function_mode_stack")
_WithoutFunctions = _lookup("torch._C", "DisableTorchFunction") or contextlib.nullcontext
_functorch_level = _lookup("torch._C", "_functorch", "maybe_current_level")
_global_hooks = [
    _lookup("torch.nn.modules.module", f"_global_{table}_hooks")
    for table in ("forward_pre", "forward", "backward_pre", "backward")
]
_active_ddp = _lookup("torch.nn.parallel", "DistributedDataParallel", "_get_active_ddp_module")


def is_a(thing: object, module: str, name: str) -> bool:
    """Whether `thing` is an instance of a torch class, without importing the class's module.

    If nobody has imported it, nothing can be an instance. (`torch.distributed.tensor` alone would
    add 0.4 s to the start of a script that does not use it.)
    """
    loaded = getattr(sys.modules.get(module), name, None)
    return loaded is not None and isinstance(thing, loaded)


def raw_stream(device: int) -> int:
    """Return the handle of the current stream of a CUDA device, without making an object of it.

    Degradation: makes one.
    """
    if _raw_stream is None:
        return int(torch.cuda.current_stream(device).cuda_stream)
    return int(_raw_stream(device))


def in_backward() -> bool:
    """Whether this thread is inside an autograd backward: a forward seen now is a recomputation.

    Degradation: False, so that activations of checkpointed modules are counted twice.
    """
    return bool(_graph_task_id() != -1) if _graph_task_id is not None else False


def backward_id() -> int:
    """Identity of the autograd backward that runs in this thread, -1 outside of one.

    Degradation: -1; a gradient is then taken for one of the latest forward.
    """
    return int(_graph_task_id()) if _graph_task_id is not None else -1


def after_backward(computed: Callable[[], None], over: Callable[[], None]) -> bool:
    """Call `computed` when the running backward is done, and `over` when its reducers are, too.

    A callback queued from a tensor hook runs before DDP copies its buckets back (measured), one
    that such a callback queues runs after it. Must be called from inside a backward.

    Degradation: returns False; gradients are then read at the optimizer step, after clipping.
    """
    if _engine_queue_callback is None:
        return False
    queue = cast("Callable[[Callable[[], None]], None]", _engine_queue_callback)

    # Neither answers: torch takes anything but None for new arguments.
    @never_traced
    def first() -> None:
        computed()
        queue(last)

    @never_traced
    def last() -> None:
        over()

    queue(first)
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


def loss_scalers() -> list[torch.amp.GradScaler]:
    """Return the enabled GradScalers of this process, which torch keeps no list of.

    Not to be called at every step, see `living`.
    """
    return [scaler for scaler in living(torch.amp.GradScaler) if scaler.is_enabled()]


def living(kind: type[T]) -> list[T]:
    """Return the objects of a class, and of those below it, that live in this process.

    One pass over the objects Python's collector knows (27 ms per 765,000 of them, measured), so
    not to be called at every step.
    """
    kinds: list[type] = [kind]
    for one in kinds:
        below: list[type] = one.__subclasses__()
        kinds.extend(k for k in below if k not in kinds)
    # type(o), not isinstance: that would ask every proxy object for its __class__.
    return [o for o in gc.get_referrers(*kinds) if issubclass(type(o), kind)]


def scale_of(scaler: torch.amp.GradScaler) -> torch.Tensor | None:
    """Return the scale as a tensor [] on its device; None before its first use.

    `get_scale()`, which is public, would make the host wait for the device.

    Degradation: None; gradients are then reported as they are, multiplied by the scale.
    """
    found = getattr(scaler, "_scale", None)
    return found if isinstance(found, torch.Tensor) else None


def round_of(scaler: torch.amp.GradScaler) -> object:
    """Return an object that the scaler keeps from one `update()` to the next, which makes another.

    Degradation: None; no step is then known to be skipped, and its bad gradients are a page.
    """
    return getattr(scaler, "_per_optimizer_states", None)


def stepped_in(round_: object) -> frozenset[int]:
    """Return the ids of the optimizers that a scaler was told to step in a round of `round_of`.

    It steps those whose gradients are finite, and skips the others: which, only the device knows.

    Degradation: an empty set, as above.
    """
    if not isinstance(round_, dict):
        return frozenset()
    states = list(round_.items())
    return frozenset(
        number for number, state in states
        if isinstance(state, dict) and getattr(state.get("stage"), "name", "") == "STEPPED"
    )  # fmt: skip


def is_functorch(tensor: torch.Tensor) -> bool:
    """Whether `tensor` lives inside vmap, grad or jvp, where its numbers cannot be read.

    Degradation: False; such a tensor then blows the fuse of the hooks.
    """
    return bool(_is_functorch(tensor)) if _is_functorch is not None else False


def outside_modes() -> contextlib.AbstractContextManager[object]:
    """Context in which our operations are seen by no mode and no subclass that is the user's.

    Selective checkpointing counts operations by a dispatch mode: one of ours in the forward that
    does not come again in the recomputation would shift its tape, and gradients would silently be
    wrong (measured). A function mode that draws a random number for each call, as one that rounds
    stochastically, would draw others (measured). Profilers and flop counters do not see us either.

    Degradation: no protection.
    """
    if _depth_of_modes is None or _without_modes is None or not _depth_of_modes():
        return cast("contextlib.AbstractContextManager[object]", _WithoutFunctions())
    return _outside_both()


@contextlib.contextmanager
def _outside_both() -> Iterator[None]:
    with _WithoutFunctions(), cast("Callable[[], Any]", _without_modes)():
        yield


def unseen_by_modes(fn: Callable[P, R]) -> Callable[P, R]:
    """Wrap what is to run as under `outside_modes`; that costs 0.1 us where there is no mode."""
    depth = _depth_of_modes

    @functools.wraps(fn)
    def unseen(*args: P.args, **kwargs: P.kwargs) -> R:
        with _WithoutFunctions():
            if depth is None or not depth():
                return fn(*args, **kwargs)
            with outside_modes():
                return fn(*args, **kwargs)

    return unseen


def in_a_mode() -> bool:
    """Whether a mode of the user's is active, that of `torch.set_default_device` apart.

    Degradation: False; `backward="full"` then shows such a mode operators of torch's own.
    """
    if _depth_of_modes is not None and _depth_of_modes():
        return True
    modes = _function_modes() if _function_modes is not None else ()
    return any(not is_a(mode, "torch.utils._device", "DeviceContext") for mode in modes)


def in_functorch() -> bool:
    """Whether vmap, grad or jvp is under way, where a full backward hook is an error of torch's.

    Degradation: False; `backward="full"` then breaks such a forward.
    """
    return _functorch_level is not None and _functorch_level() is not None


def has_global_hooks() -> bool:
    """Whether hooks hang on all modules of the process, which any module's call then calls.

    Degradation: True; what a hook takes is then measured without torch's part of it.
    """
    return any(table is None or len(table) for table in _global_hooks)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `module` was compiled with `module.compile()` or `torch.compile(module)`."""
    return getattr(module, "_compiled_call_impl", None) is not None or is_a(
        module, "torch._dynamo.eval_frame", "OptimizedModule"
    )


@dataclass(frozen=True, slots=True)
class FlatPart:
    """One original parameter inside an FSDP1 flat parameter.

    Attributes:
        module, name: where the model would hold it.
        numel_local: its elements in this rank's shard.
        ranks, replicas: how many ranks share one copy, and how many copies there are.
        identity: the same for a tied parameter under each of its names.
        start: position of its first element in the unsharded flat parameter.
        local_start, element: position of this rank's first element of it in the rank's shard of
            the flat parameter, and in the flattened parameter itself.
        rank, replica: which of the `ranks` this one is, and which of the `replicas` it holds.
        parameter: the parameter itself, where `use_orig_params=True` keeps it.
    """

    flat: torch.Tensor
    module: torch.nn.Module
    name: str
    shape: torch.Size
    numel_local: int
    trainable: bool
    sharded: bool
    ranks: int
    replicas: int
    identity: tuple[int, int]
    start: int
    local_start: int
    element: int
    rank: int
    replica: int
    parameter: torch.nn.Parameter | None


def flat_parts(model: torch.nn.Module) -> Iterator[FlatPart]:
    """Yield what FSDP1's flat parameters are made of, tied parameters under each name.

    Degradation: nothing; the flat parameters are then taken for parameters of the model.
    """
    for unit in model.modules():
        if is_a(unit, "torch.distributed.fsdp", "FullyShardedDataParallel"):
            handle: Any = getattr(unit, "_handle", None)
            if handle is not None and hasattr(handle.flat_param, "_param_infos"):
                yield from _parts_of(unit, handle)


def _parts_of(unit: Any, handle: Any) -> Iterator[FlatPart]:  # noqa: ANN401  (private objects)
    flat = handle.flat_param
    sharded = bool(handle.uses_sharded_strategy) and handle.world_size > 1
    between = getattr(unit, "_inter_node_pg", None)
    replicas = between.size() if between is not None else 1 if sharded else handle.world_size
    replica = between.rank() if between is not None else 0 if sharded else handle.rank
    own = flat._params  # noqa: SLF001  (None unless use_orig_params)
    starts = _starts(flat)
    places: dict[tuple[int, str], int] = {}

    def part(index: int, module: torch.nn.Module, name: str) -> FlatPart:
        shape, start = flat._shapes[index], starts[index]  # noqa: SLF001
        info = flat._shard_param_infos[index]  # noqa: SLF001
        local = info.numel_in_shard or 0 if sharded else shape.numel()
        trainable = bool((own[index] if own else flat).requires_grad)
        return FlatPart(
            flat, module, name, shape, local, trainable, sharded, handle.world_size, replicas,
            (id(flat), index), start, (info.offset_in_shard or 0) if sharded else start,
            (info.intra_param_start_idx or 0) if sharded else 0, handle.rank, replica,
            own[index] if own else None,
        )  # fmt: skip

    for index, (name, module, _) in enumerate(flat._param_infos):  # noqa: SLF001
        places[id(module), name] = index
        yield part(index, module, name)
    for name, module, _, first, owner, _ in flat._shared_param_infos:  # noqa: SLF001
        yield part(places[id(owner), first], module, name)


def _starts(flat: Any) -> list[int]:  # noqa: ANN401
    """Where each parameter begins in the unsharded flat one, which may be padded in between."""
    starts, position = [], 0
    for numel, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):  # noqa: SLF001
        if not padding:
            starts.append(position)
        position += numel
    return starts


def dictionaries(
    module: torch.nn.Module,
) -> tuple[
    dict[str, torch.nn.Parameter | None],
    dict[str, torch.Tensor | None],
    dict[str, torch.nn.Module | None],
]:
    """Return a module's own dictionaries of parameters, buffers and children.

    Unlike the public iterators they hold the names that are registered as None, too. Unchanged
    since torch 1.0; there is nothing to degrade to.
    """
    return module._parameters, module._buffers, module._modules  # noqa: SLF001


@contextlib.contextmanager
def fake_tensors() -> Iterator[Any]:
    """Within this block tensors have a shape, dtype and device and no memory; gives the mode.

    An operator without a shape rule is refused there, instead of being run on made-up values.
    torch's own log of errors is off: ours says where it was.

    Degradation: gives None; shapes can then not be told without a real forward.
    """
    mode = _lookup("torch._subclasses.fake_tensor", "FakeTensorMode")
    if mode is None:
        yield None
        return
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was, log.disabled = log.disabled, True
    try:
        with mode(allow_fallback_kernels=False) as entered:
            yield entered
    finally:
        log.disabled = was


def self_test() -> dict[str, bool]:
    """Try each private name on a one-element model; False: it is gone or means something else."""
    seen: list[str] = []
    x = torch.ones(1, requires_grad=True)
    y = x * 2

    def hook(_: torch.Tensor) -> None:
        seen.append(f"in:{in_backward()}")
        after_backward(lambda: seen.append("done"), lambda: seen.append(str(x.grad is not None)))

    y.register_hook(hook)
    y.sum().backward()
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    optimizer = torch.optim.SGD([x], lr=0.0)
    scaler.scale((x * torch.inf).sum()).backward()
    rounds, before = round_of(scaler), stepped_in(round_of(scaler))
    scaler.step(optimizer)
    scaler.update()
    return {
        "in_backward": "in:True" in seen and not in_backward(),
        "after_backward": seen[-2:] == ["done", "True"],
        "default_store": _default_store is not None,
        "is_functorch": _is_functorch is not None,
        "in_functorch": _functorch_level is not None and not in_functorch(),
        "outside_modes": _depth_of_modes is not None and _without_modes is not None,
        "in_a_mode": _function_modes is not None and not in_a_mode(),
        "outside_functions": _WithoutFunctions is not contextlib.nullcontext,
        "stepped_in": not before and stepped_in(rounds) == {id(optimizer)},
        "raw_stream": _raw_stream is not None or torch.version.cuda is None,
        "active_ddp": _active_ddp is not None,
        "has_global_hooks": None not in _global_hooks,
        "fake_tensors": _lookup("torch._subclasses.fake_tensor", "FakeTensorMode") is not None,
    }
