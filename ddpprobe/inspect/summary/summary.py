"""`ddpprobe.summary`: a table of the model's modules, exact under every sharding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import nn
from torch.optim import Optimizer

from ddpprobe.errors import SummaryError, UnknownRow
from ddpprobe.inspect.summary.optimizers import OptimizerRow, optimizer_rows
from ddpprobe.inspect.summary.parameters import HeldParameter, held_parameters, held_tensor
from ddpprobe.inspect.summary.shapes import Calls, Shapes, run_fake
from ddpprobe.inspect.summary.sizes import Dtypes, Sizes, inputs_of
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
        flops: floating-point operations of all these calls, without those of modules inside it: of
            matrix products, convolutions, attention and recurrent layers (see `flops`).
        has_params: whether it, or a module inside it, has parameters.
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
    flops: int
    has_params: bool
    parameters: tuple[ParameterRow, ...]


@dataclass(frozen=True, slots=True)
class Totals:
    """Elements and bytes of the whole model, and of this rank's part; each tensor counted once.

    `flops` are those of one forward; 0 without inputs.
    """

    params: int
    params_local: int
    trainable: int
    param_bytes: int
    param_bytes_local: int
    buffers: int
    buffers_local: int
    buffer_bytes: int
    buffer_bytes_local: int
    flops: int


@final
@dataclass(frozen=True, slots=True)
class Summary:
    """What `ddpprobe.summary` found; `print` shows it as a table.

    Attributes:
        rows: the modules, parents first.
        totals: of the model.
        with_shapes: whether inputs were given.
        uncounted: operators of which no FLOPs are counted: custom ones, and fused layers.
        optimizers: those that were given.
        left_out: trainable parameters that are in none of these, by name.
        loss: name of the loss function that was given.
    """

    rows: tuple[ModuleRow, ...]
    totals: Totals
    with_shapes: bool
    uncounted: tuple[str, ...] = ()
    optimizers: tuple[OptimizerRow, ...] = ()
    left_out: tuple[str, ...] = ()
    loss: str = ""

    @property
    def num_features_model(self) -> int:
        """Size of dimension 1 of the model's first output: channels, features, or tokens.

        Raises:
            SummaryError: there were no inputs, or the output has no such dimension.
        """
        shapes = self.rows[0].output_shapes
        if not shapes or len(shapes[0]) < 2:
            raise SummaryError(
                "num_features_model needs an output of at least two dimensions, got "
                f"{list(shapes)}: call ddpprobe.summary(model, batch) or give input_sizes"
            )
        return shapes[0][1]

    def __getitem__(self, fqn: str) -> ModuleRow:
        """Return the row of a module.

        Raises:
            UnknownRow: there is none of this name.
        """
        for row in self.rows:
            if row.fqn == fqn:
                return row
        known = ", ".join(repr(row.fqn) for row in self.rows[:40])
        raise UnknownRow(f"no module {fqn!r}; there are: {known}")

    def __iter__(self) -> Iterator[ModuleRow]:
        return iter(self.rows)

    def __str__(self) -> str:
        return render(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, strings and numbers, as JSON has them."""
        return dataclasses.asdict(self)


def summary(
    model: nn.Module,
    *inputs: object,
    input_sizes: Sizes | None = None,
    input_dtypes: Dtypes = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    loss_func: Callable[..., object] | None = None,
    **kwinputs: object,
) -> Summary:
    """Return a table of the model's modules: shapes, parameters, dtypes, sharding, FLOPs.

    Nothing is run, allocated or communicated, and nothing of the model changes: with inputs, a
    stand-in made of fake tensors goes through one forward. Forward hooks are left out of it, and
    parameters have their global shapes, as before sharding. Any rank may call it alone.

    Args:
        model: plain, or under any wrapper, also on the meta device.
        *inputs: as for the forward; real or meta tensors, of which only shape and dtype are read.
            Without any there are parameters only.
        input_sizes: in the place of inputs: a size, or a list of sizes, batch included.
        input_dtypes: of these, one for all or one each; None: the dtype of the first floating-point
            parameter. Token indices need torch.long.
        optimizer: one or several: their groups, their state, and which parameters they leave out.
        loss_func: only its name is read.
        **kwinputs: inputs given by name.

    Raises:
        SummaryError: `model` is not a module, or `optimizer` no optimizer; the forward cannot be
            followed on fake tensors; sizes beside inputs, or wrong.
    """
    if not isinstance(model, nn.Module):
        raise SummaryError(
            f"summary() takes a torch.nn.Module, got {type(model).__name__}. "
            "Write ddpprobe.summary(model) or ddpprobe.summary(model, batch)."
        )
    if input_sizes is not None:
        if inputs:
            raise SummaryError("give inputs or input_sizes, not both")
        inputs = inputs_of(model, input_sizes, input_dtypes)
    elif input_dtypes is not None:
        raise SummaryError("input_dtypes goes with input_sizes: inputs have their own dtypes")
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
    optimizers, left_out = optimizer_rows(model, optimizer) if optimizer is not None else ((), ())
    return Summary(
        rows,
        _totals(model, parameters.counted, sum(row.flops for row in rows)),
        with_shapes=bool(inputs or kwinputs),
        uncounted=tuple(sorted({name for call in calls.values() for name in call.uncounted})),
        optimizers=optimizers,
        left_out=left_out,
        loss=_name(loss_func) if loss_func is not None else "",
    )


def _name(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


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
        flops=seen.flops,
        has_params=next(module.parameters(), None) is not None or bool(parameters),
        parameters=parameters,
    )


def _once(texts: Iterator[str]) -> str:
    return "; ".join(filter(None, dict.fromkeys(texts)))


def _totals(model: nn.Module, parameters: list[HeldParameter], flops: int) -> Totals:
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
        flops=flops,
    )
