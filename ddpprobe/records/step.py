"""The frozen data every room shares: a site, its statistics, one step's record, an anomaly.

Torch produces these on the left of the pipeline, NumPy consumes them on the right. Nothing in here
knows torch, files or sockets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]  # [sites, len(COUNTS)]
Values = NDArray[np.float64]  # [sites, len(VALUES)]
Floats = NDArray[np.float64]
Digests = Mapping[tuple[str, str], Mapping[int, int]]

KINDS = (
    "input", "output", "grad_output", "grad_input", "param", "grad_local", "grad",
    "buffer", "optim_state", "update",
)  # fmt: skip
# What outlives a step. Whether it is finite is looked at apart from the rows, all of it at once.
STATE_KINDS = ("param", "buffer", "optim_state")
# Of these a sampled step has rows of some parameters and buffers only, after the optimizer: they
# take turns. Of an optimizer's state that is the second moment.
IN_TURN = ("param", "buffer", "optim_state", "update")
# Whose elements are counted where they are not finite; a change is as bad as its weight.
COUNTED_KINDS = tuple(kind for kind in KINDS if kind != "update")
PLACEMENTS = ("local", "sharded", "replicated", "partial", "unknown")
PHASES = ("forward", "backward", "step")
STEP_PHASES = ("data", "forward", "backward", "optimizer")  # of the time of a step
LEVELS = ("page", "warn", "info")  # of an anomaly
PHASE_OF_KIND = MappingProxyType(
    {
        "input": "forward",
        "output": "forward",
        "grad_output": "backward",
        "grad_input": "backward",
        "grad_local": "backward",
        # `grad` and `param` are what the step does with the gradients: after the reduction every
        # rank is as bad as the worst one, so these never outrank a local witness.
        "grad": "step",
        "param": "step",
        "buffer": "step",
        "optim_state": "step",
        "update": "step",
    }
)


# Seen after the reduction: there every rank may be as bad as the worst, so they name no culprit.
REDUCED_KINDS = tuple(kind for kind in COUNTED_KINDS if PHASE_OF_KIND[kind] == "step")
# What a backward produces: a GradScaler makes these overflow on purpose.
BACKWARD_KINDS = tuple(kind for kind in KINDS if PHASE_OF_KIND[kind] == "backward")


class Column(NamedTuple):
    """A statistic that every row of a record holds: what it is, and how it merges.

    Attributes:
        name: of it.
        dtype: "int64" in `counts`, "float64" in `values`.
        merge: of two rows, associative and commutative; counts always add up, exactly.
        identity: of that merge: what a row without data holds.
        unit: `ELEMENTS`, `TENSORS`, or a power of the tensor's own unit.
    """

    name: str
    dtype: str
    merge: np.ufunc
    identity: float
    unit: str


ELEMENTS, TENSORS, OWN, SQUARED = "elements", "tensors", "x", "x^2"
# In the order of a record's columns: counts of elements, of tensors, values. Of each tensor the
# kernels of `rank/stats` make all but the second, in this order; values are taken over the finite
# elements only. A site with tapped > 0 and observed == 0 is *unobserved*: no data, which is never
# the number 0.
COLUMNS = (
    Column("numel", "int64", np.add, 0, ELEMENTS),  # seen
    Column("nan", "int64", np.add, 0, ELEMENTS),
    Column("pos_inf", "int64", np.add, 0, ELEMENTS),
    Column("neg_inf", "int64", np.add, 0, ELEMENTS),
    Column("zeros", "int64", np.add, 0, ELEMENTS),  # equal to zero (+0 or -0)
    Column("tapped", "int64", np.add, 0, TENSORS),  # that a hook was placed on
    Column("observed", "int64", np.add, 0, TENSORS),  # that arrived
    Column("min", "float64", np.minimum, np.inf, OWN),
    Column("max", "float64", np.maximum, -np.inf, OWN),
    Column("sum", "float64", np.add, 0.0, OWN),
    Column("sum_sq", "float64", np.add, 0.0, SQUARED),
)
_VALUES = [c for c in COLUMNS if c.dtype == "float64"]
COUNTS = tuple(c.name for c in COLUMNS if c.dtype == "int64")
VALUES = tuple(c.name for c in _VALUES)
_EXTREMES = [(i, c.merge) for i, c in enumerate(_VALUES) if c.merge is not np.add]
VALUE_IDENTITY = np.array([c.identity for c in _VALUES])
SQUARES = np.array([c.unit == SQUARED for c in _VALUES])  # divided by the square of a scale

NUMEL, NAN, ZEROS, TAPPED, OBSERVED = map(
    COUNTS.index, ("numel", "nan", "zeros", "tapped", "observed")
)
NONFINITE = slice(NAN, COUNTS.index("neg_inf") + 1)
SUM, SUM_SQ = map(VALUES.index, ("sum", "sum_sq"))


class Formula(NamedTuple):
    """A statistic that is derived on reading.

    Attributes:
        of: what `compute` takes, in its order: columns, and "finite", the number of such elements.
        compute: from arrays of equal shape to one of that shape.
        over: the count without which there is no number.
    """

    of: tuple[str, ...]
    compute: Callable[..., NDArray[np.float64]]
    over: str = "finite"


def _std(total: Floats, square: Floats, n: Floats) -> Floats:
    mean = total / n
    return np.sqrt(np.maximum(square / n - mean * mean, 0.0))


FORMULAS: Mapping[str, Formula] = MappingProxyType(
    {
        "abs_max": Formula(("min", "max"), lambda low, high: np.maximum(abs(low), abs(high))),
        "mean": Formula(("sum", "finite"), lambda total, n: total / n),
        "std": Formula(("sum", "sum_sq", "finite"), _std),
        "rms": Formula(("sum_sq", "finite"), lambda square, n: np.sqrt(square / n)),
        "norm": Formula(("sum_sq",), np.sqrt),
        "zero_ratio": Formula(("zeros", "numel"), lambda zeros, n: zeros / n, over="numel"),
    }
)
STATS = (*COUNTS, *VALUES, "nonfinite", *FORMULAS)
ALWAYS = ("tapped", "observed")  # what these say is said whether a tensor arrived or not
# What these say is said of the finite elements alone.
OF_FINITE = frozenset({*VALUES, *(name for name, of in FORMULAS.items() if of.over == "finite")})


ROOT = "(root)"  # how the model itself is printed, whose FQN is ""


@dataclass(frozen=True, slots=True)
class Site:
    """A place where a tensor is observed.

    Attributes:
        fqn: module (or parameter) path without wrapper prefixes; "" is the root module.
        kind: one of `KINDS`.
        leaf: path of the tensor inside a structured output ("0", "logits", "0.hidden"); "" if the
            output is the tensor.
        placement: `local` (differs by rank: merged), `sharded` (each rank holds a part: merged),
            `replicated` (the same on all ranks: never summed), `partial` (a tensor-parallel partial
            sum: labelled, not merged), `unknown` (a plain tensor inside a tensor-parallel region
            whose layout cannot be told: labelled, not merged).
        primary: whether this rank's part is counted in the global value: of several ranks that hold
            the same part of a `local` or `sharded` site (HSDP replicas, a tensor-parallel group
            after one batch shard) exactly one is.
        dtype: dtype of the tensor, without the `torch.` prefix.
    """

    fqn: str
    kind: str
    leaf: str = ""
    placement: str = "local"
    primary: bool = True
    dtype: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """Identity across ranks and attempts: (fqn, kind, leaf)."""
        return (self.fqn, self.kind, self.leaf)

    @property
    def printed_fqn(self) -> str:
        """FQN as it is printed, and may be typed: that of the model itself is `(root)`."""
        return self.fqn or ROOT

    def __str__(self) -> str:
        leaf = f"[{self.leaf}]" if self.leaf else ""
        return f"{self.printed_fqn}{leaf}:{self.kind}"


# Scalar: host seconds of a step between a backward's last local gradient and its reduced ones.
REDUCE_SECONDS = "reduce_seconds"
# Scalars: of the seconds of a part of a step, those in which the training thread could have run and
# other threads had all cores. Linux counts them; elsewhere there are none.
QUEUED = {part: f"{part}_queued_seconds" for part in (*STEP_PHASES, "reduce")}
CHECKED = "state_tensors"  # scalar of a sampled step: how many tensors were looked at after it
NOTED = "noted"  # scalar, 1 on the first sampled step after what `probe.note` announced
# Scalar of a sampled step whose gradients stayed each rank's own: 3 where `no_sync` held them back,
# 2 where nothing is known that could reduce them (no wrapper; a script may do it by hand), else 1.
UNREDUCED, NOTHING_REDUCES, HELD_BACK = "unreduced", 2.0, 3.0
# Scalar, 1 on a sampled step of a rank that has begun a `join()` of DDP: once ranks have had unlike
# numbers of batches, a step of one is no longer the step of that number of another.
JOINED = "joined"
# Scalar, 1 on a sampled step whose gradients torch's hook of post-local SGD keeps to some ranks.
LOCAL_SGD = "local_sgd"
LEARNING_RATE = "lr"  # scalar: the largest of all parameter groups; a logged one stands instead
# Scalar of a sampled step: L2 norm of this rank's gradients as the optimizers are given them.
USED_NORM = "grad_norm_used"
# Scalar of a sampled step: how many parameters had a local gradient on this rank that is not zero.
ACTIVE = "active_gradients"
TRAINING = "training_share"  # scalar: of the modules, those in training mode in the forward
TRAINABLE = "trainable_parameters"  # scalar: how many parameters require a gradient
# Scalar: steps that the optimizer's state has counted before this one; absent if it counts none.
OPTIMIZER_STEPS = "optimizer_steps"
# Scalars: by how much the optimizers keep of their moments in a step; absent if they differ. Of
# the first one: Adam's first beta, the momentum of SGD.
FIRST_DECAY, MOMENT_DECAY = "first_moment_decay", "second_moment_decay"
WEIGHT_DECAY = "weight_decay"  # scalar: the largest of all parameter groups
# Scalars, each with the option after it: an option of the optimizers that no schedule changes, a
# bool as 0 or 1; absent if groups differ in it, or where it is no plain number.
OPTION = "optimizer_option@"
OPTIONS = (
    "eps", "dampening", "rho",
    "amsgrad", "nesterov", "maximize", "centered", "decoupled_weight_decay",
)  # fmt: skip
# Scalar: how many units of FSDP2 were gathered before the optimizer stepped, and not again since.
STALE = "stale_units"
BUFFER = "buffer"  # in place of a shard, in digests: a buffer that no step has changed
# The same: a parameter of a model that nothing is known to reduce, whose ranks may be replicas.
UNWRAPPED = "unwrapped"
DIGEST = "input_digest"  # scalar: 52 bits of a checksum of the first tensors given to it
INPUT_ELEMENTS = "input_elements"  # scalar: how many elements these have together
# Scalars: of that tensor, and of the first one that the model returns: which share of its mean
# square varies between the samples of a batch. 0: all of them are alike.
INPUT_SPREAD, OUTPUT_SPREAD = "input_spread", "output_spread"
# Scalars of the largest of these tensors: rms, mean, extremes and share of zeros of some numbers.
INPUT_RMS, INPUT_MEAN, INPUT_MIN = "input_rms", "input_mean", "input_min"
INPUT_MAX, INPUT_ZEROS = "input_max", "input_zeros"
# Scalar: the share of places of a text at which the largest logit is that of the very token there,
# of those whose next token is another one; -1: they are too few.
COPIED = "copied_inputs"
# Scalars of the output's gradient as a straight line over the output, see `hooks.target_facts`: its
# slope, the share of the gradient's variance that no line explains, where the line is zero, and rms
# and mean of the output.
PULL, PULL_REST, TARGET = "output_pull", "output_pull_rest", "output_target"
PULLED_RMS, PULLED_MEAN = "output_pulled_rms", "output_pulled_mean"
# Scalars of a cross-entropy over the classes of the output, see `hooks.class_facts`: its rows, how
# many of them are looked at, the weight of each in the loss, the share of those with a label, of
# these the share that is answered rightly, the label if all have the same (-1: they have not), and
# a bit for each label that there is, modulo the number of bits; by which power of its share a label
# weighs; the share of rows too sure to tell whether they have a label. NaN: it is another loss.
CLASS_ROWS, CLASS_LOOKED, CLASS_WEIGHT = "class_rows", "class_looked_at", "class_weight"
CLASS_LABELLED, CLASS_RIGHT, CLASS_OF_ALL = "class_labelled", "class_right", "class_of_all"
CLASS_SEEN, LABEL_BITS, CLASS_POWER, CLASS_SURE = "classes_seen", 52, "class_power", "class_sure"
# Scalar of the first sampled steps, see `hooks.extra_activation`: what outputs went through before
# a loss that has its own: a place among these, from 1 on. 0: nothing; NaN: nobody can tell yet.
EXTRA_ACTIVATION = "extra_activation"
EXTRA_ACTIVATIONS = (
    ("sigmoid", "binary"), ("ReLU", "binary"), ("sigmoid inside", "binary"),
    ("softmax", "classes"), ("sigmoid", "classes"), ("ReLU", "classes"),
)  # fmt: skip
# Scalars of batch norms in training mode: fewest values of a channel, largest running momentum.
NORM_VALUES, NORM_MOMENTUM = "batch_norm_values", "batch_norm_momentum"
# Scalar: how many micro-batches of the step, the first ones, were for another model's step.
LENT = "lent_passes"
# Scalar: how many times in the step gradients were thrown away before any optimizer took them.
DROPPED = "dropped_gradients"
# Scalar: norm of some gradients of the step before that the first backward of a step has added to.
KEPT = "kept_gradients"
# Scalars, a path after each: parameters in a Python list of modules with a gradient, no optimizer.
UNREGISTERED = "unregistered@"
# Scalars of what a checkpointed block computes again in the backward: of the output that differs
# most from that of the forward the mean square of the difference, as a share of its own, and the
# `fqn_number` of the module.
RECOMPUTED, RECOMPUTED_AT = "recomputed_apart", "recomputed_module"
# Scalars where several models of a process are probed, see `rank.passes`: the number of the step's
# last pass, and of the one in which `first_bad` was bad first.
PASS, PASS_OF_BAD = "pass", "pass_of_first_bad"
# Scalar of a record that tells of a bad step ahead of its losses: that of the step, if it is known.
LOSS_OF_BAD = "loss_of_first_bad"
# Scalar: nobody knows whether the module whose output is `first_bad` was given finite tensors.
UNREAD_INPUT = "first_bad_of_unread_input"


def fqn_number(fqn: str) -> float:
    """Return a number for a module that a tensor can hold: 52 bits of a hash of its FQN."""
    name = fqn.encode(errors="surrogatepass")
    return float(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 12)


# In place of an order: other ranks' may be before it or after it, and nobody knows.
UNORDERED = 1 << 62
SEVERAL = -1  # in place of a rank: more than one, and none of them first, or nobody knows which


@dataclass(frozen=True, slots=True)
class FirstBad:
    """The first non-finite local tensor of a step, on one rank or on all.

    Where several ranks have theirs at the same place, `rank` is `SEVERAL` and the counts are sums:
    the bits of one rank explain none of the others', but what they have in common may.
    `order` is the position in the rank's execution order within the step. In a pipeline, whose
    stages run one after the other, it is the time in Unix ns; on a device the stage comes before
    the position, and where its number is not known it is `UNORDERED`: then `SEVERAL` means that one
    was first, and nobody knows which. `fqn` is None when the step was not sampled and only the
    phase is known, or nobody knows which of several. The four counts are elements. `step` is
    smaller than the record's where a parameter was bad before the step's forwards began: it was
    born in an earlier step.
    """

    step: int
    micro: int
    phase: str
    order: int
    rank: int
    fqn: str | None = None
    kind: str | None = None
    leaf: str = ""
    nan: int = 0
    pos_inf: int = 0
    neg_inf: int = 0
    numel: int = 0

    @property
    def place(self) -> tuple[int, bool, int, int, int, str, str, str]:
        """Order of cause: the smallest one over all ranks is the origin.

        What a step left behind comes after all else in it, however many micro-batches a rank had.
        """
        when = (self.step, self.is_state, self.micro, PHASES.index(self.phase), self.order)
        return (*when, self.fqn or "", self.kind or "", self.leaf)

    @property
    def is_state(self) -> bool:
        """Whether it was found in what the step left behind: after the gradients it came from."""
        return self.phase == "step" and self.kind in STATE_KINDS

    def names(self, known: FirstBad) -> bool:
        """Whether it names the module of one that could not: the root's row is made last."""
        same = (self.micro, self.phase) == (known.micro, known.phase)
        return same and known.fqn is None and self.fqn is not None


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What is known of one optimizer step, of one rank or of several merged.

    Attributes:
        attempt: 0 for the first start, +1 for each restart into the same run directory.
        step: optimizer step, counted from 0 within the run.
        ranks: the ranks merged in here, ascending.
        wall_time_ns: Unix time in ns when the step ended (the latest of the merged ranks).
        sampled: False for a step of which only the every-step watch reported.
        sites: one per row of `counts` and `values`, in execution order.
        counts: int64 [sites, len(COUNTS)].
        values: float64 [sites, len(VALUES)], over finite elements.
        scalars: per rank, name -> number: `loss` and what else `probe.log` was given; `loss@-3` and
            the like of the steps since the record before, see `every_loss`;
            `grad_norm_local` (L2, before the reduction), `grad_norm` (L2, after the reduction and
            before clipping, on this rank's part; without rows of `grad`, what the optimizer is
            given), `grad_norm_used` (the same after clipping), `output_rms` (geometric mean of the
            rms of its outputs), `active_gradients` (parameters whose local gradient is not zero),
            `micro_batches`, `<phase>_seconds`, `probe_seconds`, and how the loop is set up (`lr`
            and below).
        first_bad: the earliest non-finite local tensor, if any.
        skipped: the optimizer did not step (a GradScaler found inf).
        partial: the step never reached its end (exception, exit).
        missing: ranks that were expected and did not deliver.
        digests: (parameter FQN, shard) -> checksum (64 bits, signed) -> set of the ranks that hold
            it, as a bit mask. Ranks that hold the same shard of one parameter (shard "" if it is
            whole) must agree; the head keeps only the entries in which they do not. With shard
            `BUFFER` it is a buffer that no step has changed (of a large one, stretches of it); with
            `UNWRAPPED` nobody knows whether ranks are to agree.
        binned: int64 [histograms], the rows of `sites` that have one, ascending.
        bins: int64 [histograms, bins], see `records.histogram`.
    """

    attempt: int
    step: int
    ranks: tuple[int, ...]
    wall_time_ns: int
    sampled: bool = True
    sites: tuple[Site, ...] = ()
    counts: Counts = field(default_factory=lambda: np.zeros((0, len(COUNTS)), np.int64))
    values: Values = field(default_factory=lambda: np.zeros((0, len(VALUES)), np.float64))
    scalars: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    first_bad: FirstBad | None = None
    skipped: bool = False
    partial: bool = False
    missing: tuple[int, ...] = ()
    digests: Digests = field(default_factory=dict)
    binned: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    bins: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def __post_init__(self) -> None:
        want = (len(self.sites), len(COUNTS)), (len(self.sites), len(VALUES))
        if (self.counts.shape, self.values.shape) != want:
            msg = (
                f"{len(self.sites)} sites need counts and values of shapes {want[0]} and "
                f"{want[1]}, got {self.counts.shape} and {self.values.shape}"
            )
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Anomaly:
    """One verdict of a detector. `level` is page, warn or info; `rank` is None if none is to blame.

    `module` is the FQN without wrapper prefixes, None where unknown; `values` are the numbers
    behind the verdict; `sampled` says whether the step was a sampled one.
    """

    detector: str
    level: str
    step: int
    micro: int
    rank: int | None
    module: str | None
    kind: str | None
    phase: str
    first_cause: bool
    message: str
    values: Mapping[str, float]
    sampled: bool
    attempt: int = 0
    wall_time_ns: int = 0

    @property
    def place(self) -> str:
        """The site, or the module alone if no kind of tensor is named; "" without a module."""
        if self.module is None:
            return ""
        site = str(Site(self.module, self.kind or ""))
        return site if self.kind else site.removesuffix(":")


def merge_counts(a: Counts, b: Counts) -> Counts:
    """Merge two blocks of counts of equal shape: exact integer addition."""
    return a + b


def merge_values(a: Values, b: Values) -> Values:
    """Merge two blocks of values [..., len(VALUES)] of equal shape, each column by its rule."""
    out = a + b
    for i, merge in _EXTREMES:
        out[..., i] = merge(a[..., i], b[..., i])
    return out


def merge_runs(counts: Counts, values: Values, starts: NDArray[np.intp]) -> tuple[Counts, Values]:
    """Merge runs of neighbouring rows, of which each begins where `starts` [runs] says."""
    merged = np.empty((len(starts), len(VALUES)))
    for i, column in enumerate(_VALUES):
        merged[:, i] = column.merge.reduceat(values[:, i], starts)
    return np.add.reduceat(counts, starts), merged


def empty_rows(n: int) -> tuple[Counts, Values]:
    """Return the identity of the merge for `n` sites."""
    return np.zeros((n, len(COUNTS)), np.int64), np.tile(VALUE_IDENTITY, (n, 1))


def columns_of(stat: str) -> frozenset[str]:
    """Return the columns without which a statistic of `STATS` cannot be derived."""
    more = FORMULAS[stat].of if stat in FORMULAS else (stat,)
    finite = {"numel", *COUNTS[NONFINITE]}  # whether there is a value at all
    return frozenset({*more, *finite} - {"finite", "nonfinite"})


def derive(stat: str, counts: Counts, values: Values) -> Floats:
    """Compute one statistic of `STATS` from rows [..., columns]; NaN where there is no data.

    mean, std, rms and norm are over the finite elements (population std); `zero_ratio` is over all.
    """
    if stat in COUNTS:
        return counts[..., COUNTS.index(stat)].astype(np.float64)
    nonfinite: Floats = counts[..., NONFINITE].sum(-1).astype(np.float64)
    if stat == "nonfinite":
        return nonfinite
    if stat not in STATS:
        msg = f"unknown statistic {stat!r}: choose one of {', '.join(STATS)}"
        raise ValueError(msg)

    def column(name: str) -> Floats:
        if name == "finite":
            return counts[..., NUMEL].astype(np.float64) - nonfinite
        if name in COUNTS:
            return counts[..., COUNTS.index(name)].astype(np.float64)
        return values[..., VALUES.index(name)]

    formula = FORMULAS.get(stat, Formula((stat,), np.asarray))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        out = formula.compute(*map(column, formula.of))
    return np.where(column(formula.over) > 0, out, np.nan)


def observed(stat: str, counts: Counts, values: Values) -> Floats:
    """Compute one statistic as `derive` does; NaN also where no tensor arrived."""
    found = derive(stat, counts, values)
    return found if stat in ALWAYS else np.where(counts[..., OBSERVED] > 0, found, np.nan)
