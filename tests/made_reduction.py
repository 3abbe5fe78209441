"""Steps of several ranks with a gradient of each parameter, before the reduction and after it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import Site, StepRecord
from tests.detectors.made_records import record

Gradient = NDArray[np.float64]
NAMES = ("a.weight", "a.bias", "b.weight", "b.bias")
SIZES = (100, 10, 60, 6)


def mean(gradients: Gradient, _: str) -> Gradient:
    """Reduce the ranks' gradients [ranks, elements] of a parameter, as DDP does."""
    return gradients.mean(axis=0)


def but_the_last(gradients: Gradient, _: str) -> Gradient:
    """Leave the last rank out of the mean."""
    return gradients[:-1].mean(axis=0)


def scaled(factor: float) -> Callable[[Gradient, str], Gradient]:
    """Return a reduction to a multiple of the mean."""
    return lambda gradients, _: factor * gradients.mean(axis=0)


def step(
    number: int, reduce: Callable[[Gradient, str], Gradient] = mean, *, ranks: int = 2,
    micros: int = 1, placement: str = "replicated", own_placement: str = "local",
    tapped: int | None = None, cancelled: Collection[str] = (),
    told: Mapping[str, float] | None = None, **changes: object,
) -> StepRecord:  # fmt: skip
    """A step with random gradients of each rank and micro-batch, reduced by a function.

    Args:
        number: of the step, and seed.
        reduce: takes the ranks' gradients [ranks, elements] of a parameter, and its name.
        ranks, micros: how many there are.
        placement, own_placement: of the reduced gradients, and of the local ones.
        tapped: hooks on each local gradient; by default one of each rank and micro-batch.
        cancelled: parameters whose gradients' elements add up to nothing.
        told: more scalars of each rank.
        changes: fields of the record.
    """
    rng, rows = np.random.default_rng(number), {}
    before, after = np.zeros(ranks), 0.0
    for name, size in zip(NAMES, SIZES, strict=True):
        each = rng.normal(size=(micros, ranks, size))
        if name in cancelled:
            each -= each.mean(axis=-1, keepdims=True)
        own = each.sum(axis=0)
        reduced = reduce(own, name)
        hooks = ranks * micros if tapped is None else tapped
        rows[Site(name, "grad_local", placement=own_placement)] = {
            "numel": each.size, "tapped": hooks, "observed": hooks, "sum": each.sum(),
            "sum_sq": np.square(each).sum(),
        }  # fmt: skip
        rows[Site(name, "grad", placement=placement)] = {
            "numel": size, "sum": reduced.sum(), "sum_sq": np.square(reduced).sum(),
        }  # fmt: skip
        before += np.square(own).sum(axis=1)
        after += float(np.square(reduced).sum())
    norms = [{"grad_norm_local": math.sqrt(own), "grad_norm": math.sqrt(after)} for own in before]
    scalars = {
        rank: {**norm, "micro_batches": float(micros), **(told or {})}
        for rank, norm in enumerate(norms)
    }
    return record(number, scalars, rows, **changes)
