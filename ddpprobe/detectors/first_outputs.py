"""Whether a model begins sure of wrong answers: large outputs, and a loss as of guesses by them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ddpprobe.detectors.loss import loss_of
from ddpprobe.detectors.statistics_of import statistic_of
from ddpprobe.records.identity_cache import IdentityCache
from ddpprobe.records.step import Site, StepRecord

_FEWEST = 32  # elements of which a mean is one
# The gradient of a cross-entropy by its logits sums to zero over the classes; of other losses the
# mean is that of the residuals. Relative to the rms; seen: 1e-9 in float32.
_BALANCED = 1e-5
_ROUNDED = {"bfloat16": 2.0**-8, "float16": 2.0**-11}  # of each element, relative
_MOST_CLASSES = 13.0  # log of their number: a mean cross-entropy exceeds the logits' range by less


class FirstOutputs(NamedTuple):
    """The logits of the first look: of which module, their standard deviation, the loss by them."""

    module: str
    deviation: float
    loss: float


def first_outputs(record: StepRecord) -> FirstOutputs | None:
    """Return what a model begins with; None where its loss is no cross-entropy of what it returns.

    A loss that is a sum over many predictions is larger than any difference of logits explains.
    """
    loss = loss_of(record)
    if math.isnan(loss):
        return None
    for module, root, gradient in gradient_rows(record):
        if not _is_balanced(record, gradient):
            continue
        low, high, deviation = (stat_of(record, root, stat) for stat in ("min", "max", "std"))
        if loss <= high - low + _MOST_CLASSES:
            return FirstOutputs(module, deviation, loss)
    return None


def gradient_rows(record: StepRecord) -> Iterator[tuple[str, int, int]]:
    """Yield what the model returns: the first module whose output it is, its row, its gradient's.

    The model has no gradient of its own under a wrapper, so one of any module counts whose output
    has the same numbers.
    """
    returned, gradients = _outputs_of(record.sites)
    for root in returned:
        same = _same(record, root)
        for site in same:
            gradient = gradients.get((site.fqn, site.leaf))
            if gradient is not None:
                yield same[0].fqn, root, gradient


def _places(sites: tuple[Site, ...]) -> tuple[list[int], dict[tuple[str, str], int]]:
    """Return the rows of what the model returns, and those of outputs' gradients by (FQN, leaf)."""
    returned = [i for i, site in enumerate(sites) if (site.fqn, site.kind) == ("", "output")]
    gradients = {(s.fqn, s.leaf): i for i, s in enumerate(sites) if s.kind == "grad_output"}
    return returned, gradients


_outputs_of = IdentityCache(_places, 8)  # tables: of the last attempts, and where ranks are missing


def _same(record: StepRecord, row: int) -> list[Site]:
    """Return the outputs that are this one, in execution order: a module's, and the model's."""
    counts, values = record.counts == record.counts[row], record.values == record.values[row]
    alike = counts.all(1) & values.all(1)
    return [record.sites[i] for i in np.flatnonzero(alike) if record.sites[i].kind == "output"]


def _is_balanced(record: StepRecord, row: int) -> bool:
    mean, rms, numel = (stat_of(record, row, stat) for stat in ("mean", "rms", "numel"))
    if numel < _FEWEST:
        return False
    rounded = 2 * _ROUNDED.get(record.sites[row].dtype, 0.0) / math.sqrt(numel)
    return abs(mean) < (_BALANCED + rounded) * rms


def stat_of(record: StepRecord, row: int, stat: str) -> float:
    """Return a statistic of one row."""
    return float(statistic_of(record, stat)[row])
