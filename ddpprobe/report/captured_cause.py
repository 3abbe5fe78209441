"""What was captured of the module of a first cause, at its step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import final

import numpy as np

from ddpprobe.errors import Error
from ddpprobe.reader.run import Run
from ddpprobe.reader.tensors import Captured
from ddpprobe.records.step import Anomaly

MOST_BYTES = 1 << 28  # of the inputs that are read for one cause


@final
@dataclass(frozen=True, slots=True)
class CapturedCause:
    """The module can be executed again.

    Attributes:
        module: its FQN.
        inputs: how many of its inputs were looked at; of a cause in another pass none.
        bad: of these, the names of those that were not finite.
    """

    module: str
    inputs: int
    bad: tuple[str, ...]


def look(run: Run, cause: Anomaly, captures: Sequence[Captured]) -> CapturedCause | None:
    """Return what there is; None where the module was not captured at that step.

    The inputs are those that the rank of the cause got: others may have got others.
    """
    for each in captures:
        if (each.attempt, each.step) == (cause.attempt, cause.step):
            if cause.module is None or cause.module not in each.modules:
                continue
            try:
                found = _inputs(run, cause) if cause.kind == "output" else {}
            except Error:  # it is damaged, or gone since: `story.lost` says so
                found = {}
            bad = sorted(name for name, finite in found.items() if not finite)
            return CapturedCause(cause.module, len(found), tuple(bad))
    return None


def _inputs(run: Run, cause: Anomaly) -> dict[str, bool]:
    """Return by name whether each input was finite in all calls; nothing if they are too large."""
    found: dict[str, bool] = {}
    room = MOST_BYTES
    for call in run.capsules(cause.step, cause.module or "", cause.attempt):
        if (call.rank, call.micro) != (cause.rank, cause.micro):
            continue
        for (kind, _, leaf), tensor in call.tensors.items():
            if kind != "input":
                continue
            room -= prod(tensor.shape) * tensor.whole.dtype.itemsize
            if room < 0:
                return {}
            values = tensor.read()
            name = f"input[{leaf}]" if leaf else "input"
            countable = values.dtype.kind in "fcV"  # V: bfloat16, float8
            found[name] = found.get(name, True) and not (
                countable and not np.isfinite(values).all()
            )
    return found
