"""`ddpprobe.summary`: a table of the model's modules, exact under every sharding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import nn

from ddpprobe.inspect.summary.parameters import HeldParameter, held_parameters, held_tensor
from ddpprobe.inspect.summary.shapes import Calls, Shapes, run_fake
from ddpprobe.inspect.summary.skeleton import unwrapped
from ddpprobe.inspect.summary.table import render
from ddpprobe.rank.stats.dense import dtype_name
from ddpprobe.rank.topology.naming import inner, own_class, walk


@dataclass(frozen=True, slots=True)
class ParameterRow:
    """One parameter of one module.

    Attributes:
        fqn: its name without wrapper prefixes.
        shape: of the whole parameter.
        numel, numel_local: elements of the whole, and of what this rank stores.
        placement: how it is spread over ranks; "" if it is plain.
        tied_to: FQN under which the same parameter was already counted; "" if this is the first.
    """

    fqn: str
    shape: tuple[int, ...]
    numel: int
    numel_local: int
    dtype: str
    trainable: bool
    placement: str
    tied_to: str


@dataclass(frozen=True, slots=True)
class ModuleRow:
    """One module, wrappers left out. Numbers are of its own parameters, its children's excluded.

    Attributes:
        fqn: its name; "" for the root. A module under several names has its first.
        type: its class.
        depth: 0 for the root.
        input_shapes, output_shapes: of the tensors in its first call; empty without inputs.
        output_dtypes: of those outputs.
        dtype: of its parameters, "" without any.
        params_global, params_local: elements of the whole model's and of this rank's parameters;
            a tied one counts where it comes first.
        trainable: how many of `params_global` require a gradient.
        placement: how its parameters are spread, such as "Shard(0) over dp(4)".
        calls: how often one forward calls it; 0 without inputs.
        parameters: one by one, tied ones included.
    """

    fqn: str
    type: str
    depth: int
    input_shapes: Shapes
    output_shapes: Shapes
    output_dtypes: tuple[str, ...]
    dtype: str
    params_global: int
    params_local: int
    trainable: int
    placement: str
    calls: int
    parameters: tuple[ParameterRow, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """Elements and bytes of the whole model, and of this rank's part; each tensor counted once."""

    params: int
    params_local: int
    trainable: int
    param_bytes: int
    param_bytes_local: int
    buffers: int
    buffers_local: int
    buffer_bytes: int
    buffer_bytes_local: int


@final
@dataclass(frozen=True, slots=True)
class Summary:
    """What `ddpprobe.summary` found; `print` shows it as a table.

    Attributes:
        rows: the modules, parents first.
        totals: of the model.
        with_shapes: whether inputs were given.
    """

    rows: tuple[ModuleRow, ...]
    totals: Totals
    with_shapes: bool

    def __getitem__(self, fqn: str) -> ModuleRow:
        """Return the row of a module.

        Raises:
            KeyError: there is none of this name.
        """
        for row in self.rows:
            if row.fqn == fqn:
                return row
        raise KeyError(f"no module {fqn!r}; there are: {', '.join(r.fqn for r in self.rows[:40])}")

    def __iter__(self) -> Iterator[ModuleRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        return render(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, strings and numbers, as JSON has them."""
        return dataclasses.asdict(self)


def summary(model: nn.Module, *inputs: object, **kwinputs: object) -> Summary:
    """Return a table of the model's modules: shapes, parameters, dtypes, sharding.

    Nothing is run, allocated or communicated, and nothing of the model changes: with inputs, a
    stand-in made of fake tensors goes through one forward. Forward hooks are left out of it, and
    parameters have their global shapes, as before sharding. Any rank may call it alone.

    Args:
        model: plain, or under any wrapper, also on the meta device.
        *inputs: as for the forward; real or meta tensors, of which only shape and dtype are read.
            Without any there are parameters only.
        **kwinputs: those given by name.

    Raises:
        TypeError: `model` is not a module.
        SummaryError: the forward cannot be followed on fake tensors.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"summary() takes a torch.nn.Module, got {type(model).__name__}. "
            "Write ddpprobe.summary(model) or ddpprobe.summary(model, batch)."
        )
    modules = [(fqn, m) for fqn, m in walk(unwrapped(model)) if inner(m) is None]
    held = held_parameters(model)
    calls: Mapping[int, Calls] = {}
    if inputs or kwinputs:
        names = {id(module): fqn for fqn, module in modules}
        calls = run_fake(model, names, held, inputs, kwinputs)
    parameters = _Parameters(held)
    rows = tuple(
        _module_row(fqn, module, parameters.of(fqn, module), calls.get(id(module)))
        for fqn, module in modules
    )
    return Summary(rows, _totals(model, parameters.counted), bool(inputs or kwinputs))


@final
class _Parameters:
    """Hands out each module's parameters, and counts a tied one once."""

    def __init__(self, held: Mapping[tuple[int, str], HeldParameter]) -> None:
        self.counted: list[HeldParameter] = []
        self._first: dict[object, str] = {}
        self._of: dict[int, list[tuple[str, HeldParameter]]] = {}
        for (owner, name), one in held.items():
            self._of.setdefault(owner, []).append((name, one))

    def of(self, fqn: str, module: nn.Module) -> tuple[ParameterRow, ...]:
        """Return the rows of a module's own parameters."""
        found = []
        for name, held in self._of.get(id(module), []):
            full = f"{fqn}.{name}" if fqn else name
            tied_to = self._first.get(held.identity, "")
            if not tied_to:
                self._first[held.identity] = full
                self.counted.append(held)
            found.append(
                ParameterRow(
                    full, held.shape, held.numel, held.numel_local, dtype_name(held.dtype),
                    held.trainable, held.placement, tied_to,
                )
            )  # fmt: skip
        return tuple(found)


def _module_row(
    fqn: str, module: nn.Module, parameters: tuple[ParameterRow, ...], call: Calls | None
) -> ModuleRow:
    own = [p for p in parameters if not p.tied_to]
    seen = call or Calls((), calls=0)
    return ModuleRow(
        fqn=fqn,
        type=own_class(module).__name__,
        depth=fqn.count(".") + 1 if fqn else 0,
        input_shapes=seen.inputs,
        output_shapes=seen.outputs,
        output_dtypes=seen.output_dtypes,
        dtype=_once(p.dtype for p in parameters),
        params_global=sum(p.numel for p in own),
        params_local=sum(p.numel_local for p in own),
        trainable=sum(p.numel for p in own if p.trainable),
        placement=_once(p.placement for p in parameters),
        calls=seen.calls,
        parameters=parameters,
    )


def _once(texts: Iterator[str]) -> str:
    return "; ".join(filter(None, dict.fromkeys(texts)))


def _totals(model: nn.Module, parameters: list[HeldParameter]) -> Totals:
    buffers = [held_tensor(b) for b in {id(b): b for b in model.buffers()}.values()]
    return Totals(
        params=sum(p.numel for p in parameters),
        params_local=sum(p.numel_local for p in parameters),
        trainable=sum(p.numel for p in parameters if p.trainable),
        param_bytes=sum(p.numel * p.dtype.itemsize for p in parameters),
        param_bytes_local=sum(p.numel_local * p.dtype.itemsize for p in parameters),
        buffers=sum(b.numel for b in buffers),
        buffers_local=sum(b.numel_local for b in buffers),
        buffer_bytes=sum(b.numel * b.dtype.itemsize for b in buffers),
        buffer_bytes_local=sum(b.numel_local * b.dtype.itemsize for b in buffers),
    )
