"""Watches every operator that torch dispatches, and finds the first that made a non-finite number.

Non-finite numbers are followed from operator to operator through the memory they lie in, so that
the one is named from which the bad result really descends: a mask of -inf that softmax turns into
zeros is nobody's fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ddpprobe.rank.stats.dense import dtype_name
from ddpprobe.rank.torch_private.modes import PlainMode
from ddpprobe.reader.reexecute.source_line import LineFinder, SourceLine

FORWARD, BACKWARD = "forward", "backward"
# Their memory is whatever lay there before.
_UNWRITTEN = ("aten.empty", "aten.new_empty", "aten.resize")


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor that went into or came out of an operator.

    Attributes:
        dtype: torch's name without "torch.".
        shape: of the tensor.
        nan, inf: non-finite elements; None if they were overwritten before they were counted.
        low, high: the range, NaN where there is a NaN or no element.
    """

    dtype: str
    shape: tuple[int, ...]
    nan: int | None
    inf: int | None
    low: float
    high: float

    def __str__(self) -> str:
        text = f"{self.dtype}{list(self.shape)}"
        if self.nan or self.inf:
            counts = {"NaN": self.nan or 0, "Inf": self.inf or 0}
            return f"{text} ({', '.join(f'{n} {what}' for what, n in counts.items() if n)})"
        return text if math.isnan(self.low) else f"{text} in [{self.low:.6g}, {self.high:.6g}]"


@dataclass(frozen=True, slots=True)
class Op:
    """One operator whose result was not finite.

    Attributes:
        number: position among all operators of the execution.
        name: torch's, e.g. `aten.log.default`.
        phase: `forward` or `backward`.
        inputs, outputs: its floating-point tensors.
        line: the user's line after it, None where it is not known.
        module: FQN of the module that ran it, None where it is not known.
        node: name of the autograd node, in the backward.
    """

    number: int
    name: str
    phase: str
    inputs: tuple[TensorFacts, ...]
    outputs: tuple[TensorFacts, ...]
    line: SourceLine | None
    module: str | None
    node: str | None


@dataclass(frozen=True, slots=True)
class _Event:
    """A non-finite result, the events its inputs came from, and whether it is an origin."""

    op: Op
    parents: tuple[int, ...]
    is_origin: bool


class OpWatch(PlainMode):
    """Context in which every operator is looked at; costs a reduction per tensor, and its wait.

    Args:
        lines: finds the user's line.

    Attributes:
        count: operators seen.
        random: names of those that drew random numbers.
    """

    def __init__(self, lines: LineFinder) -> None:
        super().__init__()
        self.count = 0
        self.random: list[str] = []
        self._phase = FORWARD
        self._lines = lines
        self._node: Node | None = None
        self._events: list[_Event] = []
        # Storage -> latest event that wrote to it. Memory is only ever reused by what is written
        # by a later operator, which is seen here, so an address never tells of the dead.
        self._bad: dict[int, int] = {}

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def enter_backward(self, roots: Iterable[Tensor]) -> None:
        """Say that from now on operators belong to the backward of `roots`."""
        self._phase = BACKWARD
        for node in _graph(roots):
            node.register_prehook(self._note(node))

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401  (these are torch's)
        types: object,
        args: Any = (),  # noqa: ANN401
        kwargs: Any = None,  # noqa: ANN401
    ) -> object:
        """Run one operator and look at what went in and what came out."""
        kwargs = kwargs or {}
        self.count += 1
        name = str(func)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            self.random.append(name)
        given = [(_address(t), facts(t)) for t in _floats((args, kwargs))]
        result = func(*args, **kwargs)
        made = list(_floats(result))
        found = [] if name.startswith(_UNWRITTEN) else [facts(t) for t in made]
        if all(map(_is_finite, found)):
            for tensor in made:
                self._bad.pop(_address(tensor), None)
        else:
            constant = _has_constant((args, kwargs))
            event = self._event(name, given, tuple(found), is_constant=constant)
            self._events.append(event)
            for tensor, one in zip(made, found, strict=True):
                if not _is_finite(one):
                    self._bad[_address(tensor)] = len(self._events) - 1
        return result

    def first_bad(self, results: Iterable[Tensor]) -> Op | None:
        """Return the first operator that made what is not finite in `results`.

        It is the first of their ancestors whose inputs are finite and whose outputs are not, or
        that makes a NaN without having got one. None if what went in was bad already.
        """
        left = [self._bad[a] for t in results if (a := _address(t)) in self._bad]
        seen: set[int] = set()
        while left:
            event = left.pop()
            if event not in seen:
                seen.add(event)
                left.extend(self._events[event].parents)
        return next((self._events[e].op for e in sorted(seen) if self._events[e].is_origin), None)

    def _event(
        self, name: str, given: list[tuple[int, TensorFacts]], made: tuple[TensorFacts, ...], *,
        is_constant: bool,
    ) -> _Event:  # fmt: skip
        inputs = tuple(one for _, one in given)
        clean = all(map(_is_finite, inputs)) and not is_constant
        new_nan = any(f.nan for f in made) and not any(f.nan for f in inputs)
        parents = [self._bad[a] for a, f in given if not _is_finite(f) and a in self._bad]
        line, module = self._lines.here()
        node = self._node if self._phase == BACKWARD else None
        if line is None and node is not None:
            line = self._lines.of_node(node)
        number, called = self.count - 1, node.name() if node is not None else None
        op = Op(number, name, self._phase, inputs, made, line, module, called)
        return _Event(op, tuple(parents), clean or new_nan)

    def _note(self, node: Node) -> Callable[[object], None]:
        def note(_gradients: object) -> None:
            self._node = node

        return note


def facts(tensor: Tensor) -> TensorFacts:
    """Look at a floating-point or complex tensor; waits for its device."""
    dtype, shape = dtype_name(tensor.dtype), tuple(tensor.shape)
    if not tensor.numel() or tensor.is_meta:
        return TensorFacts(dtype, shape, 0, 0, math.nan, math.nan)
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    real = real.float() if real.element_size() == 1 else real  # float8 has few operators
    low, high = (float(x) for x in torch.aminmax(real.detach()))
    if math.isfinite(low) and math.isfinite(high):
        return TensorFacts(dtype, shape, 0, 0, low, high)
    nan, inf = int(real.isnan().sum()), int(real.isinf().sum())
    return TensorFacts(dtype, shape, nan, inf, low, high)


def _is_finite(one: TensorFacts) -> bool:
    return not (one.nan or one.inf)


def _floats(value: object) -> Iterator[Tensor]:
    """Yield the floating-point and complex tensors in an operator's arguments or results."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _floats(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _floats(item)


def _has_constant(value: object) -> bool:
    """Whether an argument is a non-finite number that somebody wrote down: it is meant."""
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, Mapping):
        return any(map(_has_constant, value.values()))
    return isinstance(value, (tuple, list)) and any(map(_has_constant, value))


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _graph(roots: Iterable[Tensor]) -> Iterator[Node]:
    left = [t.grad_fn for t in roots if t.grad_fn is not None]
    seen: set[Node] = set()
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        left += [n for n, _ in node.next_functions if n is not None]
