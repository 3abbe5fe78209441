"""What is combined, what torch itself rules out, and the cells that follow.

Pairwise: every pair of values that some valid cell can hold stands in at least one cell, plus
the corners in `corners.py`. The generator is greedy and deterministic: no randomness, no clock.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields

DDP = ("ddp", "ddp-bucket-view", "ddp-static", "ddp-unused")
FSDP1 = ("fsdp1", "fsdp1-flat", "hsdp1")
FSDP2 = ("fsdp2", "hsdp", "fsdp2-tp")
DDP_TP = "ddp-tp"  # refused, so it is no value of the axis
TP = ("tp", "fsdp2-tp", DDP_TP)

# The first value of an axis is the plain one: ties go to it.
AXES: Mapping[str, tuple[object, ...]] = {
    "wrapper": ("plain", *DDP, *FSDP1, *FSDP2, "tp", "pp"),
    "model": (
        "mlp", "resnet", "hf", "shared", "tied", "frozen", "branches", "moe", "attention",
        "sparse", "empty",
    ),
    "loop": ("one", "accumulate", "no-sync", "two-optimizers", "eval", "lbfgs", "no-optimizer"),
    "memory": ("none", "checkpoint", "reentrant", "wrapper", "offload-wrapper", "cpu-offload"),
    "ranks": (2, 1, 3, 4),
    "precision": ("fp32", "autocast", "mixed", "scaler"),
    "engine": ("eager", "whole", "block"),
    "install": ("after", "before", "late"),
    "every": (1, 2),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination. `dp` ranks see different data; the others repeat theirs."""

    wrapper: str = "plain"
    model: str = "mlp"
    loop: str = "one"
    memory: str = "none"
    ranks: int = 2
    precision: str = "fp32"
    engine: str = "eager"
    install: str = "after"
    every: int = 1

    @property
    def recomputes(self) -> bool:
        """Whether the backward computes a part of the forward again."""
        return self.memory in ("checkpoint", "reentrant", "wrapper")

    @property
    def name(self) -> str:
        """Identity, stable as long as the values are."""
        return " ".join(str(getattr(self, f.name)) for f in fields(self))

    @classmethod
    def named(cls, name: str) -> Cell:
        """Return the cell of a name."""
        return cls(*(int(word) if word.isdecimal() else word for word in name.split()))  # type: ignore[arg-type]

    @property
    def dp(self) -> int:
        """How many different batches a micro-batch has over all ranks."""
        return {"tp": 1, "pp": 1, "fsdp2-tp": self.ranks // 2, DDP_TP: self.ranks // 2}.get(
            self.wrapper, self.ranks
        )

    @property
    def inplace(self) -> bool:
        """Whether ReLUs work in place; torch refuses that after a ColwiseParallel Linear."""
        return self.wrapper not in TP

    @property
    def micros(self) -> int:
        """Training forwards in one step."""
        return 2 if self.loop in ("accumulate", "no-sync", "lbfgs") or self.wrapper == "pp" else 1

    @property
    def low_precision(self) -> bool:
        """Whether activations are bf16 or fp16."""
        return self.precision != "fp32"

    def choice(self, what: str, among: int) -> int:
        """A fixed arbitrary number below `among` for this cell."""
        return zlib.crc32(f"{what} {self.name}".encode()) % among


@dataclass(frozen=True)
class Constraint:
    """A combination that torch itself refuses, or that means nothing; `forbids` says which."""

    forbids: Callable[..., bool]
    reason: str

    @functools.cached_property
    def axes(self) -> tuple[str, ...]:
        """The axes it speaks of: the names of its arguments."""
        return tuple(inspect.signature(self.forbids).parameters)


CONSTRAINTS = tuple(
    Constraint(forbids, reason)
    for forbids, reason in (
        # -- the shape of the job --
        (lambda wrapper, ranks: wrapper in ("hsdp", "hsdp1", "fsdp2-tp") and ranks != 4,
         "a 2-D mesh of 2 x 2 needs 4 ranks"),
        (lambda wrapper, ranks: wrapper in ("tp", "pp") and ranks == 1,
         "one rank shards nothing and has one stage"),
        (lambda wrapper, model: wrapper in TP and model in ("resnet", "attention", "sparse"),
         "parallelize_module shards no convolution, packed attention or sparse gradient"),
        (lambda wrapper, model: wrapper == "pp" and model != "mlp",
         "a pipeline stage passes one tensor on, owns its weights and trains some of them"),
        (lambda wrapper, loop: wrapper == "pp" and loop not in ("one", "two-optimizers"),
         "the pipeline schedule runs the micro-batches itself"),
        (lambda wrapper, precision: wrapper == "pp" and precision != "fp32",
         "the pipeline schedule runs forward and backward itself"),
        (lambda wrapper, engine: wrapper == "pp" and engine == "whole",
         "a stage is a part: compiled per block"),
        (lambda engine, install: install == "late" and engine == "eager",
         "installing after the first call differs from before it only when compiled"),
        # -- loops --
        (lambda wrapper, loop: loop == "no-sync" and wrapper in ("plain", "tp", "pp"),
         "has no no_sync"),
        (lambda wrapper, loop: loop == "lbfgs" and wrapper not in ("plain", *DDP),
         "LBFGS takes inner products over whole parameters, not over shards"),
        (lambda loop, model: loop == "lbfgs" and model in ("sparse", "branches", "moe"),
         "LBFGS wants a dense, smooth gradient of every parameter"),
        (lambda loop, precision: precision == "scaler" and loop in ("lbfgs", "no-optimizer"),
         "GradScaler takes neither closures nor loops without an optimizer"),
        (lambda wrapper, loop: wrapper == "ddp-static" and loop == "no-sync",
         "static_graph counts a first backward that synchronises"),
        # -- models --
        (lambda wrapper, model: model == "branches"
         and wrapper not in ("plain", "ddp-unused", "fsdp1", "fsdp1-flat", "hsdp1"),
         "ranks reduce different parameters: only find_unused_parameters and flat parameters cope"),
        (lambda wrapper, model: model == "sparse"
         and wrapper in ("ddp-bucket-view", *FSDP1, *FSDP2),
         "sparse gradients are reduced by DDP without bucket views only"),
        (lambda wrapper, model: model == "frozen" and wrapper == "fsdp1-flat",
         "a flat parameter is trained or frozen as a whole"),
        # -- precision --
        (lambda wrapper, precision: precision == "mixed" and wrapper not in (*FSDP1, *FSDP2),
         "MixedPrecision is FSDP's"),
        (lambda wrapper, precision: wrapper == "tp" and precision == "scaler",
         "GradScaler refuses plain tensors beside DTensors"),
        (lambda model, precision: precision == "mixed" and model == "resnet",
         "BatchNorm takes no bf16 weights beside fp32 running statistics"),
        (lambda model, precision: precision == "scaler" and model == "sparse",
         "fp16 overflow in a sparse gradient is not reduced by gloo"),
        # -- memory --
        (lambda wrapper, memory: memory == "cpu-offload" and wrapper not in (*FSDP1, *FSDP2),
         "parameters are offloaded by FSDP"),
        (lambda wrapper, memory: memory == "cpu-offload" and wrapper in FSDP1,
         "FSDP1 offloads from an accelerator only"),
        (lambda memory, model: memory == "reentrant" and model == "frozen",
         "a reentrant checkpoint gives no gradients when its input needs none"),
        (lambda memory, wrapper: memory == "reentrant" and wrapper == "pp",
         "the pipeline schedule passes `inputs` to backward, which reentrant checkpoints refuse"),
        (lambda memory, engine: memory == "reentrant" and engine != "eager",
         "dynamo traces no reentrant checkpoint"),
        (lambda memory, wrapper: memory == "reentrant" and wrapper == "ddp-unused",
         "find_unused_parameters searches a graph that reentrant checkpoints hide"),
        (lambda memory, wrapper, model: memory == "reentrant" and model == "shared"
         and wrapper in ("ddp", "ddp-bucket-view", "ddp-unused"),
         "DDP marks a parameter ready twice"),
        (lambda memory, wrapper, model: memory == "reentrant" and model == "shared"
         and wrapper in FSDP2,
         "FSDP2 reduces the first of the nested backwards only: torch itself trains wrongly"),
        (lambda memory, wrapper: memory == "offload-wrapper" and wrapper in TP,
         "offload_wrapper copies plain tensors into saved DTensors: torch raises"),
        # -- engines --
        (lambda wrapper, engine: wrapper == "fsdp1-flat" and engine != "eager",
         "dynamo wants use_orig_params=True"),
    )
)  # fmt: skip


def excluded(values: Mapping[str, object]) -> str | None:
    """Return why a full or partial combination is impossible, None if it is not."""
    for constraint in CONSTRAINTS:
        given = [values[axis] for axis in constraint.axes if axis in values]
        if len(given) == len(constraint.axes) and constraint.forbids(*given):
            return constraint.reason
    return None


_ORDER = {axis: index for index, axis in enumerate(AXES)}
Pair = tuple[tuple[str, object], tuple[str, object]]


@functools.cache
def cells() -> tuple[Cell, ...]:
    """All cells: the corners first, then what pairwise coverage still asks for."""
    from tests.grid.corners import CORNERS

    found = list(dict.fromkeys(CORNERS))
    for cell in found:
        reason = excluded(_values(cell))
        if reason:
            raise ValueError(f"corner {cell.name!r} is impossible: {reason}")
    open_pairs = dict.fromkeys(_all_pairs())
    for cell in found:
        _strike(open_pairs, _values(cell))
    while open_pairs:
        pair = next(iter(open_pairs))
        values = _complete(dict(pair), open_pairs)
        if values is None:
            del open_pairs[pair]  # no valid cell holds it
            continue
        _strike(open_pairs, values)
        found.append(Cell(**values))
    return tuple(found)


def _values(cell: Cell) -> dict[str, object]:
    return {axis: getattr(cell, axis) for axis in AXES}


def _all_pairs() -> Iterator[Pair]:
    for (a, left), (b, right) in itertools.combinations(AXES.items(), 2):
        yield from (((a, x), (b, y)) for x in left for y in right)


def _strike(open_pairs: dict[Pair, None], values: Mapping[str, object]) -> None:
    ordered = [(axis, values[axis]) for axis in AXES]
    for pair in itertools.combinations(ordered, 2):
        open_pairs.pop(pair, None)


def _complete(values: dict[str, object], open_pairs: Mapping[Pair, None]) -> dict | None:
    """Fill the missing axes so that many open pairs are covered; None if no valid cell exists."""
    if excluded(values):
        return None
    axis = next((a for a in AXES if a not in values), None)
    if axis is None:
        return values
    known = [item for item in values.items() if _ORDER[item[0]] < _ORDER[axis]]
    later = [item for item in values.items() if _ORDER[item[0]] > _ORDER[axis]]

    def gain(value: object) -> int:
        mine = (axis, value)
        return sum((item, mine) in open_pairs for item in known) + sum(
            (mine, item) in open_pairs for item in later
        )

    for value in sorted(AXES[axis], key=gain, reverse=True):  # stable: ties in listed order
        done = _complete({**values, axis: value}, open_pairs)
        if done is not None:
            return done
    return None
