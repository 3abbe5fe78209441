"""Cheap facts of a sampled step: how the loop is set up, and which data it was given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddpprobe.rank import torch_private
from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.hooks.pending_rows import unless_logged
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.sweep import is_plain
from ddpprobe.rank.stats.checksum import checksum
from ddpprobe.rank.stats.dense import lies_on
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.torch_private import sharding
from ddpprobe.records.step import (
    DIGEST,
    LEARNING_RATE,
    MOMENT_DECAY,
    OPTIMIZER_STEPS,
    STALE,
    TRAINABLE,
    TRAINING,
)

DIGEST_BYTES = 1 << 18  # of an input: more tells two batches apart no better
# So many bits are exact in a float64. The upper ones of a checksum depend on every bit below them,
# the lower ones on none above.
_BITS = 52
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def modes(topology: Topology) -> dict[str, float]:
    """Return the share of modules in training mode, and how many parameters require a gradient."""
    training = [module.training for _, module in topology.walk()]
    trained = sum([p.requires_grad for _, p in topology.named_parameters()])
    return {TRAINING: sum(training) / max(len(training), 1), TRAINABLE: float(trained)}


def of_optimizer(optimizer: object, all_: Sequence[Optimizer], rows: StepRows) -> dict[str, float]:
    """Return the largest learning rate of all parameter groups, before an optimizer's step.

    Where one is a tensor the host may not read it: it is put into `rows` instead. So is how many
    steps the first one of the optimizers has counted, if it is this one; 0 without a state yet.
    """
    if all_ and all_[0] is optimizer:
        _add_steps(all_[0], rows)
    rates = [group["lr"] for o in all_ for group in o.param_groups if "lr" in group]
    far = [rate for rate in rates if isinstance(rate, Tensor)]
    if far:
        rows.add_scalar(unless_logged(LEARNING_RATE), far[0])
    told = {LEARNING_RATE: float(max(rates))} if rates and not far else {}
    return told | _moment_decay(all_)


def _moment_decay(all_: Sequence[Optimizer]) -> dict[str, float]:
    """Return the decay of second moments: Adam's second beta, RMSprop's alpha; {} if unknown."""
    groups = [group for optimizer in all_ for group in optimizer.param_groups]
    found = {_decay_of(group) for group in groups}
    decay = found.pop() if len(found) == 1 else None
    return {MOMENT_DECAY: decay} if decay is not None else {}


def _decay_of(group: Mapping[str, Any]) -> float | None:
    """Return the decay of an optimizer's group; None where its arguments mean something else."""
    if "betas" not in group:
        decay = group.get("alpha", group.get("rho"))
    else:
        betas = group["betas"]
        decay = betas[1] if isinstance(betas, (tuple, list)) and len(betas) == 2 else None
    return decay if isinstance(decay, float) else None


def add_stale_units(topology: Topology, rows: StepRows) -> None:
    """Before a forward: add how many units of FSDP2 will compute with the weights of a step before.

    What is still gathered by now was gathered behind the optimizer, by the script, or before it.
    The first trained parameter of a unit stands for all, which are gathered together. Nothing is
    added where units are gathered and none of them can be compared.
    """
    if not any(True for _ in topology.units()):
        return
    with torch.no_grad():
        pairs = list(sharding.gathered(topology.root, _are_comparable))
        stale = [
            (_bits(pair[0]) != _bits(pair[1].to(pair[0].dtype))).any() for pair in pairs if pair
        ]
        if stale or not pairs:
            rows.add_scalar(STALE, torch.stack(stale).sum() if stale else 0.0)


def _are_comparable(full: Tensor, shard: Tensor) -> bool:
    # Not an offloaded shard, which lies on the CPU, nor a class with another way to gather (fp8).
    return is_plain(full) and is_plain(shard) and full.device == shard.device


def _bits(tensor: Tensor) -> Tensor:
    """Return a plain tensor as integers of its size: a NaN is equal to itself there."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def _add_steps(optimizer: Optimizer, rows: StepRows) -> None:
    # One parameter stands for all. Whether others hold a state first differs by rank, and is no
    # matter: their counts are the same. SGD has a state that counts nothing.
    state = getattr(optimizer, "state", None)  # a wrapper may be without
    of_one = next(iter(state.values()), {"step": 0.0}) if isinstance(state, Mapping) else {}
    steps = of_one.get("step") if isinstance(of_one, Mapping) else None
    if isinstance(steps, Tensor | int | float):
        rows.add_scalar(OPTIMIZER_STEPS, steps)


def add_digest(given: Iterable[object], rows: StepRows) -> None:
    """Add a checksum of the first tensor in what the root was given; none if it is not plain.

    Args:
        given: the root's args and kwargs.
        rows: where the number goes: the upper 52 bits of the checksum, on the tensor's device.
    """
    tensor = next((tensor for one in given for _, tensor in leaves(one)), None)
    if tensor is None or tensor.is_meta or torch_private.in_functorch():
        return
    with torch.no_grad():
        part = _beginning(tensor.detach())
        if part is None:
            return
        word = torch.zeros((), dtype=torch.int64, device=tensor.device)
        checksum(part, word)
        rows.add_scalar(DIGEST, ((word >> (64 - _BITS)) & ((1 << _BITS) - 1)).double())


def _beginning(tensor: Tensor) -> Tensor | None:
    """Return the first elements of a plain tensor [n], at most `DIGEST_BYTES`; None of others.

    What is not contiguous (`tokens[:, :-1]`, channels last) is copied, and no more of it than rows
    are needed.
    """
    most = DIGEST_BYTES // tensor.element_size()
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    if not plain or tensor.is_nested or not tensor.numel():
        return None
    if not tensor.is_contiguous():
        row = tensor.numel() // tensor.shape[0]
        tensor = tensor[: -(-most // row)].contiguous()
    return tensor.view(-1)[:most] if lies_on(tensor, tensor.device) else None
