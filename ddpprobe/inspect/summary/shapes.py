"""Shapes of what goes into and out of each module, from a forward on fake tensors."""

from __future__ import annotations

import gc
import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ddpprobe.errors import SummaryError
from ddpprobe.inspect.summary.flops import flops_of
from ddpprobe.inspect.summary.parameters import HeldParameter, held_tensor
from ddpprobe.inspect.summary.skeleton import Skeleton
from ddpprobe.rank import torch_private
from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.stats.dense import dtype_name
from ddpprobe.rank.topology.naming import own_class

Shapes = tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Calls:
    """What one module was called with, how often; shapes and dtypes are those of the first call.

    `flops` are of all calls, without those of the modules inside; `uncounted` are the operators in
    them that are not torch's.
    """

    inputs: Shapes
    outputs: Shapes = ()
    output_dtypes: tuple[str, ...] = ()
    calls: int = 1
    flops: int = 0
    uncounted: set[str] = field(default_factory=set)


def run_fake(
    model: nn.Module,
    names: Mapping[int, str],
    held: Mapping[tuple[int, str], HeldParameter],
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> dict[int, Calls]:
    """Run the forward of a stand-in of `model`; return what each module saw, by id of the original.

    Args:
        model: stays as it is.
        names: FQNs, by the id of the module.
        held: the parameters.
        args: the inputs; their tensors serve as shapes and dtypes only.
        kwargs: those given by name.

    Raises:
        SummaryError: the forward failed; the text names the module.
    """
    where = _Where(names)
    made: list[tuple[weakref.ref[Tensor], str]] = []
    with ExitStack() as stack:
        stack.enter_context(_nothing_moved())
        stack.enter_context(_originals_stay_idle(model))
        stack.enter_context(_Explained(type(model).__name__, where))
        mode = stack.enter_context(torch_private.fake_tensors())
        if mode is None:
            raise SummaryError(f"torch {torch.__version__}, which has no fake tensors.")
        skeleton = Skeleton(mode, held)
        root = skeleton.build(model)
        given = skeleton.inputs(tuple(args)), skeleton.inputs(dict(kwargs))
        for original, module in skeleton.modules.items():
            where.watch(original, module)

        def keep(tensor: Tensor) -> None:
            made.append((weakref.ref(tensor), where.innermost))

        with _Guard(skeleton, keep, where.count):
            root(*given[0], **given[1])
    del root, given, skeleton, module
    _warn_of_kept(made)
    return where.calls


@final
class _Where:
    """Follows the forward: which module is running, and what each was given."""

    def __init__(self, names: Mapping[int, str]) -> None:
        self.calls: dict[int, Calls] = {}
        self._names = names
        self._running: list[tuple[str, str, int]] = []

    @property
    def innermost(self) -> str:
        """The module that runs, as `'layers.3' (Router)`."""
        fqn, kind, _ = self._running[-1] if self._running else ("", "", 0)
        return f"{fqn!r} ({kind})" if fqn else f"the root ({kind})" if kind else "no module"

    def count(self, func: object, args: Sequence[Any], out: object) -> None:
        """Add an operator to what the running module does."""
        found = flops_of(func, args, out)
        if not self._running:
            return
        call = self.calls[self._running[-1][2]]
        if found is None:
            call.uncounted.add(str(func))
        else:
            call.flops += found

    def watch(self, original: int, module: nn.Module) -> None:
        """Follow one stand-in."""
        fqn, kind = self._names[original], type(module).__name__

        def before(_: nn.Module, args: object, kwargs: object) -> None:
            self._running.append((fqn, kind, original))
            known = self.calls.get(original)
            if known is None:
                self.calls[original] = Calls(_shapes((args, kwargs)))
            else:
                known.calls += 1

        def after(_: nn.Module, __: object, output: object) -> None:
            self._running.pop()
            call = self.calls[original]
            if call.calls == 1:
                call.outputs = _shapes(output)
                call.output_dtypes = tuple(dtype_name(t.dtype) for _, t in leaves(output))

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)


def _shapes(value: object) -> Shapes:
    return tuple(tuple(tensor.shape) for _, tensor in leaves(value))


@final
class _Guard(torch_private.DispatchMode):
    """Sees every operator of the forward before it runs on fake tensors."""

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(
        self, skeleton: Skeleton, on_result: Callable[[Tensor], None],
        on_call: Callable[[object, Sequence[Any], object], None],
    ) -> None:  # fmt: skip
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._skeleton = skeleton
        self._on_result, self._on_call = on_result, on_call

    def __torch_dispatch__(
        self, func: Any, types: object, args: Any = (), kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401  (torch's protocol)  # fmt: skip
        if getattr(func, "namespace", "") == "c10d":
            raise SummaryError(
                f"the forward calls a collective ({func}), and summary never runs one."
            )
        self._refuse_writes(func, args, kwargs or {})
        result = func(*self._fake(args), **self._fake(kwargs or {}))
        self._on_call(func, args, result)
        for _, tensor in leaves(result):
            self._on_result(tensor)
        return result

    def _refuse_writes(self, func: Any, args: Any, kwargs: Any) -> None:  # noqa: ANN401
        schema = getattr(func, "_schema", None)  # operators that take functions have none
        for index, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.alias_info is not None and argument.alias_info.is_write:
                place = args[index] if index < len(args) else kwargs.get(argument.name)
                if any(_is_real(tensor) for _, tensor in leaves(place)):
                    raise SummaryError(
                        "it writes in place into a tensor that the model does not own."
                    )

    def _fake(self, value: Any) -> Any:  # noqa: ANN401
        """Make tensors from outside of the model fake, such as a global constant."""
        if _is_real(value):
            return self._skeleton.fake(held_tensor(value), value)
        if isinstance(value, (list, tuple)):
            parts = [self._fake(part) for part in value]
            return parts if isinstance(value, list) else tuple(parts)
        if isinstance(value, dict):
            return {name: self._fake(part) for name, part in value.items()}
        return value


def _is_real(value: object) -> bool:
    return type(value) in (Tensor, nn.Parameter)


@final
class _Explained:
    """Turns an error of the fake forward into one that says where it happened and what to do."""

    def __init__(self, model: str, where: _Where) -> None:
        self._model = model
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        _: TracebackType | None,
    ) -> None:  # fmt: skip
        if not isinstance(error, Exception):
            return
        ours = isinstance(error, SummaryError)
        what = str(error) if ours else f"{type(error).__name__}: {error}"
        raise SummaryError(
            f"the forward of {self._model} cannot be followed on fake tensors: it failed in "
            f"{self._where.innermost} with {what}\n"
            "A module that looks at values (routing, masks, .item()) has no shapes to tell before "
            "it sees them; a forward that fails on real inputs, too, got the wrong ones. "
            "Call ddpprobe.summary(model) without inputs for parameters only."
        ) from error


@contextmanager
def _originals_stay_idle(model: nn.Module) -> Iterator[None]:
    """Refuse the call of a module of the model itself, reached through some other object."""
    originals = {id(module) for module in model.modules()}
    thread = threading.get_ident()

    def refuse(module: nn.Module, _: object) -> None:
        if id(module) in originals and threading.get_ident() == thread:
            raise SummaryError(
                f"it calls {own_class(module).__name__} through an object that is not a module."
            )

    handle = register_module_forward_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _nothing_moved() -> Iterator[None]:
    """Give the random generators back as they were; leave torch.compile out."""
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy.random.get_state() if numpy else None
    caches = torch.is_autocast_cache_enabled()  # an outer autocast would keep fake weights
    with torch.random.fork_rng(devices=[]), ExitStack() as stack:
        torch.set_autocast_cache_enabled(False)
        if "torch._dynamo" in sys.modules:  # a function under @torch.compile
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(caches)
            random.setstate(python)
            if numpy:
                numpy.random.set_state(arrays)


def _warn_of_kept(made: Sequence[tuple[weakref.ref[Tensor], str]]) -> None:
    """Say so if the forward put a fake tensor into a cache that outlives it."""
    if not any(result() is not None for result, _ in made):
        return
    gc.collect()
    if kept := sorted({module for result, module in made if result() is not None}):
        warnings.warn(
            f"the forward keeps a tensor that was made in {', '.join(kept[:3])} outside of the "
            "model, and it is a fake one now. Clear that cache (functools.lru_cache: "
            "function.cache_clear()) before the model runs.",
            RuntimeWarning,
            stacklevel=4,
        )
