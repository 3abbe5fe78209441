"""What the ranks of a record say under one name."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ddpprobe.records.step import (
    CLASS_SEEN,
    DIGEST,
    HELD_BACK,
    LABEL_BITS,
    LOCAL_SGD,
    NOTHING_REDUCES,
    UNREDUCED,
    USED_NORM,
    StepRecord,
)

SAME = 1e-6  # relative: what the norm of one gradient differs by when it is computed twice


def scalars(record: StepRecord, name: str) -> list[float]:
    """Return the numbers of the ranks that have a scalar of this name."""
    return [float(said[name]) for said in record.scalars.values() if name in said]


def digests_of(record: StepRecord) -> dict[int, float]:
    """Return the digest of what each rank is given, of those that tell it."""
    return {rank: float(of[DIGEST]) for rank, of in record.scalars.items() if DIGEST in of}


def loss_scale_of(record: StepRecord) -> float:
    """Return by how much a GradScaler has multiplied the loss; 1 without one."""
    return next((scale for scale in scalars(record, "loss_scale") if scale > 0), 1.0)


def micro_batches_of(record: StepRecord) -> float:
    """Return how many micro-batches the step had, on the rank that had most; 1 or more."""
    return max(1.0, max(scalars(record, "micro_batches"), default=1.0))


def are_one(norms: list[float]) -> bool:
    """Whether norms are those of one gradient, which each rank computed by itself."""
    return not max(norms) - min(norms) > SAME * max(norms)


def largest(record: StepRecord, name: str) -> float:
    """Return the largest of them; NaN where no rank has one."""
    return max(scalars(record, name), default=math.nan)


def labels_seen(record: StepRecord) -> list[int]:
    """Return a bit for each label that a rank has seen, of each rank, see `CLASS_SEEN`."""
    known = (seen for seen in scalars(record, CLASS_SEEN) if 0 <= seen < 1 << LABEL_BITS)
    return [int(seen) for seen in known]  # NaN is not


def looks_with(bits: Sequence[int]) -> NDArray[np.int64]:
    """Return at how many of some ranks' looks each label came [LABEL_BITS], see `labels_seen`."""
    octets = np.array(bits, "<u8")[:, None].view(np.uint8)
    found: NDArray[np.int64] = np.unpackbits(
        octets, axis=1, count=LABEL_BITS, bitorder="little"
    ).sum(0, np.int64)
    return found


def norm_used_by_all(record: StepRecord) -> float | None:
    """Return the norm of the gradients that the optimizers of all ranks got; None: not one norm."""
    used = scalars(record, USED_NORM)
    alike = len(used) == len(record.ranks) > 0 and math.isfinite(sum(used)) and are_one(used)
    return max(used) if alike else None


def is_local_sgd(record: StepRecord) -> bool:
    """Whether replicas are meant to part, by torch's hook of post-local SGD."""
    return bool(scalars(record, LOCAL_SGD))


def is_unwrapped(record: StepRecord) -> bool:
    """Whether nothing is known that could reduce the gradients."""
    return any(said.get(UNREDUCED) == NOTHING_REDUCES for said in record.scalars.values())


def is_held_back(record: StepRecord) -> bool:
    """Whether the script kept gradients from being reduced: `no_sync` up to the optimizer."""
    return any(said.get(UNREDUCED) == HELD_BACK for said in record.scalars.values())
