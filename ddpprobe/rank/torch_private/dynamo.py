"""Every private name of torch.compile that ddpprobe uses, each with a stated degradation.

What `torch_private` is for the rest of torch; apart from it because none of these is touched before
a compiled module is met. That they do what they should is not tested at install, which would take a
compilation: a compiled region that runs and is not heard is found out at its first observed step.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

_eval_frame: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)  # noqa: SLF001
_MINOR = tuple(map(int, torch.__version__.split(".")[:2]))
_COMPILE_FILE, _NOT_COMPILED = "torch/_dynamo/eval_frame.py", "DisableContext."


# Whether graphs may hold our operators, which a torch that keeps no operator for its effect drops.
# Torch 2.6 also breaks a graph off at a hook of a tensor made inside, and 2.7 makes one for each
# module until its limit: with `fullgraph=True` both would raise (measured).
# 2.12 has the name, and refuses what is changed in place after our operator (measured); of 2.10
# and 2.11 nothing is known.
SPEAKING = hasattr(torch.library, "_register_effectful_op") and _MINOR >= (2, 13)

# Degradation: the public one, which imports the compiler at once, and not when it is called.
_disable: Any = getattr(torch, "_disable_dynamo", torch.compiler.disable)

_log = logging.getLogger("ddpprobe")
# What is marked, once: each backward makes its callbacks anew, of the same code. By id, as equal
# codes are not the same; and kept, so that no other gets that id.
_as_python: dict[int, CodeType] = {}


def _always() -> bool:
    return True


# Whether the graph that is traced here may hold nothing of ours, as one that is exported.
# Degradation: True; what is inside a compiled region is then not observed, and said to be so.
is_silent: Callable[[], bool] = torch.compiler.is_exporting if SPEAKING else _always


def run_as_python(hook: Callable[P, R]) -> Callable[P, R]:
    """Let calls of a hook that torch.compile meets on their own, and all they call, be.

    The hooks of a module that is compiled as a whole are such calls, and those of a tensor in the
    backward of a compiled function: they would become graphs of their own, all that share a code
    sharing one `recompile_limit`. Inlined into a graph they are traced as any other code.

    Degradation: a copy-safe hook on such a module does nothing, and the region is found blind;
    hooks of a tensor are compiled, which takes long.
    """
    code = hook.__code__
    if id(code) not in _as_python:
        _as_python[id(code)] = code
        with contextlib.suppress(AttributeError, TypeError):
            skip = _eval_frame._FrameAction.SKIP  # noqa: SLF001
            strategy = _eval_frame._FrameExecStrategy(skip, skip)  # noqa: SLF001
            _eval_frame.set_code_exec_strategy(code, strategy)
    return hook


@functools.cache
def _say_unheard() -> None:
    _log.warning(
        "ddpprobe: torch.compile(fullgraph=True) lets nothing run beside its graph: what it holds "
        "of backward(), optimizer.step() and probe.log() is not heard."
    )


def some_is_unheard() -> bool:
    """Whether a graph of this process holds an optimizer's step, perhaps, that nobody hears of."""
    return _say_unheard.cache_info().currsize > 0


def is_whole() -> bool:
    """Whether the graph that is traced here may not be broken off, as with `fullgraph=True`.

    Degradation: False; such a graph is then refused by torch where something is to run beside it.
    """
    tracing = getattr(sys.modules.get("torch._dynamo.symbolic_convert"), "tls", None)
    tracer = getattr(tracing, "current_tx", None)
    whole = any(getattr(tracer, name, False) for name in ("one_graph", "error_on_graph_break"))
    if whole:
        _say_unheard()
    return whole


is_whole._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001  (not traced)


def run_beside_graphs(hook: Callable[P, R]) -> Callable[P, R | None]:
    """Wrap what is called by code that may be compiled: a graph breaks off there.

    One that may not does without the call: an error would be the end of the training.
    """

    def plain(*args: P.args, **kwargs: P.kwargs) -> R:
        return hook(*args, **kwargs)

    beside: Callable[P, R] = _disable(plain)  # which notes something on it: a method takes no notes

    @functools.wraps(hook)
    @run_as_python
    def called(*args: P.args, **kwargs: P.kwargs) -> R | None:
        if torch.compiler.is_compiling() and is_whole():
            return None
        return beside(*args, **kwargs)

    return called


def may_break_off() -> bool:
    """Whether Python that is no part of a graph may run here, at the price of a graph's end."""
    return not (torch.compiler.is_compiling() and is_whole())


def never_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Let a graph that comes to a call of a function break off; that costs the call nothing.

    Degradation: it is traced up to what torch cannot trace, with a warning of torch's.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # noqa: SLF001
    function._torchdynamo_disable_msg = None  # type: ignore[attr-defined]  # noqa: SLF001
    return run_as_python(function)


def hands_back(
    hear: Callable[[S, torch.Tensor | None], None],
) -> Callable[[S, torch.Tensor | None], torch.Tensor | None]:
    """Make the hook of a tensor of what hears of its gradient, which the hook hands back.

    Compiled autograd takes the None of a hook for the gradient (2.13), and the training would end
    with an error. It traces hooks: what is ours runs beside its graph, and not at all where that
    may not be broken off.

    Degradation: as of `never_traced`.
    """
    heard = never_traced(hear)

    @functools.wraps(hear, updated=())
    @run_as_python
    def hook(self: S, gradient: torch.Tensor | None) -> torch.Tensor | None:
        if may_break_off():
            heard(self, gradient)
        return gradient

    return hook


def keep_in_graphs(operator: str) -> bool:
    """Say that an operator without results has an effect, and keep its calls in their order.

    Degradation: its calls are kept in any order; False if they may vanish from graphs.
    """
    try:
        from torch._higher_order_ops.effects import _EffectType  # noqa: PLC0415

        torch.library._register_effectful_op(operator, _EffectType.ORDERED)  # noqa: SLF001
    except (ImportError, AttributeError, TypeError):
        namespace, name = operator.split("::")
        try:
            torch.fx.node.has_side_effect(getattr(getattr(torch.ops, namespace), name).default)
        except AttributeError:
            return False
    return True


def keep_out_of_cuda_graphs(operator: str) -> bool:
    """Let inductor end a CUDA graph in front of each call of an operator, and begin another after.

    The tag `cudagraph_unsafe` says the same, but a call of an operator with an effect stands in a
    graph as `with_effects`, which has none (measured, 2.13).

    Degradation: False; a torch that cannot split a graph makes no CUDA graph at all of one that has
    an input on the CPU, as ours have, and a call that is captured all the same does nothing.
    """
    try:
        from torch._inductor import config  # noqa: PLC0415

        operators = config.custom_should_partition_ops
    except (ImportError, AttributeError):
        return False
    if operator not in operators:
        config.custom_should_partition_ops = [*operators, operator]
    return True


@functools.cache
def _unwrap_dtensors(operator: Any, kind: type) -> type | None:  # noqa: ANN401  (an OpOverload)
    def local(_: object, function: Any, types: object, args: Any, kwargs: Any) -> object:  # noqa: ANN401, ARG001
        plain = [getattr(arg, "_local_tensor", arg) for arg in args]
        return function(*plain, **(kwargs or {}))

    try:
        torch.library.register_torch_dispatch(operator, kind, local)
    except (AttributeError, RuntimeError):
        return None
    return kind


def unwrap_dtensors(operator: Any) -> type | None:  # noqa: ANN401  (an OpOverload)
    """Let `operator`, called with a DTensor, see its local part; gives DTensor, if it is loaded.

    Degradation: None; DTensors inside graphs are not observed.
    """
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return None if kind is None else _unwrap_dtensors(operator, kind)


def compiles_backwards() -> bool:
    """Whether compiled autograd is on: a backward that is started now is compiled.

    Degradation: False; a millisecond's measurement of ours is then compiled, too.
    """
    loaded = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(loaded, "compiled_autograd_enabled", False))


def was_compiled(module: torch.nn.Module) -> bool:
    """Whether torch may hold graphs of `module`, a module that is compiled as a whole.

    Degradation: True; they are then compiled anew without need.
    """
    entries = getattr(_eval_frame, "_debug_get_cache_entry_list", None)
    if entries is None:
        return True
    forward = type(module).forward
    code = getattr(getattr(forward, "__wrapped__", forward), "__code__", None)
    return code is None or bool(entries(code))


def has_graphs() -> bool:
    """Whether torch.compile has made any graph in this process.

    Degradation: True if torch.compile is loaded at all.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return False
    counters = getattr(utils, "counters", None)
    return counters is None or counters["stats"]["unique_graphs"] > 0


def in_a_compiled_call() -> bool:
    """Whether this Python code was called from a compiled callable, as a hook of its module is.

    Degradation: False; what was wrapped in torch.compile outside of the model's own modules is then
    not seen, and its modules are reported as silent.
    """
    frame: FrameType | None = sys._getframe()  # noqa: SLF001  (CPython's, documented)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith(_COMPILE_FILE):
            # What keeps a function uncompiled, as torch does with LBFGS.step, lives there too.
            return not code.co_qualname.startswith(_NOT_COMPILED)
        frame = frame.f_back
    return False
