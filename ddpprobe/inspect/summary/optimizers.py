"""What an optimizer does to a model: its groups, its state, and the parameters that it forgets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer

from ddpprobe.errors import SummaryError
from ddpprobe.inspect.summary.parameters import held_tensor
from ddpprobe.rank.topology.naming import clean


@dataclass(frozen=True, slots=True)
class OptimizerRow:
    """One optimizer.

    Attributes:
        type: its class.
        lr: of each parameter group; None where a group has none.
        tensors: parameters in its groups.
        foreign: of these, not the model's.
        state_bytes_local: of its state on this rank; 0 before its first step.
    """

    type: str
    lr: tuple[float | None, ...]
    tensors: int
    foreign: int
    state_bytes_local: int


def optimizer_rows(
    model: nn.Module, optimizers: Optimizer | Sequence[Optimizer]
) -> tuple[tuple[OptimizerRow, ...], tuple[str, ...]]:
    """Return the optimizers, and the trainable parameters that are in none of them, by name.

    Raises:
        SummaryError: one of them is no optimizer of torch's kind.
    """
    given = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for one in given:
        if not isinstance(one, Optimizer):
            raise SummaryError(
                f"optimizer must be a torch.optim.Optimizer or a list of them, got "
                f"{type(one).__name__}"
            )
    named = {id(p): clean(name) for name, p in model.named_parameters() if p.requires_grad}
    known = {id(p) for p in model.parameters()}
    held = {id(p) for one in given for group in one.param_groups for p in group["params"]}
    left_out = tuple(name for key, name in named.items() if key not in held)
    return tuple(_row(one, known) for one in given), left_out


def _row(one: Optimizer, known: set[int]) -> OptimizerRow:
    tensors = [p for group in one.param_groups for p in group["params"]]
    state = [v for held in one.state.values() for v in held.values() if isinstance(v, Tensor)]
    return OptimizerRow(
        type=type(one).__name__,
        lr=tuple(_number(group.get("lr")) for group in one.param_groups),
        tensors=len(tensors),
        foreign=sum(id(p) not in known for p in tensors),
        state_bytes_local=sum(held_tensor(t).numel_local * t.dtype.itemsize for t in state),
    )


def _number(value: object) -> float | None:
    """Return a learning rate; None of one on a device, which nobody waits for here."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" else None
    return float(value) if isinstance(value, (int, float)) else None
