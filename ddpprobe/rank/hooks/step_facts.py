"""Cheap facts of a sampled step: how the loop is set up, and which data it was given."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, final

import torch
from torch import Tensor

from ddpprobe.rank import torch_private
from ddpprobe.rank.hooks.gradients import UsedNorms
from ddpprobe.rank.hooks.outputs import leaves
from ddpprobe.rank.hooks.pending_rows import unless_logged
from ddpprobe.rank.hooks.step_rows import StepRows
from ddpprobe.rank.hooks.sweep import is_plain
from ddpprobe.rank.stats.checksum import checksum
from ddpprobe.rank.stats.dense import FLOATS, lies_on
from ddpprobe.rank.topology.describe import Topology
from ddpprobe.rank.torch_private import sharding
from ddpprobe.records.step import (
    DIGEST,
    FIRST_DECAY,
    INPUT_ELEMENTS,
    INPUT_MAX,
    INPUT_MEAN,
    INPUT_MIN,
    INPUT_RMS,
    INPUT_SPREAD,
    INPUT_ZEROS,
    JOINED,
    LEARNING_RATE,
    LOCAL_SGD,
    MOMENT_DECAY,
    OPTIMIZER_STEPS,
    OPTION,
    OPTIONS,
    OUTPUT_SPREAD,
    STALE,
    TRAINABLE,
    TRAINING,
    WEIGHT_DECAY,
)

INPUTS = 4  # tensors that the root is given, the first ones
_ODD = 6_364_136_223_846_793_005  # so that tensors which change places change the sum
DIGEST_BYTES = 1 << 18  # of an input: more tells two batches apart no better
# Of an input or an output, whether samples are alike; both are taken at equal distances.
SAMPLES, NUMBERS = 16, 4096
_COMPARED = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
# So many bits are exact in a float64. The upper ones of a checksum depend on every bit below them,
# the lower ones on none above.
_BITS = 52
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def modes(topology: Topology) -> dict[str, float]:
    """Return the share of modules in training mode, and how many parameters require a gradient.

    And that ranks may be at unlike steps, or are to part, if so.
    """
    training = [module.training for _, module in topology.walk()]
    trained = sum([p.requires_grad for _, p in topology.named_parameters()])
    told = {TRAINING: sum(training) / max(len(training), 1), TRAINABLE: float(trained)}
    asked = (JOINED, sharding.is_joined), (LOCAL_SGD, sharding.is_local_sgd)
    return told | {name: 1.0 for name, is_ in asked if any(is_(ddp) for _, ddp in topology.ddps)}


@final
class OptimizerFacts:
    """What the optimizers of a step are set to and given; each is asked when its `step` begins."""

    def __init__(self) -> None:
        self._norms = UsedNorms()
        self._rate: float | None = None
        self._is_far = False  # a learning rate that the host may not read
        # Scalar -> what the groups say; None: what nobody knows. Told is what all say, and of the
        # weight decay the largest.
        self._said: defaultdict[str, set[float | None]] = defaultdict(set)

    def begin_step(self) -> None:
        """Forget the step before."""
        self._norms.begin_step()
        self._rate, self._is_far = None, False
        self._said.clear()

    def add(
        self, optimizer: object, topology: Topology, scale: Tensor | None, rows: StepRows,
        first: object,
    ) -> None:  # fmt: skip
        """Take the facts of an optimizer; a learning rate that is a tensor goes into `rows`.

        Args:
            optimizer: that steps parameters of the model; one without parameter groups has none.
            topology: the model.
            scale: [] by which it will divide the gradients itself; None: they are what they are.
            rows: of the step.
            first: the optimizer that tells how many steps all have counted: 0 without a state yet.
        """
        self._norms.add(optimizer, topology, scale)
        if optimizer is first:
            _add_steps(optimizer, rows)
        groups = getattr(optimizer, "param_groups", ())
        for group in groups:
            if WEIGHT_DECAY in group:
                self._said[WEIGHT_DECAY].add(_plain(group[WEIGHT_DECAY]))
            self._said[MOMENT_DECAY].add(_decay_of(group))
            self._said[FIRST_DECAY].add(_first_decay_of(group))
            for option in OPTIONS:
                if option in group:
                    self._said[f"{OPTION}{option}"].add(_plain(group[option]))
        rates = [group["lr"] for group in groups if "lr" in group]
        far = [rate for rate in rates if isinstance(rate, Tensor)]
        if far and not self._is_far:
            rows.add_scalar(unless_logged(LEARNING_RATE), far[0])
        self._is_far |= bool(far)
        if rates and not far:
            self._rate = max(float(max(rates)), -math.inf if self._rate is None else self._rate)

    def tell(self, rows: StepRows, *, alone: bool) -> dict[str, float]:
        """Put the norm of the gradients as they are used into `rows`, and return what is known.

        That is the largest learning rate and weight decay of all groups, and the decay of first
        moments (Adam's first beta, SGD's momentum) and of second ones (Adam's second beta,
        RMSprop's alpha) and the options of `OPTIONS` where all groups agree on it.
        `alone`: as of `UsedNorms`.
        """
        self._norms.tell(rows, alone=alone)
        told = {} if self._rate is None or self._is_far else {LEARNING_RATE: self._rate}
        for name, values in self._said.items():
            known = [value for value in values if value is not None]
            if len(known) == len(values) and (len(known) == 1 or name == WEIGHT_DECAY):
                told[name] = max(known)
        return told


def _plain(value: object) -> float | None:
    """Return an option as a number; None of a tensor, which the host may not read, or a tuple."""
    return float(value) if isinstance(value, float | int) else None


def _first_decay_of(group: Mapping[str, Any]) -> float | None:
    """Return the decay of first moments of a group; None where there are none, or on a device."""
    return _plain(_betas_of(group)[0] if "betas" in group else group.get("momentum"))


def _decay_of(group: Mapping[str, Any]) -> float | None:
    """Return the decay of an optimizer's group; None where its arguments mean something else."""
    decay = _betas_of(group)[1] if "betas" in group else group.get("alpha", group.get("rho"))
    return decay if isinstance(decay, float) else None


def _betas_of(group: Mapping[str, Any]) -> tuple[object, object]:
    """Return Adam's two; None where the argument means something else."""
    betas = group["betas"]
    is_pair = isinstance(betas, (tuple, list)) and len(betas) == 2
    return (betas[0], betas[1]) if is_pair else (None, None)


def add_stale_units(topology: Topology, rows: StepRows) -> None:
    """Before a forward: add how many units of FSDP2 will compute with the weights of a step before.

    What is still gathered by now was gathered after the optimizer, by the script, or before it.
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


def _add_steps(optimizer: object, rows: StepRows) -> None:
    # One parameter stands for all. Whether others hold a state first differs by rank, and is no
    # matter: their counts are the same. SGD has a state that counts nothing.
    state = getattr(optimizer, "state", None)  # a wrapper may be without
    of_one = next(iter(state.values()), {"step": 0.0}) if isinstance(state, Mapping) else {}
    steps = of_one.get("step") if isinstance(of_one, Mapping) else None
    if isinstance(steps, Tensor | int | float):
        rows.add_scalar(OPTIMIZER_STEPS, steps)


def add_input(given: Iterable[object], rows: StepRows) -> None:
    """Add checksum and size of the first tensors that the root was given, and of which numbers.

    Of several, as the first one may be a mask or a coefficient: samples are alike if they are in
    all, and the numbers are those of the largest. Nothing of a tensor that is not plain. The
    checksum's upper 52 bits are kept.

    Args:
        given: the root's args and kwargs.
        rows: where the numbers go, on the tensor's device.
    """
    tensors = list(itertools.islice((t for one in given for _, t in leaves(one)), INPUTS))
    first = _first(tensors)
    if first is None:
        return
    rows.add_scalar(INPUT_ELEMENTS, sum(t.numel() for t in tensors))
    tensors = [t for t in tensors if t.device == first.device]
    with torch.no_grad():
        parts = [_beginning(t.detach()) for t in tensors]
        words = torch.zeros(len(parts), dtype=torch.int64, device=first.device)
        whole = words.new_zeros(())
        for part, word in zip(parts, words, strict=True):
            if part is not None:
                checksum(part, word)
                whole = whole * _ODD + word  # of one tensor it is that one's
        if any(part is not None for part in parts):
            rows.add_scalar(DIGEST, ((whole >> (64 - _BITS)) & ((1 << _BITS) - 1)).double())
        dense = [t for t in tensors if is_dense(t)]
        # What has another first dimension than the largest is no batch of samples.
        samples = max(dense, key=Tensor.numel).shape[:1] if dense else ()
        batches = [some for t in dense if t.shape[:1] == samples and (some := _some(t)) is not None]
        if batches:
            rows.add_scalar(INPUT_SPREAD, torch.stack([_spread(some) for some in batches]).max())
            _add_numbers(max(batches, key=Tensor.numel), rows)


def add_output(returned: object, rows: StepRows) -> None:
    """Add how far samples differ in the first tensor that has a gradient to come, and is no loss.

    Args:
        returned: what the root returned.
        rows: where the number goes, on the tensor's device.
    """
    tensor = _first(one for _, one in leaves(returned) if one.requires_grad and one.dim())
    if tensor is not None:
        with torch.no_grad():
            some = _some(tensor)
            if some is not None:
                rows.add_scalar(OUTPUT_SPREAD, _spread(some))


def _first(tensors: Iterable[Tensor]) -> Tensor | None:
    """Return the first one; None if there is none, or none that has numbers here."""
    tensor = next(iter(tensors), None)
    known = tensor is not None and not (tensor.is_meta or torch_private.in_functorch())
    return tensor if known else None


def _add_numbers(some: Tensor, rows: StepRows) -> None:
    """Add rms, mean, extremes and share of zeros of some numbers of an input."""
    low, high = some.aminmax()
    facts = some.square().mean().sqrt(), some.mean(), low, high, (some == 0).float().mean()
    names = INPUT_RMS, INPUT_MEAN, INPUT_MIN, INPUT_MAX, INPUT_ZEROS
    rows.add_scalars(names, torch.stack(facts).double())


def _some(tensor: Tensor) -> Tensor | None:
    """Return some numbers of some samples of a tensor as float32, [samples, numbers].

    Samples lie along the first dimension; one of size 1 before the others is passed over, as packed
    samples lie along the next. None of a single sample, of one that is expanded, and of a tensor
    that is not plain.
    """
    if not is_dense(tensor) or tensor.dtype not in _COMPARED or not tensor.numel():
        return None
    while tensor.dim() > 2 and tensor.shape[0] == 1:
        tensor = tensor[0]
    if not tensor.dim() or len(tensor) < 2 or not tensor.stride(0):
        return None
    some = tensor.detach()[:: -(-len(tensor) // SAMPLES)]
    while some[0].numel() > NUMBERS:  # of views: nothing is copied
        largest = max(range(1, some.dim()), key=lambda dim: some.shape[dim])
        some = some[(slice(None),) * largest + (slice(None, None, 2),)]
    return some.float().reshape(len(some), -1)


def _spread(some: Tensor) -> Tensor:
    """Return the share of the mean square of numbers [samples, numbers] that varies, []."""
    some = some / some.abs().max().clamp(min=torch.finfo(torch.float32).tiny)  # so squares fit
    apart = (some - some.mean(0)).square().sum()
    share: Tensor = apart / some.square().sum().clamp(min=1.0)  # it is less of zeros only
    return share


def _beginning(tensor: Tensor) -> Tensor | None:
    """Return the first elements of a plain tensor [n], at most `DIGEST_BYTES`; None of others.

    What is not contiguous (`tokens[:, :-1]`, channels last) is copied, and no more of it than rows
    are needed.
    """
    most = DIGEST_BYTES // tensor.element_size()
    if not is_dense(tensor) or not tensor.numel():
        return None
    if not tensor.is_contiguous():
        row = tensor.numel() // tensor.shape[0]
        tensor = tensor[: -(-most // row)].contiguous()
    return tensor.view(-1)[:most] if lies_on(tensor, tensor.device) else None


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor has a shape, and numbers of its own in it."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return plain and not (tensor.is_nested or tensor.is_quantized)
